"""Mean-variance normalisation of features: per utterance, per speaker, or over the corpus.

    y = (x - mean) / std,  std over all frames (no Bessel correction)

Only real frames count: statistics are taken from utterances before they are padded. They are
float64 and streamed by the pairwise update of Chan, Golub & LeVeque 1979 ("Updating formulae and
a pairwise algorithm for computing sample variances"), so that parts of a corpus can be measured
apart and merged, and a large mean does not swallow a small variance.

A feature that does not vary carries nothing and becomes 0, never NaN.

Shapes: T frames, F features per frame, N groups (speakers, or one for the corpus).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

Kind = Literal["none", "utterance", "speaker", "global"]
# A spread below this share of the mean is rounding: features are float32 (2**-24 = 6e-8).
CONSTANT = 1e-6
EVERYONE = ""  # the one group of `global`


class StatisticsError(Exception):
    """One line: statistics that are missing, unreadable, or of other features."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What is known of the frames so far; `squares` sums the squared deviations from `mean`."""

    count: int
    mean: Tensor  # (F,) float64
    squares: Tensor  # (F,) float64

    @classmethod
    def of(cls, features: Tensor) -> "Moments":
        """features (T, F), T at least 1."""
        frames = features.double()
        mean = frames.mean(dim=0)
        return cls(len(frames), mean, (frames - mean).square().sum(dim=0))

    def __add__(self, other: "Moments") -> "Moments":
        """The moments of both sets of frames together (Chan et al. 1979, eq. 2.1)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        spread = apart.square() * (self.count * other.count / count)
        return Moments(count, mean, self.squares + other.squares + spread)

    def normalise(self, features: Tensor, variance: bool) -> Tensor:
        """(T, F) -> (T, F) in the dtype of `features`."""
        centred = features.double() - self.mean
        if variance:
            std = (self.squares / self.count).sqrt()
            constant = std <= CONSTANT * self.mean.abs()  # also where both are 0
            centred = (centred / std.masked_fill(constant, 1.0)).masked_fill(constant, 0.0)
        return centred.to(features.dtype)


class MeanVarianceNorm:
    """Normalises (T, F) features; `variance=False` subtracts the mean only.

    kind        mean and variance of
    none        nothing: features stay as they are
    utterance   the utterance itself
    speaker     all utterances added for its speaker; where none were, or no speaker is told, the
                utterance itself
    global      all utterances added; StatisticsError while there are none
    """

    def __init__(self, kind: Kind = "utterance", variance: bool = True) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"kind {kind!r} must be one of {', '.join(get_args(Kind))}")
        self.kind, self.variance = kind, variance
        self.groups: dict[str, Moments] = {}

    @property
    def needs_statistics(self) -> bool:
        """Whether the corpus must be added before training."""
        return self.kind in ("speaker", "global")

    def __call__(self, features: Tensor, speaker: str | None = None) -> Tensor:
        """(T, F) -> (T, F). One frame normalised by itself, and a constant feature, give 0.

        Raises StatisticsError for `global` without statistics, or with those of another F.
        """
        if self.kind == "none" or not len(features):
            return features
        return self._moments(features, speaker).normalise(features, self.variance)

    def add(self, features: Tensor, speaker: str | None = None) -> None:
        """Counts one utterance (T, F) into the statistics; nothing to do for the first two kinds.

        Raises StatisticsError for features that are not finite or of another F, or, where
        statistics are per speaker, for an utterance without one.
        """
        if not self.needs_statistics or not len(features):
            return
        if self.kind == "speaker" and speaker is None:
            raise StatisticsError("statistics per speaker need to know the speaker of an utterance")
        if not features.isfinite().all():
            raise StatisticsError("features hold NaN or infinite values; statistics are unchanged")
        self._add(EVERYONE if self.kind == "global" else str(speaker), Moments.of(features))

    def merge(self, other: "MeanVarianceNorm") -> None:
        """Counts in all that another one of the same kind has seen, as from another process."""
        if other.kind != self.kind:
            raise StatisticsError(f"cannot merge {other.kind} statistics into {self.kind} ones")
        for group, moments in other.groups.items():
            self._add(group, moments)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the statistics to one safetensors file, empty where the kind needs none."""
        groups = list(self.groups.values())
        tensors = {
            "count": torch.tensor([moments.count for moments in groups], dtype=torch.int64),  # (N,)
            "mean": _stack([moments.mean for moments in groups]),  # (N, F)
            "squares": _stack([moments.squares for moments in groups]),  # (N, F)
        }
        # Safetensors keeps free text beside the tensors: names of speakers are data, never keys.
        names = {"kind": self.kind, "groups": json.dumps(list(self.groups))}
        unfinished = Path(f"{os.fspath(path)}.unfinished")
        # Not save_file, which makes its file private: a run folder is often shared.
        unfinished.write_bytes(save(tensors, metadata=names))
        unfinished.replace(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes the place of the statistics so far; StatisticsError for a file that will not do."""
        try:
            with safe_open(os.fspath(path), "pt") as file:
                names = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise StatisticsError(f"{path}: no such file of feature statistics") from error
        except (SafetensorError, OSError, UnicodeError) as error:
            raise StatisticsError(f"{path}: not readable as feature statistics") from error
        if names.get("kind") != self.kind:
            kind = names.get("kind", "unknown")
            raise StatisticsError(f"{path}: statistics of kind {kind}, but mvn is {self.kind}")
        self.groups = _parse(names, tensors, str(path))

    def _moments(self, features: Tensor, speaker: str | None) -> Moments:
        if self.kind == "global" and EVERYONE not in self.groups:
            raise StatisticsError(
                "mvn is global, but no statistics were measured or loaded; add the training corpus"
            )
        group = EVERYONE if self.kind == "global" else speaker
        known = self.groups.get(group) if group is not None else None
        if self.kind == "utterance" or known is None:
            return Moments.of(features)
        _check_size(known, features.shape[1])
        return known

    def _add(self, group: str, moments: Moments) -> None:
        known = self.groups.get(group)
        if known is not None:
            _check_size(known, len(moments.mean))
        self.groups[group] = moments if known is None else known + moments


def _check_size(known: Moments, size: int) -> None:
    if len(known.mean) != size:
        raise StatisticsError(
            f"statistics are of {len(known.mean)} features per frame, but these have {size}"
        )


def _stack(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, 0, dtype=torch.float64)


def _parse(
    names: Mapping[str, str], tensors: Mapping[str, Tensor], path: str
) -> dict[str, Moments]:
    """The groups of a file from anywhere: nothing in it is taken on trust."""
    try:
        groups = json.loads(names["groups"])
        count, mean, squares = tensors["count"], tensors["mean"], tensors["squares"]
        sound = (
            isinstance(groups, list)
            and len(groups) == len(count) == len(mean)
            and all(isinstance(group, str) for group in groups)
            and count.dtype == torch.int64
            and mean.ndim == 2
            and mean.shape == squares.shape
            and mean.dtype == squares.dtype == torch.float64
            and bool((count > 0).all() and mean.isfinite().all() and squares.isfinite().all())
            and bool((squares >= 0).all())
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        sound = False
    if not sound:
        raise StatisticsError(f"{path}: damaged feature statistics; measure them anew")
    rows = zip(groups, count.tolist(), mean, squares, strict=True)
    return {group: Moments(*row) for group, *row in rows}

"""Mean-variance normalisation of features: per utterance, per speaker, or over the corpus.

    y = (x - mean) / std,  std over all frames (no Bessel correction)

Only real frames count: statistics are taken from utterances before they are padded. They are
float64 and streamed by the pairwise update of Chan, Golub & LeVeque 1979 ("Updating formulae and
a pairwise algorithm for computing sample variances"), so that a small variance survives a large
mean. A constant feature becomes 0, never NaN.

Shapes: T frames, F features per frame, N groups (speakers, or one for the corpus).
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from asr.features import StatisticsError

Kind = Literal["none", "utterance", "speaker", "global"]
# A spread below this share of the mean is rounding: features are float32 (2**-24 = 6e-8).
CONSTANT = 1e-6
EVERYONE = ""  # the one group of `global`
MAX_MEAN = 1e30  # features are float32
MAX_BYTES = 1 << 30  # of a file of statistics: 800,000 speakers


@dataclass(frozen=True, slots=True)
class Moments:
    """Count and mean of frames, and `squares`, the sum of squared deviations from the mean."""

    count: int
    mean: Tensor  # (F,) float64
    squares: Tensor  # (F,) float64

    @classmethod
    def of(cls, features: Tensor) -> "Moments":
        """features (T, F), T at least 1."""
        frames = features.double()
        mean = frames.mean(dim=0)
        return cls(frames.size(0), mean, (frames - mean).square().sum(dim=0))

    def __add__(self, other: "Moments") -> "Moments":
        """The moments of both sets of frames together (Chan et al. 1979, eq. 2.1)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        between = delta.square() * (self.count * other.count / count)
        return Moments(count, mean, self.squares + other.squares + between)

    def normalise(self, features: Tensor, variance: bool) -> Tensor:
        """(T, F) -> (T, F) in the dtype of `features`."""
        mean = self.mean.to(features.device)
        centred = features.double() - mean
        if variance:
            power = (self.squares / self.count).to(features.device)
            constant = power <= (CONSTANT * mean).square()  # also where both are 0
            std = power.masked_fill(constant, 1.0).sqrt()  # whose gradient at 0 is infinite
            centred = (centred / std).masked_fill(constant, 0.0)
        return centred.to(features.dtype)


class MeanVarianceNorm:
    """Normalises (T, F) features; `variance=False` subtracts the mean only.

    kind        mean and variance of
    none        nothing: features stay as they are
    utterance   the utterance itself
    speaker     all utterances added for its speaker; if there are none, or no speaker is named,
                the utterance itself
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
        if self.kind == "none" or features.size(0) == 0:
            return features
        return self._moments(features, speaker).normalise(features, self.variance)

    def add(self, features: Tensor, speaker: str | None = None) -> None:
        """Add one utterance (T, F) to the statistics; does nothing for the first two kinds.

        Raises StatisticsError for features that are not finite or of another F, and for kind
        `speaker` without a speaker.
        """
        if not self.needs_statistics or not len(features):
            return
        if self.kind == "speaker" and speaker is None:
            raise StatisticsError("statistics per speaker need to know the speaker of an utterance")
        if not features.isfinite().all():
            raise StatisticsError("features hold NaN or infinite values; statistics are unchanged")
        group, moments = EVERYONE if self.kind == "global" else speaker, Moments.of(features)
        known = self.groups.get(group)
        if known is not None:
            _check_size(known, features.shape[1])
        self.groups[group] = moments if known is None else known + moments

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to one safetensors file, empty if the kind needs none."""
        groups = list(self.groups.values())
        tensors = {
            "count": torch.tensor([moments.count for moments in groups], dtype=torch.int64),  # (N,)
            "mean": _stack([moments.mean for moments in groups]),  # (N, F)
            "squares": _stack([moments.squares for moments in groups]),  # (N, F)
        }
        # Names of speakers are data, hence text beside the tensors, never keys.
        names = {"kind": self.kind, "groups": json.dumps(list(self.groups))}
        unfinished = Path(f"{os.fspath(path)}.unfinished")
        # Not save_file, which makes its file private: a run folder is often shared.
        unfinished.write_bytes(save(tensors, metadata=names))
        unfinished.replace(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the statistics by a file's. Raises StatisticsError for an unusable file."""
        try:
            status = Path(path).stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise OSError("no regular file, or too large")
            with safe_open(os.fspath(path), "pt") as file:
                names = file.metadata() or {}
                parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                if names.get("kind") != self.kind:
                    kinds = f"of kind {names.get('kind', 'unknown')[:20]}, but mvn is {self.kind}"
                    raise StatisticsError(f"{path}: statistics {kinds}")
                self.groups = _parse(names, parts, str(path))
        except FileNotFoundError as error:
            raise StatisticsError(f"{path}: no such file of feature statistics") from error
        except (SafetensorError, OSError, UnicodeError) as error:
            raise StatisticsError(f"{path}: not readable as feature statistics") from error

    def _moments(self, features: Tensor, speaker: str | None) -> Moments:
        if self.kind == "global" and EVERYONE not in self.groups:
            fault = "mvn is global, but no statistics were measured or loaded"
            raise StatisticsError(f"{fault}; add the training corpus")
        known = self.groups.get(EVERYONE if self.kind == "global" else speaker)
        if self.kind == "utterance" or known is None:
            return Moments.of(features)
        _check_size(known, features.shape[1])
        return known


def _check_size(known: Moments, size: int) -> None:
    if len(known.mean) != size:
        sizes = f"{len(known.mean)} features per frame, but these have {size}"
        raise StatisticsError(f"statistics are of {sizes}")


def _stack(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, 0, dtype=torch.float64)


def _parse(names: dict[str, str], parts: dict[str, Any], path: str) -> dict[str, Moments]:
    """The groups of a file, every part of which is checked, the shapes before anything is read."""
    try:
        groups = json.loads(names["groups"])
        rows = [len(groups)] if isinstance(groups, list) else None
        shapes = [parts[key].get_shape() for key in ("count", "mean", "squares")]
        if shapes != [rows, [*rows, *shapes[1][1:]], shapes[1]] or len(shapes[1]) != 2:
            raise ValueError("shapes do not agree")
        count, mean, squares = (parts[key][:] for key in ("count", "mean", "squares"))
        valid = (
            all(isinstance(group, str) for group in groups)
            and len(set(groups)) == len(groups)
            and count.dtype == torch.int64
            and mean.dtype == squares.dtype == torch.float64
            and bool((count > 0).all() and (mean.abs() < MAX_MEAN).all())
            and bool((squares.isfinite() & (squares >= 0)).all())
        )
    except (KeyError, TypeError, ValueError, RecursionError, IndexError):
        valid = False
    if not valid:
        raise StatisticsError(f"{path}: damaged feature statistics; measure them anew")
    return dict(zip(groups, map(Moments, count.tolist(), mean, squares), strict=True))

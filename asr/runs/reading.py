"""A run as asr.compare reads it: curves, cost, evaluations, and what is wrong with it."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asr.data.content import SHA256, sha256_of_files
from asr.errors import UserError
from asr.recipe import flat
from asr.runs.folder import finished, last_error, names_of, recipe_of
from asr.scoring.events import Curve, event_files, read_scalars
from asr.scoring.files import Evaluation, read_evaluation
from asr.scoring.groups import value_text
from asr.settings import Decode
from asr.training.checkpoint import TRAINING, choose, list_checkpoints, read_training

TRAIN, VALID = "train/nats", "valid/nats"
HOURS, SECONDS = "run/audio_hours", "run/train_seconds"  # what a run has cost so far
FIGURES = ("accuracy", "nats")  # of score.json, where it is not of words
WORLD = "data and vocabulary"  # a setting beside those of the recipe


@dataclass(frozen=True)
class Run:
    """What was read of one run. `fault` says why it is not counted."""

    folder: Path
    settings: dict[str, Any] | None  # None where its recipe cannot be read
    curves: dict[str, Curve]
    fault: str | None
    name: str  # its folder's, or more of its path where that is not its alone

    @property
    def world(self) -> str:
        """The same for two runs whose losses can be compared."""
        return (self.settings or {})[WORLD]


@dataclass(frozen=True)
class Cost:
    """Audio and time against steps. Linear in between; empty where nothing is known."""

    steps: np.ndarray  # (N,), from 0
    hours: np.ndarray  # of audio trained on
    seconds: np.ndarray  # in steps and loading; validation is not in it

    def at(self, step: float) -> tuple[float, float] | None:
        """Audio-hours and seconds at a step; beyond the last one as if it went on like that."""
        if len(self.steps) < 2:
            return None
        scale = max(1.0, step / self.steps[-1])
        place = min(step, self.steps[-1])
        hours = np.interp(place, self.steps, self.hours) * scale
        return float(hours), float(np.interp(place, self.steps, self.seconds) * scale)


def read_runs(folders: Sequence[Path], curve: str) -> list[Run]:
    """Each run's recipe and curves, and what is wrong with it, if anything is."""
    return [_read_run(*pair, curve) for pair in zip(folders, names_of(folders), strict=True)]


def _read_run(folder: Path, name: str, curve: str) -> Run:
    try:
        recipe = recipe_of(folder)
    except UserError as error:
        return Run(folder, None, {}, str(error), name)
    curves = read_scalars(folder, {TRAIN, curve, HOURS, SECONDS})
    settings = flat(recipe)
    wrong = fault(folder, curves, curve)
    return Run(folder, settings | {WORLD: world(folder, settings)}, curves, wrong, name)


def fault(folder: Path, curves: dict[str, Curve], curve: str) -> str | None:
    """Why a run does not count: it has no curve, its loss is NaN, or it did not come to its end."""
    if not event_files(folder):
        return f"{folder}: no event file{last_error(folder)}"
    for name in (TRAIN, curve):
        values = curves[name].values
        if len(values) and not math.isfinite(values[-1]):
            good = np.flatnonzero(np.isfinite(values))
            step = curves[name].steps[good[-1] + 1 if len(good) else 0]
            return (
                f"{folder}: diverged: {name} is not finite from step {step} on{last_error(folder)}"
            )
    if finished(folder) is None:
        last = max((int(c.steps[-1]) for c in curves.values() if len(c)), default=0)
        return f"{folder}: not finished, last seen at step {last}{last_error(folder)}"
    if not len(curves[curve]):
        return f"{folder}: no point of {curve} in its event files"
    return None


def world(folder: Path, settings: dict[str, Any]) -> str:
    """Validation data and vocabulary, told by their content where that is known."""
    digest = hashlib.sha256(_validated_on(folder) or _named(settings))
    for path in (folder / "tokenizer.json", folder / "tokenizer.model"):
        digest.update(path.read_bytes() if path.is_file() else b"none")
    return digest.hexdigest()[:8]


def _validated_on(folder: Path) -> bytes | None:
    """The hash that the last checkpoint has of it; the files may have changed since."""
    there = list_checkpoints(folder)
    if not there or not (there[-1].folder / TRAINING).exists():
        return None
    with suppress(UserError):  # damaged
        content = read_training(there[-1], mapped=True).get("content", {})
        for key in ("data.valid", "data.folder"):  # of images, a part of the folder's
            if key in content:
                return str(content[key].get(SHA256)).encode()
    return None


def _named(settings: dict[str, Any]) -> bytes:
    """What lies there now under the name that the recipe gives."""
    named = settings.get("data.valid")
    files = [Path(str(name)) for name in (named if isinstance(named, list) else [named])]
    there = all(file.is_file() for file in files)
    return (sha256_of_files(files) if there else str(named)).encode()


def cost(run: Run) -> Cost:
    """From the curves HOURS and SECONDS; without them from the last checkpoint."""
    hours, seconds = run.curves[HOURS], run.curves[SECONDS]
    if len(hours) and len(seconds):
        steps = np.intersect1d(hours.steps, seconds.steps)
        pair = [c.values[np.isin(c.steps, steps)] for c in (hours, seconds)]
        return Cost(*(np.insert(row, 0, 0) for row in (steps, *pair)))
    there = list_checkpoints(run.folder)
    if not there:
        return Cost(*np.zeros((3, 0)))
    place = read_training(there[-1], mapped=True)["position"]
    ends = (place["step"], place["audio_seconds"] / 3600, place["train_seconds"])
    return Cost(*(np.array([0.0, end]) for end in ends))


def read_health(run: Path) -> tuple[int | None, dict[str, float]]:
    """Step and figures of the last look inside; None and nothing where nobody looked."""
    try:
        seen = json.loads((run / "health.json").read_text(encoding="utf-8"))
        return int(seen["step"]), {name: float(value) for name, value in seen["figures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, {}


def read_evaluations(run: Path, notes: list[str]) -> tuple[dict[str, Evaluation], dict[str, float]]:
    """Evaluations by split; of a run that recognises no speech its figures ("accuracy of test")."""
    scores, figures = {}, {}
    for file in sorted(run.glob("evaluate/*/score.json")):
        split = file.parent.name
        if rates := _no_words(file):
            there = {name: rates[name] for name in FIGURES if isinstance(rates.get(name), float)}
            figures |= {f"{name} of {split}": value for name, value in there.items()}
            continue
        try:
            scores[split] = read_evaluation(file.parent)
        except UserError as error:
            notes.append(f"left out: {error}.")
            continue
        if went_on(run, scores[split].about):
            notes.append(
                f"{file.parent}: of older checkpoints than the run has now; evaluate again."
            )
    return scores, figures


def went_on(run: Path, about: Mapping[str, Any]) -> bool:
    """Whether an evaluation, if it says so, is of other checkpoints than it would be of now."""
    decode, steps = about.get("decode"), about.get("steps")
    if not isinstance(decode, dict) or steps is None or not list_checkpoints(run):
        return False
    now = choose(run, decode.get("checkpoint", "best"), decode.get("average", 1))
    return [checkpoint.step for checkpoint in now] != steps


def how_decoded(about: Mapping[str, Any]) -> dict[str, str]:
    """What an evaluation says of its search, and of settings other than the run's own."""
    decode = about.get("decode")
    # An evaluation from before a setting was made knew what is now its default.
    found = Decode().model_dump(mode="json") | decode if isinstance(decode, dict) else {}
    found.pop("batch_seconds", None)
    other = [change.partition("=") for change in about.get("overrides", ())]
    found |= {key: value for key, _, value in other if not key.startswith(("decode.", "data."))}
    return {key: value_text(value) for key, value in found.items()}


def _no_words(file: Path) -> dict[str, Any]:
    """What score.json holds, or nothing where it is of words, or damaged."""
    try:
        rates = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return rates if isinstance(rates, dict) and "wer" not in rates else {}

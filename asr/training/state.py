"""The state of a training: its position in the run, random generators, and what training.pt holds.

The checksum of training.pt shows damage alone, for whoever makes a file can make its checksum. So
all its values are checked once, as they are read.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch
from torch import Tensor

from asr.config.schema import EarlyStoppingConfig, TrainConfig
from asr.io import open_file

MAX_COUNT = 1 << 53
MAX_TEXT = 1_000_000  # characters of the recipe, as of a recipe file
MAX_PICKLE = 16 << 20  # bytes of everything but tensors: 8 KB a rank
_WORDS = 624  # of the Mersenne Twister


@dataclass
class TrainState:
    """Progress of a run: the position in the corpus, and totals over all resumes."""

    step: int = 0  # finished steps
    epoch: int = 1
    batch: int = 0  # finished batches of this epoch
    stage: int = 0  # of the recipe's `stages` that have begun
    audio_seconds: float = 0.0
    utterances: int = 0
    broken: int = 0  # unreadable utterances
    train_seconds: float = 0.0  # wall time of steps and loading
    best: float = 0.0  # of train.early_stopping.metric; at best_step, 0 if there is none yet
    best_step: int = 0
    not_improved: int = 0  # validations since


def rank_of(metric: str, value: float) -> float:
    """By which checkpoints are ranked: the lower, the better."""
    return -value if metric in ("accuracy", "diagonality") else value


def count_validation(state: TrainState, config: EarlyStoppingConfig, value: float) -> None:
    """Count a validation, in which the metric has this value, as an improvement or not."""
    gain = rank_of(config.metric, state.best) - rank_of(config.metric, value)
    if math.isfinite(value) and (not state.best_step or gain > config.min_delta):
        state.best, state.best_step, state.not_improved = value, state.step, 0
    else:
        state.not_improved += 1


def has_stopped_early(state: TrainState, config: TrainConfig) -> bool:
    """Whether train.early_stopping has ended the run."""
    early = config.early_stopping
    return early is not None and state.not_improved >= early.patience


def is_finished(state: TrainState, config: TrainConfig) -> bool:
    """Whether the run has stopped early, or reached its last step or epoch."""
    if has_stopped_early(state, config):
        return True
    if config.steps is not None:
        return state.step >= config.steps
    return state.epoch > config.epochs


def progress(state: TrainState, config: TrainConfig, batches: int) -> float:
    """The share of the run (0 to 1) that is finished after the current step.

    `batches` are those of an epoch. Without config.steps it is the share of the corpus, so that a
    run resumed with another number of ranks or batches per step keeps its schedule.
    """
    if config.steps is not None:
        return min((state.step + 1) / config.steps, 1.0)
    return min((state.epoch - 1 + state.batch / batches) / config.epochs, 1.0)


def due_stage(state: TrainState, config: TrainConfig, starts: Sequence[float]) -> int:
    """How many stages, which start at these shares of the run, have begun.

    A stage begins with an epoch, since the batches of an epoch are planned as a whole.
    """
    if state.batch or is_finished(state, config):
        return state.stage
    if config.steps is not None:
        finished = state.step / config.steps
    else:
        finished = (state.epoch - 1) / config.epochs
    return max(state.stage, sum(start <= finished for start in starts))


def random_state() -> dict[str, Any]:
    """The states of torch's, Python's and numpy's generators, as numbers and tensors."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (a library may draw from it)
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set all generators to what random_state returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002


def check_archive(path: Path, limit: int) -> None:
    """Raise ValueError, or UserError as open_file does, unless torch can read the file as it is.

    That is an archive without compression, which could expand a thousandfold.
    """
    with open_file(path, limit) as file, ZipFile(file) as archive:
        entries, size = archive.infolist(), file.seek(0, 2)
    if any(e.compress_type != ZIP_STORED or e.compress_size != e.file_size for e in entries):
        raise ValueError("it is compressed")
    # Other readers could find other entries in an archive that begins elsewhere.
    if sum(e.file_size for e in entries) > size or min(e.header_offset for e in entries) > 0:
        raise ValueError("its entries overlap")
    if any(e.file_size > MAX_PICKLE for e in entries if e.filename.endswith("/data.pkl")):
        raise ValueError(f"its values are larger than {MAX_PICKLE} bytes")


def check_training(state: Any) -> None:
    """Raise ValueError for a value that no training writes, and where one is missing.

    Shapes, which depend on the model, are checked by optim.load_moments and EvaluationWeights.load.
    """
    if not isinstance(state, dict):
        raise ValueError("it is not a mapping")
    if missing := [key for key in _VALUES if key not in state]:
        raise ValueError(f"{missing[0]} is missing")
    for key, (is_valid, meaning) in _VALUES.items():
        try:
            valid = is_valid(state[key])
        except Exception:  # the generators raise many kinds
            valid = False
        if not valid:
            raise ValueError(f"{key} must be {meaning}")


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= MAX_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (type(value) is float or abs(value) <= MAX_COUNT)


def _is_text(value: Any, most: int = 200) -> bool:
    return isinstance(value, str) and len(value) <= most and value.encode() is not None


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch("[A-Za-z0-9_-]{1,64}", value))


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    groups, state = value["param_groups"], value["state"]
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group["params"], list) for group in groups)
        and isinstance(state, dict)
        and all(isinstance(moments, dict) for moments in state.values())
    )


def _is_position(value: Any) -> bool:
    kinds = {field.name: field.type for field in fields(TrainState)}
    return value.get("epoch", 1) >= 1 and all(
        _is_count(one) if kinds[name] is int else _is_number(one) and 0 <= one < math.inf
        for name, one in value.items()
    )


def _is_random(value: Any) -> bool:
    """Sets new generators, which check more than types, to the states."""
    if not isinstance(value, dict):
        return False
    torch.Generator().set_state(value["cpu"])
    gpus = value["cuda"]
    if gpus and len(gpus) == torch.cuda.device_count():
        for state in gpus:
            torch.Generator("cuda").set_state(state)
    valid = isinstance(gpus, list) and all(isinstance(state, Tensor) for state in gpus)
    version, words, gauss = value["python"]
    random.Random().setstate((version, tuple(words), gauss))
    kind, keys, index, has_gauss, cached = value["numpy"]
    np.random.RandomState(0).set_state((kind, keys, index, has_gauss, cached))
    # Both take some values that they cannot use: numpy reads at any index.
    return valid and (gauss is None or _is_number(gauss)) and index in range(_WORDS + 1)


def _is_weights(value: Any) -> bool:
    return isinstance(value, dict) and all(type(tensor) is Tensor for tensor in value.values())


def _is_content(value: Any) -> bool:
    figures = [item for figures in value.values() for item in figures.items()]
    return all(map(_is_text, value)) and all(
        _is_text(name) and (_is_text(figure) or _is_number(figure)) for name, figure in figures
    )


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer": (_is_optimizer, "the moments of parameters by their number"),
    "position": (_is_position, "counts and seconds, 0 or more"),
    "random": (_is_random, "states of torch's, Python's and numpy's generators"),
    "ranks": (lambda value: isinstance(value, list) and all(map(_is_random, value)), "such states"),
    "trained": (lambda v: isinstance(v, list) and all(map(_is_weights, v)), "weights of ranks"),
    "recipe": (lambda value: _is_text(value, MAX_TEXT), "a recipe's text"),
    "content": (_is_content, "figures by recipe key"),
    "validated": (lambda value: _is_count(value, -1), "a step"),
    "trackers": (lambda v: all(map(_is_text, v)) and all(map(_is_id, v.values())), "ids of runs"),
    "metrics": (lambda v: all(_is_text(k) and _is_number(n) for k, n in v.items()), "numbers"),
}

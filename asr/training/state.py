"""The state of a training: its position in the run, random generators, and what training.pt holds.

The checksum of training.pt shows damage alone, for whoever makes a file can make its checksum. So
its values are checked as they are read.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZIP_STORED, ZipFile

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from asr.config.schema import EarlyStoppingConfig, TrainConfig
from asr.io import open_file

MAX_PICKLE = 16 << 20  # bytes of everything but tensors
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Number = Annotated[float, Field(allow_inf_nan=False)]
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


@dataclass(config=ConfigDict(strict=True, extra="forbid"))
class TrainState:
    """Progress of a run: the position in the corpus, and totals over all resumes."""

    step: Count = 0  # finished steps
    epoch: Annotated[int, Field(ge=1, le=1 << 53)] = 1
    batch: Count = 0  # finished batches of this epoch
    stage: Count = 0  # of the recipe's `stages` that have begun
    audio_seconds: Number = 0.0
    utterances: Count = 0
    broken: Count = 0  # unreadable utterances
    train_seconds: Number = 0.0  # wall time of steps and loading
    best: Number = 0.0  # of train.early_stopping.metric, at best_step; both 0 if there is none yet
    best_step: Count = 0
    not_improved: Count = 0  # validations since


def rank_of(metric: str, value: float) -> float:
    """By which checkpoints are ranked: the lower, the better."""
    return -value if metric in ("accuracy", "diagonality") else value


def count_validation(state: TrainState, config: EarlyStoppingConfig, value: float) -> None:
    """Count a validation, in which the metric has this value, as an improvement or not."""
    gain = rank_of(config.metric, state.best) - rank_of(config.metric, value)
    if math.isfinite(value) and (not (state.best_step or state.best) or gain > config.min_delta):
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
    return stage_at_epoch(state, config, starts)


def stage_at_epoch(state: TrainState, config: TrainConfig, starts: Sequence[float]) -> int:
    """The stage of the epoch that the state is at the beginning of."""
    finished = share_at_epoch(state, config)
    return max(state.stage, sum(start <= finished for start in starts))


def share_at_epoch(state: TrainState, config: TrainConfig) -> float:
    """The share of the run (0 to 1) before the epoch that the state is at the beginning of."""
    if config.steps is not None:
        return state.step / config.steps
    return (state.epoch - 1) / config.epochs


def random_state() -> dict[str, Any]:
    """The states of torch's generators, from which alone a training draws."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what random_state returned. Raises ValueError for other tensors."""
    try:
        torch.set_rng_state(state["cpu"])
        if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"random: {error}") from None


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


class _RandomState(BaseModel):
    model_config = STRICT

    cpu: Tensor
    cuda: list[Tensor]


class _ParameterGroup(BaseModel):
    model_config = STRICT

    params: list[int]


class _OptimizerState(BaseModel):
    model_config = STRICT

    param_groups: list[_ParameterGroup]
    state: dict[int, dict[str, Any]]  # moments by the number of their parameter


class _TrainingFile(BaseModel):
    """What training.pt holds; Training.write_checkpoint says what it means."""

    model_config = STRICT

    optimizer: _OptimizerState
    position: dict[str, Any]  # of a TrainState
    random: _RandomState
    ranks: list[_RandomState]
    trained: list[dict[str, Tensor]]
    recipe: str
    content: dict[str, dict[str, int | Number | str]]
    validated: Annotated[int, Field(ge=-1)]
    trackers: dict[str, Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]]
    metrics: dict[str, float]


def check_training(state: Any) -> None:
    """Raise ValueError for a value that no training writes, and where one is missing.

    Tensors, which depend on the model, are checked as they are loaded.
    """
    try:
        TrainState(**_TrainingFile.model_validate(state).position)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{where}: {first['msg']}") from None

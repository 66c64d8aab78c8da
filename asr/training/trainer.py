"""The training loop, for every task.

A step reads `accumulate` batches on each rank, sums their objective, divides the gradient by the
number of targets of the whole step, clips it and updates the weights. `fit` repeats this epoch
after epoch. Logging, validation and checkpoints are passed in as Callbacks, so the loop depends on
no model and no corpus.

To resume, the TrainState, the weights, the optimiser and the random state suffice: the learning
rate is a function of the step, the data are one of seed, epoch and utterance, and bf16 needs no
loss scaler.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn

from asr.config.schema import TrainConfig
from asr.data.batching import Broken, EpochPlan
from asr.errors import UserError, WorkerKilled
from asr.training.distributed import add_gradients, add_sums, gather, rank, world
from asr.training.losses import Sum, add, read
from asr.training.oom import retry_in_halves
from asr.training.optim import Schedule, check_weights

MAX_NAMED = 5  # utterances that the report of a validation names


class TaskBatch(Protocol):
    """What the loop needs of a batch; its tensors concern only the task's objective."""

    size_key: ClassVar[str]  # recipe key of the batch size
    length_key: ClassVar[str | None]  # recipe key of the longest example, if there is one
    ids: tuple[str, ...]  # of its utterances (or sentences, images)
    seconds: float  # of audio; 0 in tasks without audio
    broken: tuple[Broken, ...]  # utterances that cannot be read

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> "TaskBatch": ...

    def split(self) -> "list[TaskBatch]":
        """Its two halves; the batch itself where it has one example."""


class Epochs(Protocol):
    """A training corpus in batches; epochs count from 1."""

    def plan(self, epoch: int) -> EpochPlan: ...

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> Iterator[TaskBatch]: ...


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


@dataclass(frozen=True)
class BatchStats:
    """Counts over the batches of a step or of a validation, on one rank or on all."""

    batches: int = 0
    utterances: int = 0  # readable ones
    seconds: float = 0.0  # of audio
    broken: tuple[Broken, ...] = ()
    stop: bool = False  # whether a signal asks to stop before this step

    @classmethod
    def of(cls, group: Sequence[TaskBatch], stop: bool = False) -> "BatchStats":
        """Over batches of this rank."""
        broken = tuple(each for batch in group for each in batch.broken)
        seconds = sum(batch.seconds for batch in group)
        return cls(len(group), sum(map(len, group)), seconds, broken, stop)

    @classmethod
    def total(cls, parts: Sequence["BatchStats"]) -> "BatchStats":
        """Of several batches or ranks together."""
        return cls(
            sum(part.batches for part in parts),
            sum(part.utterances for part in parts),
            sum(part.seconds for part in parts),
            tuple(each for part in parts for each in part.broken),
            any(part.stop for part in parts),
        )


@dataclass(frozen=True)
class Step:
    """Results of one step, for the log."""

    sums: dict[str, Sum]
    norm: float  # of the gradient, before clipping
    lr: float
    seconds: float  # of audio
    finite: bool = True  # False: the weights were not updated


@dataclass(frozen=True)
class Callbacks:
    """Called between steps; each function decides itself whether it is due."""

    log_step: Callable[[TrainState, Step], None]
    after_step: Callable[[TrainState], None]
    after_epoch: Callable[[TrainState], None]
    log: Callable[[str], None]  # a line of text
    stop_requested: Callable[[], bool] = lambda: False
    # Writes batches without a finite gradient to disk and returns a sentence on where.
    dump: Callable[[Sequence[TaskBatch]], str] = lambda group: ""


def fit(
    objective: nn.Module,
    epochs: Epochs,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    state: TrainState,
    config: TrainConfig,
    max_unreadable: float,
    callbacks: Callbacks,
) -> None:
    """Train from `state`, which it updates, to the last step or epoch of `config`.

    Returns early, between two steps, where callbacks.stop_requested. max_unreadable: the share of
    the corpus that may be unreadable. Raises UserError where more of it is, where a batch does not
    fit in memory, where the weights have diverged, or where config.bad_steps steps in a row have
    no finite gradient.
    """
    device = next(objective.parameters()).device
    scheduled = [module for module in objective.modules() if hasattr(module, "set_step")]
    utterances = sum(map(len, epochs.plan(1).batches))
    # Unreadable utterances an epoch: a share, but one in a corpus of any size.
    allowed = max(max_unreadable * utterances, math.ceil(max_unreadable))
    bad = 0
    while not _finished(state, config):
        begin, batches = time.perf_counter(), len(epochs.plan(state.epoch).batches)
        for group, stats in _steps(epochs, state, config.accumulate, callbacks):
            if stats.stop:
                return
            count_batches(state, stats, allowed, callbacks.log)
            for module in scheduled:
                module.set_step(state.step)
            lr = schedule(state.step + 1, progress(state, config, batches))
            readable = [batch.to(device) for batch in group if len(batch)]
            step = take_step(objective, readable, optimizer, lr, config, callbacks.log)
            state.step += 1
            bad = 0 if step.finite else bad_step(bad, group, objective, state, config, callbacks)
            state.train_seconds += time.perf_counter() - begin
            callbacks.log_step(state, replace(step, seconds=stats.seconds))
            callbacks.after_step(state)
            if _finished(state, config):
                return
            begin = time.perf_counter()
        state.epoch, state.batch = state.epoch + 1, 0
        callbacks.after_epoch(state)


def take_step(
    objective: nn.Module,
    group: Sequence[TaskBatch],
    optimizer: torch.optim.Optimizer,
    lr: float,
    config: TrainConfig,
    log: Callable[[str], None] = print,
) -> Step:
    """One update from the batches of all ranks; none where loss or gradient is not finite."""
    objective.train()
    messages: list[str] = []
    own = retry_in_halves(
        lambda part: sum_gradients(objective, part, config.precision), group, messages.append
    )
    sums, lines = add_sums(own, messages)
    add_gradients(objective)
    for line in lines:
        log(line)
    gradients = [p.grad for p in objective.parameters() if p.grad is not None]
    if not gradients:  # every utterance of the step was unreadable
        return Step(sums, 0.0, lr, 0.0)
    # Summed, then divided by the targets of the whole step: a short utterance weighs no more. The
    # only wait for the device in a step.
    norm, total, count = read([nn.utils.get_total_norm(gradients), *sums["objective"]]).tolist()
    norm = norm / count if count else math.nan
    finite = math.isfinite(norm) and math.isfinite(total)
    step = Step(sums, norm, lr, sum(batch.seconds for batch in group), finite)
    if step.finite:
        torch._foreach_mul_(gradients, min(1.0, config.clip / (norm + 1e-6)) / count)
        for settings in optimizer.param_groups:
            settings["lr"] = lr
        optimizer.step()
    return step


def sum_gradients(
    objective: nn.Module, group: Sequence[TaskBatch], precision: str
) -> dict[str, Sum]:
    """Put the gradient of the group's summed objective into the parameters; -> all its sums."""
    objective.zero_grad(set_to_none=True)
    sums: dict[str, Sum] = {}
    device = next(objective.parameters()).device
    for batch in group:
        with autocast(device, precision):
            out = objective(batch)
        out["objective"].total.backward()
        add(sums, out)
    return sums


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Mixed precision for `bf16`; parameters and optimiser stay fp32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


@torch.no_grad()
def validate(
    objective: nn.Module, batches: Iterable[TaskBatch], precision: str
) -> tuple[dict[str, Sum], BatchStats]:
    """-> the objective's sums over the batches, in eval mode, and their counts."""
    objective.eval()
    device = next(objective.parameters()).device
    sums: dict[str, Sum] = {}
    stats = BatchStats()
    for batch in batches:
        stats = BatchStats.total([stats, BatchStats.of([batch])])
        if len(batch):
            with autocast(device, precision):
                add(sums, objective(batch.to(device)))
    return sums, stats


def unreadable_report(stats: BatchStats) -> list[str]:
    """A line on the unreadable utterances of a validation, if there are any."""
    if not stats.broken:
        return []
    ids = " ".join(broken.id for broken in stats.broken[:MAX_NAMED])
    more = " ..." if len(stats.broken) > MAX_NAMED else ""
    count = f"{len(stats.broken)} of {stats.utterances + len(stats.broken)} utterances"
    return [f"validation: {count} skipped: {ids}{more} ({stats.broken[0].reason})"]


def count_batches(
    state: TrainState, stats: BatchStats, allowed: float, log: Callable[[str], None]
) -> None:
    """Add a step to the state. Raises UserError above `allowed` unreadable utterances an epoch."""
    state.batch += stats.batches
    state.audio_seconds += stats.seconds
    state.utterances += stats.utterances
    state.broken += len(stats.broken)
    for broken in stats.broken:
        log(f"skipped {broken.id}: {broken.reason}")
    if state.broken > allowed * state.epoch:
        seen = state.utterances + state.broken
        raise UserError(
            f"{state.broken} of {seen} training utterances so far cannot be read, more than the "
            "share data.max_unreadable of the corpus; the log names each. "
            "Run python -m asr.prepare tsv."
        )


def bad_step(
    bad: int,
    group: Sequence[TaskBatch],
    objective: nn.Module,
    state: TrainState,
    config: TrainConfig,
    callbacks: Callbacks,
) -> int:
    """Log the utterances of a step without a finite gradient; -> the number of such in a row.

    Dumps the batches and raises UserError where these are config.bad_steps. Raises UserError at
    once where not the batches but the weights are the reason.
    """
    check_weights(dict(objective.named_parameters()), state.step - 1, config.optimizer)
    ids = " ".join(chain(*gather([name for batch in group for name in batch.ids])))
    callbacks.log(f"step {state.step}: loss or gradient not finite, not used; utterances {ids}")
    if bad + 1 >= config.bad_steps:
        raise UserError(
            f"step {state.step}: {bad + 1} steps in a row without a finite gradient; lower "
            "train.optimizer.lr or train.clip. The log names the utterances. "
            f"{callbacks.dump(group)}".rstrip()
        )
    return bad + 1


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
    if state.batch or _finished(state, config):
        return state.stage
    if config.steps is not None:
        finished = state.step / config.steps
    else:
        finished = (state.epoch - 1) / config.epochs
    return max(state.stage, sum(start <= finished for start in starts))


def planned_steps(epochs: Epochs, config: TrainConfig, state: TrainState) -> int:
    """Steps of the whole run; without config.steps, as if all epochs had as many as the first."""
    if config.steps is not None:
        return config.steps
    batches, at_once = len(epochs.plan(1).batches), config.accumulate * world()
    per_epoch = math.ceil(batches / at_once)
    rest = math.ceil(max(0, batches - state.batch) / at_once)
    return state.step + max(0, rest + (config.epochs - state.epoch) * per_epoch)


def _finished(state: TrainState, config: TrainConfig) -> bool:
    if config.steps is not None:
        return state.step >= config.steps
    return state.epoch > config.epochs


def _steps(
    epochs: Epochs, state: TrainState, accumulate: int, callbacks: Callbacks
) -> Iterator[tuple[list[TaskBatch], BatchStats]]:
    """For each step to the epoch's end: up to `accumulate` batches of this rank, all ranks' counts.

    A rank may have none in the last step. A request to stop on one rank stops all before the same
    step.
    """
    source: Iterator[TaskBatch] = iter(())
    if not callbacks.stop_requested():
        source = iter(epochs.batches(state.epoch, state.batch + rank(), world()))
    while True:
        group: list[TaskBatch] = []
        try:
            if not callbacks.stop_requested():
                group = list(islice(source, accumulate))
        except (RuntimeError, WorkerKilled):
            if not callbacks.stop_requested():  # a signal ends the loader's processes, too
                raise
        stats = BatchStats.total(gather(BatchStats.of(group, callbacks.stop_requested())))
        if not (stats.batches or stats.stop):
            return
        yield group, stats

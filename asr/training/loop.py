"""The training loop, in plain view, for every task.

A step reads `accumulate` batches, sums their objective, divides the gradient by the step's count
of targets, clips it and updates. Everything that happens between steps (logging, validation,
saving) is handed in as a function, so that the loop knows no model and no corpus.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from asr.data.batch import Broken, Plan
from asr.errors import UserError
from asr.training.objective import Sum, add
from asr.training.optim import Schedule


class Batch(Protocol):
    """What the loop reads of a batch; the rest is between a task's corpus and its objective."""

    ids: tuple[str, ...]  # of its utterances, or whatever the task calls its examples
    seconds: float  # audio in it; 0 where there is none
    broken: tuple[Broken, ...]

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> "Batch": ...


class Epochs(Protocol):
    """A training corpus, epoch after epoch, counted from 1."""

    def plan(self, epoch: int) -> Plan: ...

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]: ...


@dataclass
class Position:
    """Where a run stands: with weights, optimiser and random states, all that resuming needs."""

    step: int = 0
    epoch: int = 1
    batch: int = 0  # batches of this epoch that are done
    audio_seconds: float = 0.0
    utterances: int = 0
    broken: int = 0
    train_seconds: float = 0.0  # spent in steps and loading, over all resumes


@dataclass(frozen=True)
class Limits:
    """How far to train and what each step may do."""

    epochs: int
    steps: int | None = None  # overrides epochs
    accumulate: int = 1
    clip: float = 5.0
    precision: str = "fp32"
    broken: float = 0.01  # share of unreadable utterances that stops the run
    bad_steps: int = 10  # steps without a finite gradient, in a row, that stop the run


@dataclass(frozen=True)
class Step:
    """What one step did, for the log."""

    sums: dict[str, Sum]
    norm: float  # of the gradient, before clipping
    lr: float
    seconds: float  # audio in it


@dataclass(frozen=True)
class Between:
    """What happens between steps; each function looks itself whether it is due."""

    log: Callable[[Position, Step], None]
    after_step: Callable[[Position], None]
    after_epoch: Callable[[Position], None]
    note: Callable[[str], None]


def fit(
    objective: nn.Module,
    epochs: Epochs,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    position: Position,
    limits: Limits,
    between: Between,
) -> None:
    """Train from `position` on, which is kept up to date, until the limit of epochs or steps.

    Raises UserError where too many utterances cannot be read or the loss stays non-finite.
    """
    device = next(objective.parameters()).device
    total = planned_steps(epochs, limits)
    utterances = sum(map(len, epochs.plan(1).batches))
    # One bad file is forgiven in any corpus, unless none shall be.
    allowed = max(limits.broken * utterances, math.ceil(limits.broken))  # per epoch
    bad = 0
    while not _finished(position, limits):
        begin = time.perf_counter()
        for group in groups(epochs.batches(position.epoch, position.batch), limits.accumulate):
            _count(position, group, allowed, between.note)
            objective.set_step(position.step)
            lr = schedule(position.step + 1, min((position.step + 1) / total, 1.0))
            readable = [batch.to(device) for batch in group if len(batch)]
            step = take_step(objective, readable, optimizer, lr, limits)
            position.step += 1
            finite = math.isfinite(step.norm)
            bad = 0 if finite else _bad_step(bad, group, position, limits, between.note)
            position.train_seconds += time.perf_counter() - begin
            between.log(position, step)
            between.after_step(position)
            if _finished(position, limits):
                return
            begin = time.perf_counter()
        position.epoch, position.batch = position.epoch + 1, 0
        between.after_epoch(position)


def take_step(
    objective: nn.Module,
    group: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    lr: float,
    limits: Limits,
) -> Step:
    """One update from the batches of a group; none where the gradient is not finite."""
    objective.train()
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, Sum] = {}
    device = next(objective.parameters()).device
    for batch in group:
        with autocast(device, limits.precision):
            out = objective(batch)
        out["objective"].total.backward()
        add(sums, out)
    gradients = [p.grad for p in objective.parameters() if p.grad is not None]
    if not gradients:  # every utterance of the group was broken
        return Step(sums, 0.0, lr, 0.0)
    # Summed, then divided by the targets of the whole step: a short utterance weighs no more.
    norm = float(nn.utils.get_total_norm(gradients) / sums["objective"].count)
    if math.isfinite(norm):
        scale = min(1.0, limits.clip / (norm + 1e-6)) / float(sums["objective"].count)
        torch._foreach_mul_(gradients, scale)
        for settings in optimizer.param_groups:
            settings["lr"] = lr
        optimizer.step()
    return Step(sums, norm, lr, sum(batch.seconds for batch in group))


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """bf16 where the recipe asks for it; parameters and optimiser stay fp32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


@torch.no_grad()
def validate(objective: nn.Module, batches: Iterable[Batch], precision: str) -> dict[str, Sum]:
    """The objective's sums over the batches, without dropout."""
    objective.eval()
    device = next(objective.parameters()).device
    sums: dict[str, Sum] = {}
    for batch in batches:
        if len(batch):
            with autocast(device, precision):
                add(sums, objective(batch.to(device)))
    return sums


def groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """The batches of one step after another; an epoch's last step may have fewer."""
    source = iter(batches)
    while group := list(islice(source, size)):
        yield group


def planned_steps(epochs: Epochs, limits: Limits) -> int:
    """Steps of the whole run; by epochs, as if all were as long as the first."""
    if limits.steps is not None:
        return limits.steps
    return limits.epochs * math.ceil(len(epochs.plan(1).batches) / limits.accumulate)


def random_state() -> dict[str, Any]:
    """Torch's generators, which dropout draws from; the loader draws from its own."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Back to where random_state was taken."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def position_state(position: Position) -> dict[str, Any]:
    """A Position as plain numbers."""
    return asdict(position)


def _finished(position: Position, limits: Limits) -> bool:
    if limits.steps is not None:
        return position.step >= limits.steps
    return position.epoch > limits.epochs


def _count(
    position: Position, group: Sequence[Batch], allowed: float, note: Callable[[str], None]
) -> None:
    position.batch += len(group)
    for batch in group:
        position.audio_seconds += batch.seconds
        position.utterances += len(batch)
        position.broken += len(batch.broken)
        for broken in batch.broken:
            note(f"left out {broken.id}: {broken.reason}")
    if position.broken > allowed * position.epoch:
        seen = position.utterances + position.broken
        raise UserError(
            f"{position.broken} of {seen} training utterances so far cannot be read, more than the "
            "share data.broken of the corpus; the log names each. Run python -m asr.prepare tsv."
        )


def _bad_step(
    bad: int,
    group: Sequence[Batch],
    position: Position,
    limits: Limits,
    note: Callable[[str], None],
) -> int:
    ids = [name for batch in group for name in batch.ids]
    note(f"step {position.step}: gradient is not finite, not used; utterances {' '.join(ids)}")
    if bad + 1 >= limits.bad_steps:
        raise UserError(
            f"step {position.step}: {bad + 1} steps in a row without a finite gradient; lower "
            "train.optimizer.lr or train.clip. The log names the utterances."
        )
    return bad + 1

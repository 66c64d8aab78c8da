"""The training loop, in plain view, for every task.

A step reads `accumulate` batches, sums their objective, divides the gradient by the step's count
of targets, clips it and updates. Everything that happens between steps (logging, validation,
saving) is handed in as a function, so that the loop knows no model and no corpus. What goes wrong
in a step is dealt with in memory.py (it does not fit) and faults.py (it gives no numbers). Of
several ranks (distributed.py) each reads its share of a step; their sums make one step of all.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from asr.data.workers import WorkerKilled
from asr.training.distributed import add_gradients, add_sums, gather, rank, world
from asr.training.faults import allowed_broken, bad_step, count
from asr.training.given import Batch, Between, Epochs, Limits, Read, Step
from asr.training.memory import in_memory
from asr.training.objective import Sum, add
from asr.training.optim import Schedule
from asr.training.position import Position


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

    Returns sooner where it is asked to stop, always between two steps. Raises UserError where too
    many utterances cannot be read, a batch does not fit in memory, or gradients stay non-finite.
    """
    device = next(objective.parameters()).device
    allowed = allowed_broken(limits, sum(map(len, epochs.plan(1).batches)))
    bad = 0
    while not _finished(position, limits):
        begin, batches = time.perf_counter(), len(epochs.plan(position.epoch).batches)
        for group, read in _steps(epochs, position, limits.accumulate, between):
            if read.asked:
                return
            count(position, read, allowed, between.note)
            objective.set_step(position.step)
            lr = schedule(position.step + 1, progress(position, limits, batches))
            readable = [batch.to(device) for batch in group if len(batch)]
            step = take_step(objective, readable, optimizer, lr, limits, between.note)
            position.step += 1
            bad = 0 if step.finite else bad_step(bad, group, position, limits, between)
            position.train_seconds += time.perf_counter() - begin
            between.log(position, replace(step, seconds=read.seconds))
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
    note: Callable[[str], None] = print,
) -> Step:
    """One update from the batches of all ranks' groups; none where a number is not finite."""
    objective.train()
    said: list[str] = []
    mine = in_memory(
        lambda part: sum_gradients(objective, part, limits.precision), group, said.append
    )
    sums, lines = add_sums(mine, said)
    add_gradients(objective)
    for line in lines:
        note(line)
    gradients = [p.grad for p in objective.parameters() if p.grad is not None]
    if not gradients:  # every utterance of the step was broken
        return Step(sums, 0.0, lr, 0.0)
    total, count = sums["objective"]
    # Summed, then divided by the targets of the whole step: a short utterance weighs no more.
    norm = float(nn.utils.get_total_norm(gradients) / count)
    step = Step(sums, norm, lr, sum(batch.seconds for batch in group), _is_finite(norm, total))
    if step.finite:
        torch._foreach_mul_(gradients, min(1.0, limits.clip / (norm + 1e-6)) / float(count))
        for settings in optimizer.param_groups:
            settings["lr"] = lr
        optimizer.step()
    return step


def sum_gradients(objective: nn.Module, group: Sequence[Batch], precision: str) -> dict[str, Sum]:
    """Leaves the gradient of the group's summed objective in the parameters; -> all its sums."""
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
    """bf16 where the recipe asks for it; parameters and optimiser stay fp32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


@torch.no_grad()
def validate(
    objective: nn.Module, batches: Iterable[Batch], precision: str
) -> tuple[dict[str, Sum], Read]:
    """The objective's sums over the batches, without dropout; and what was read for them."""
    objective.eval()
    device = next(objective.parameters()).device
    sums: dict[str, Sum] = {}
    read = Read.of([])
    for batch in batches:
        read = Read.by_all([read, Read.of([batch])])
        if len(batch):
            with autocast(device, precision):
                add(sums, objective(batch.to(device)))
    return sums, read


def groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """The batches of one step after another; an epoch's last step may have fewer."""
    source = iter(batches)
    while group := list(islice(source, size)):
        yield group


def progress(position: Position, limits: Limits, batches: int) -> float:
    """The share of the run that is done with the step whose batches were counted last, 0 to 1.

    `batches` is what the epoch has. By epochs it is the share of the corpus, so that a run that
    goes on with more ranks, or other steps, follows the same schedule.
    """
    if limits.steps is not None:
        return min((position.step + 1) / limits.steps, 1.0)
    return min((position.epoch - 1 + position.batch / batches) / limits.epochs, 1.0)


def planned_steps(epochs: Epochs, limits: Limits, position: Position) -> int:
    """Steps of the whole run, those that are done included; by epochs, as if all were alike."""
    if limits.steps is not None:
        return limits.steps
    batches, at_once = len(epochs.plan(1).batches), limits.accumulate * world()
    whole = math.ceil(batches / at_once)
    here = math.ceil(max(0, batches - position.batch) / at_once)
    return position.step + max(0, here + (limits.epochs - position.epoch) * whole)


def _finished(position: Position, limits: Limits) -> bool:
    if limits.steps is not None:
        return position.step >= limits.steps
    return position.epoch > limits.epochs


def _is_finite(norm: float, total: Tensor) -> bool:
    return math.isfinite(norm) and bool(total.isfinite())


def _steps(
    epochs: Epochs, position: Position, accumulate: int, between: Between
) -> Iterator[tuple[list[Batch], Read]]:
    """This rank's batches of each step to the epoch's end, and what all ranks read for it.

    A rank may have none in the last step. What was `asked` of one stops all before the same step.
    """
    source: Iterator[list[Batch]] = iter(())
    if not between.asked_to_stop():
        mine = epochs.batches(position.epoch, position.batch + rank(), world())
        source = groups(mine, accumulate)
    while True:
        group = _next(source, between)
        read = Read.by_all(gather(Read.of(group, between.asked_to_stop())))
        if not (read.batches or read.asked):
            return
        yield group, read


def _next(source: Iterator[list[Batch]], between: Between) -> list[Batch]:
    """A signal that ends the run may have ended the loader's workers before us."""
    try:
        return [] if between.asked_to_stop() else next(source, [])
    except (RuntimeError, WorkerKilled):
        if not between.asked_to_stop():
            raise
        return []

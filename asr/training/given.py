"""What the training loop is given: batches, how far to go, and what happens between its steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from asr.data.batch import Broken
from asr.data.plan import Plan
from asr.training.objective import Sum
from asr.training.position import Position


class Batch(Protocol):
    """What the loop reads of a batch; the rest is between a task's corpus and its objective.

    A dataclass, so that one that does not fit in memory can be cut (memory.py).
    """

    size_key: ClassVar[str]  # the recipe key that says how large it is
    length_key: ClassVar[str | None]  # the one that says how long an example may be
    ids: tuple[str, ...]  # of its utterances, or whatever the task calls its examples
    seconds: float  # audio in it; 0 where there is none
    broken: tuple[Broken, ...]

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> "Batch": ...


class Epochs(Protocol):
    """A training corpus, epoch after epoch, counted from 1."""

    def plan(self, epoch: int) -> Plan: ...

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Read:
    """What was read for a step or a validation, by one rank or by all of them."""

    batches: int
    utterances: int
    seconds: float  # of audio
    broken: tuple[Broken, ...]
    asked: bool  # to stop before that step

    @classmethod
    def of(cls, group: Sequence[Batch], asked: bool = False) -> "Read":
        """By this rank."""
        broken = tuple(each for batch in group for each in batch.broken)
        seconds = sum(batch.seconds for batch in group)
        return cls(len(group), sum(map(len, group)), seconds, broken, asked)

    @classmethod
    def by_all(cls, parts: Sequence["Read"]) -> "Read":
        """By all ranks."""
        return cls(
            sum(part.batches for part in parts),
            sum(part.utterances for part in parts),
            sum(part.seconds for part in parts),
            tuple(each for part in parts for each in part.broken),
            any(part.asked for part in parts),
        )


@dataclass(frozen=True)
class Limits:
    """How far to train and what each step may do."""

    epochs: int
    steps: int | None = None  # overrides epochs
    accumulate: int = 1  # batches of a step, on each rank
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
    finite: bool = True  # whether it could be used


@dataclass(frozen=True)
class Between:
    """What happens between steps; each function looks itself whether it is due."""

    log: Callable[[Position, Step], None]
    after_step: Callable[[Position], None]
    after_epoch: Callable[[Position], None]
    note: Callable[[str], None]
    asked_to_stop: Callable[[], bool] = lambda: False
    evidence: Callable[[Sequence[Batch]], str] = lambda group: ""  # keeps bad batches, says where

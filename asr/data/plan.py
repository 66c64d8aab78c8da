"""The batches of an epoch, planned before its first utterance is read.

Utterances of like length share a batch, and the batches are shuffled. A plan depends on (seed,
epoch) and the lengths alone, so resuming is leaving out its first batches. It is held as arrays:
5 bytes an utterance and 16 a batch, so that ten million utterances cost no more than their
numbers; a batch becomes a list of Items only when it is asked for.

N utterances.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CHUNK = 1 << 20  # utterances that are turned into Python's numbers at a time


class Item(NamedTuple):
    """One utterance as an epoch reads it; epoch 0 is evaluation, without augmentation."""

    index: int
    epoch: int
    speed: float


@dataclass(frozen=True)
class Plan:
    """The batches of one epoch, and the share of padding in them."""

    batches: Sequence[Sequence[Item]]
    padding: float


class Row(Sequence[Item]):
    """The Items of one batch; only its numbers are held, and sent to a loader's worker.

    order, choices (n,): utterances, and the number of each one's speed among `speeds`.
    """

    def __init__(
        self, order: np.ndarray, choices: np.ndarray, speeds: tuple[float, ...], epoch: int
    ) -> None:
        self.order, self.choices, self.speeds, self.epoch = order, choices, speeds, epoch

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int | slice) -> "Item | Row":  # type: ignore[override]
        order, choice = self.order[index], self.choices[index]
        if isinstance(index, slice):
            return Row(order, choice, self.speeds, self.epoch)
        return Item(int(order), self.epoch, self.speeds[choice])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Batches(Sequence[Row]):
    """Batch b is the part starts[b] : stops[b] of `whole`; a slice of batches shares `whole`."""

    def __init__(self, whole: Row, starts: np.ndarray, stops: np.ndarray) -> None:
        self.whole, self.starts, self.stops = whole, starts, stops

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int | slice) -> "Row | Batches":  # type: ignore[override]
        if isinstance(index, slice):
            return Batches(self.whole, self.starts[index], self.stops[index])
        return self.whole[self.starts[index] : self.stops[index]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batches) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def plan_epoch(
    seconds: np.ndarray,
    cap: float,
    seed: int,
    epoch: int,
    speeds: Sequence[float] = (1.0,),
    short_first: bool = False,
    grid: float = 0.0,
) -> Plan:
    """Batches of at most `cap` padded seconds (one utterance at least), by length, then shuffled.

    seconds (N,) of every utterance; each draws one of `speeds`. `short_first` keeps the batches
    in the order of their length. With a `grid` above 0 the padded seconds are multiples of it, so
    that an epoch has few shapes of batches, which come back.
    """
    random = np.random.default_rng([seed, epoch])
    choices = random.choice(len(speeds), size=len(seconds)).astype(np.uint8)
    length = seconds / np.asarray(speeds, np.float64)[choices]
    # A little noise, so that the same utterances do not meet in every epoch.
    order = np.argsort(length * random.uniform(0.95, 1.05, size=len(length)), kind="stable")
    random = None if short_first else random
    return _planned(order, length, cap, choices, speeds, epoch, random, grid)


def plan_evaluation(seconds: np.ndarray, cap: float) -> Plan:
    """Every utterance once, the longest first: what does not fit in memory shows at once."""
    order = np.argsort(-seconds, kind="stable")
    return _planned(order, seconds, cap, np.zeros(len(seconds), np.uint8), (1.0,), 0, None)


def _planned(
    order: np.ndarray,
    length: np.ndarray,
    cap: float,
    choices: np.ndarray,
    speeds: Sequence[float],
    epoch: int,
    random: np.random.Generator | None,
    grid: float = 0.0,
) -> Plan:
    """The utterances in that order cut into batches, which `random` shuffles."""
    order = order.astype(np.uint32)
    real = float(length.sum())
    length = (np.ceil(length / grid) * grid if grid else length)[order]
    cuts = np.fromiter(_cuts(length, cap), np.int64)
    starts, stops = cuts[:-1], cuts[1:]
    padded = 0.0
    if len(starts):
        padded = float((np.maximum.reduceat(length, starts) * (stops - starts)).sum())
    if random:
        turn = np.arange(len(starts))
        random.shuffle(turn)
        starts, stops = starts[turn], stops[turn]
    whole = Row(order, choices[order], tuple(speeds), epoch)
    return Plan(Batches(whole, starts, stops), 1.0 - real / padded if padded else 0.0)


def _cuts(length: np.ndarray, cap: float) -> Iterator[int]:
    """length (N,) in the batches' order -> where each batch begins, and N."""
    yield 0
    count, longest, index = 0, 0.0, 0
    for chunk in range(0, len(length), CHUNK):
        # As Python's own numbers, which this loop is ten times faster with than with numpy's.
        for index, seconds in enumerate(length[chunk : chunk + CHUNK].tolist(), start=chunk):
            longest = max(longest, seconds)
            if count and longest * (count + 1) > cap:
                yield index
                count, longest = 0, seconds
            count += 1
    if count:
        yield index + 1

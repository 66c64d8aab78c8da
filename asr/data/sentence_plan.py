"""Sentences of like length in one padded batch, epoch after epoch.

Length is counted in bytes of UTF-8, which is known without reading a line; a line's end counts as
one more. All lines are shuffled, then put together by length within pools of POOL lines, and the
batches of a pool are shuffled: an epoch of any size is planned with 4 bytes a line and a pool.
It depends on (seed, epoch) alone, so resuming is leaving out the first batches.
"""

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader

from asr.data.sentences import SentenceBatch, Sentences
from asr.data.workers import read, start_worker
from asr.errors import UserError

POOL = 1 << 20  # lines


@dataclass(frozen=True)
class Batches(Sequence[np.ndarray]):
    """Batch b is the lines order[starts[b] : stops[b]]; a slice of batches shares `order`."""

    order: np.ndarray  # (N,) uint32
    starts: np.ndarray  # (batches,) int64
    stops: np.ndarray  # (batches,) int64

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int | slice) -> "np.ndarray | Batches":
        if isinstance(index, slice):
            return Batches(self.order, self.starts[index], self.stops[index])
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.order[self.starts[index] : self.stops[index]]


@dataclass(frozen=True)
class SentencePlan:
    """The batches of one epoch, and the share of padding in them."""

    batches: Batches
    padding: float


def plan_sentences(
    lengths: np.ndarray, cap: int, longest: int, seed: int, epoch: int, pool: int = POOL
) -> SentencePlan:
    """Batches of at most `cap` padded bytes (one line at least), without lines over `longest`.

    lengths (N,) in bytes. Epoch 0 is evaluation: nothing is shuffled.
    """
    random = np.random.default_rng([seed, epoch])
    order = np.arange(len(lengths), dtype=np.uint32)[lengths <= longest]
    if epoch:
        random.shuffle(order)
    sizes, real, padded = [np.zeros(1, np.int64)], 0, 0
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        part = part[np.argsort(lengths[part], kind="stable")]
        places = lengths[part].astype(np.int64) + 1
        cuts = _cuts(places, cap)
        turn = random.permutation(len(cuts) - 1) if epoch else np.arange(len(cuts) - 1)
        order[start : start + pool] = np.concatenate([part[cuts[b] : cuts[b + 1]] for b in turn])
        sizes.append(np.diff(cuts)[turn])
        real += int(places.sum())
        padded += int((places[cuts[1:] - 1] * np.diff(cuts)).sum())
    cuts = np.cumsum(np.concatenate(sizes))
    batches = Batches(order, cuts[:-1], cuts[1:])
    return SentencePlan(batches, 1 - real / padded if padded else 0.0)


def _cuts(places: np.ndarray, cap: int) -> np.ndarray:
    """places (n,) ascending -> where each batch begins, and n."""
    cuts = [0]
    while cuts[-1] < len(places):
        start = cuts[-1]
        most = min(max(cap // int(places[start]), 1), len(places) - start)
        padded = functools.partial(_padded, places[start : start + most])
        cuts.append(start + max(bisect_right(range(1, most + 1), cap, key=padded), 1))
    return np.array(cuts)


def _padded(places: np.ndarray, count: int) -> int:
    return int(places[count - 1]) * count


@dataclass
class SentenceEpochs:
    """A text in batches, epoch after epoch; epoch 0 is evaluation."""

    sentences: Sentences
    cap: int  # padded bytes in a batch
    longest: int  # bytes; longer lines are left out
    seed: int
    workers: int = 0

    def __post_init__(self) -> None:
        self.plan = functools.lru_cache(maxsize=1)(self.plan)  # it may be hundreds of megabytes

    def plan(self, epoch: int) -> SentencePlan:
        """The batches of an epoch. UserError where every line is too long."""
        lengths = self.sentences.lengths
        made = plan_sentences(lengths, self.cap, self.longest, self.seed, epoch)
        if not len(made.batches):
            raise UserError(
                f"data.max_bytes = {self.longest}: each of the {len(lengths)} lines is longer"
            )
        return made

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> Iterator[SentenceBatch]:
        """Every so many of those batches, read, without the first `skip`."""
        return read(
            DataLoader(
                self.sentences,
                batch_size=None,
                sampler=self.plan(epoch).batches[skip::every],
                num_workers=self.workers,
                worker_init_fn=start_worker,
                generator=torch.Generator(),  # its seed is not drawn from what dropout draws from
            )
        )

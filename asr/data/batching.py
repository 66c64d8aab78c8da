"""Which utterances share a batch, and how they are padded to one.

An epoch is planned before its first utterance is read: utterances of similar length share a batch,
and the batches are shuffled. A plan depends on (seed, epoch) and the lengths alone, so resuming
skips its first batches. It is stored as arrays, 5 bytes an utterance and 16 a batch, so that ten
million utterances cost little memory; a batch becomes a list of Items only when asked for.

N utterances, B in a batch, T frames, F features, U tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.data.tokenizer import BLANK

CHUNK = 1 << 20  # utterances converted to Python's numbers at a time
FRAME_SECONDS = 0.01  # of log-mel features
TOKEN_GRID = 8  # a batch on a grid of seconds is padded to a multiple of so many tokens, too


class Item(NamedTuple):
    """One utterance in one epoch; epoch 0 is evaluation, without augmentation."""

    index: int
    epoch: int
    speed: float


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch, and the share of padding in them.

    A batch is a sequence of Items, or for language models of the numbers of its lines.
    """

    batches: Sequence[Sequence]
    padding: float


class Epochs:
    """Base of the training corpora: batches, epoch after epoch; epochs count from 1."""

    _last: tuple[int, EpochPlan] | None = None  # the epoch planned last, perhaps 100 megabytes

    def plan(self, epoch: int) -> EpochPlan:
        """The batches of an epoch."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._new_plan(epoch)
        return self._last[1]

    def _new_plan(self, epoch: int) -> EpochPlan:
        raise NotImplementedError

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> "Iterator[TaskBatch]":
        """The batches of an epoch, read: without the first `skip`, then one of `every`."""
        raise NotImplementedError


@dataclass(eq=False)
class ItemSequence(Sequence[Item]):
    """Items stored as arrays, which is also how a batch is sent to a loader's worker."""

    order: np.ndarray  # (n,) utterances
    choices: np.ndarray  # (n,) the index of each one's speed among `speeds`
    speeds: tuple[float, ...]
    epoch: int

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int | slice) -> "Item | ItemSequence":  # type: ignore[override]
        order, choice = self.order[index], self.choices[index]
        if isinstance(index, slice):
            return ItemSequence(order, choice, self.speeds, self.epoch)
        return Item(int(order), self.epoch, self.speeds[choice])


@dataclass(eq=False)
class BatchSequence(Sequence[Sequence]):
    """Batch b is items[starts[b] : stops[b]]; a slice of batches shares `items`."""

    items: ItemSequence | np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int | slice) -> "Sequence | BatchSequence":  # type: ignore[override]
        if isinstance(index, slice):
            return BatchSequence(self.items, self.starts[index], self.stops[index])
        return self.items[self.starts[index] : self.stops[index]]


def plan_epoch(
    seconds: np.ndarray,
    cap: float,
    seed: int,
    epoch: int,
    speeds: Sequence[float],
    short_first: bool,
    grid: float = 0.0,
) -> EpochPlan:
    """Batches of at most `cap` padded seconds (one utterance at least), by length, then shuffled.

    seconds (N,) of every utterance; each draws one of `speeds`. `short_first`: not shuffled, the
    shortest first. `grid`, if not 0: padded seconds are multiples of it, so few batch shapes occur.
    """
    random = np.random.default_rng([seed, epoch])
    choices = random.choice(len(speeds), size=len(seconds)).astype(np.uint8)
    length = seconds / np.asarray(speeds, np.float64)[choices]
    # A little noise, so that batches differ from epoch to epoch.
    order = np.argsort(length * random.uniform(0.95, 1.05, size=len(length)), kind="stable")
    items = ItemSequence(order.astype(np.uint32), choices[order], tuple(speeds), epoch)
    return _planned(items, length, cap, None if short_first else random, grid)


def plan_evaluation(seconds: np.ndarray, cap: float) -> EpochPlan:
    """Every utterance once, the longest first: a lack of memory shows at once."""
    order = np.argsort(-seconds, kind="stable").astype(np.uint32)
    items = ItemSequence(order, np.zeros(len(seconds), np.uint8), (1.0,), epoch=0)
    return _planned(items, seconds, cap)


def _planned(
    items: ItemSequence,
    length: np.ndarray,
    cap: float,
    random: np.random.Generator | None = None,
    grid: float = 0.0,
) -> EpochPlan:
    """Cut the items, in their order, into batches; length (N,) is in the corpus' order."""
    real = float(length.sum())
    length = (np.ceil(length / grid) * grid if grid else length)[items.order]
    cuts = np.fromiter(batch_starts(length, cap), np.int64)
    starts, stops = cuts[:-1], cuts[1:]
    longest = np.maximum.reduceat(length, starts) if len(starts) else np.zeros(0)
    padded = float((longest * (stops - starts)).sum())
    if random:
        shuffled = np.arange(len(starts))
        random.shuffle(shuffled)
        starts, stops = starts[shuffled], stops[shuffled]
    return EpochPlan(BatchSequence(items, starts, stops), 1.0 - real / padded if padded else 0.0)


def batch_starts(length: np.ndarray, cap: float) -> Iterator[int]:
    """length (N,) in the batches' order, cap of a padded batch -> where each begins, and N."""
    yield 0
    count, longest, index = 0, 0.0, 0
    for chunk in range(0, len(length), CHUNK):
        # Python's numbers: with numpy's this loop is ten times slower.
        for index, seconds in enumerate(length[chunk : chunk + CHUNK].tolist(), start=chunk):
            longest = max(longest, seconds)
            if count and longest * (count + 1) > cap:
                yield index
                count, longest = 0, seconds
            count += 1
    if count:
        yield index + 1


class Example(NamedTuple):
    """One utterance, read: features (T, F), tokens (U,).

    other_speeds: features at other speeds. second_view: the features with other masks.
    """

    id: str
    features: Tensor
    tokens: Tensor
    other_speeds: Sequence[Tensor] = ()
    second_view: Tensor | None = None


class Broken(NamedTuple):
    """An utterance that could not be read, and why."""

    id: str
    reason: str


class TaskBatch:
    """Base of the batches of all tasks, frozen dataclasses with these fields.

    Beyond them the training loop knows nothing of a batch.
    """

    size_key: ClassVar[str]  # recipe key of the batch size
    length_key: ClassVar[str | None]  # recipe key of the longest example, if there is one
    moved: ClassVar[tuple[str, ...]]  # the tensors for the model's device
    rows: ClassVar[tuple[str, ...]]  # the fields with one row per example
    ids: tuple[str, ...]  # of its utterances (or sentences, images)
    seconds: float  # of audio; 0 in tasks without audio
    broken: tuple[Broken, ...]  # utterances that cannot be read

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> "TaskBatch":
        """The same on another device, but for the lengths, which are read on the CPU.

        The copy of pinned memory is not waited for.
        """
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "TaskBatch":
        """The same in pinned memory; torch's loader calls this."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "TaskBatch":
        found = {name: getattr(self, name) for name in self.moved}
        return replace(self, **{name: x if x is None else change(x) for name, x in found.items()})

    def split(self) -> "list[TaskBatch]":
        """Its two halves, for training; itself if it has one row. Rows share `seconds` evenly."""
        size, middle = len(self), (len(self) + 1) // 2
        if size < 2:
            return [self]
        parts = []
        for start, stop in ((0, middle), (middle, size)):
            found = {name: getattr(self, name) for name in self.rows}
            rows = {name: x if x is None else x[start:stop] for name, x in found.items()}
            parts.append(replace(self, seconds=self.seconds * (stop - start) / size, **rows))
        return parts


@dataclass(frozen=True)
class Batch(TaskBatch):
    """features (B, T, F), lengths (B,), tokens (B, U) without <sos> and <eos>, token_lengths (B,).

    Padding is 0 in features and <blank> in tokens. seconds: audio of the real frames. broken:
    utterances that could not be read. other_speeds: features (B, T', F) and lengths (B,) of the
    same utterances at each other speed. second_view (B, T, F): the features with other masks.
    """

    size_key: ClassVar = "train.batch_seconds"
    length_key: ClassVar = "data.max_seconds"
    moved: ClassVar = ("features", "tokens", "second_view")
    rows: ClassVar = ("ids", "features", "lengths", "tokens", "token_lengths", "second_view")
    ids: tuple[str, ...]
    features: Tensor
    lengths: Tensor
    tokens: Tensor
    token_lengths: Tensor
    seconds: float
    broken: tuple[Broken, ...] = ()
    other_speeds: tuple[tuple[Tensor, Tensor], ...] = ()
    second_view: Tensor | None = None

    @property
    def all_speeds(self) -> list[tuple[Tensor, Tensor]]:
        """Features and lengths at speed 1, then at each other speed."""
        return [(self.features, self.lengths), *self.other_speeds]

    def pin_memory(self) -> "Batch":
        """As TaskBatch, also `other_speeds`, which `to` leaves where they are."""
        other_speeds = tuple(
            (features.pin_memory(), lengths) for features, lengths in self.other_speeds
        )
        return replace(super().pin_memory(), other_speeds=other_speeds)

    def both_views(self) -> "Batch":
        """A batch of 2 B rows: `features`, then `second_view`."""
        names = ("lengths", "tokens", "token_lengths")
        twice = {name: torch.cat([getattr(self, name)] * 2) for name in names}
        features = torch.cat([self.features, self.second_view])
        return replace(self, ids=self.ids * 2, features=features, second_view=None, **twice)


def collate(
    examples: Sequence[Example | Broken | None],
    grid: float = 0.0,
    frame_seconds: float = FRAME_SECONDS,
) -> Batch:
    """Pad examples to one batch; the broken ones go into `Batch.broken`.

    A `grid` above 0 pads to a multiple of so many seconds and of TOKEN_GRID tokens.
    """
    good = [example for example in examples if isinstance(example, Example)]
    broken = tuple(example for example in examples if isinstance(example, Broken))
    features = [example.features for example in good] or [torch.zeros(0, 0)]
    second_view = [example.second_view for example in good if example.second_view is not None]
    tokens = [example.tokens for example in good] or [torch.zeros(0, dtype=torch.long)]
    other_speeds = zip(*(example.other_speeds for example in good), strict=True)
    lengths = _lengths([example.features for example in good])
    multiple = max(round(grid / frame_seconds), 1)
    return Batch(
        tuple(example.id for example in good),
        _pad(features, multiple),
        lengths,
        _pad(tokens, TOKEN_GRID if grid else 1),
        _lengths([example.tokens for example in good]),
        int(lengths.sum()) * frame_seconds,
        broken,
        tuple((_pad(speed), _lengths(speed)) for speed in other_speeds),
        _pad(second_view, multiple) if second_view else None,
    )


def _lengths(rows: Sequence[Tensor]) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.long)


def _pad(rows: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """B of (T, ...) -> (B, T', ...), padded with 0, also BLANK, to a multiple of T."""
    padded = pad_sequence(list(rows), batch_first=True, padding_value=BLANK)
    missing = -padded.size(1) % multiple
    if not missing:
        return padded  # pad would copy it even so
    return nn.functional.pad(padded, (0, 0) * (padded.dim() - 2) + (0, missing))

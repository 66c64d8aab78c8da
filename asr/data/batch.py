"""Utterances that are read, padded to batches; loader.py reads them, plan.py says which meet.

B utterances, T frames, F features, U tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.tokens import BLANK

TOKEN_GRID = 8  # tokens a batch is padded to a multiple of, where its seconds are too


class Example(NamedTuple):
    """One utterance, ready: features (T, F), tokens (U,).

    others: features at other speeds; again: as `features`, masked otherwise, or None.
    """

    id: str
    features: Tensor
    tokens: Tensor
    others: Sequence[Tensor] = ()
    again: Tensor | None = None


class Broken(NamedTuple):
    """An utterance that could not be read, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """features (B, T, F), lengths (B,), tokens (B, U) without <sos> and <eos>, token_lengths (B,).

    Padding is 0 in features and <blank> in tokens. `seconds` is the audio of the real frames.
    others: features (B, T', F) and lengths (B,) of the same utterances at each other speed.
    again (B, T, F): the features once more, masked otherwise, where training compares the two.
    """

    size_key: ClassVar = "train.batch_seconds"
    length_key: ClassVar = "data.max_seconds"
    ids: tuple[str, ...]
    features: Tensor
    lengths: Tensor
    tokens: Tensor
    token_lengths: Tensor
    seconds: float
    broken: tuple[Broken, ...] = field(default=())
    others: tuple[tuple[Tensor, Tensor], ...] = ()
    again: Tensor | None = None

    @property
    def readings(self) -> list[tuple[Tensor, Tensor]]:
        """Features and lengths of all: speed 1, then the others."""
        return [(self.features, self.lengths), *self.others]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> "Batch":
        """The same on another device; lengths too, since masks are made from them there."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("features", "lengths", "tokens", "token_lengths", "again")
            if getattr(self, name) is not None
        }
        return replace(self, **moved)

    def both_views(self) -> "Batch":
        """`features` and `again` as the first and the second half of one batch of 2 B rows."""
        twice = {
            name: torch.cat([getattr(self, name)] * 2)
            for name in ("lengths", "tokens", "token_lengths")
        }
        features = torch.cat([self.features, self.again])
        return replace(self, ids=self.ids * 2, features=features, again=None, **twice)


def collate(
    examples: Sequence[Example | Broken], frame_seconds: float = 0.01, grid: float = 0.0
) -> Batch:
    """Pad examples to one batch; the broken ones are set aside.

    With a `grid` above 0, to a multiple of so many seconds and of TOKEN_GRID tokens.
    """
    good = [example for example in examples if isinstance(example, Example)]
    broken = tuple(example for example in examples if isinstance(example, Broken))
    frames = [len(example.features) for example in good]
    features = [example.features for example in good] or [torch.zeros(0, 0)]
    again = [example.again for example in good if example.again is not None]
    tokens = [example.tokens for example in good] or [torch.zeros(0, dtype=torch.long)]
    multiple = max(round(grid / frame_seconds), 1)
    return Batch(
        tuple(example.id for example in good),
        _widened(pad_sequence(features, batch_first=True), multiple),
        torch.tensor(frames, dtype=torch.long),
        _widened(
            pad_sequence(tokens, batch_first=True, padding_value=BLANK),
            TOKEN_GRID if grid else 1,
        ),
        torch.tensor([len(example.tokens) for example in good], dtype=torch.long),
        sum(frames) * frame_seconds,
        broken,
        tuple(map(_padded, zip(*(example.others for example in good), strict=True))),
        _widened(pad_sequence(again, batch_first=True), multiple) if again else None,
    )


def _padded(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """B of (T, F) -> (B, T, F), lengths (B,)."""
    return pad_sequence(list(features), batch_first=True), torch.tensor([len(x) for x in features])


def _widened(padded: Tensor, multiple: int) -> Tensor:
    """(B, T, ...) with more zeros, up to the next multiple of T; BLANK is 0 too."""
    missing = -padded.size(1) % multiple
    if not missing:
        return padded  # pad would copy it all the same
    return nn.functional.pad(padded, (0, 0) * (padded.dim() - 2) + (0, missing))

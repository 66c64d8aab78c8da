"""Sentences for language models: the lines of texts, one sentence a line, in batches.

B sentences in a batch, U tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from asr.data.batch import Broken
from asr.data.lines import Lines
from asr.data.text import Tokenizer
from asr.tokens import BLANK


@dataclass(frozen=True)
class SentenceBatch:
    """tokens (B, U) without <sos> and <eos>, padded with <blank>; token_lengths, words (B,)."""

    size_key: ClassVar = "data.batch_bytes"
    length_key: ClassVar = "data.max_bytes"
    ids: tuple[str, ...]
    tokens: Tensor
    token_lengths: Tensor
    words: Tensor
    seconds: float = 0.0
    broken: tuple[Broken, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> "SentenceBatch":
        """The same on another device."""
        names = ("tokens", "token_lengths", "words")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


class Sentences(Dataset):
    """The lines of several texts, one after another; `sentences[rows]` is a batch of them."""

    def __init__(self, texts: Sequence[Lines], tokenizer: Tokenizer | None = None) -> None:
        self.texts, self.tokenizer = list(texts), tokenizer
        self.starts = np.cumsum([0, *map(len, texts)]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def lengths(self) -> np.ndarray:
        """UTF-8 bytes of each, (N,) int32."""
        return np.concatenate([text.lengths for text in self.texts])

    def line(self, index: int) -> str:
        """One sentence."""
        text = bisect_right(self.starts, index) - 1
        return self.texts[text][index - self.starts[text]]

    def spread(self, count: int) -> list[int]:
        """The numbers of at most `count` of them, evenly spread."""
        return np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64).tolist()

    def sample(self, count: int) -> list[str]:
        """At most `count` of them, evenly spread."""
        return [self.line(row) for row in self.spread(count)]

    def __getitem__(self, rows: Sequence[int]) -> SentenceBatch:
        lines = [self.line(int(row)) for row in rows]
        tokens = [torch.tensor(self.tokenizer.encode(line), dtype=torch.long) for line in lines]
        return SentenceBatch(
            tuple(str(int(row)) for row in rows),
            pad_sequence(tokens, batch_first=True, padding_value=BLANK),
            torch.tensor([len(line) for line in tokens]),
            torch.tensor([len(line.split()) for line in lines]),
        )

"""Sentences for language models: the lines of texts, one sentence a line, in padded batches.

The cleaned lines of a large text are memory-mapped (line_index), so that 40 million lines cost no
more memory than their lengths and their order: 8 bytes a line.

A batch holds sentences of similar length, counted in bytes of UTF-8, which is known without reading
a line; a line's end counts as one more. All lines are shuffled, then sorted by length within pools
of POOL lines, and the batches of a pool are shuffled: planning an epoch of any size costs 4 bytes a
line and a pool. A plan depends on (seed, epoch) alone, so resuming skips its first batches.

N lines, B sentences in a batch, U tokens.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from asr.data.batching import BatchSequence, Broken, EpochPlan, Epochs, TaskBatch, batch_starts
from asr.data.line_index import Block, Lines, open_lines
from asr.data.loader import read_batches
from asr.data.manifest import raw_lines, read_rows
from asr.data.tokenizer import BLANK, Tokenizer
from asr.errors import UserError
from asr.words import split_words

BLOCK = 1 << 13  # lines in memory at once
POOL = 1 << 20  # lines


def read_lines(path: Path) -> Lines:
    """The lines of a .txt, .txt.gz or manifest (.tsv, its column text), without empty ones.

    Raises UserError if it is missing, damaged, empty or not UTF-8.
    """
    growth = 8 if path.suffix == ".gz" else 1
    return open_lines(path, ".text-index", partial(_read_blocks, path), growth=growth)


def _read_blocks(path: Path) -> Iterator[Block]:
    """The sentences of a file. Raises UserError if there is none."""
    lines, count = clean_lines(path), 0
    while block := list(islice(lines, BLOCK)):
        count += len(block)
        yield Block("".join(f"{line}\n" for line in block).encode(), np.empty(0, np.float32))
    if not count:
        raise UserError(f"{path}: holds no sentence; one a line is expected")


def clean_lines(path: Path) -> Iterator[str]:
    """The sentences of a file in Unicode's form NFC, words separated by single spaces."""
    if path.suffix == ".tsv":
        texts = (row["text"] for _, row in read_rows(path, ["text"]))
    else:
        texts = raw_lines(path)
    for text in texts:
        if words := text.split():
            yield unicodedata.normalize("NFC", " ".join(words))


def plan_sentences(
    lengths: np.ndarray, cap: int, longest: int, seed: int, epoch: int, pool: int = POOL
) -> EpochPlan:
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
        line_bytes = lengths[part].astype(np.int64) + 1
        cuts = np.fromiter(batch_starts(line_bytes, cap), np.int64)
        batches = random.permutation(len(cuts) - 1) if epoch else np.arange(len(cuts) - 1)
        order[start : start + pool] = np.concatenate([part[cuts[b] : cuts[b + 1]] for b in batches])
        sizes.append(np.diff(cuts)[batches])
        real += int(line_bytes.sum())
        padded += int((line_bytes[cuts[1:] - 1] * np.diff(cuts)).sum())
    cuts = np.cumsum(np.concatenate(sizes))
    planned = BatchSequence(order, cuts[:-1], cuts[1:])
    return EpochPlan(planned, 1 - real / padded if padded else 0.0)


@dataclass(frozen=True)
class SentenceBatch(TaskBatch):
    """tokens (B, U) without <sos> and <eos>, padded with <blank>; token_lengths, words (B,)."""

    size_key: ClassVar = "data.batch_bytes"
    length_key: ClassVar = "data.max_bytes"
    moved: ClassVar = ("tokens", "words")
    rows: ClassVar = ("ids", "tokens", "token_lengths", "words")
    ids: tuple[str, ...]
    tokens: Tensor
    token_lengths: Tensor
    words: Tensor
    seconds: float = 0.0
    broken: tuple[Broken, ...] = ()


class Sentences(Dataset):
    """The lines of several texts, one after another; `sentences[rows]` is a batch of them."""

    def __init__(self, texts: Sequence[Lines], tokenizer: Tokenizer | None = None) -> None:
        self.texts, self.tokenizer = list(texts), tokenizer
        self.starts = np.cumsum([0, *map(len, texts)]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def lengths(self) -> np.ndarray:
        """UTF-8 bytes of each line, (N,) int32."""
        return np.concatenate([text.lengths for text in self.texts])

    def line(self, index: int) -> str:
        """Sentence number `index`."""
        text = bisect_right(self.starts, index) - 1
        return self.texts[text][index - self.starts[text]]

    def spread(self, count: int) -> list[int]:
        """The numbers of at most `count` sentences, evenly spread."""
        return np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64).tolist()

    def sample(self, count: int) -> list[str]:
        """At most `count` sentences, evenly spread."""
        return [self.line(row) for row in self.spread(count)]

    def __getitem__(self, rows: Sequence[int]) -> SentenceBatch:
        lines = [self.line(int(row)) for row in rows]
        tokens = [torch.tensor(self.tokenizer.encode(line), dtype=torch.long) for line in lines]
        return SentenceBatch(
            tuple(str(int(row)) for row in rows),
            pad_sequence(tokens, batch_first=True, padding_value=BLANK),
            torch.tensor([len(line) for line in tokens]),
            torch.tensor([len(split_words(line)) for line in lines]),
        )


@dataclass
class SentenceEpochs(Epochs):
    """The batches of texts; epoch 0 is evaluation."""

    sentences: Sentences
    cap: int  # padded bytes in a batch
    longest: int  # bytes; longer lines are skipped
    seed: int
    workers: int

    def _new_plan(self, epoch: int) -> EpochPlan:
        """Raises UserError if every line is too long."""
        lengths = self.sentences.lengths
        plan = plan_sentences(lengths, self.cap, self.longest, self.seed, epoch)
        if not len(plan.batches):
            fault = f"each of the {len(lengths)} lines is longer"
            raise UserError(f"data.max_bytes = {self.longest}: {fault}")
        return plan

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> Iterator[SentenceBatch]:
        return read_batches(
            self.sentences,
            self.workers,
            batch_size=None,
            sampler=self.plan(epoch).batches[skip::every],
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its seed is not drawn from what dropout draws from
        )

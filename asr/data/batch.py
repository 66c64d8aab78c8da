"""Planned utterances, read and padded to batches.

What is drawn at random (order, speed, masks) depends on (seed, epoch, utterance) alone, never on
how many workers load or where a run was cut off; plan.py says which utterances share a batch.

B utterances, T frames, F features, U tokens.
"""

import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from asr.data.corpus import Corpus
from asr.data.plan import Item, Plan, plan_epoch
from asr.data.text import Tokenizer
from asr.tokens import BLANK
from features.audio import AudioError
from features.front_end import FrontEnd

TOKEN_GRID = 8  # tokens a batch is padded to a multiple of, where its seconds are too


class Example(NamedTuple):
    """One utterance, ready: features (T, F), tokens (U,); others: features at other speeds."""

    id: str
    features: Tensor
    tokens: Tensor
    others: Sequence[Tensor] = ()


class Broken(NamedTuple):
    """An utterance that could not be read, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """features (B, T, F), lengths (B,), tokens (B, U) without <sos> and <eos>, token_lengths (B,).

    Padding is 0 in features and <blank> in tokens. `seconds` is the audio of the real frames.
    others: features (B, T', F) and lengths (B,) of the same utterances at each other speed.
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
            for name in ("features", "lengths", "tokens", "token_lengths")
        }
        return replace(self, **moved)


class Utterances(Dataset):
    """Reads one planned Item: audio -> features and text -> tokens.

    others: speeds at which every utterance is read besides, where nothing is augmented.
    """

    def __init__(
        self,
        corpus: Corpus,
        front_end: FrontEnd,
        tokenizer: Tokenizer,
        seed: int,
        others: Sequence[float] = (),
    ) -> None:
        self.corpus, self.front_end, self.tokenizer, self.seed = corpus, front_end, tokenizer, seed
        self.others = others

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, item: Item) -> Example | Broken:
        utterance = self.corpus[item.index]
        others: Sequence[Tensor] = ()
        try:
            waveform = self.front_end.load(utterance.audio)
            if item.epoch == 0:
                features, *others = self.front_end.at_speeds(
                    waveform, utterance.speaker, self.others
                )
            else:
                chance = random_of(self.seed, item.epoch, utterance.id)
                features = self.front_end.augmented(waveform, utterance.speaker, item.speed, chance)
        except AudioError as error:
            return Broken(utterance.id, str(error))
        if len(features) == 0:
            return Broken(utterance.id, f"{utterance.audio}: shorter than one frame")
        tokens = torch.tensor(self.tokenizer.encode(utterance.text), dtype=torch.long)
        return Example(utterance.id, features, tokens, others)


def random_of(seed: int, epoch: int, name: str) -> torch.Generator:
    """The random numbers of one utterance in one epoch."""
    digest = hashlib.blake2b(f"{seed} {epoch} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


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


@dataclass
class Epochs:
    """The training corpus, epoch after epoch."""

    utterances: Utterances
    cap: float  # padded seconds per batch
    speeds: tuple[float, ...] = (1.0,)
    short_first: bool = False  # in epoch 1
    workers: int = 0
    grid: float = 0.0  # batches are padded to multiples of so many seconds

    def __post_init__(self) -> None:
        self.plan = lru_cache(maxsize=1)(self.plan)  # one may be a hundred megabytes

    def plan(self, epoch: int) -> Plan:
        """The batches of an epoch, counted from 1."""
        return plan_epoch(
            self.utterances.corpus.seconds,
            self.cap,
            self.utterances.seed,
            epoch,
            self.speeds,
            self.short_first and epoch == 1,
            self.grid,
        )

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> Iterator[Batch]:
        """Every so many of those batches, read, without the first `skip`."""
        planned = self.plan(epoch).batches[skip::every]
        return load(self.utterances, planned, self.workers, self.grid)


def load(
    utterances: Utterances,
    batches: Sequence[Sequence[Item]],
    workers: int,
    grid: float = 0.0,
) -> Iterator[Batch]:
    """The planned batches, in order, read by `workers` processes (0: by this one)."""
    return iter(
        DataLoader(
            utterances,
            batch_sampler=batches,
            collate_fn=partial(collate, grid=grid),
            num_workers=min(workers, len(batches)),
            worker_init_fn=start_worker,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its seed is drawn here, not from what dropout draws
        )
    )


def start_worker(worker: int) -> None:
    """One thread: more threads than cores made a step twenty times slower. And no Ctrl-C.

    A signal to the whole group of processes is the trainer's to answer, which still needs a batch
    for the step it is in. Ended by SIGTERM, a worker leaves without the noise of a crash.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

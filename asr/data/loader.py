"""Planned utterances, read in batches.

What is drawn at random (order, speed, masks) depends on (seed, epoch, utterance) alone, never on
how many workers load or where a run was cut off; plan.py says which utterances share a batch.

T frames, F features, U tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from asr.data.batch import Batch, Broken, Example, collate
from asr.data.corpus import Corpus
from asr.data.plan import Item, Plan, plan_epoch
from asr.data.text import Tokenizer
from asr.data.workers import read, start_worker
from features.front_end import FrontEnd
from features.samples import AudioError


class Utterances(Dataset):
    """Reads one planned Item: audio -> features and text -> tokens.

    others: speeds at which every utterance is read besides, where nothing is augmented; views: 2
    where training compares each utterance with itself, masked otherwise.
    """

    def __init__(
        self,
        corpus: Corpus,
        front_end: FrontEnd,
        tokenizer: Tokenizer,
        seed: int,
        others: Sequence[float] = (),
        views: int = 1,
    ) -> None:
        self.corpus, self.front_end, self.tokenizer, self.seed = corpus, front_end, tokenizer, seed
        self.others, self.views = others, views

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, item: Item) -> Example | Broken:
        utterance = self.corpus[item.index]
        others: Sequence[Tensor] = ()
        again: Sequence[Tensor] = ()
        try:
            waveform = self.front_end.load(utterance.audio)
            if item.epoch == 0:
                features, *others = self.front_end.at_speeds(
                    waveform, utterance.speaker, self.others
                )
            else:
                chance = random_of(self.seed, item.epoch, utterance.id)
                features, *again = self.front_end.augmented(
                    waveform, utterance.speaker, item.speed, chance, self.views
                )
        except AudioError as error:
            return Broken(utterance.id, str(error))
        if len(features) == 0:
            return Broken(utterance.id, f"{utterance.audio}: shorter than one frame")
        tokens = torch.tensor(self.tokenizer.encode(utterance.text), dtype=torch.long)
        return Example(utterance.id, features, tokens, others, *again)


def random_of(seed: int, epoch: int, name: str) -> torch.Generator:
    """The random numbers of one utterance in one epoch."""
    digest = hashlib.blake2b(f"{seed} {epoch} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


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
    return read(
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

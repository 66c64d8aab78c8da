"""Read planned batches with worker processes, and measure the corpus' feature statistics.

What is drawn at random (order, speed, masks) depends on (seed, epoch, utterance) alone, never on
the number of workers or on where a run was interrupted.

B utterances, T frames, F features, U tokens.
"""

import ctypes
import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from asr.data.batching import Batch, Broken, EpochPlan, Epochs, Example, Item, collate, plan_epoch
from asr.data.corpus import Corpus, ExampleAudio, Utterance
from asr.data.feature_cache import FeatureCache
from asr.data.tokenizer import Tokenizer
from asr.errors import KILLED, WorkerKilled, is_killed
from asr.features import AudioError
from asr.features.audio import array_and_rate, from_samples
from asr.features.front_end import FrontEnd, group_of
from asr.features.normalize import MeanVarianceNorm
from asr.io import usable_cores

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of Linux


def read_batches(dataset: Dataset, workers: int, **options: Any) -> Iterator[Any]:
    """The batches of a DataLoader with these options, read by `workers` processes (0: by this one),
    no more than there are cores; reading begins at once. Raises WorkerKilled if a worker is gone.
    """
    workers = min(workers, usable_cores())
    loader = DataLoader(dataset, num_workers=workers, worker_init_fn=start_worker, **options)
    if not workers:
        return iter(loader)
    # A worker gets signals only when it handles them; Ctrl-C would print a traceback before.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return _report_killed(iter(loader))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _report_killed(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and not is_killed(error):
            raise
        raise WorkerKilled(KILLED) from None


def start_worker(worker: int) -> None:
    """Settings of a worker process: one thread, as more threads than cores are far slower.

    Signals to the process group are for the trainer, which still needs a batch to end its step.
    """
    torch.set_num_threads(1)
    _end_with_parent()
    sys.excepthook = _excepthook
    # By default a batch that cannot be passed, as where /dev/shm is full, is awaited for ever.
    Queue._on_queue_feeder_error = lambda *error: os._exit(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _end_with_parent() -> None:
    """Let the system end this process with its parent (in Linux, the thread that started it).

    A worker of torch checks only every few seconds, and never ends if the parent was killed first.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    # A forkserver, by which Python 3.14 starts processes, stands between them.
    is_child = multiprocessing.get_start_method() != "forkserver"
    if parent and is_child and os.getppid() != parent.pid:
        os._exit(0)


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print no traceback of the thread that passes tensors where the trainer is gone."""
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


@dataclass(eq=False)
class UtteranceDataset(Dataset):
    """Reads one planned Item: audio -> features and text -> tokens."""

    corpus: Corpus
    front_end: FrontEnd
    tokenizer: Tokenizer
    seed: int
    other_speeds: Sequence[float] = ()  # further speeds at which evaluation reads every utterance
    views: int = 1  # 2 if training compares two maskings of each utterance
    skips: Callable[[FrontEnd, Tensor], bool] | None = None  # waveforms that evaluation leaves out
    cache: FeatureCache | None = None  # features before normalisation

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, item: Item) -> Example | Broken | None:
        utterance = self.corpus[item.index]
        try:
            if item.epoch == 0:
                views = self._evaluated(utterance)
                if views is None:
                    return None
                features, *other_speeds = views
                second_view: Sequence[Tensor] = ()
            else:
                features, *second_view = self._augmented(item, utterance)
                other_speeds = []
        except AudioError as error:
            return Broken(utterance.id, str(error))
        if len(features) == 0:
            return Broken(utterance.id, f"{utterance.audio}: shorter than one frame")
        tokens = torch.tensor(self.tokenizer.encode(utterance.text), dtype=torch.long)
        return Example(utterance.id, features, tokens, other_speeds, *second_view)

    def _evaluated(self, utterance: Utterance) -> Sequence[Tensor] | None:
        """Features at speed 1 and at `other_speeds`; None for audio that is skipped."""
        front_end, waveform = self.front_end, torch.empty(0)
        stored = read_stored(self.cache, utterance, (1.0, *self.other_speeds))
        if self.skips or any(raw is None for raw in stored):
            waveform = load_waveform(front_end, utterance.audio)
            if self.skips and self.skips(front_end, waveform):
                return None
        return front_end.at_speeds(waveform, utterance.speaker, self.other_speeds, stored)

    def _augmented(self, item: Item, utterance: Utterance) -> Sequence[Tensor]:
        """Features for training, in `views`."""
        front_end, speaker = self.front_end, utterance.speaker
        random = utterance_generator(self.seed, item.epoch, utterance.id)
        (raw,) = read_stored(self.cache, utterance, [item.speed])
        if raw is not None:
            features = front_end.normalised(raw, speaker, item.speed)
            return front_end.masked(features, random, self.views)
        waveform = load_waveform(front_end, utterance.audio)
        return front_end.augmented(waveform, speaker, item.speed, random, self.views)


def load_waveform(front_end: FrontEnd, audio: Path | ExampleAudio) -> Tensor:
    """(S,) at the front end's rate. Raises AudioError."""
    source = audio.read() if isinstance(audio, ExampleAudio) else audio
    if isinstance(source, str | Path):
        return front_end.load(source)
    return from_samples(*array_and_rate(source), front_end.sample_rate, str(audio))


def read_stored(
    cache: FeatureCache | None, utterance: Utterance, speeds: Sequence[float]
) -> list[Tensor | None]:
    """The stored features (T, F) at each speed, None where they are missing."""
    return [cache.read(utterance.id, speed) if cache else None for speed in speeds]


def utterance_generator(seed: int, epoch: int, name: str) -> torch.Generator:
    """The random numbers of one utterance in one epoch."""
    digest = hashlib.blake2b(f"{seed} {epoch} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass
class SpeechEpochs(Epochs):
    """The batches of utterances."""

    utterances: UtteranceDataset
    cap: float  # padded seconds in a batch
    speeds: tuple[float, ...]
    short_first: bool  # in epoch 1
    workers: int
    grid: float = 0.0  # seconds: batches are padded to multiples of it

    def _new_plan(self, epoch: int) -> EpochPlan:
        seconds, seed = self.utterances.corpus.seconds, self.utterances.seed
        first = self.short_first and epoch == 1
        return plan_epoch(seconds, self.cap, seed, epoch, self.speeds, first, self.grid)

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> Iterator[Batch]:
        planned = self.plan(epoch).batches[skip::every]
        return load_batches(self.utterances, planned, self.workers, self.grid)


def load_batches(
    utterances: UtteranceDataset, batches: Sequence[Sequence[Item]], workers: int, grid: float = 0.0
) -> Iterator[Batch]:
    """The planned batches, in order, read by at most `workers` processes (0: by this one)."""
    return read_batches(
        utterances,
        min(workers, len(batches)),
        batch_sampler=batches,
        collate_fn=partial(collate, grid=grid, frame_seconds=utterances.front_end.frame_seconds),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its seed is drawn here, not from what dropout draws
    )


MEASURED = 30_000  # utterances, about a hundred hours: more would not move their mean


@dataclass(eq=False)
class _RawFeatures(Dataset):
    """Features (T, F) before normalisation, with their speaker; none if the audio is unreadable."""

    corpus: Corpus
    front_end: FrontEnd
    speeds: Sequence[float]
    cache: FeatureCache | None

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, index: int) -> list[tuple[Tensor, str | None]]:
        utterance = self.corpus[index]
        stored = read_stored(self.cache, utterance, self.speeds)
        if all(raw is not None for raw in stored):
            groups = [group_of(utterance.speaker, speed) for speed in self.speeds]
            return list(zip(stored, groups, strict=True))
        try:
            waveform = load_waveform(self.front_end, utterance.audio)
        except AudioError:
            return []
        return self.front_end.features_for_statistics(waveform, utterance.speaker, self.speeds)


def measure_statistics(
    corpus: Corpus,
    front_end: FrontEnd,
    workers: int,
    speeds: Sequence[float],
    cache: FeatureCache | None = None,
) -> None:
    """Add the readable utterances to the front end's normalisation, if it needs statistics.

    Global statistics are measured at speed 1 on at most MEASURED utterances, evenly spread;
    statistics of speakers on all utterances, separately for each of `speeds`.
    """
    if not front_end.norm.needs_statistics:
        return
    if front_end.norm.kind == "global":
        corpus, speeds = corpus.sample(MEASURED), (1.0,)
    raw = _RawFeatures(corpus, front_end, speeds, cache)
    for examples in read_batches(raw, workers, batch_size=16, collate_fn=list):
        for features, speaker in chain.from_iterable(examples):
            front_end.norm.add(features, speaker)


def with_split_statistics(
    front_end: FrontEnd,
    corpus: Corpus,
    workers: int,
    speeds: Sequence[float],
    cache: FeatureCache | None = None,
) -> FrontEnd:
    """The front end with the speaker statistics of this split alone, if it normalises by them."""
    if front_end.norm.kind != "speaker":
        return front_end
    by_speaker = copy(front_end)
    by_speaker.norm = MeanVarianceNorm("speaker", front_end.norm.variance)
    measure_statistics(corpus, by_speaker, workers, speeds, cache)
    return by_speaker

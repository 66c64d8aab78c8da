"""Compute the features of a frozen encoder for a corpus, into its feature_cache.

S samples, T frames, F features per frame.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from asr.data.corpus import Corpus, Utterance
from asr.data.feature_cache import (
    FRAMES,
    INDEX,
    FeatureCache,
    Part,
    append,
    cache_folders,
    find_copies,
    open_cache,
    read_cache,
)
from asr.data.loader import load_waveform, read_batches
from asr.data.progress import AudioProgress
from asr.errors import UserError, print_line
from asr.features import AudioError
from asr.features.front_end import FrontEnd
from asr.io import lock_file

Wanted = tuple[Utterance, float]  # at that speed


def make_cache(
    corpus: Corpus,
    front_end: FrontEnd,
    key: str,
    speeds: Sequence[float],
    workers: int,
    device: torch.device,
) -> FeatureCache | None:
    """The cache of a corpus, completed by what it lacks; None without a manifest.

    Of several processes one computes, and the others wait. Utterances that cannot be read or have
    no frame are stored as such. Raises UserError where the disk has no room or cannot be written.
    """
    cache = open_cache(corpus, key, front_end.size)
    if cache and not _missing(cache, front_end, corpus, speeds):
        return cache
    folders = list(cache_folders(corpus, key))
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                continue
        except OSError:
            continue
        with lock_file(folder / "lock", None) as locked:
            if not locked:
                continue
            (folder / FRAMES).touch()
            (folder / INDEX).touch()
            try:
                find_copies(folder, corpus, front_end.size)
                cache = read_cache(folder, corpus, front_end.size)
                wanted = _missing(cache, front_end, corpus, speeds)
                _add(folder, front_end, wanted, workers, device)
            except OSError as error:
                raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
        return read_cache(folder, corpus, front_end.size)
    if folders:
        print_line(
            f"{corpus.path}: no folder for its features can be written and locked; the encoder "
            "computes them in each epoch"
        )
    return None


def _missing(
    cache: FeatureCache, front_end: FrontEnd, corpus: Corpus, speeds: Sequence[float]
) -> list[Wanted]:
    """What is not stored of all that is short enough for the encoder."""
    return [
        (utterance, speed)
        for speed in speeds
        for utterance in corpus
        if utterance.seconds / speed <= front_end.longest
        and (utterance.id, speed) not in cache.spans
    ]


class _Missing(Dataset):
    """Features of one utterance at one speed, or the waveform if the encoder is on a GPU."""

    def __init__(self, front_end: FrontEnd, wanted: Sequence[Wanted], on_cpu: bool) -> None:
        self.front_end, self.wanted, self.on_cpu = front_end, wanted, on_cpu

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, number: int) -> Part:
        utterance, speed = self.wanted[number]
        try:
            part = load_waveform(self.front_end, utterance.audio)
            if self.on_cpu:
                part = self.front_end.raw(part, speed).half()
        except AudioError:
            part = None
        return utterance, speed, part


def _add(
    folder: Path,
    front_end: FrontEnd,
    wanted: Sequence[Wanted],
    workers: int,
    device: torch.device,
) -> None:
    """Compute the wanted features and append them."""
    if not wanted:
        return
    hours = sum(utterance.seconds / speed for utterance, speed in wanted) / 3600
    _check_room(folder, hours * 3600 / front_end.frame_seconds * front_end.size * 2, hours)
    encoder, on_cpu = front_end.extract.encoder, device.type == "cpu"
    encoder.to(device)
    missing = _Missing(front_end, wanted, on_cpu)
    parts: Iterator[Part] = read_batches(missing, min(workers, len(wanted)), batch_size=None)
    if not on_cpu:
        parts = (_on_device(front_end, *part) for part in parts)
    try:
        append(folder, front_end.size, _reported(parts, hours))
    finally:
        encoder.to("cpu")


def _on_device(
    front_end: FrontEnd, utterance: Utterance, speed: float, waveform: Tensor | None
) -> Part:
    try:
        raw = None if waveform is None else front_end.raw(waveform, speed).half()
    except AudioError:
        raw = None
    return utterance, speed, raw


def _check_room(folder: Path, needed: float, hours: float) -> None:
    free = shutil.disk_usage(folder).free
    print_line(f"computing features of {hours:.1f} h of audio: {needed / 1e9:.2f} GB in {folder}")
    if needed > free:
        raise UserError(f"{folder}: the disk has {free / 1e9:.2f} GB; make room, or a link to it")


def _reported(parts: Iterable[Part], hours: float) -> Iterator[Part]:
    """The parts, with a line on the progress from time to time."""
    progress = AudioProgress("features:", 3600 * hours)
    for utterance, speed, features in parts:
        yield utterance, speed, features
        progress.add(utterance.seconds / speed)

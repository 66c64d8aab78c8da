"""Features of a frozen encoder, computed once and stored as float16 in one file for each manifest.

    FOLDER/features.f16    frames (N, F), one utterance after another
    FOLDER/index.tsv       of each utterance: id, audio file with size, time and checksum, speed,
                           first frame, number of frames, 0 where it has none or is unreadable

FOLDER is NAME.features/KEY beside NAME.tsv, or in the user's cache folder where that cannot be
written; KEY stands for the encoder's weights, layer and sample rate. Both files only grow, the
frames first, so an interrupted computation is continued, and an audio file that has changed is
computed again; one that was only copied, and has another time, is not. Reading maps the frames
into memory, which the loader's processes share.

N frames in all, F features per frame, S samples.
"""

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.data.corpus import Corpus, Utterance
from asr.errors import UserError
from asr.features.tar import PackedError, member_of, read_member
from asr.io import open_file, sha256_of_files, user_cache

FRAMES, INDEX = "features.f16", "index.tsv"
SYNC_SECONDS = 10.0  # between two additions to the index
MAX_INDEX = 8 << 30  # bytes


# Features (T, F) of an utterance at a speed; None for unreadable audio.
Part = tuple[Utterance, float, Tensor | None]


class Entry(NamedTuple):
    """A line of the index."""

    id: str
    audio: str
    size: int  # of the file, bytes
    time: int  # of its last change, ns
    checksum: str  # SHA256 of its content, the first 16 digits
    speed: float
    start: int  # frame
    frames: int


@dataclass(frozen=True, eq=False)
class FeatureCache:
    """The stored features of a corpus, by utterance and speed."""

    frames: np.ndarray  # (N, F) float16, memory-mapped
    spans: dict[tuple[str, float], tuple[int, int]]  # id and speed -> first frame, frames

    def read(self, utterance: str, speed: float) -> Tensor | None:
        """Features (T, F), float32; None where they are not stored."""
        start, frames = self.spans.get((utterance, speed), (0, 0))
        if not frames:
            return None
        return torch.from_numpy(self.frames[start : start + frames].astype(np.float32))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled for a process that is not forked, which maps the file itself."""
        file = getattr(self.frames, "filename", None)
        return _map_again, (file, self.frames.shape, self.spans)


def _map_again(
    file: Path | None, shape: tuple[int, int], spans: dict[tuple[str, float], tuple[int, int]]
) -> FeatureCache:
    return FeatureCache(_mapped(file, shape), spans)


def _mapped(file: Path | None, shape: tuple[int, int]) -> np.ndarray:
    """The frames of a file; an empty one cannot be mapped."""
    return np.memmap(file, np.float16, "r", shape=shape) if shape[0] else np.zeros(shape, "f2")


def open_cache(corpus: Corpus, key: str, size: int) -> FeatureCache | None:
    """What is stored of the corpus' features, of `size` values a frame; None where nothing is."""
    for folder in cache_folders(corpus, key):
        with suppress(FileNotFoundError, NotADirectoryError):
            return read_cache(folder, corpus, size)
    return None


def cache_key(weights: str, layer: Any, sample_rate: int) -> str:
    """The name of a cache's folder; weights: the checksum of the encoder."""
    return hashlib.sha256(f"{weights} {layer} {sample_rate}".encode()).hexdigest()[:16]


def cache_folders(corpus: Corpus, key: str) -> Iterator[Path]:
    """Where the cache of a corpus may be; nowhere without a manifest."""
    if corpus.path is None or not corpus.path.is_file():
        return
    yield corpus.path.with_suffix(".features") / key
    beside = hashlib.sha256(os.fsencode(corpus.path.absolute())).hexdigest()[:16]
    yield user_cache() / "features" / beside / key


def read_cache(folder: Path, corpus: Corpus, size: int) -> FeatureCache:
    """Map the frames. Raises FileNotFoundError where there are none."""
    frames = folder / FRAMES
    count = frames.stat().st_size // (2 * size)
    stamps = {utterance.id: _stamp(utterance) for utterance in corpus}
    spans = {
        (entry.id, entry.speed): (entry.start, entry.frames)
        for entry in _stored(folder, count)
        if (entry.audio, entry.size, entry.time) == stamps.get(entry.id)
    }
    return FeatureCache(_mapped(frames, (count, size)), spans)


def find_copies(folder: Path, corpus: Corpus, size: int) -> None:
    """Enter the present time of audio that has another one than is stored, but the content."""
    count = (folder / FRAMES).stat().st_size // (2 * size)
    stored = defaultdict(list)
    for entry in _stored(folder, count):
        stored[entry.id].append(entry)
    lines = [b"\n"]  # ends a torn line
    for utterance in corpus:
        if not (entries := stored[utterance.id]) or not (stamp := _stamp(utterance)):
            continue
        name, file_size, now = stamp
        moved = [e for e in entries if (e.audio, e.size) == (name, file_size) and e.time != now]
        checksum = _checksum(utterance) if moved else None
        lines += [_line(e._replace(time=now)) for e in moved if e.checksum == checksum]
    with (folder / INDEX).open("ab") as index:
        index.write(b"".join(lines))


def _stored(folder: Path, count: int) -> Iterable[Entry]:
    """The entries of an index within the first `count` frames."""
    with open_file(folder / INDEX, MAX_INDEX) as file:
        entries = {(e.id, e.speed): e for e in _entries(file) if e.start + e.frames <= count}
    return entries.values()


def _entries(file: IO[bytes]) -> Iterator[Entry]:
    """The complete lines of an index; a later one of the same key replaces an earlier one."""
    for line in file:
        fields = line.decode(errors="replace").rstrip("\n").split("\t")
        with suppress(ValueError, TypeError):
            name, audio, size, at, checksum, speed, start, frames = fields
            file_stamp = int(size), int(at), checksum
            entry = Entry(name, audio, *file_stamp, float(speed), int(start), int(frames))
            if line.endswith(b"\n") and entry.start >= 0 and entry.frames >= 0:
                yield entry


def _stamp(utterance: Utterance) -> tuple[str, int, int] | None:
    """The utterance's file, its size and time; None where it cannot be read."""
    audio = str(utterance.audio)
    member = member_of(audio)
    try:
        status = Path(member.tar if member else audio).stat()
    except OSError:
        return None
    name = Path(audio).name if member is None else audio.rpartition("/")[2]
    return name, status.st_size, status.st_mtime_ns


def _line(entry: Entry) -> bytes:
    return ("\t".join(map(str, entry)) + "\n").encode()


def _checksum(utterance: Utterance) -> str | None:
    """Of the content of the utterance's file; None where it cannot be read."""
    audio = str(utterance.audio)
    try:
        if member := member_of(audio):
            return hashlib.sha256(read_member(member)).hexdigest()[:16]
        return sha256_of_files([Path(audio)])[:16]
    except (OSError, PackedError, UserError):
        return None


def append(folder: Path, size: int, parts: Iterable[Part]) -> None:
    """Append frames, then the lines that name them, so that a line never lacks its frames."""
    with (folder / FRAMES).open("r+b") as frames, (folder / INDEX).open("ab") as index:
        start = frames.seek(0, os.SEEK_END) // (2 * size)
        frames.truncate(frames.seek(2 * size * start))  # without a torn frame
        index.write(b"\n")  # ends a torn line
        lines: list[bytes] = []
        last = time.monotonic()
        try:
            for utterance, speed, features in parts:
                stamp, checksum = _stamp(utterance), _checksum(utterance)
                if not stamp or not checksum:
                    continue
                added = 0 if features is None else len(features)
                if added:
                    frames.write(features.numpy().tobytes())
                lines.append(_line(Entry(utterance.id, *stamp, checksum, speed, start, added)))
                start += added
                if time.monotonic() - last > SYNC_SECONDS:
                    _flush(frames, index, lines)
                    last = time.monotonic()
        finally:
            _flush(frames, index, lines)


def _flush(frames: IO[bytes], index: IO[bytes], lines: list[bytes]) -> None:
    frames.flush()
    os.fsync(frames.fileno())
    index.write(b"".join(lines))
    index.flush()
    lines.clear()

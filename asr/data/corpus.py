"""Utterances, and the corpora that manifests list.

A manifest of up to SMALL bytes is kept in memory. Of a larger one the checked rows, where each ends
and each duration are written once to MANIFEST.index and memory-mapped: opening takes milliseconds,
rows become strings only when asked for, and the loader's processes share the memory. An index whose
manifest has another size or modification time is written again. If it cannot be written beside the
manifest, or another file has its name, it goes to the user's cache folder, and if not there either,
all rows are kept in memory. An index may have come with the manifest: nothing in it is trusted.
Rows are found by number and columns are never queried, so two arrays suffice, without Arrow.

N utterances.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from asr.data.manifest import (
    COLUMNS,
    cache_name,
    check_row,
    damaged_index,
    file_state,
    line_of,
    read_blocks,
    write_rows,
)
from asr.errors import UserError, print_line
from asr.io import atomic_writer, open_file, parse_json, user_cache

SMALL = 16 << 20  # bytes of a manifest
MAGIC = b"asrindex"
VERSION = 1
MAX_DESCRIPTION = 4096  # bytes


@dataclass(frozen=True)
class ManifestRows(Sequence[tuple[str, ...]]):
    """`rows[i]` are the fields of manifest.COLUMNS; seconds (N,) float32 of all."""

    text: np.ndarray  # (bytes,) uint8: every row with a line break after it
    ends: np.ndarray  # (N,) int64: where each row's break is
    seconds: np.ndarray
    file: Path | None = None  # the index they are mapped from
    source: tuple[tuple[str, int], ...] = ()  # of the index: version, and the manifest's size, time

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[str, ...]:  # type: ignore[override]
        index = range(len(self))[index]
        row = line_of(self.text, self.ends, index, self.file).split("\t")
        if len(row) != len(COLUMNS):
            raise damaged_index(self.file)
        return tuple(row)

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that is not forked maps the file itself: numpy would send it the content.
        if self.file:
            return _reopened, (self.file, self.source)
        return ManifestRows, (self.text, self.ends, self.seconds)


def open_rows(path: Path, allow_outside: bool) -> ManifestRows:
    """The rows of a manifest. Raises UserError as manifest.read_blocks does."""
    state = file_state(path, VERSION)
    if state["size"] <= SMALL:
        return _in_memory(path, allow_outside)
    source = tuple({**state, "outside": int(allow_outside)}.items())
    places = [path.with_name(f"{path.name}.index"), *_cached(path)]
    for place in places:
        if rows := _mapped(place, source):
            return rows
    for place in filter(_may_be_written, places):
        with contextlib.suppress(OSError):  # a read-only or a full disk
            _write_index(path, place, source, allow_outside)
            return _reopened(place, source)
    print_line(f"{path}: its index cannot be written, so each process reads it again")
    return _in_memory(path, allow_outside)


def _cached(path: Path) -> list[Path]:
    """The index's place in the user's cache folder; none for a user without a home."""
    try:
        return [user_cache() / f"{cache_name(path)}.index"]
    except RuntimeError:
        return []


def _may_be_written(place: Path) -> bool:
    """Whether there is nothing at `place`, or an index, damaged or not."""
    if not os.path.lexists(place):
        return True
    try:
        with open_file(place) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(MAGIC)))
            return not place.is_symlink() and file.read() == MAGIC
    except (OSError, UserError):
        return False


def _in_memory(path: Path, allow_outside: bool) -> ManifestRows:
    text = bytearray()
    ends, seconds = _gather(path, allow_outside, text.extend)
    return ManifestRows(np.frombuffer(text, np.uint8), ends, seconds)


def _gather(
    path: Path, allow_outside: bool, write: Callable[[bytes], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Passes every block's text to `write` -> ends and seconds of all rows, (N,) each."""
    ends, seconds, place = [], [], 0
    for block in read_blocks(path, allow_outside):
        write(block.text)
        ends.append(place + np.flatnonzero(np.frombuffer(block.text, np.uint8) == ord("\n")))
        seconds.append(block.seconds)
        place += len(block.text)
    return np.concatenate(ends), np.concatenate(seconds)


def _write_index(path: Path, place: Path, source: tuple, allow_outside: bool) -> None:
    """Text, padding to 8 bytes, ends, seconds, a description as JSON, its length, MAGIC."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(place, sync=True) as file:
        print_line(f"checking {path} and writing {place} (once)")
        ends, seconds = _gather(path, allow_outside, file.write)
        size = file.tell()
        file.write(bytes(-size % 8))
        for array in (ends, seconds):  # tofile would not name the cause where the disk is full
            file.write(array.data)
        about = json.dumps({"source": source, "bytes": size, "rows": len(ends)}).encode()
        file.write(about + len(about).to_bytes(8, "little") + MAGIC)


def _mapped(place: Path, source: tuple) -> ManifestRows | None:
    """The index at `place`; None if there is none, or of another source."""
    try:
        with open_file(place) as file:
            about, end = _read_description(file)
        size, count = int(about["bytes"]), int(about["rows"])
        start = size + -size % 8
        known = about["source"] == [list(pair) for pair in source]
        if not known or min(size, count) < 1 or end != start + 12 * count:
            return None
        rows = ManifestRows(  # as plain arrays: every slice of a memmap costs microseconds
            np.asarray(np.memmap(place, np.uint8, "r", shape=(size,))),
            np.asarray(np.memmap(place, np.int64, "r", start, (count,))),
            np.memmap(place, np.float32, "r", start + 8 * count, (count,)),
            place,
            source,
        )
        return rows if rows.seconds.min() > 0 else None  # not of NaN
    except (OSError, UserError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _read_description(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The description at the end of an index, and its position. Raises ValueError without one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 16))
    tail = file.read()
    length = int.from_bytes(tail[:8], "little")
    if tail[8:] != MAGIC or length > MAX_DESCRIPTION:
        raise ValueError
    start = file.seek(max(0, size - 16 - length))
    return parse_json(file.read()[:-16]), start


def _reopened(place: Path, source: tuple) -> ManifestRows:
    rows = _mapped(place, source)
    if rows is None:
        raise UserError(f"{place}: is no longer the index that was opened; start again")
    return rows


@dataclass(frozen=True, slots=True)
class Utterance:
    """One recording with its transcript; `seconds` is the duration that the manifest gives."""

    id: str
    speaker: str
    audio: Path
    seconds: float
    text: str


class Corpus:
    """Utterances in the order of their manifest: any sequence, also one that makes them lazily.

    `corpus[i]` is an Utterance, `corpus[a:b]` a Corpus; `seconds` (N,) are the durations.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        path: Path | None = None,
        seconds: np.ndarray | None = None,
    ) -> None:
        self.path, self._utterances = path, utterances
        if seconds is None:
            seconds = np.array([u.seconds for u in utterances], dtype=np.float32)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self._utterances)

    def __getitem__(self, index: int | slice) -> "Utterance | Corpus":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self._utterances[index]

    def __iter__(self) -> Iterator[Utterance]:
        return iter(self._utterances)

    def take(self, rows: np.ndarray) -> "Corpus":
        """The utterances of these numbers (n,), in their order."""
        chosen = _Chosen(self._utterances, rows.astype(np.uint32))
        return Corpus(chosen, self.path, self.seconds[rows])

    def sample(self, count: int) -> "Corpus":
        """At most `count` utterances, evenly spread."""
        if len(self) <= count:
            return self
        return self.take(np.linspace(0, len(self) - 1, count).astype(np.int64))

    @property
    def unreadable(self) -> str:
        """The message if none of its audio can be read."""
        return f"{self.path}: none of its {len(self)} utterances could be read"

    # These lists are made at every call: of a large corpus take a sample first.

    @property
    def ids(self) -> list[str]:
        return [u.id for u in self]

    @property
    def speakers(self) -> list[str]:
        return [u.speaker for u in self]

    @property
    def texts(self) -> list[str]:
        return [u.text for u in self]


@dataclass(frozen=True)
class _Chosen(Sequence[Utterance]):
    utterances: Sequence[Utterance]
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Utterance:  # type: ignore[override]
        return self.utterances[int(self.rows[index])]


@dataclass(frozen=True)
class _Listed(Sequence[Utterance]):
    """The utterances of a manifest in the folder `root`."""

    rows: ManifestRows
    root: Path
    allow_outside: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Utterance:  # type: ignore[override]
        row = self.rows[index]
        # Checked again: an index that came with a manifest may hold anything.
        check_row(row, self.root, f"row {index} of the index", self.allow_outside)
        name, speaker, audio, seconds, text = row
        return Utterance(name, speaker or name, self.root / audio, float(seconds), text)


def read_manifest(path: str | Path, allow_outside: bool = False) -> Corpus:
    """The corpus of a manifest; `allow_outside` accepts audio that is not below its folder.

    The audio files are not opened. Raises UserError with file and line for the first invalid row,
    and for a manifest that is missing, empty or lacks a column.
    """
    path = Path(path)
    rows = open_rows(path, allow_outside)
    return Corpus(_Listed(rows, path.parent, allow_outside), path, rows.seconds)


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write utterances whose audio is below the manifest's folder, atomically.

    Raises UserError for a field with a tab or a line break and for audio outside the folder.
    """
    path = Path(path)

    def fields(u: Utterance) -> tuple[str, ...]:
        return u.id, u.speaker, audio_field(u.audio, path), f"{u.seconds:.3f}", u.text

    write_rows(path, COLUMNS, map(fields, utterances))


def audio_field(audio: Path, manifest: Path) -> str:
    """The path as the manifest writes it, relative to its folder."""
    try:
        return audio.relative_to(manifest.parent).as_posix()
    except ValueError:
        raise UserError(f"{manifest}: audio {audio} is outside the manifest's folder") from None


def linked_folder(manifest: Path, audio: Path) -> Path:
    """The path below the manifest's folder that `link_audio` will give. Raises as it does."""
    folder, audio = manifest.parent.resolve(), audio.resolve()
    if audio.is_relative_to(folder):
        return manifest.parent / audio.relative_to(folder)
    link = manifest.with_suffix(".audio")
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link}: in the way; a link to {audio} belongs there")
    return link


def link_audio(manifest: Path, audio: Path) -> Path:
    """A path to the folder `audio` below the manifest's folder: itself, or the link NAME.audio.

    Raises UserError if NAME.audio is no link, or links cannot be made.
    """
    link, audio = linked_folder(manifest, audio), audio.resolve()
    if audio.is_relative_to(manifest.parent.resolve()):
        return link
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        manifest.parent.mkdir(parents=True, exist_ok=True)
        fresh.symlink_to(audio, target_is_directory=True)
        fresh.replace(link)
    except OSError as error:
        fault = f"cannot be made a link to {audio}: {error.strerror}"
        remedy = "or let --to be a folder that holds the audio"
        raise UserError(f"{link}: {fault}; {remedy}") from None
    return link

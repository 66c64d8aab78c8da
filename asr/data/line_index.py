"""The lines of a file, of a large one memory-mapped from an index that is written once.

A file of up to SMALL bytes is kept in memory. Of a larger one the checked lines, where each ends
and what number belongs to each are written once, beside the file: opening takes milliseconds, lines
become strings only when asked for, and the loader's processes share the memory. An index whose file
has another size or modification time is written again. If it cannot be written beside the file, or
something else has its name, it goes to the user's cache folder, and if not there either, all lines
are kept in memory. An index may have come with the file: nothing in it is trusted. Lines are found
by number and never queried, so arrays suffice, without Arrow.

N lines.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from asr.errors import UserError, print_line
from asr.io import atomic_writer, open_file, parse_json, user_cache

SMALL = 16 << 20  # bytes of a file
LONGEST = 1 << 20  # bytes of a line; a longer one is no table or text
MAGIC = b"asrindex"
VERSION = 2
MAX_DESCRIPTION = 4096  # bytes


class Block(NamedTuple):
    """n lines, each with a line break after it, and their durations (n,) float32, or none (0,)."""

    text: bytes
    seconds: np.ndarray


@dataclass(frozen=True)
class Lines(Sequence[str]):
    """The lines of one file: `lines[i]` is a string."""

    text: np.ndarray  # (bytes,) uint8: every line with a line break after it
    ends: np.ndarray  # (N,) int64: where each line's break is
    seconds: np.ndarray  # (N,) float32 of a manifest's rows, else (0,)
    file: Path | None = None  # the index they are mapped from
    source: tuple[tuple[str, int], ...] = ()  # of the index: version, and the file's size, time

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        index = range(len(self))[index]
        start, end = int(self.ends[index - 1]) + 1 if index else 0, int(self.ends[index])
        if not 0 <= start <= end <= min(start + LONGEST, len(self.text)):
            raise damaged_index(self.file)
        return self.text[start:end].tobytes().decode(errors="replace")

    @property
    def lengths(self) -> np.ndarray:
        """UTF-8 bytes of each line, (N,) int32. Raises UserError for a damaged index."""
        if not 0 <= self.ends[0] < len(self.text):
            raise damaged_index(self.file)
        lengths = np.empty(len(self), np.int32)
        lengths[0] = self.ends[0] + 1
        # Directly into 32 bits: numpy's diff would make three copies in 64.
        np.subtract(self.ends[1:], self.ends[:-1], out=lengths[1:], casting="unsafe")
        lengths -= 1
        if lengths.min() < 0:
            raise damaged_index(self.file)
        return lengths

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that is not forked maps the file itself: numpy would send it the content.
        if self.file:
            return _reopened, (self.file, self.source)
        return Lines, (self.text, self.ends, self.seconds)


def open_lines(
    path: Path,
    suffix: str,
    read: Callable[[], Iterable[Block]],
    *,
    timed: bool,
    options: Mapping[str, int] | None = None,
    growth: int = 1,
) -> Lines:
    """The lines that `read` gives of the file, from memory or the index PATH + suffix.

    timed: whether they have durations. options: what else they depend on. growth: how many bytes of
    lines a byte of the file gives. Raises UserError for a missing file, and what `read` raises.
    """
    state = _state(path)
    if growth * state["size"] <= SMALL:
        return _in_memory(read())
    source = tuple({**state, "timed": int(timed), **(options or {})}.items())
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    candidates = [path.with_name(f"{path.name}{suffix}")]
    with contextlib.suppress(RuntimeError):  # a user without a home
        candidates.append(user_cache() / f"{path.stem}-{name}{suffix}")
    for index_path in candidates:
        if lines := _mapped(index_path, source):
            return lines
    for index_path in filter(_may_be_written, candidates):
        with contextlib.suppress(OSError):  # a read-only or a full disk
            index_path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(index_path, sync=True) as file:
                print_line(f"checking {path} and writing {index_path} (once)")
                _write(file, read(), source)
            return _reopened(index_path, source)
    print_line(f"{path}: its index cannot be written, so each process reads it again")
    return _in_memory(read())


def damaged_index(index_path: Path | None) -> UserError:
    """The error for an index whose content no manifest or text gives."""
    return UserError(f"{index_path}: damaged; remove it, and it is written again")


def _state(path: Path) -> dict[str, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return {"version": VERSION, "size": status.st_size, "modified": status.st_mtime_ns}


def _may_be_written(index_path: Path) -> bool:
    """Whether there is nothing at `index_path`, or an index, damaged or not."""
    if not os.path.lexists(index_path):
        return True
    try:
        with open_file(index_path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(MAGIC)))
            return not index_path.is_symlink() and file.read() == MAGIC
    except (OSError, UserError):
        return False


def _in_memory(blocks: Iterable[Block]) -> Lines:
    text = bytearray()
    ends, seconds = _gather(blocks, text.extend)
    return Lines(np.frombuffer(text, np.uint8), ends, seconds)


def _gather(
    blocks: Iterable[Block], write: Callable[[bytes], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Passes every block's text to `write` -> ends and seconds of all lines."""
    ends, seconds, offset = [], [], 0
    for block in blocks:
        write(block.text)
        ends.append(offset + np.flatnonzero(np.frombuffer(block.text, np.uint8) == ord("\n")))
        seconds.append(block.seconds)
        offset += len(block.text)
    return np.concatenate(ends), np.concatenate(seconds)


def _write(file: IO[bytes], blocks: Iterable[Block], source: tuple) -> None:
    """Text, padding to 8 bytes, ends, seconds, a description as JSON, its length, MAGIC."""
    ends, seconds = _gather(blocks, file.write)
    header = {"source": source, "bytes": file.tell(), "lines": len(ends)}
    file.write(bytes(-file.tell() % 8))
    for array in (ends, seconds):  # tofile would not name the cause where the disk is full
        file.write(array.data)
    description = json.dumps(header).encode()
    file.write(description + len(description).to_bytes(8, "little") + MAGIC)


def _mapped(index_path: Path, source: tuple) -> Lines | None:
    """The index at `index_path`; None if there is none, or of another source."""
    try:
        with open_file(index_path) as file:
            header, end = _read_description(file)
        size, count = int(header["bytes"]), int(header["lines"])
        start, timed = size + -size % 8, dict(source)["timed"] * count
        known = header["source"] == [list(pair) for pair in source]
        if not known or min(size, count) < 1 or end != start + 8 * count + 4 * timed:
            return None
        # As plain arrays: every slice of a memmap costs microseconds.
        text = np.asarray(np.memmap(index_path, np.uint8, "r", shape=(size,)))
        ends = np.asarray(np.memmap(index_path, np.int64, "r", start, (count,)))
        seconds = np.empty(0, np.float32)
        if timed:
            seconds = np.memmap(index_path, np.float32, "r", start + 8 * count, (timed,))
        sound = ends[-1] == size - 1 and (not timed or seconds.min() > 0)  # not of NaN
        return Lines(text, ends, seconds, index_path, source) if sound else None
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


def _reopened(index_path: Path, source: tuple) -> Lines:
    lines = _mapped(index_path, source)
    if lines is None:
        raise UserError(f"{index_path}: is no longer the index that was opened; start again")
    return lines

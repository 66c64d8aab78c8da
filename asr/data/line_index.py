"""The lines of a file, of a large one memory-mapped from an index that is written once.

A file of up to SMALL bytes is kept in memory. Of a larger one the checked lines, where each ends
and what number belongs to each are written once, beside the file: opening takes milliseconds, lines
become strings only when asked for, and the loader's processes share the memory. An index whose file
has another size or modification time is written again. If it cannot be written beside the file, or
something else has its name, it goes to the user's cache folder, and if not there either, all lines
are kept in memory. Lines are found by number and never queried, so arrays suffice, without Arrow.

N lines.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from asr.errors import UserError, print_line
from asr.io import atomic_writer, open_file, user_cache

SMALL = 16 << 20  # bytes of a file
LONGEST = 1 << 20  # bytes of a line; a longer one is no table or text
MAGIC = int.from_bytes(b"asrindex", "little")
VERSION = 3
HEADER = 7  # int64: MAGIC, VERSION, size and time of the file, variant, bytes of the text, N


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
    source: tuple[int, ...] = ()  # the beginning of its header

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        index = range(len(self))[index]
        start = int(self.ends[index - 1]) + 1 if index else 0
        return self.text[start : int(self.ends[index])].tobytes().decode(errors="replace")

    @property
    def lengths(self) -> np.ndarray:
        """UTF-8 bytes of each line, (N,) int32."""
        lengths = np.empty(len(self), np.int32)
        lengths[0] = self.ends[0] + 1
        # Directly into 32 bits: numpy's diff would make three copies in 64.
        np.subtract(self.ends[1:], self.ends[:-1], out=lengths[1:], casting="unsafe")
        return np.subtract(lengths, 1, out=lengths)

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
    variant: int = 0,
    growth: int = 1,
) -> Lines:
    """The lines that `read` gives of the file, from memory or the index PATH + suffix.

    variant: what else they depend on. growth: how many bytes of lines a byte of the file gives.
    Raises UserError for a missing file, and what `read` raises.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if growth * status.st_size <= SMALL:
        return _in_memory(read())
    source = (MAGIC, VERSION, status.st_size, status.st_mtime_ns, variant)
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    candidates = [path.with_name(f"{path.name}{suffix}")]
    with contextlib.suppress(RuntimeError):  # a user without a home
        candidates.append(user_cache() / f"{path.stem}-{name}{suffix}")
    for index_path in candidates:
        if lines := _mapped(index_path, source):
            return lines
    for index_path in candidates:
        if os.path.lexists(index_path) and _header(index_path)[:1] != [MAGIC]:
            continue
        with contextlib.suppress(OSError):  # a read-only or a full disk
            index_path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(index_path, sync=True) as file:
                print_line(f"checking {path} and writing {index_path} (once)")
                _write(file, read(), source)
            return _reopened(index_path, source)
    print_line(f"{path}: its index cannot be written, so each process reads it again")
    return _in_memory(read())


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


def _write(file: IO[bytes], blocks: Iterable[Block], source: tuple[int, ...]) -> None:
    """The header, the text, padding to 8 bytes, ends and seconds."""
    file.write(bytes(8 * HEADER))
    ends, seconds = _gather(blocks, file.write)
    size = file.tell() - 8 * HEADER
    file.write(bytes(-size % 8))
    for array in (ends, seconds):  # tofile would not name the cause where the disk is full
        file.write(array.data)
    file.seek(0)
    file.write(np.array([*source, size, len(ends)], np.int64).data)


def _header(index_path: Path) -> list[int]:
    """The numbers at the start of a file, fewer than HEADER if it is too short or unreadable."""
    try:
        with open_file(index_path) as file:
            return np.fromfile(file, np.int64, HEADER).tolist()
    except (OSError, UserError):
        return []


def _mapped(index_path: Path, source: tuple[int, ...]) -> Lines | None:
    """The index at `index_path`; None if there is none, or an incomplete or outdated one."""
    header = _header(index_path)
    if header[:-2] != [*source]:
        return None
    size, count = header[-2:]
    start = 8 * HEADER + size + -size % 8  # of the ends
    rest = index_path.stat().st_size - start - 8 * count
    if rest not in (0, 4 * count):  # a copy that was broken off
        return None
    # As plain arrays: every slice of a memmap costs microseconds.
    text = np.asarray(np.memmap(index_path, np.uint8, "r", 8 * HEADER, (size,)))
    ends = np.asarray(np.memmap(index_path, np.int64, "r", start, (count,)))
    seconds = np.empty(0, np.float32)
    if rest:
        seconds = np.memmap(index_path, np.float32, "r", start + 8 * count, (count,))
    return Lines(text, ends, seconds, index_path, source)


def _reopened(index_path: Path, source: tuple[int, ...]) -> Lines:
    lines = _mapped(index_path, source)
    if lines is None:
        raise UserError(f"{index_path}: is no longer the index that was opened; start again")
    return lines

"""The rows of a manifest by their number, without holding them: mapped from a file beside it.

A manifest of up to SMALL bytes is held in memory. Of a larger one the checked rows, where each
ends and how long each utterance is are written once to MANIFEST.index and mapped from then on:
opening takes milliseconds, rows become strings only when they are asked for, and the loader's
processes share the memory. The table stays the source: an index of another size or time of change
is made anew. Where it cannot be written beside the manifest it goes to the user's cache folder,
and where that is not to be had either, all is held in memory.

Plain numpy rather than Arrow or Parquet: rows are found by number, columns are never queried, so
two arrays of numbers do all that those would, without 40 MB of library. One file, renamed into
place, so that processes that start together never see half of one.

N utterances.
"""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from asr.data.manifest import COLUMNS, read_blocks
from asr.data.table import own_name, whole
from asr.errors import UserError

SMALL = 16 << 20  # bytes of a manifest
MAGIC = b"asrindex"
VERSION = 1


@dataclass(frozen=True)
class Rows(Sequence[tuple[str, ...]]):
    """`rows[i]` are the fields of manifest.COLUMNS; seconds (N,) float32 of all."""

    text: np.ndarray  # (bytes,) uint8: every row with a line break behind it
    ends: np.ndarray  # (N,) int64: where each row's break is
    seconds: np.ndarray
    file: Path | None = None  # that they are mapped from
    source: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[str, ...]:  # type: ignore[override]
        index = range(len(self))[index]
        start = self.ends[index - 1] + 1 if index else 0
        row = self.text[start : self.ends[index]].tobytes().decode(errors="replace").split("\t")
        if len(row) != len(COLUMNS):
            raise UserError(f"{self.file}: damaged; remove it, and it will be made anew")
        return tuple(row)

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that is not forked maps the file itself: numpy would send it the content.
        if self.file:
            return _reopened, (self.file, self.source)
        return Rows, (self.text, self.ends, self.seconds)


def open_rows(path: Path, allow_outside: bool) -> Rows:
    """The rows of a manifest. Raises UserError as manifest.read_blocks does."""
    try:
        about = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if about.st_size <= SMALL:
        return _in_memory(path, allow_outside)
    key = {"version": VERSION, "size": about.st_size, "modified": about.st_mtime_ns}
    source = tuple({**key, "outside": int(allow_outside)}.items())
    places = [path.with_name(f"{path.name}.index")]
    with contextlib.suppress(RuntimeError):  # a user without a home
        places.append(_cached(path))
    for place in places:
        if rows := _mapped(place, source):
            return rows
    for place in places:
        try:
            _write(path, place, source, allow_outside)
        except OSError:  # a read-only or a full disk
            continue
        return _reopened(place, source)
    print(f"{path}: its index can be written nowhere, so each process reads it anew", flush=True)
    return _in_memory(path, allow_outside)


def _cached(path: Path) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "layernorm-asr" / f"{own_name(path)}.index"


def _in_memory(path: Path, allow_outside: bool) -> Rows:
    text = bytearray()
    ends, seconds = _gather(path, allow_outside, text.extend)
    return Rows(np.frombuffer(text, np.uint8), ends, seconds)


def _gather(
    path: Path, allow_outside: bool, write: Callable[[bytes], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Hands every block's text to `write`; -> ends and seconds of all rows."""
    ends, seconds, place = [], [], 0
    for block in read_blocks(path, allow_outside):
        write(block.text)
        ends.append(place + np.flatnonzero(np.frombuffer(block.text, np.uint8) == ord("\n")))
        seconds.append(block.seconds)
        place += len(block.text)
    return np.concatenate(ends), np.concatenate(seconds)


def _write(path: Path, place: Path, source: tuple, allow_outside: bool) -> None:
    """The index at `place`, whole or not at all. OSError where it cannot be written there."""
    with whole(place) as file:
        print(f"checking {path} and writing {place} (once)", flush=True)
        ends, seconds = _gather(path, allow_outside, file.write)
        size = file.tell()
        file.write(bytes(-size % 8))
        ends.tofile(file)
        seconds.tofile(file)
        about = json.dumps({"source": source, "bytes": size, "rows": len(ends)}).encode()
        file.write(about + len(about).to_bytes(8, "little") + MAGIC)


def _mapped(place: Path, source: tuple) -> Rows | None:
    """The index at `place`; None where there is none of that source."""
    try:
        with place.open("rb") as file:
            about, end = _about(file)
        size, count = about["bytes"], about["rows"]
        start = size + -size % 8
        if about["source"] != [list(pair) for pair in source] or end != start + 12 * count:
            return None
        return Rows(  # as plain arrays: every slice of a memmap costs microseconds
            np.asarray(np.memmap(place, np.uint8, "r", shape=(size,))),
            np.asarray(np.memmap(place, np.int64, "r", start, (count,))),
            np.memmap(place, np.float32, "r", start + 8 * count, (count,)),
            place,
            source,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _about(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """What the end of an index says of it, and where that stands. ValueError where it is none."""
    whole = file.seek(0, os.SEEK_END)
    file.seek(max(0, whole - 16))
    tail = file.read()
    if tail[8:] != MAGIC:
        raise ValueError
    end = file.seek(max(0, whole - 16 - int.from_bytes(tail[:8], "little")))
    return json.loads(file.read()[:-16]), end


def _reopened(place: Path, source: tuple) -> Rows:
    rows = _mapped(place, source)
    if rows is None:
        raise UserError(f"{place}: is no longer the index that was opened; start again")
    return rows

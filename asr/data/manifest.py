"""Every rule of a manifest, checked on the way from its table to the rows of a corpus.

A corpus may have ten million utterances, so the table is streamed, some megabytes at a time. A
block of lines that is plainly in order is checked column by column, in two microseconds a row; any
other goes through `_careful`, which looks at one row after another and says what is wrong.

Legend: N utterances, n of them in a block.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from asr.data.table import EMPTY, check_header, fields_of, read_rows, reading
from asr.errors import UserError

COLUMNS = ("id", "speaker", "audio", "seconds", "text")
BLOCK = 1 << 20  # characters read at once
SHORTEST = 0.0005  # seconds: less would be written as 0.000

# The fields of n rows, column by column in the order of COLUMNS: plain lists of strings, since a
# tuple a row would have the garbage collector walk over all of them time and again.
Columns = list[list[str]]


class Block(NamedTuple):
    """Some rows: the fields of COLUMNS parted by tabs, one row a line; seconds (n,) float32."""

    text: bytes
    seconds: np.ndarray


def read_blocks(path: Path, allow_outside: bool) -> Iterator[Block]:
    """All rows of a manifest. The audio files themselves are not looked at.

    Raises UserError with file and line for the first row that is wrong (for an id that comes twice
    after all others), and for a manifest that is missing, empty or lacks a column.
    """
    ids: list[np.ndarray] = []
    with reading(path) as file:
        line, header = _header(file)
        check_header(path, header, COLUMNS)
        places = [header.index(name) for name in COLUMNS]
        while lines := file.readlines(BLOCK):
            columns = _plain(lines, len(header), places, None if allow_outside else path.parent)
            if columns is None:
                columns = _careful(path, line, lines, len(header), places, allow_outside)
            line += len(lines)
            if columns:
                ids.append(np.fromiter(map(hash, columns[0]), np.int64, len(columns[0])))
                yield _block(columns)
    if not ids:
        raise UserError(f"{path}: {EMPTY}")
    _refuse_repeats(path, np.concatenate(ids))


def _header(file: IO[str]) -> tuple[int, list[str]]:
    """The number of the line after the header, and the header."""
    line = 1
    while text := file.readline():
        line += 1
        if text.strip():
            return line, fields_of(text)
    return line, []


def _plain(lines: list[str], width: int, places: list[int], root: Path | None) -> Columns | None:
    """The rows of lines that are in order at first sight; None where one may not be."""
    if {line.count("\t") for line in lines} != {width - 1}:
        return None
    # A last line may lack its break.
    fields = "".join(lines).rstrip("\n").replace("\n", "\t").split("\t")
    columns = [list(map(str.strip, fields[place::width])) for place in places]
    ids, _, audio, seconds, _ = columns
    if not (all(ids) and all(audio) and _are_lengths(seconds)):
        return None
    if root is not None and _may_leave(audio, root):
        return None
    return columns


def _are_lengths(fields: list[str]) -> bool:
    try:
        seconds = np.fromiter(map(float, fields), np.float64, len(fields))
    except ValueError:
        return False
    return bool((np.isfinite(seconds) & (seconds > 0)).all())


def _may_leave(audio: list[str], root: Path) -> bool:
    together = "\n".join(audio)
    if ".." in together:
        return True
    if not (together.startswith("/") or "\n/" in together):
        return False
    inside = os.path.join(os.path.abspath(root), "")  # noqa: PTH100, PTH118 (not resolved)
    return not all(path.startswith(inside) for path in audio if path.startswith("/"))


def _careful(
    path: Path,
    first: int,
    lines: list[str],
    width: int,
    places: list[int],
    allow_outside: bool,
) -> Columns:
    """The rows of lines, each looked at by itself; empty lines are passed over."""
    rows = []
    for number, line in enumerate(lines, start=first):
        if not line.strip():
            continue
        fields = fields_of(line)
        if len(fields) != width:
            raise UserError(f"{path}:{number}: {len(fields)} fields where the header has {width}")
        row = tuple(fields[place] for place in places)
        check_row(row, path.parent, f"{path}:{number}", allow_outside)
        rows.append(row)
    return list(map(list, zip(*rows, strict=True)))


def check_row(row: Sequence[str], root: Path, where: str, allow_outside: bool) -> None:
    """UserError, beginning with `where`, for a row (the fields of COLUMNS) that breaks a rule."""
    name, _, audio, seconds, _ = row
    if not name or not audio:
        raise UserError(f"{where}: every row needs an id and an audio file")
    if not allow_outside and leaves(audio, root):
        raise UserError(
            f"{where}: audio {audio!r} lies outside the manifest's folder; "
            "if you trust this table, data.outside=true reads it (asr.prepare shards: --outside); "
            "`python -m asr.prepare tsv --audio FOLDER` makes a manifest with a link to that folder"
        )
    try:
        parse_seconds(seconds)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def parse_seconds(field: str) -> float:
    """A length above 0; ValueError (for the caller to add file and line) for anything else."""
    try:
        seconds = float(field)
    except ValueError:
        raise ValueError(f"seconds is {field!r}, not a number") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds is {field!r}; a length must be above 0")
    return seconds


def seconds_field(seconds: float) -> str:
    """A length as manifests hold it; ValueError (as parse_seconds) for one too short for that."""
    if seconds < SHORTEST:
        raise ValueError(f"{1000 * seconds:.2g} milliseconds long, too short for a manifest")
    return f"{seconds:.3f}"


def leaves(audio: str, root: Path) -> bool:
    """Whether the path, by its text alone, leads out of `root`. Links are not followed."""
    if ".." in audio and ".." in Path(audio).parts:
        return True
    if not os.path.isabs(audio):  # noqa: PTH117 (a million rows: a Path each costs seconds)
        return False
    return not Path(audio).is_relative_to(os.path.abspath(root))  # noqa: PTH100 (not resolved)


def _block(columns: Columns) -> Block:
    text = "\n".join(map("\t".join, zip(*columns, strict=True))) + "\n"
    seconds = np.fromiter(map(float, columns[3]), np.float64, len(columns[3]))
    with np.errstate(over="ignore"):  # a length beyond float32 is left out as too long
        return Block(text.encode(), seconds.astype(np.float32))


def _refuse_repeats(path: Path, ids: np.ndarray) -> None:
    """UserError for the first id that stands in two lines; ids (N,) are hashed."""
    ids.sort()
    twice = set(ids[1:][ids[1:] == ids[:-1]].tolist())
    if not twice:
        return
    seen: dict[str, int] = {}
    for line, row in read_rows(path, COLUMNS):
        if hash(row["id"]) in twice:  # two ids may share a hash, once in a million corpora
            first = seen.setdefault(row["id"], line)
            if first != line:
                raise UserError(f"{path}:{line}: id {row['id']!r} stands in line {first} already")

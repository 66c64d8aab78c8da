"""Manifests: UTF-8 tables with a header, columns separated by tabs, one utterance a line.

    id  speaker  audio  seconds  text

More columns are ignored. An utterance without a speaker has one to itself. `audio` is
relative to the manifest and must stay below its folder, so that an untrusted manifest cannot name a
file of yours. That rule concerns the text of the path: the owner of the folder may put a symbolic
link into it, as asr.prepare does (`NAME.audio` beside `NAME.tsv`). Ids and speakers have no control
characters, and no line is longer than LONGEST.

N utterances, n of them in a block.
"""

import codecs
import gzip
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from asr.data.line_index import LONGEST, Block
from asr.errors import UserError
from asr.io import atomic_writer, open_file

COLUMNS = ("id", "speaker", "audio", "seconds", "text")
BLOCK = 1 << 13  # rows in memory at once
SHORTEST = 0.0005  # seconds: less would be written as 0.000
EMPTY = "the manifest is empty; it needs one line per utterance"
BYTE_ORDER_MARK = "\ufeff"  # of spreadsheets; also in mid-file, where tables were joined
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def raw_lines(path: Path) -> Iterator[str]:
    """The lines of a text with their line breaks; unpacked if its name ends in .gz.

    Raises UserError if it is missing, not a regular file or not UTF-8, and for a line over LONGEST.
    """
    number = 0
    try:
        with (
            open_file(path) as packed,
            gzip.open(packed) if path.suffix == ".gz" else packed as file,
        ):
            while line := file.readline(LONGEST + 1):
                number += 1
                if len(line) > LONGEST:
                    fault = f"longer than {LONGEST} bytes; is this a table or text?"
                    raise UserError(f"{path}:{number}: {fault}")
                yield line.decode().lstrip(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        utf_16 = number == 1 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        reason = "it is UTF-16" if utf_16 else error.reason
        fault = f"not UTF-8 text ({reason}); save it as UTF-8"
        raise UserError(f"{path}:{number}: {fault}") from None
    except (EOFError, zlib.error):
        raise UserError(f"{path}: cannot be read: the gzip file is damaged or ends early") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text that are not empty, with their numbers. Raises UserError as raw_lines."""
    for number, line in enumerate(raw_lines(path), start=1):
        if line.strip():
            yield number, line.rstrip("\r\n")


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split("\t")]


def read_header(
    path: Path, required: Sequence[str], lines: Iterator[tuple[int, str]] | None = None
) -> list[str]:
    """The names of a table's columns. lines: of the table, after which the rows follow.

    Raises UserError for a column that is missing or appears twice.
    """
    _, line = next(lines or numbered_lines(path), (1, ""))
    header = _fields(line)
    missing = [name for name in required if name not in header]
    if missing:
        found = ", ".join(name[:40] for name in header[:20])
        message = (
            f"{path}: no column {', '.join(missing)}; the first line names {found or 'none'}, and "
            "must have the names of the columns, separated by tabs"
        )
        if tuple(required) == COLUMNS and {"audio", "text"} <= set(header):
            message += f"; python -m asr.prepare table {path} --to FOLDER adds what is missing"
        raise UserError(message)
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice:
        raise UserError(f"{path}: column {twice} appears twice; rename or remove one of them")
    return header


def read_rows(path: Path, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table as (line number, {column: field}), without empty lines.

    Raises UserError for a row with another number of fields than the header, and for a file that is
    missing, not UTF-8, without rows or without a required column.
    """
    lines = numbered_lines(path)
    header, number = read_header(path, required, lines), None
    for number, line in lines:
        fields = _fields(line)
        if len(fields) != len(header):
            fault = f"{len(fields)} fields where the header has {len(header)}"
            raise UserError(f"{path}:{number}: {fault}")
        yield number, dict(zip(header, fields, strict=True))
    if number is None:
        raise UserError(f"{path}: {EMPTY}")


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table, atomically. Raises UserError as join_fields, for a field that it refuses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path, sync=True) as file:
        for row in chain([header], rows):
            try:
                file.write(join_fields(row))
            except ValueError as error:
                raise UserError(f"{path}: {row[0][:100]!r} {error}") from None


def join_fields(row: Sequence[str]) -> bytes:
    """The line of a row. Raises ValueError for fields that no table can hold."""
    if any(mark in field for field in row for mark in "\t\n\r"):
        raise ValueError("has a tab or a line break in a field")
    try:
        line = ("\t".join(row) + "\n").encode()
    except UnicodeEncodeError:
        raise ValueError("has a field with bytes or surrogates that are not text") from None
    if len(line) > LONGEST:
        raise ValueError(f"makes a line longer than {LONGEST} bytes")
    return line


def check_row(row: Sequence[str], root: Path, where: str, allow_outside: bool) -> None:
    """UserError, beginning with `where`, for a row of a manifest in `root` that breaks a rule."""
    name, speaker, audio, seconds, _ = row
    if not name or not audio:
        raise UserError(f"{where}: every row needs an id and an audio file")
    if not allow_outside and is_outside(audio, root):
        raise UserError(
            f"{where}: if you trust this table, data.allow_outside_audio=true reads it "
            "(asr.prepare shards: --outside); `python -m asr.prepare table --audio FOLDER` makes a "
            f"manifest with a link to that folder; audio {audio!r} is outside the manifest's folder"
        )
    try:
        check_names(name, speaker)
        parse_seconds(seconds)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def check_names(name: str, speaker: str) -> None:
    """Raises ValueError for an id or a speaker with control characters."""
    for what, value in (("id", name), ("speaker", speaker)):
        if _CONTROL.search(value):
            raise ValueError(f"{what} {value!r} has a control character; remove it")


def is_outside(audio: str, root: Path) -> bool:
    """Whether the path, by its text alone, leaves `root`. Links are not followed."""
    if ".." in audio and ".." in Path(audio).parts:
        return True
    if not os.path.isabs(audio):  # noqa: PTH117 (a million rows: a Path each costs seconds)
        return False
    return not Path(audio).is_relative_to(os.path.abspath(root))  # noqa: PTH100 (not resolved)


def parse_seconds(field: str) -> float:
    """A duration above 0. Raises ValueError, for the caller to add file and line."""
    try:
        seconds = float(field)
    except ValueError:
        raise ValueError(f"seconds is {field!r}, not a number") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds is {field!r}; a length must be above 0")
    return seconds


def seconds_field(seconds: float) -> str:
    """A duration as manifests hold it. Raises ValueError for one that rounds to 0."""
    if seconds < SHORTEST:
        raise ValueError(f"{1000 * seconds:.2g} milliseconds long, too short for a manifest")
    return f"{seconds:.3f}"


def read_blocks(path: Path, allow_outside: bool) -> Iterator[Block]:
    """The valid rows of a manifest, their fields in the order of COLUMNS, a block at a time.

    Raises UserError with file and line for the first invalid row, for an id that appears twice, and
    as read_rows does.
    """
    hashes = []
    rows = _checked_rows(path, allow_outside)
    while block := list(islice(rows, BLOCK)):
        hashes.append(np.array([hash(row[0]) for row in block]))
        text = "".join("\t".join(row) + "\n" for row in block)
        with np.errstate(over="ignore"):  # a duration beyond float32 is skipped as too long
            yield Block(
                text.encode(), np.array([float(row[3]) for row in block]).astype(np.float32)
            )
    _check_unique(path, np.concatenate(hashes))


def _checked_rows(path: Path, allow_outside: bool) -> Iterator[list[str]]:
    folder = path.parent
    for line, row in read_rows(path, COLUMNS):
        fields = [row[name] for name in COLUMNS]
        check_row(fields, folder, f"{path}:{line}", allow_outside)
        yield fields


def _check_unique(path: Path, hashes: np.ndarray) -> None:
    """Raises UserError for the first id that appears in two lines; hashes (N,) of the ids."""
    hashes.sort()
    twice = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not twice:
        return
    lines: dict[str, int] = {}
    for line, row in read_rows(path, COLUMNS):
        if hash(row["id"]) in twice:  # two ids may share a hash, once in a million corpora
            first = lines.setdefault(row["id"], line)
            if first != line:
                raise UserError(f"{path}:{line}: id {row['id']!r} is already in line {first}")

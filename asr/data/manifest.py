"""Manifests: UTF-8 tables with a header, columns separated by tabs, one utterance a line.

    id  speaker  audio  seconds  text

More columns are ignored. An utterance without a speaker has one to itself. `audio` is
relative to the manifest and must stay below its folder, so that an untrusted manifest cannot name a
file of yours. That rule concerns the text of the path: the owner of the folder may put a symbolic
link into it, as asr.prepare does (`NAME.audio` beside `NAME.tsv`). Ids and speakers have no control
characters, and no line is longer than LONGEST.

Manifests of ten million utterances are read in blocks of a megabyte. A block is checked column by
column, in two microseconds a row; if that fails, row by row, which finds the line and the error.

N utterances, n of them in a block.
"""

import contextlib
import gzip
import io
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from asr.data.line_index import LONGEST, Block
from asr.errors import UserError
from asr.io import atomic_writer, open_file

COLUMNS = ("id", "speaker", "audio", "seconds", "text")
BLOCK = 1 << 20  # characters of the rows checked at once
READ = 1 << 16  # bytes read at once
SHORTEST = 0.0005  # seconds: less would be written as 0.000
EMPTY = "the manifest is empty; it needs one line per utterance"
BYTE_ORDER_MARK = "\ufeff"  # also in mid-file, where tables were joined
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

# The fields of n rows, column by column in the order of COLUMNS: plain lists of strings, since a
# tuple a row would make the garbage collector visit all of them again and again.
Columns = list[list[str]]


class _BoundedLines(io.RawIOBase):
    """The bytes of an open file. Raises UserError as soon as a line exceeds LONGEST bytes."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file, self.length = path, file, 0  # length: of the line at its position

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer as far as the file and the line's limit go; -> the number of bytes."""
        content = self.file.read(min(len(buffer), LONGEST + 1 - self.length))
        buffer[: len(content)] = content
        end = max(content.rfind(b"\n"), content.rfind(b"\r"))
        self.length = len(content) - end - 1 + (self.length if end < 0 else 0)
        if self.length > LONGEST:
            position = f"at byte {self.file.tell() - self.length}"
            fault = f"the line {position} is longer than {LONGEST} bytes"
            raise UserError(f"{self.path}: {fault}; is this a table of one utterance a line?")
        return len(content)


@contextlib.contextmanager
def open_table(path: Path) -> Iterator[IO[str]]:
    """The table as a text file, whose lines are bounded; unpacked if its name ends in .gz.

    Raises UserError if it is missing, not a regular file or not UTF-8, and for a line over LONGEST.
    """
    # utf-8-sig: spreadsheets put a byte-order mark before the first column's name.
    try:
        with open_file(path) as packed, contextlib.ExitStack() as stack:
            file: IO[bytes] = packed
            if path.suffix == ".gz":
                file = stack.enter_context(gzip.open(packed))
            lines = io.BufferedReader(_BoundedLines(path, file), READ)
            yield io.TextIOWrapper(lines, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except (EOFError, zlib.error):
        raise UserError(f"{path}: cannot be read: the gzip file is damaged or ends early") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def split_line(line: str) -> list[str]:
    """The fields of a line, without space around them and a mark at which tables were joined."""
    return [field.strip() for field in line.lstrip(BYTE_ORDER_MARK).rstrip("\n").split("\t")]


def parse_header(path: Path, file: IO[str], required: Sequence[str]) -> tuple[int, list[str]]:
    """The number of the line after the header, and the header.

    Raises UserError for a column that is missing or appears twice.
    """
    line, header = 1, []
    while not header and (text := file.readline()):
        line += 1
        header = split_line(text) if text.strip() else []
    missing = [name for name in required if name not in header]
    if missing:
        found = ", ".join(name[:40] for name in header[:20])
        raise UserError(
            f"{path}: no column {', '.join(missing)}; the first line names {found or 'none'}, and "
            "must have the names of the columns, separated by tabs"
        )
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice:
        raise UserError(f"{path}: column {twice} appears twice; rename or remove one of them")
    return line, header


def read_rows(path: Path, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table as (line number, {column: field}), without empty lines.

    Raises UserError for a row with another number of fields than the header, and for a file that is
    missing, not UTF-8, without rows or without a required column.
    """
    with open_table(path) as file:
        line, header = parse_header(path, file, required)
        rows = ((n, split_line(text)) for n, text in enumerate(file, start=line) if text.strip())
        number = None
        for number, fields in rows:
            if len(fields) != len(header):
                raise UserError(f"{path}:{number}: {_wrong_width(fields, len(header))}")
            yield number, dict(zip(header, fields, strict=True))
        if number is None:
            raise UserError(f"{path}: {EMPTY}")


def _wrong_width(fields: Sequence[str], width: int) -> str:
    return f"{len(fields)} fields where the header has {width}"


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


def _outside(where: str, audio: str, count: int) -> UserError:
    """The error for a row whose audio is outside the manifest's folder, one of `count`."""
    rows = f", in one of {count:,} such rows" if count > 1 else ""
    return UserError(
        f"{where}: if you trust this table, data.allow_outside_audio=true reads it (asr.prepare "
        "shards: --outside); `python -m asr.prepare table --audio FOLDER` makes a manifest with a "
        f"link to that folder; audio {audio!r} is outside the manifest's folder{rows}"
    )


def check_row(row: Sequence[str], root: Path, where: str, allow_outside: bool) -> None:
    """UserError, beginning with `where`, for a row of a manifest in `root` that breaks a rule."""
    name, speaker, audio, seconds, _ = row
    if not name or not audio:
        raise UserError(f"{where}: every row needs an id and an audio file")
    if not allow_outside and is_outside(audio, root):
        raise _outside(where, audio, 1)
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
    """All rows of a manifest, one a line: the fields of COLUMNS separated by tabs.

    The audio files are not opened.

    Raises UserError for a manifest that is missing, empty or lacks a column, and with file and line
    for the first invalid row (a repeated id: after all others).
    """
    hashes: list[np.ndarray] = []
    with open_table(path) as file:
        line, header = parse_header(path, file, COLUMNS)
        width, column_numbers = len(header), [header.index(name) for name in COLUMNS]
        while lines := file.readlines(BLOCK):
            columns = _valid_columns(
                lines, width, column_numbers, None if allow_outside else path.parent
            )
            if columns is None:
                columns = _checked_columns(path, line, lines, width, column_numbers, allow_outside)
            line += len(lines)
            if columns:
                hashes.append(np.fromiter(map(hash, columns[0]), np.int64, len(columns[0])))
                yield _block(columns)
    if not hashes:
        raise UserError(f"{path}: {EMPTY}")
    _check_unique(path, np.concatenate(hashes))


def _valid_columns(
    lines: list[str], width: int, column_numbers: list[int], root: Path | None
) -> Columns | None:
    """The rows of lines that are surely valid; None if one may not be."""
    if {line.count("\t") for line in lines} != {width - 1}:
        return None
    # The file's last line may lack its break.
    fields = "".join(lines).rstrip("\n").replace("\n", "\t").split("\t")
    columns = [list(map(str.strip, fields[column::width])) for column in column_numbers]
    ids, speakers, audio, seconds, _ = columns
    valid = all(ids) and all(audio) and _are_durations(seconds)
    valid = valid and not (_have_control(ids) or _have_control(speakers))
    return columns if valid and not (root and _may_be_outside(audio, root)) else None


def _have_control(names: list[str]) -> bool:
    text = "".join(names)
    if not text.isascii():
        return _CONTROL.search(text) is not None
    codes = np.frombuffer(text.encode(), np.uint8)  # a tenth of the expression's time
    return bool(((codes < 32) | (codes == 127)).any())


def _are_durations(fields: list[str]) -> bool:
    try:
        seconds = np.fromiter(map(float, fields), np.float64, len(fields))
    except ValueError:
        return False
    return bool((np.isfinite(seconds) & (seconds > 0)).all())


def _may_be_outside(audio: list[str], root: Path) -> bool:
    text = "\n".join(audio)
    if ".." in text:
        return True
    if not (text.startswith("/") or "\n/" in text):
        return False
    inside = os.path.join(os.path.abspath(root), "")  # noqa: PTH100, PTH118 (not resolved)
    return not all(path.startswith(inside) for path in audio if path.startswith("/"))


def _checked_columns(
    path: Path,
    first: int,
    lines: list[str],
    width: int,
    column_numbers: list[int],
    allow_outside: bool,
) -> Columns:
    """The rows of lines, without empty lines, each checked by itself."""
    rows = []
    for number, line in enumerate(lines, start=first):
        if not line.strip():
            continue
        fields = split_line(line)
        if len(fields) != width:
            raise UserError(f"{path}:{number}: {_wrong_width(fields, width)}")
        row = tuple(fields[column] for column in column_numbers)
        if not allow_outside and is_outside(row[2], path.parent):
            raise _outside(f"{path}:{number}", row[2], _count_outside(path))
        check_row(row, path.parent, f"{path}:{number}", allow_outside)
        rows.append(row)
    return list(map(list, zip(*rows, strict=True)))


def _count_outside(path: Path) -> int:
    """The rows whose audio is outside; 1 if a row of the manifest cannot be read."""
    try:
        return sum(is_outside(row["audio"], path.parent) for _, row in read_rows(path, ["audio"]))
    except UserError:
        return 1


def _block(columns: Columns) -> Block:
    text = "\n".join(map("\t".join, zip(*columns, strict=True))) + "\n"
    seconds = np.fromiter(map(float, columns[3]), np.float64, len(columns[3]))
    with np.errstate(over="ignore"):  # a duration beyond float32 is skipped as too long
        return Block(text.encode(), seconds.astype(np.float32))


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

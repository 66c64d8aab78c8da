"""Tables as text: UTF-8, a header, columns parted by tabs, one row a line."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

from asr.errors import UserError

EMPTY = "the manifest is empty; it needs one line per utterance"


def read_rows(
    path: Path, required: Sequence[str], faults: dict[int, str] | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table as (line number, {column: field}); empty lines are passed over.

    Raises UserError where the file is missing, not UTF-8, lacks a required column or has no rows.
    A row with another number of fields than the header is noted in `faults` by its line, or raises
    UserError where there is no such note-book.
    """
    lines = _lines(path)
    header = next(lines, (1, []))[1]
    check_header(path, header, required)
    line = None
    for line, fields in lines:
        if len(fields) == len(header):
            yield line, dict(zip(header, fields, strict=True))
            continue
        fault = f"{len(fields)} fields where the header has {len(header)}"
        if faults is None:
            raise UserError(f"{path}:{line}: {fault}")
        faults[line] = fault
    if line is None:
        raise UserError(f"{path}: {EMPTY}")


def check_header(path: Path, header: Sequence[str], required: Sequence[str]) -> None:
    """UserError where a column is missing, or stands twice: which would be meant?"""
    missing = [name for name in required if name not in header]
    if missing:
        raise UserError(
            f"{path}: no column {', '.join(missing)}; the first line must name the columns "
            f"{' '.join(required)}, parted by tabs"
        )
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice:
        raise UserError(f"{path}: column {twice} stands twice; rename or remove one of them")


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    with reading(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, fields_of(line)


def fields_of(line: str) -> list[str]:
    """The fields of a line, without the space around them."""
    return [field.strip() for field in line.rstrip("\n").split("\t")]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[IO[str]]:
    """The table as a text file. UserError for one that is missing or not UTF-8."""
    # utf-8-sig: spreadsheets put a byte-order mark before the first column's name.
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table of which no half is ever seen."""
    with whole(path) as file:
        for row in chain([header], rows):
            file.write(_line(row, path).encode())


@contextlib.contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write into beside `path`, where it is put at the end, on the disk by then.

    Of what fails in between nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)  # mkstemp makes it private; a corpus is often shared
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def own_name(path: Path) -> str:
    """A name for what is kept of a file in another folder, which no file of that name shares."""
    return f"{path.stem}-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]}"


def _line(fields: Sequence[str], path: Path) -> str:
    if any(mark in field for field in fields for mark in "\t\n\r"):
        raise UserError(f"{path}: {fields[0]!r} has a tab or a line break in a field")
    return "\t".join(fields) + "\n"

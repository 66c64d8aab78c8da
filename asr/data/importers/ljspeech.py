"""LJ Speech, and corpora in its layout: https://keithito.com/LJ-Speech-Dataset/

A folder with wavs/ID.wav and metadata.csv, whose lines are ID|TEXT|NORMALISED TEXT without quotes
and header; the normalised text, where it exists, is what is spoken. All is of one speaker.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from asr.data.importers.records import first_line
from asr.data.importers.rows import Fault, Row, Split
from asr.data.importers.table import AUDIO_KEYS, table_of
from asr.data.manifest import numbered_lines
from asr.errors import UserError

TABLE = "metadata.csv"
AUDIO = "wavs"


def recognise(source: Path) -> bool:
    """Whether the folder has wavs/ and a metadata.csv in whose first line is a `|`, no header."""
    has_rows = (source / AUDIO).is_dir() and "|" in first_line(source / TABLE)
    return has_rows and not _has_header(source / TABLE)


def read(source: Path) -> list[Split]:
    """The only split, of the folder's name. Raises UserError if the folder has no metadata.csv."""
    table = source / TABLE
    if not table.is_file():
        raise UserError(f"{source}: no {TABLE} in it")
    if _has_header(table):
        raise UserError(f"{table}: its first line names columns; read it by: asr.prepare table")
    name = source.resolve().name
    return [Split(name, table, source, partial(_rows, table, name))]


def _has_header(table: Path) -> bool:
    return table_of(table).column(AUDIO_KEYS) is not None


def _rows(table: Path, speaker: str) -> Iterator[Row | Fault]:
    for number, line in numbered_lines(table):
        fields = [field.strip() for field in line.split("|")]
        if len(fields) not in (2, 3):
            fault = f"{len(fields)} fields between |, where ID|TEXT|NORMALISED is expected"
            yield Fault(table, number, fault)
            continue
        name, text = fields[0], fields[-1] or fields[1]
        yield Row(table, number, name, name, text, speaker)

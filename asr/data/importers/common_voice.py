"""Mozilla Common Voice: https://github.com/common-voice/cv-dataset

A folder of one language has clips/*.mp3 and tables train.tsv, dev.tsv, test.tsv, validated.tsv and
others with the columns path (in clips/), sentence and client_id (the speaker). SOURCE is that
folder, whose train, dev and test become splits, or one of its tables.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from asr.data.importers.records import first_line, rows_of, tsv_records
from asr.data.importers.rows import Fault, Row, Split
from asr.errors import UserError

COLUMNS = ("path", "sentence", "client_id")
SPLITS = ("train", "dev", "test")  # of different speakers; the other tables overlap with them


def recognise(source: Path) -> bool:
    """Whether one of the tables has Common Voice's columns."""
    return any(_has_columns(table) for table in _tables(source))


def read(source: Path) -> list[Split]:
    """The splits. Raises UserError if there is no table."""
    tables = _tables(source)
    if not tables:
        names = ", ".join(f"{name}.tsv" for name in SPLITS)
        raise UserError(f"{source}: neither a table of Common Voice nor a folder with {names}")
    return [
        Split(table.stem, table, table.parent, partial(_rows, table), table.parent / "clips")
        for table in tables
    ]


def _tables(source: Path) -> list[Path]:
    if source.is_dir():
        return [path for name in SPLITS if (path := source / f"{name}.tsv").is_file()]
    return [source] if source.is_file() else []


def _has_columns(table: Path) -> bool:
    return set(COLUMNS) <= set(first_line(table).split("\t"))


def _rows(table: Path) -> Iterator[Row | Fault]:
    return rows_of(table, tsv_records(table, COLUMNS), partial(_row, table))


def _row(table: Path, line: int, row: dict[str, str]) -> Iterator[Row]:
    name = PurePosixPath(row["path"])
    if row["path"] and not name.suffix:  # releases of 2019
        name = PurePosixPath(f"{name}.mp3")
    audio = str(name) if row["path"] else ""
    yield Row(table, line, name.stem, audio, row["sentence"], row["client_id"])

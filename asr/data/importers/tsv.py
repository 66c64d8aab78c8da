"""Own data: a table of recordings.

The table has a header and columns separated by tabs: `id`, `audio` and `text`, perhaps `speaker`
(otherwise every utterance is its own speaker) and `seconds` (otherwise it is measured), and any
others, which are kept. `audio` is relative to the table.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from asr.data.importers.records import first_line, read_header, rows_of, tsv_records
from asr.data.importers.rows import Fault, Row, Split
from asr.data.manifest import COLUMNS

REQUIRED = ("id", "audio", "text")


def recognise(source: Path) -> bool:
    """Whether the first line of the file names the columns."""
    return set(REQUIRED) <= {name.strip() for name in first_line(source).split("\t")}


def read(source: Path) -> list[Split]:
    """The only split. Raises UserError for a table that cannot be read or lacks a column."""
    more = tuple(name for name in read_header(source, REQUIRED) if name not in COLUMNS)
    name = source.name.removesuffix(source.suffix)
    return [Split(name, source, source.parent, partial(_rows, source, more), more=more)]


def _rows(table: Path, more: tuple[str, ...]) -> Iterator[Row | Fault]:
    return rows_of(table, tsv_records(table, REQUIRED), partial(_row, table, more))


def _row(table: Path, more: tuple[str, ...], line: int, row: dict[str, str]) -> Iterator[Row]:
    fields = {key: row.get(key, "") for key in COLUMNS}
    yield Row(table, line, **fields, more=tuple(row[name] for name in more))

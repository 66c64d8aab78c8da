"""Records of tables: (line number, {column: value}), or a Fault for a line that is no record.

TSV has a header and no quotes, CSV a header and quotes, JSON lines one object a line. A file whose
name ends in .gz is unpacked.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from asr.data.importers.rows import Fault, Row
from asr.data.manifest import numbered_lines, raw_lines
from asr.errors import UserError
from asr.io import parse_json

Record = tuple[int, dict[str, Any]]


def rows_of(
    table: Path,
    records: Iterable[Record | Fault],
    read: Callable[[int, dict[str, Any]], Iterable[Row | Fault]],
) -> Iterator[Row | Fault]:
    """The rows that `read` makes of each record, and the faults: also its ValueError is one."""
    for found in records:
        if isinstance(found, Fault):
            yield found
            continue
        try:
            yield from read(*found)
        except ValueError as error:
            yield Fault(table, found[0], str(error))


def first_line(path: Path) -> str:
    """The first line of a text file with content; "" if there is none that can be read."""
    try:
        return next((line.strip() for _, line in numbered_lines(path)), "")
    except UserError:
        return ""


def json_object(text: str) -> dict[str, Any] | None:
    """The object of a JSON text; None for what is none."""
    try:
        record = parse_json(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def table_records(path: Path, delimiter: str) -> Iterator[Record | Fault]:
    """The rows below a header; of a row over several lines the number of the first.

    Quotes enclose fields as in CSV, except between tabs. Raises UserError as manifest.raw_lines
    does, and for what breaks the rules of CSV.
    """
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(raw_lines(path), delimiter=delimiter, quoting=quoting, strict=True)
    line = 1
    try:
        header = next((fields for fields in reader if any(fields)), [])
        line = reader.line_num + 1
        for fields in reader:
            if not any(map(str.strip, fields)):
                pass  # as spreadsheet programs write below a table
            elif len(fields) == len(header):
                yield line, dict(zip(header, fields, strict=True))
            else:
                yield Fault(path, line, _wrong_width(len(fields), len(header), delimiter))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{line}: not CSV: {error}") from None


def _wrong_width(count: int, width: int, delimiter: str) -> str:
    wrong = f"{count} fields where the header has {width}"
    if count < width or delimiter == "\t":
        return wrong
    return f"{wrong}; a text with {delimiter!r} needs double quotes around it"


def json_records(path: Path) -> Iterator[Record | Fault]:
    """The objects of JSON lines. Raises UserError as manifest.raw_lines does."""
    for number, line in numbered_lines(path):
        record = json_object(line)
        if record is None:
            yield Fault(path, number, "not a JSON object; one is expected in every line")
        else:
            yield number, record

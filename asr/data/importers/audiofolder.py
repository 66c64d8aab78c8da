"""Hugging Face's audiofolder: https://huggingface.co/docs/datasets/audio_dataset

A folder of audio with metadata.csv or metadata.jsonl, in which file_name is relative to the
metadata's folder and another column is the text. As in the `datasets` library, a part of the
folder named train, validation, test or alike is a split: each has its own metadata, or the
file_names of one metadata begin with it.
"""

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from asr.data.importers.records import (
    Record,
    csv_records,
    first_line,
    first_object,
    json_records,
    rows_of,
)
from asr.data.importers.rows import SPEAKER_KEYS, Fault, Row, Split, text_of
from asr.errors import UserError

TABLES = ("metadata.csv", "metadata.jsonl")
FILE = "file_name"
TEXTS = ("transcription", "text", "sentence", "transcript", "normalized_text", "raw_text")
# The library's names of splits (datasets/data_files.py) -> that of the manifest.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "valid"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


def recognise(source: Path) -> bool:
    """Whether there is a metadata table with file_name."""
    return any(FILE in _columns(table) for table in _tables(source))


def read(source: Path, text_column: str | None = None) -> list[Split]:
    """The splits. text_column: None takes the first of TEXTS.

    Raises UserError for a folder without metadata, and for metadata without the columns.
    """
    tables = _tables(source)
    if not tables:
        raise UserError(f"{source}: no {' or '.join(TABLES)} in it, nor in a folder of it")
    splits = []
    for table in tables:
        column = choose_text_column(_columns(table), text_column, table)
        for name, part_names in _split_names(table, source).items():
            rows = partial(_rows, table, column, part_names)
            splits.append(Split(name, table, table.parent, rows))
    return splits


def choose_text_column(columns: list[str], wanted: str | None, location: Path) -> str:
    """The column of the text. Raises UserError if there is none."""
    found = next((name for name in ([wanted] if wanted else TEXTS) if name in columns), None)
    if found is None:
        missing = f"no column {wanted}" if wanted else f"none of the columns {', '.join(TEXTS)}"
        has = ", ".join(columns[:50]) or "none"
        raise UserError(f"{location}: {missing}; it has {has}. --text-column NAME chooses one")
    return found


def _tables(source: Path) -> list[Path]:
    for pattern in ("", "*/", "data/*/"):
        found = [path for name in TABLES for path in source.glob(pattern + name) if path.is_file()]
        if found:
            return sorted({path.parent: path for path in reversed(found)}.values())
    return []


def _columns(table: Path) -> list[str]:
    if table.suffix == ".jsonl":
        return list(first_object(table))
    return next(csv.reader([first_line(table)]), [])


def _split_names(table: Path, source: Path) -> dict[str, str | None]:
    """Name -> the split of SPLITS to which its rows belong; None: the table is one split."""
    if table.parent != source:
        folder = table.parent.name
        return {SPLITS.get(folder, folder): None}
    records = (found for found in _records(table) if not isinstance(found, Fault))
    names = {_split_of(about) for _, about in records}
    if names <= {None}:
        return {source.resolve().name: None}
    return {name or source.resolve().name: name or "" for name in sorted(names, key=str)}


def _split_of(about: dict[str, Any]) -> str | None:
    return SPLITS.get(next(iter(PurePosixPath(text_of(about, FILE)).parts), ""))


def _rows(table: Path, text_column: str, split: str | None) -> Iterator[Row | Fault]:
    return rows_of(table, _records(table), partial(_row, table, text_column, split))


def _row(
    table: Path, text_column: str, split: str | None, line: int, about: dict[str, Any]
) -> Iterator[Row]:
    if split is not None and (_split_of(about) or "") != split:
        return
    audio = text_of(about, FILE)
    name = text_of(about, "id") or str(PurePosixPath(audio).with_suffix("")) if audio else ""
    speaker = text_of(about, *SPEAKER_KEYS)
    yield Row(table, line, name, audio, text_of(about, text_column), speaker)


def _records(table: Path) -> Iterator[Record | Fault]:
    return json_records(table) if table.suffix == ".jsonl" else csv_records(table)

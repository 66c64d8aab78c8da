"""Tables of recordings: CSV, TSV or JSON lines with a path and a text in each row.

Columns are found by their usual names in any case, such as path and sentence (Mozilla Common
Voice), file_name and transcription (Hugging Face's audiofolder) or audio and text. Also read are
an id, a speaker, seconds, the start and end of a part (seconds or h:mm:ss), and the channel that is
spoken on (A and B, left and right, or numbers, from 1 where none is 0); an id is otherwise the path
without its suffix. Further columns are kept. A delimiter is a tab, comma, semicolon or |.

NeMo's manifests (JSON lines with audio_filepath, text, duration and perhaps offset) and WeNet's
data.list (key, wav, txt and perhaps start and end) are such tables. SOURCE is a table, or a folder
with some: train, dev and test, each a split, or one in each folder.
A single table is divided by its column `split`, or by paths that begin with train, test or alike.
"""

import csv
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from asr.data.importers.records import (
    Record,
    first_line,
    json_object,
    json_records,
    rows_of,
    table_records,
)
from asr.data.importers.rows import (
    SPEAKER_KEYS,
    SPLITS,
    TEXT_KEYS,
    Fault,
    Row,
    Split,
    choose_text_column,
    key_of,
    number_of,
    split_of,
    text_of,
)
from asr.data.manifest import COLUMNS, numbered_lines
from asr.errors import UserError, print_line
from asr.features.files import AUDIO_SUFFIXES, RECORDING_SUFFIXES
from asr.io import read_json

ENDINGS = (".csv", ".tsv", ".jsonl", ".json", ".list")
SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
DELIMITERS = "\t,;|"
AUDIO_KEYS = (
    "audio", "path", "file", "file_name", "filename", "file_path", "filepath", "audio_path",
    "audio_file", "audio_filename", "audio_filepath", "wav", "wav_path", "wav_file", "wav_filename",
)  # fmt: skip
NEMO = "audio_filepath"  # in whose manifests a duration without an offset is a part, too
ID_KEYS = ("id", "utt_id", "utterance_id", "utt", "key")
SECONDS_KEYS = ("seconds", "duration")
START_KEYS, END_KEYS = ("start", "start_time", "offset"), ("end", "end_time")
READ_KEYS = (ID_KEYS, SECONDS_KEYS, START_KEYS, END_KEYS)  # beside audio, text and speaker
CHANNEL_KEYS = ("channel",)
CHANNELS = {"a": 0, "b": 1, "left": 0, "right": 1, "l": 0, "r": 1}
NOT_NEMO = (*END_KEYS, "start", "start_time")
SPLIT_KEYS = ("split", "subset", "partition")
METADATA = "metadata"  # audiofolder's name of a table, which says nothing of its content
MAX_LIST = 1 << 28  # bytes of a JSON list, which is read as a whole
CLOCK = re.compile(r"(\d+:)?\d+:\d{1,2}(\.\d*)?")  # 1:02:03.5
WINDOWS = re.compile(r"[A-Za-z]:[/\\]|\\\\")


class Table(NamedTuple):
    """A table and the names of its columns; those of JSON are its first object's."""

    path: Path
    columns: list[str]
    delimiter: str  # "{": JSON lines, "[": a list in JSON

    def column(self, keys: tuple[str, ...]) -> str | None:
        """The column with the first of these names; None if there is none."""
        names = {key_of(name): name for name in self.columns}
        return next((names[key] for key in keys if key in names), None)

    def records(self) -> Iterator[Record | Fault]:
        """The rows, with their columns by key_of. Raises UserError for what cannot be read."""
        if self.delimiter == "[":
            records = enumerate(_list(self.path), start=1)
        elif self.delimiter == "{":
            records = json_records(self.path)
        else:
            records = table_records(self.path, self.delimiter)
        for found in records:
            if isinstance(found, Fault):
                yield found
            else:
                yield found[0], {key_of(name): value for name, value in found[1].items()}


def recognise(source: Path) -> bool:
    """Whether there is a table with a column of audio files."""
    return bool(_tables(source))


def read(source: Path, text_column: str | None = None) -> list[Split]:
    """The splits. text_column: None takes the first of TEXT_KEYS.

    Raises UserError where there is no table, and for one without the columns.
    """
    tables = _tables(source)
    if not tables:
        raise UserError(missing(source))
    listed = (table for table in candidates(source) if table.column(AUDIO_KEYS))
    others = [table.path.name for table in listed if table not in tables]
    if others:
        print_line(f"{source}: not read: {', '.join(others)}; SOURCE can be one of them")
    return [split for table in tables for split in _splits(table, source, tables, text_column)]


def table_of(path: Path) -> Table:
    """The table in a file; without columns if it is none."""
    line = first_line(path)
    if line.startswith("{"):
        return Table(path, list(json_object(line) or {}), "{")
    if line.startswith("["):
        return Table(path, list(next(iter(_list(path)), {})), "[")
    found = [Table(path, _fields(line, mark), mark) for mark in DELIMITERS if mark in line]
    known = [table for table in found if table.column(AUDIO_KEYS)]
    return next(iter(known or found), Table(path, _fields(line, ","), ","))


def _fields(line: str, delimiter: str) -> list[str]:
    try:
        return [field.strip() for field in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _list(path: Path) -> list[dict[str, Any]]:
    try:
        found = read_json(path, MAX_LIST)
    except (ValueError, OSError, UserError):
        return []
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def candidates(source: Path) -> list[Table]:
    """The files of a folder that may be tables: in it, else in folders of it, else of data/."""
    if not source.is_dir():
        return [table_of(source)] if source.is_file() else []
    others: list[Table] = []
    for pattern in ("*", "*/*", "data/*/*"):
        paths = (p for p in source.glob(pattern) if p.suffix.lower() in ENDINGS and p.is_file())
        tables = [table_of(path) for path in sorted(paths) if not path.name.startswith(".")]
        if any(table.column(AUDIO_KEYS) for table in tables):
            return tables
        others += tables
    return others


def _tables(source: Path) -> list[Table]:
    """The tables to read: with a text if any has one, and named as splits if some are."""
    found = [table for table in candidates(source) if table.column(AUDIO_KEYS)]
    if source.is_dir():
        found = [table for table in found if not _is_beside_its_audio(table.path)]
    with_text = [table for table in found if table.column(TEXT_KEYS)] or found
    return [table for table in with_text if split_of(table.path.stem)] or with_text


def _is_beside_its_audio(path: Path) -> bool:
    """Whether a .json describes the one recording of the same name."""
    suffixes = AUDIO_SUFFIXES if path.suffix.lower() == ".json" else ()
    return any(path.with_suffix(suffix).exists() for suffix in suffixes)


def missing(source: Path) -> str:
    """What a source lacks to be read as a table."""
    paths = sorted(source.glob("*")) if source.is_dir() else [source]
    if sheet := next((path for path in paths if path.suffix.lower() in SPREADSHEETS), None):
        return f"{sheet}: a spreadsheet, which is not read; save it as CSV (UTF-8)"
    listed = candidates(source)
    tables = [table for table in listed if table.columns]
    if not tables:
        try:
            for table in listed:
                next(numbered_lines(table.path), None)
        except UserError as error:
            return str(error)
        if source.is_dir():
            return f"{source}: no table ({', '.join(ENDINGS)}) in it, nor in a folder of it"
        return f"{source}: not a table with a first line that names its columns"
    table = next((table for table in tables if table.column(TEXT_KEYS)), tables[0])
    names = ", ".join(name[:40] for name in table.columns[:20])
    return (
        f"{table.path}: no column of audio files; the first line has {names}, and must name the "
        f"columns: {', '.join(AUDIO_KEYS[:4])} or alike, and {', '.join(TEXT_KEYS[:4])} or alike"
    )


def _splits(
    table: Table, source: Path, tables: list[Table], text_column: str | None
) -> Iterator[Split]:
    path, columns = table.path, table.columns
    keys = [key for key in map(key_of, columns) if key]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(f"{path}: column {twice} appears twice; rename or remove one of them")
    text = choose_text_column(columns, text_column, path)
    audio = key_of(table.column(AUDIO_KEYS) or "")  # every table of `tables` has one
    known = {*SPEAKER_KEYS, *SPLIT_KEYS, *COLUMNS, key_of(text), audio}
    known |= {key_of(table.column(keys) or "") for keys in READ_KEYS}
    channels = _channels(table)
    known |= {key_of(table.column(CHANNEL_KEYS) or "")} if channels else set()
    more = [] if table.delimiter in "{[" else [n for n in columns if key_of(n) not in known]
    more_keys = tuple(map(key_of, more))
    read_row = partial(_row, table, audio, key_of(text), channels, more_keys)
    names = tuple(" ".join(name.split()) for name in more)
    for name, part in _names(table, audio, source, tables).items():
        rows = partial(_rows, table, partial(read_row, part))
        yield Split(name, path, path.parent, rows, more=names)


def _channels(table: Table) -> dict[str, int]:
    """The channel, from 0, of each value in its column; empty where the column names no channels,
    but broadcasters, say.
    """
    if table.column(CHANNEL_KEYS) is None:
        return {}
    records = (found for found in table.records() if not isinstance(found, Fault))
    values = {text_of(record, *CHANNEL_KEYS).lower() for _, record in records} - {""}
    if values <= CHANNELS.keys():
        return CHANNELS
    if not all(value.isdecimal() for value in values):
        return {}
    first = min(1, min(map(int, values)))
    return {value: int(value) - first for value in values}


def _names(table: Table, audio: str, source: Path, tables: list[Table]) -> dict[str, str | None]:
    """Name of a manifest -> the split of SPLITS that its rows are of; None: all rows."""
    path, folder = table.path, table.path.resolve().parent.name
    stem = Path(path.name.removesuffix(".gz")).stem
    if split_of(stem):
        return {stem: None}
    if source.is_dir() and path.parent != source:
        alone = sum(other.path.parent == path.parent for other in tables) == 1
        name = SPLITS.get(folder.lower(), folder)
        return {name if alone else f"{name}-{stem}": None}
    rest = folder if stem == METADATA or path.suffix == ".list" else stem
    records = (found for found in table.records() if not isinstance(found, Fault))
    names = {_split_of(record, audio) for _, record in records}
    if names <= {""}:
        return {rest: None}
    return {name or rest: name for name in sorted(names)}


def _split_of(record: dict[str, Any], audio: str) -> str:
    """The split that a row names: "" if none."""
    first = next(iter(PurePosixPath(text_of(record, audio)).parts), "")
    return split_of(text_of(record, *SPLIT_KEYS)) or SPLITS.get(first.lower(), "")


def _rows(
    table: Table, read_row: Callable[[int, dict[str, Any]], Iterator[Row]]
) -> Iterator[Row | Fault]:
    return rows_of(table.path, table.records(), read_row)


def _row(
    table: Table,
    audio_key: str,
    text_key: str,
    channels: dict[str, int],
    more: tuple[str, ...],
    split: str | None,
    line: int,
    record: dict[str, Any],
) -> Iterator[Row]:
    if split is not None and _split_of(record, audio_key) != split:
        return
    audio = text_of(record, audio_key)
    if WINDOWS.match(audio):
        raise ValueError(f"audio {audio!r} is a path of Windows; write it relative to the table")
    audio = audio.replace("\\", "/")
    channel = text_of(record, *CHANNEL_KEYS) if channels else ""
    key = next((key for key in ID_KEYS if key in record), None)
    if audio_key == NEMO and table.delimiter == "{" and record.keys().isdisjoint(NOT_NEMO):
        start, length = number_of(record, "offset") or None, number_of(record, "duration")
        other_name = f"{table.path.stem}-{line}"
    else:
        start, length = part_of(record)
        other_name = _id(audio, start) + (channel and f"-{channel}")
    seconds = "" if start or length else text_of(record, *SECONDS_KEYS).replace(",", ".")
    name = text_of(record, key) if key else other_name
    yield Row(
        table.path,
        line,
        name,
        audio,
        text_of(record, text_key),
        text_of(record, *SPEAKER_KEYS),
        seconds,
        start,
        length,
        channels.get(channel.lower()),
        more=tuple(" ".join(str(record[key]).split()) for key in more),
    )


def _id(audio: str, start: float | None) -> str:
    """The path without its suffix, and the start of a part in milliseconds."""
    path = PurePosixPath(audio)
    if path.suffix.lower() in RECORDING_SUFFIXES:
        path = path.with_suffix("")
    return part_id(str(path).lstrip("/") if audio else "", start)


def part_id(name: str, start: float | None) -> str:
    """The id of a recording's part; None: all of it."""
    return name if start is None else f"{name}-{round(1000 * start):07d}"


def part_of(record: dict[str, Any]) -> tuple[float | None, float | None]:
    """Start and length of the part of the file that is spoken; None: of all of it."""
    start, end = (_time(record, keys) for keys in (START_KEYS, END_KEYS))
    if start is None and end is None:
        return None, None
    start = start or 0.0
    length = _time(record, SECONDS_KEYS) if end is None else end - start
    if length is not None and length <= 0:
        raise ValueError(f"the part from {start:g} to {start + length:g} s has no length")
    return start, length


def _time(record: dict[str, Any], keys: tuple[str, ...]) -> float | None:
    text = text_of(record, *keys).replace(",", ".")  # a spreadsheet's point may be a comma
    if CLOCK.fullmatch(text):
        parts = reversed(text.split(":"))
        return sum(float(part) * 60**power for power, part in enumerate(parts))
    return number_of({keys[0]: text}, keys[0]) if text else None

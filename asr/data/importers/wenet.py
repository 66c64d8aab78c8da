"""WeNet's lists of raw data: https://wenet.org.cn/wenet/data.html

A file data.list with one JSON object a line: key, wav, txt, and perhaps start and end in seconds,
and speaker. SOURCE is such a file, a folder with a data.list, or a folder of such folders, each of
which is a split. A list of shards names tars, which the format `webdataset` reads.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from asr.data.importers.records import first_line, first_object, json_records, rows_of
from asr.data.importers.rows import SPEAKER_KEYS, Fault, Row, Split, number_of, text_of
from asr.errors import UserError

LIST = "data.list"


def recognise(source: Path) -> bool:
    """Whether the first line of a list is JSON with key, wav and txt."""
    return any(first_object(path).keys() >= {"key", "wav", "txt"} for path in _lists(source))


def read(source: Path) -> list[Split]:
    """A split for each list. Raises UserError if there is none, and for a list of shards."""
    lists = _lists(source)
    if not lists:
        raise UserError(f"{source}: neither a {LIST} nor a folder with one")
    for path in lists:
        if first_line(path).endswith((".tar", ".tar.gz")):
            remedy = "python -m asr.prepare webdataset FOLDER_OF_TARS --to DIR"
            raise UserError(f"{path}: is a list of shards, whose texts are in the tars: {remedy}")
    return [Split(_name(path), path, path.parent, partial(_rows, path)) for path in lists]


def _lists(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = [source / LIST] if (source / LIST).is_file() else source.glob(f"*/{LIST}")
    return sorted(path for path in found if path.is_file())


def _name(path: Path) -> str:
    return path.resolve().parent.name if path.name == LIST else path.stem


def _rows(path: Path) -> Iterator[Row | Fault]:
    return rows_of(path, json_records(path), partial(_row, path))


def _row(path: Path, line: int, record: dict[str, Any]) -> Iterator[Row]:
    start, end, length = number_of(record, "start"), number_of(record, "end"), None
    if end is not None:
        start = start or 0.0
        length = end - start
        if length <= 0:
            raise ValueError(f"the segment from {start:g} to {end:g} s has no length")
    name, audio, text = (text_of(record, key) for key in ("key", "wav", "txt"))
    speaker = text_of(record, *SPEAKER_KEYS)
    yield Row(path, line, name, audio, text, speaker, "", start, length)

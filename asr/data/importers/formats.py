"""The forms of corpora by the names that `asr.prepare` gives them."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType

from asr.data.importers import (
    datasets,
    folder,
    kaldi,
    lhotse,
    librispeech,
    ljspeech,
    table,
    webdataset,
)
from asr.data.importers.rows import Split
from asr.errors import UserError
from asr.features.files import RECORDING_SUFFIXES

FORMATS: dict[str, ModuleType] = {
    "kaldi": kaldi,
    "ljspeech": ljspeech,
    "datasets": datasets,
    "lhotse": lhotse,
    "webdataset": webdataset,
    "librispeech": librispeech,
}
# Recognised where none of these is.
GENERAL: dict[str, ModuleType] = {"table": table, "folder": folder}
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
SHOWN = 8  # suffixes in messages
MAX_FILES = 1_000_000  # counted for a message
MAX_FOLDERS = 20  # searched for a message
WITH_TEXT_COLUMN = ("table", "datasets")


def recognise(source: Path) -> list[str]:
    """The formats that a source may have, the most likely one first.

    Raises UserError if there is none, or no such source.
    """
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    found = _of(source, FORMATS) or _of(source, GENERAL)
    if not found:
        raise UserError(_unrecognised(source))
    return found


def _of(source: Path, importers: Mapping[str, ModuleType]) -> list[str]:
    return [name for name, importer in importers.items() if importer.recognise(source)]


def _unrecognised(source: Path) -> str:
    """What a source has, and what it lacks for the nearest format."""
    if source.is_file():
        suffix = source.suffix.lower()
        if suffix in RECORDING_SUFFIXES:
            return f"{source}: a recording; name its folder, or a table of recordings"
        if suffix in ARCHIVES:
            return f"{source}: an archive; unpack it, and name the folder"
        return f"format table: {table.missing(source)}"
    if not source.is_dir():
        return f"{source}: neither a file nor a folder"
    counts = Counter(path.suffix.lower() or "without suffix" for path in _files(source))
    shown = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(SHOWN))
    has = f"{source}: no format is recognised; its files are {shown or 'none'}"
    for path in sorted(path for path in source.iterdir() if path.is_dir())[:MAX_FOLDERS]:
        if names := _of(path, FORMATS):
            return f"{has}; {path} is read as {names[0]}: name that folder"
    parent = source.resolve().parent
    beside = [found for found in table.candidates(parent) if found.path.parent == parent]
    if ljspeech.recognise(parent) or any(found.column(table.AUDIO_KEYS) for found in beside):
        return f"{has}; the table is in the folder above: name {parent}"
    is_table = bool(table.candidates(source))
    is_table |= any(suffix in counts for suffix in table.SPREADSHEETS)
    nearest = "table" if is_table else "folder"
    return f"{has}. Nearest is format {nearest}: {GENERAL[nearest].missing(source)}"


def _files(source: Path) -> Iterator[Path]:
    """The first MAX_FILES files below a folder, without hidden ones."""
    paths = (Path(root, name) for root, _, names in os.walk(source) for name in names)
    return islice((path for path in paths if not path.name.startswith(".")), MAX_FILES)


def read(name: str, source: Path, text_column: str | None = None) -> list[Split]:
    """The splits of a source in a format. Raises UserError as its importer does."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    importer = (FORMATS | GENERAL)[name]
    if name in WITH_TEXT_COLUMN:
        return importer.read(source, text_column)
    if text_column:
        names = " and ".join(WITH_TEXT_COLUMN)
        raise UserError(f"--text-column {text_column}: only {names} let you choose; this is {name}")
    return importer.read(source)

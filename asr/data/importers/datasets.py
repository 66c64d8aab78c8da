"""Data sets that the Hugging Face `datasets` library saved to disk (Dataset.save_to_disk).

SOURCE is the folder of a Dataset, or of a DatasetDict, whose entries are splits. The audio files
are in the column of the type Audio and stay encoded as they are. The library, the extra `datasets`,
reads the Arrow files.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from asr.data.importers.rows import SPEAKER_KEYS, SPLITS, Row, Split, choose_text_column, text_of
from asr.errors import UserError, missing_package

EXTRA = missing_package("datasets", "datasets")


def recognise(source: Path) -> bool:
    """Whether the folder is one that save_to_disk has written."""
    saved = all((source / name).is_file() for name in ("state.json", "dataset_info.json"))
    return saved or (source / "dataset_dict.json").is_file()


def read(source: Path, text_column: str | None = None) -> list[Split]:
    """The splits. text_column: None takes the first of rows.TEXT_KEYS.

    Raises UserError for a folder that the library cannot read, without the columns, or if the
    library is not installed.
    """
    if not recognise(source):
        raise UserError(f"{source}: no data set that save_to_disk has written")
    loaded = _load(source)
    if not isinstance(loaded, dict):
        return [_split(source.resolve().name, loaded, source, text_column)]
    return [_split(SPLITS.get(k, k), v, source / k, text_column) for k, v in loaded.items()]


def _load(source: Path) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source}: {EXTRA}") from None
    try:
        return datasets.load_from_disk(str(source))
    except Exception as error:  # of pyarrow, json or the library itself, of any kind
        reason = str(error) or type(error).__name__
        raise UserError(f"{source}: the datasets library cannot read it: {reason}") from None


def _split(name: str, dataset: Any, location: Path, text_column: str | None) -> Split:
    from datasets import Audio, Value

    features = dataset.features
    audio = next((name for name, kind in features.items() if isinstance(kind, Audio)), None)
    if audio is None:
        kinds = ", ".join(list(features)[:50])
        raise UserError(f"{location}: no column of the type Audio; it has {kinds}; use cast_column")
    columns = [name for name, kind in features.items() if isinstance(kind, Value)]
    text = choose_text_column(columns, text_column, location)
    kept = [name for name in dict.fromkeys((text, "id", *SPEAKER_KEYS)) if name in columns]
    # Audio as two columns: paths are read without the contents, of which each is read when asked
    # for. Other columns are skipped before flatten, which fails on some types and renames others.
    part = dataset.select_columns([audio, *kept])
    encoded = part.cast_column(audio, Audio(decode=False)).flatten()
    rows = encoded.select_columns([f"{audio}.path", *kept])
    contents = encoded.select_columns([f"{audio}.bytes"])
    return Split(
        name, location, location, partial(_rows, rows, contents, f"{audio}.path", text, location)
    )


def _rows(
    rows: Any, contents: Any, path_column: str, text_column: str, location: Path
) -> Iterator[Row]:
    names: Counter[str] = Counter()
    for number, record in enumerate(rows, start=1):
        path = record[path_column] or ""
        name = text_of(record, "id")
        name = name or _numbered(PurePosixPath(path).stem or f"{location.name}-{number}", names)
        text, speaker = text_of(record, text_column), text_of(record, *SPEAKER_KEYS)
        load = partial(_content, contents, number - 1)
        yield Row(location, number, name, path or name, text, speaker, load=load)


def _numbered(name: str, names: Counter[str]) -> str:
    """The name, with a number from 2 on if it is repeated: the library keeps no files' folders."""
    unique = name
    while names[unique]:
        names[name] += 1
        unique = f"{name}-{names[name]}"
    names[unique] += 1
    return unique


def _content(contents: Any, index: int) -> bytes:
    """Raises ValueError for a row without a content."""
    (content,) = contents[index].values()
    if not content:
        raise ValueError("has no audio in it; save the data set anew with save_to_disk")
    return content

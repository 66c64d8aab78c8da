"""NeMo manifests: https://docs.nvidia.com/nemo-framework/user-guide/latest/nemotoolkit/asr/datasets.html

One JSON object a line: audio_filepath (relative to the manifest), text, duration, and perhaps
offset, both in seconds, and speaker. SOURCE is a manifest, or a folder whose manifests are splits.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from asr.data.importers.records import first_object, json_records, rows_of
from asr.data.importers.rows import SPEAKER_KEYS, Fault, Row, Split, number_of, text_of
from asr.errors import UserError


def recognise(source: Path) -> bool:
    """Whether the first line of a manifest has an audio_filepath."""
    return bool(_manifests(source))


def read(source: Path) -> list[Split]:
    """A split for each manifest. Raises UserError if there is none."""
    manifests = _manifests(source)
    if not manifests:
        raise UserError(f"{source}: no line of JSON with an audio_filepath, nor a folder of such")
    return [Split(path.stem, path, path.parent, partial(_rows, path)) for path in manifests]


def _manifests(source: Path) -> list[Path]:
    paths = [source]
    if source.is_dir():
        paths = sorted(path for path in source.iterdir() if path.suffix in (".json", ".jsonl"))
    return [path for path in paths if "audio_filepath" in first_object(path)]


def _rows(manifest: Path) -> Iterator[Row | Fault]:
    return rows_of(manifest, json_records(manifest), partial(_row, manifest))


def _row(manifest: Path, line: int, record: dict[str, Any]) -> Iterator[Row]:
    start, length = number_of(record, "offset"), number_of(record, "duration")
    audio, text = text_of(record, "audio_filepath"), text_of(record, "text")
    # The same file may be in several lines, each with another offset.
    name = text_of(record, "id", "utt_id") or f"{manifest.stem}-{line}"
    speaker = text_of(record, *SPEAKER_KEYS)
    yield Row(manifest, line, name, audio, text, speaker, "", start or None, length)

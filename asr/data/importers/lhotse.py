"""Lhotse's CutSets: https://lhotse.readthedocs.io/en/latest/cuts.html

A cut is a part of a recording, and each of its supervisions a part of the cut with text, speaker
and perhaps a channel: an utterance. SOURCE is a CutSet as *.jsonl or *.jsonl.gz, or a folder of
such, each of which is a split. The manifests are read as JSON, without the library: that would run
the commands which a recording may name as its source.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from asr.data.importers.records import first_line, json_object, json_records, rows_of
from asr.data.importers.rows import Fault, Row, Split, number_of, text_of
from asr.errors import UserError

ENDINGS = (".jsonl", ".jsonl.gz")
SAVE = "write its audio with Lhotse's CutSet.save_audios(FOLDER), and import the CutSet it returns"
NEAR = 1e-4  # seconds between the ends of a cut and of its recording, which JSON may round
ROUNDING = 0.02  # seconds, two frames: cuts may have been made on a grid of frames
WHOLE = "import the CutSet from before CutSet.truncate or cut_into_windows; trim_to_supervisions "
WHOLE += "leaves no parts if keep_overlapping is False"


def recognise(source: Path) -> bool:
    """Whether the first line of a manifest is a cut."""
    return bool(_manifests(source))


def read(source: Path) -> list[Split]:
    """A split for each manifest. Raises UserError if there is none."""
    manifests = _manifests(source)
    if not manifests:
        raise UserError(f"{source}: no CutSet of the kind {' or '.join(ENDINGS)}")
    return [
        Split(p.name.removesuffix(".gz").removesuffix(".jsonl"), p, p.parent, partial(_rows, p))
        for p in manifests
    ]


def _manifests(source: Path) -> list[Path]:
    paths = sorted(source.iterdir()) if source.is_dir() else [source]
    return [path for path in paths if path.name.endswith(ENDINGS) and _is_cut(path)]


def _is_cut(manifest: Path) -> bool:
    record = json_object(first_line(manifest)) or {}
    return str(record.get("type", "")).endswith("Cut") or record.keys() >= {"id", "supervisions"}


def _rows(manifest: Path) -> Iterator[Row | Fault]:
    return rows_of(manifest, json_records(manifest), partial(_checked_utterances, manifest))


def _checked_utterances(manifest: Path, line: int, cut: dict[str, Any]) -> Iterator[Row | Fault]:
    try:
        yield from _utterances(manifest, line, cut)
    except (TypeError, AttributeError, KeyError):
        fault = "not a cut: a field of it has another type than Lhotse's"
        raise ValueError(fault) from None


def _utterances(manifest: Path, line: int, cut: dict[str, Any]) -> Iterator[Row | Fault]:
    """A row for each supervision. Raises ValueError for a cut that is no part of a file."""
    kind, recording = cut.get("type"), cut.get("recording")
    if kind not in ("MonoCut", "MultiCut", None):
        raise ValueError(f"is a {str(kind)[:40]}, which is computed from several parts; {SAVE}")
    if not recording:
        raise ValueError("the cut has no recording, perhaps features alone")
    if recording.get("transforms"):
        raise ValueError(f"the recording is transformed when it is read; {SAVE}")
    supervisions = cut.get("supervisions") or []
    if not supervisions:
        raise ValueError("the cut has no supervision, hence no text")
    for supervision in supervisions:
        try:
            yield _utterance(manifest, line, cut, recording, supervision)
        except ValueError as error:  # the cut's other supervisions may be good
            yield Fault(manifest, line, str(error))


def _utterance(
    manifest: Path,
    line: int,
    cut: dict[str, Any],
    recording: dict[str, Any],
    supervision: dict[str, Any],
) -> Row:
    channels = supervision.get("channel", cut.get("channel", 0))
    audio, channel = _file(recording, channels if isinstance(channels, list) else [channels])
    begin, end = number_of(cut, "start") or 0.0, number_of(cut, "duration")
    start, length = float(supervision.get("start") or 0.0), number_of(supervision, "duration")
    name = text_of(supervision, "id") or text_of(cut, "id")
    first = begin + max(0.0, start)
    last = begin + min(end, start + length) if end and length else begin + (end or 0.0)
    if not first < last < math.inf:  # also for what is not a number
        raise ValueError(f"the supervision from {first:g} to {last:g} s has no length")
    # The text would be that of all of it.
    if length and last - first < length - ROUNDING:
        raise ValueError(
            f"cut {text_of(cut, 'id')!r} has {last - first:g} of the {length:g} s of supervision "
            f"{name!r}, hence a part of its text; {WHOLE}"
        )
    whole = number_of(recording, "duration")
    is_whole = first < NEAR and whole is not None and abs(last - whole) < NEAR
    part = (None if is_whole else first, last - first)
    text, speaker = text_of(supervision, "text"), text_of(supervision, "speaker")
    return Row(manifest, line, name, audio, text, speaker, "", *part, channel)


def _file(recording: dict[str, Any], channels: list[int]) -> tuple[str, int | None]:
    """The file of these channels, and the channel in it; None for all of its channels."""
    sources = [s for s in recording["sources"] if set(channels) & set(s["channels"])]
    if len(sources) != 1:
        raise ValueError(f"channels {channels} are not those of one file; {SAVE}")
    (source,) = sources
    if source.get("type") != "file":
        raise ValueError(f"the audio is a {str(source.get('type'))[:40]}, not a file; {SAVE}")
    available = source["channels"]
    if set(channels) == set(available):
        return str(source["source"]), None
    if len(channels) > 1:
        raise ValueError(
            f"channels {channels} are some of {available}, which would be averaged; {SAVE}"
        )
    return str(source["source"]), available.index(channels[0])

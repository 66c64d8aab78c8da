"""Kaldi data directories: https://kaldi-asr.org/doc/data_prep.html

    wav.scp    RECORDING PATH
    segments   UTTERANCE RECORDING START END [CHANNEL]   in seconds, END -1: the file's end; without
                                                         segments each recording is an utterance
    text       UTTERANCE WORDS
    utt2spk    UTTERANCE SPEAKER                         optional

SOURCE is one such directory, or a folder of several (train, dev, ...), each of which is a split.
Commands in wav.scp are never run.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from asr.data.importers.rows import Fault, Row, Split
from asr.data.manifest import numbered_lines
from asr.errors import UserError

PIPE = (
    "is a command, which prepare does not run. Write its audio to a file: mkdir -p wav; "
    """while read -r id c; do bash -c "${c%|}" > wav/$id.wav </dev/null; echo $id wav/$id.wav; """
    "done < wav.scp > new.scp; and let new.scp replace wav.scp"
)
ARCHIVE = "is inside a Kaldi archive; write it to a separate file (wav-copy) and name that file"
CHANNELS = {"A": 0, "B": 1, "0": 0, "1": 1}  # of telephone calls


def recognise(source: Path) -> bool:
    """Whether there is a wav.scp in the folder, or in folders of it."""
    return bool(_directories(source))


def read(source: Path) -> list[Split]:
    """A split for each data directory. Raises UserError if there is none."""
    folders = _directories(source)
    if not folders:
        raise UserError(f"{source}: no wav.scp in it, nor in a folder of it")
    for folder in folders:
        if not (folder / "text").is_file():
            raise UserError(f"{folder}: has a wav.scp, but no text with the transcripts")
    return [Split(f.resolve().name or "kaldi", f, f, partial(_rows, f)) for f in folders]


def _directories(source: Path) -> list[Path]:
    if (source / "wav.scp").is_file():
        return [source]
    if not source.is_dir():
        return []
    return sorted(path.parent for path in source.glob("*/wav.scp") if path.is_file())


def _rows(folder: Path) -> Iterator[Row | Fault]:
    texts = yield from _table(folder / "text")
    speakers = None
    if (folder / "utt2spk").is_file():
        speakers = yield from _table(folder / "utt2spk")
    listing = "segments" if (folder / "segments").is_file() else "wav.scp"
    recordings = (row for _, row in _recordings(folder))
    source = _segments(folder) if listing == "segments" else recordings
    for row in source:
        if isinstance(row, Fault):
            yield row
            continue
        if row.id not in texts:
            yield Fault(row.file, row.line, "the utterance has no line in text")
        elif speakers is not None and row.id not in speakers:
            yield Fault(row.file, row.line, "the utterance has no line in utt2spk")
        else:
            row.text = texts[row.id][1]
            row.speaker = speakers[row.id][1] if speakers is not None else ""
            yield row
    listed = {name for _, name, _ in _lines(folder / listing)}
    for name in (name for name in texts if name not in listed):
        yield Fault(folder / "text", texts[name][0], f"utterance {name!r} is not in {listing}")


def _lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, key, the rest) of every line."""
    for number, line in numbered_lines(path):
        key, *rest = line.strip().split(maxsplit=1)
        yield number, key, rest[0] if rest else ""


def _table(path: Path) -> Iterator[Fault]:
    """Yield the faults of a table, return {key: (line number, the rest)}."""
    table: dict[str, tuple[int, str]] = {}
    for number, key, rest in _lines(path):
        if table.setdefault(key, (number, rest))[0] != number:
            yield Fault(path, number, f"{key!r} is already in line {table[key][0]}")
    return table


def _path_fault(path: str) -> str | None:
    """Why an entry of wav.scp is not the path of an audio file."""
    if not path:
        return "no audio file is given"
    if path.endswith("|"):
        return PIPE
    name, _, offset = path.rpartition(":")
    return ARCHIVE if name.endswith(".ark") and offset.isdecimal() else None


def _recordings(folder: Path) -> Iterator[tuple[str, Row | Fault]]:
    """(name, its row or fault) of every line of wav.scp."""
    path = folder / "wav.scp"
    for number, name, audio in _lines(path):
        if fault := _path_fault(audio):
            yield name, Fault(path, number, fault)
        else:
            yield name, Row(path, number, name, audio, "")


def _segments(folder: Path) -> Iterator[Row | Fault]:
    path, listed = folder / "segments", list(_recordings(folder))
    recordings = dict(listed)
    # An entry of wav.scp that is not a file is one fault, which faults of its segments would hide.
    yield from (row for _, row in listed if isinstance(row, Fault))
    for number, name, rest in _lines(path):
        try:
            recording, start, length, channel = _segment(rest)
            if recording not in recordings:
                raise ValueError(f"recording {recording!r} has no file in wav.scp")
            if isinstance(source := recordings[recording], Fault):
                continue
        except ValueError as error:
            yield Fault(path, number, str(error))
        else:
            yield Row(
                path, number, name, source.audio, "", start=start, length=length, channel=channel
            )


def _segment(fields: str) -> tuple[str, float, float | None, int | None]:
    """Recording, start, length and channel. Raises ValueError."""
    recording, *times = fields.split()
    if len(times) not in (2, 3):
        raise ValueError("not a line 'UTTERANCE RECORDING START END'")
    try:
        start, end = map(float, times[:2])
    except ValueError:
        raise ValueError(f"times are {' '.join(times[:2])!r}, not two numbers") from None
    if not (0 <= start < 1e9 and (end == -1 or start < end < 1e9)):
        raise ValueError(f"the segment from {times[0]} to {times[1]} s has no length")
    if len(times) == 3 and times[2] not in CHANNELS:
        raise ValueError(f"channel is {times[2]!r}; it must be of {', '.join(CHANNELS)}")
    channel = CHANNELS[times[2]] if len(times) == 3 else None
    return recording, start, None if end == -1 else end - start, channel

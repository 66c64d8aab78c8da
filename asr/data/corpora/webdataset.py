"""Tars in the layout of the webdataset library: a manifest of what lies in them.

A sample is the files that stand one behind another under one name up to its first point: audio, and
the text as .txt or as "text" in .json, which may also say id, speaker and seconds (or duration).
Names with more points, such as times, may make one sample of several recordings; it is left out,
for nothing tells which text is whose.
Only the tars' headers and these small files are read, and of audio whose length nobody tells, that.
"""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath

from asr.data.corpus import audio_field, link_audio
from asr.data.manifest import COLUMNS, parse_seconds, seconds_field
from asr.data.table import write_rows
from asr.errors import UserError
from features.audio import audio_seconds
from features.packed import BLOCK
from features.samples import AudioError

AUDIO = {"wav", "flac", "ogg", "opus", "mp3"}
SIDE = {"txt", "json"}
MOST_SIDE = 1 << 20  # bytes of text beside an audio file


@dataclass
class Found:
    """The manifest that was written, and the samples that are not in it."""

    manifest: Path
    left_out: list[str] = field(default_factory=list)


def write(folder: str | Path, to: str | Path) -> Found:
    """Writes TO/NAME.tsv of all FOLDER/*.tar, NAME being the folder's, and TO/NAME.audio, a link.

    Raises UserError where there is no tar, one is damaged, or no sample has audio and text.
    """
    folder = Path(folder).resolve()
    found = Found(Path(to) / f"{folder.name}.tsv")
    tars = sorted(folder.glob("*.tar"))
    if not tars:
        raise UserError(f"{folder}: there is no .tar in it")
    shown = link_audio(found.manifest, folder)
    rows: dict[str, tuple[str, ...]] = {}
    for tar in tars:
        for row in _rows(tar, shown, found):
            if rows.setdefault(row[0], row) is not row:
                found.left_out.append(f"{tar.name}: another sample of the id {row[0]!r}")
    if not rows:
        raise UserError(f"{folder}: no sample has both audio and text: {found.left_out[0]}")
    write_rows(found.manifest, COLUMNS, rows.values())
    return found


def _rows(tar: Path, shown: Path, found: Found) -> Iterator[tuple[str, ...]]:
    try:
        with tarfile.open(tar, "r:") as file:
            members = (member for member in file if member.isreg())
            for key, files in groupby(members, key=lambda member: _split(member.name)[0]):
                where = f"{tar.name}: {key}"
                row = _row(file, list(files), shown / tar.name, where, found)
                if row:
                    yield f"{tar.stem}-{key}" if not row[0] else row[0], *row[1:]
                file.members.clear()  # a library's memory of all it has read
    except (tarfile.TarError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{tar}: damaged, or no uncompressed tar: {reason}") from None


def _row(
    file: tarfile.TarFile, files: list[tarfile.TarInfo], tar: Path, where: str, found: Found
) -> tuple[str, ...] | None:
    """The fields of COLUMNS of one sample, the id empty where it tells none; None where it cannot
    be an utterance, and why is noted."""
    try:
        audio, about = _audio(files), _about(file, files)
        text = " ".join(about.get("text", "").split())
        if audio is None or not text:
            raise ValueError(f"has no {'text' if audio else 'audio'}")
        place = tar / f"{_name(file, audio)}@{audio.offset_data}+{audio.size}"
        told = about.get("seconds", about.get("duration"))
        seconds = seconds_field(audio_seconds(place) if told is None else parse_seconds(told))
    except (AudioError, ValueError) as error:
        found.left_out.append(f"{where}: {error}")
        return None
    name, speaker = (" ".join(about.get(key, "").split()) for key in ("id", "speaker"))
    speaker = speaker or name or where
    return name, speaker, audio_field(place, found.manifest), seconds, text


def _audio(files: list[tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The recording of a sample. ValueError where it has two of a kind."""
    kinds = [_split(member.name)[1] for member in files]
    recordings = [i for i, kind in enumerate(kinds) if kind in AUDIO]
    most = max(len(recordings), *map(kinds.count, SIDE))
    if most > 1:
        raise ValueError(f"{most} files of one kind; names must differ before their first point")
    return files[recordings[0]] if recordings else None


def _about(file: tarfile.TarFile, files: list[tarfile.TarInfo]) -> dict[str, str]:
    """What the small files beside the audio tell. ValueError where one cannot be read."""
    about: dict[str, str] = {}
    for member in files:
        kind = _split(member.name)[1]
        if kind in SIDE and member.size <= MOST_SIDE:
            try:
                about |= _told(file.extractfile(member).read().decode("utf-8-sig"), kind)
            except UnicodeDecodeError as error:
                raise ValueError(f"its .{kind} is not UTF-8 text ({error.reason})") from None
    return about


def _told(content: str, kind: str) -> dict[str, str]:
    if kind == "txt":
        return {"text": content}
    try:
        about = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("its .json cannot be read as JSON") from None
    told = about.items() if isinstance(about, dict) else ()
    return {key: str(value) for key, value in told if isinstance(value, str | int | float)}


def _split(name: str) -> tuple[str, str]:
    """a/b.c.flac -> a/b, flac: the sample's name, and what this file of it is."""
    path = PurePosixPath(name)
    key, _, kind = path.name.partition(".")
    return str(path.with_name(key or path.name)), kind.rpartition(".")[2].lower()


def _name(file: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """As the block right before the content has it: of a long name there is only a part."""
    file.fileobj.seek(member.offset_data - BLOCK)
    return tarfile.TarInfo.frombuf(file.fileobj.read(BLOCK), "utf-8", "surrogateescape").name

"""Tars in the layout of the webdataset library: a manifest of the samples in them.

A sample is consecutive files with one name up to its first point: audio, and the text as .txt or as
"text" in .json, which may also give id, speaker and seconds (or duration). Names with more points,
such as times, may merge several recordings into one sample, which is skipped: its texts cannot be
assigned. Only the tars' headers and these small files are read, and audio of unknown duration.
"""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath

from asr.data.corpus import audio_field, link_audio
from asr.data.manifest import COLUMNS, parse_seconds, seconds_field, write_rows
from asr.errors import UserError
from features import AudioError
from features.audio import BLOCK, audio_seconds

AUDIO = {"wav", "flac", "ogg", "opus", "mp3"}
TEXT = {"txt", "json"}
MAX_TEXT = 1 << 20  # bytes of a .txt or .json


@dataclass
class ImportedTars:
    """The manifest that is written, and a line on every sample that is skipped."""

    manifest: Path
    skipped: list[str] = field(default_factory=list)


def write(folder: str | Path, to: str | Path) -> ImportedTars:
    """Write TO/NAME.tsv of all FOLDER/*.tar, NAME being the folder's, and TO/NAME.audio, a link.

    Raises UserError if there is no tar, one is damaged, or no sample has audio and text.
    """
    folder = Path(folder).resolve()
    result = ImportedTars(Path(to) / f"{folder.name}.tsv")
    tars = sorted(folder.glob("*.tar"))
    if not tars:
        raise UserError(f"{folder}: there is no .tar in it")
    link = link_audio(result.manifest, folder)
    rows: dict[str, tuple[str, ...]] = {}
    for tar in tars:
        for row in _rows(tar, link, result):
            if rows.setdefault(row[0], row) is not row:
                result.skipped.append(f"{tar.name}: another sample of the id {row[0]!r}")
    if not rows:
        raise UserError(f"{folder}: no sample has both audio and text: {result.skipped[0]}")
    write_rows(result.manifest, COLUMNS, rows.values())
    return result


def _rows(tar: Path, link: Path, result: ImportedTars) -> Iterator[tuple[str, ...]]:
    """The fields of COLUMNS of every sample."""
    try:
        with tarfile.open(tar, "r:") as file:
            members = (member for member in file if member.isreg())
            for key, files in groupby(members, key=lambda member: _split(member.name)[0]):
                where = f"{tar.name}: {key}"
                try:
                    name, *fields = _row(file, list(files), link / tar.name, where, result.manifest)
                    yield name or f"{tar.stem}-{key}", *fields
                except (AudioError, ValueError) as error:
                    result.skipped.append(f"{where}: {error}")
                file.members.clear()  # tarfile remembers all that it has read
    except (tarfile.TarError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{tar}: damaged, or no uncompressed tar: {reason}") from None


def _row(
    file: tarfile.TarFile, files: list[tarfile.TarInfo], tar: Path, where: str, manifest: Path
) -> tuple[str, ...]:
    """The fields of COLUMNS of one sample; the id is empty if it has none.

    Raises AudioError or ValueError for a sample that cannot be an utterance.
    """
    audio, about = _audio(files), _description(file, files)
    text = " ".join(about.get("text", "").split())
    if audio is None or not text:
        raise ValueError(f"has no {'text' if audio else 'audio'}")
    # The name in the block right before the content, which holds only a part of a long name.
    file.fileobj.seek(audio.offset_data - BLOCK)
    stored = tarfile.TarInfo.frombuf(file.fileobj.read(BLOCK), "utf-8", "surrogateescape").name
    place = tar / f"{stored}@{audio.offset_data}+{audio.size}"
    given = about.get("seconds", about.get("duration"))
    seconds = seconds_field(audio_seconds(place) if given is None else parse_seconds(given))
    name, speaker = (" ".join(about.get(key, "").split()) for key in ("id", "speaker"))
    return name, speaker or name or where, audio_field(place, manifest), seconds, text


def _audio(files: list[tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The recording of a sample. Raises ValueError if there are two files of a kind."""
    kinds = [_split(member.name)[1] for member in files]
    recordings = [i for i, kind in enumerate(kinds) if kind in AUDIO]
    most = max(len(recordings), *map(kinds.count, TEXT))
    if most > 1:
        raise ValueError(f"{most} files of one kind; names must differ before their first point")
    return files[recordings[0]] if recordings else None


def _description(file: tarfile.TarFile, files: list[tarfile.TarInfo]) -> dict[str, str]:
    """The contents of the sample's .txt and .json. Raises ValueError if one cannot be read."""
    about: dict[str, str] = {}
    for member in files:
        kind = _split(member.name)[1]
        if kind in TEXT and member.size <= MAX_TEXT:
            try:
                content = file.extractfile(member).read().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"its .{kind} is not UTF-8 text ({error.reason})") from None
            about |= {"text": content} if kind == "txt" else _parse(content)
    return about


def _parse(content: str) -> dict[str, str]:
    try:
        about = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("its .json cannot be read as JSON") from None
    items = about.items() if isinstance(about, dict) else ()
    return {key: str(value) for key, value in items if isinstance(value, str | int | float)}


def _split(name: str) -> tuple[str, str]:
    """a/b.c.flac -> a/b, flac: the sample's name, and the kind of the file."""
    path = PurePosixPath(name)
    key, _, kind = path.name.partition(".")
    return str(path.with_name(key or path.name)), kind.rpartition(".")[2].lower()

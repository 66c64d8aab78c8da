"""Tars in the layout of the webdataset library: a manifest of the samples in them.

A sample is consecutive files with one name up to its first point: audio, and the text as .txt or as
"text" in .json, which may also give id, speaker and seconds (or duration). Names with more points,
such as times, may merge several recordings into one sample, which is skipped: its texts cannot be
assigned. Only the tars' headers and these small files are read, and audio of unknown duration.
"""

import math
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path, PurePosixPath

from asr.data.corpus import audio_field, link_audio
from asr.data.importers.archive import ArchiveError, TarReader, short
from asr.data.manifest import (
    COLUMNS,
    check_names,
    join_fields,
    parse_seconds,
    seconds_field,
    write_rows,
)
from asr.errors import UserError
from asr.io import open_file, parse_json
from features import AudioError
from features.audio import BLOCK, audio_seconds

AUDIO = {"wav", "flac", "ogg", "opus", "mp3"}
TEXT = {"txt", "json"}
MAX_TEXT = 1 << 18  # bytes of a .txt or .json
MAX_NAME = 4096  # characters of a file's name, as systems allow
MAX_KINDS = 1000  # files of a sample


@dataclass
class ImportedTars:
    """The manifest that is written, and a line on every sample that is skipped."""

    manifest: Path
    skipped: list[str] = field(default_factory=list)


def write(folder: str | Path, to: str | Path) -> ImportedTars:
    """Write TO/NAME.tsv of all FOLDER/*.tar, NAME being the folder's, and TO/NAME.audio, a link.

    Raises UserError if there is no tar, some are damaged, or no sample has audio and text.
    """
    folder = Path(folder).resolve()
    result = ImportedTars(Path(to) / f"{folder.name}.tsv")
    tars = sorted(folder.glob("*.tar"))
    if not tars:
        raise UserError(f"{folder}: there is no .tar in it")
    link = link_audio(result.manifest, folder)
    rows: dict[str, tuple[str, ...]] = {}
    damaged = []
    for tar in tars:
        try:
            for row in _rows(tar, link, result):
                if rows.setdefault(row[0], row) is not row:
                    fault = f"another sample of the id {short(row[0])}"
                    result.skipped.append(f"{tar.name}: {fault}")
        except (ArchiveError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            damaged.append(f"{tar}: damaged, or no uncompressed tar: {reason}")
    if damaged:
        raise UserError("; ".join(damaged))
    if not rows:
        first = result.skipped[0] if result.skipped else f"{tars[0].name}: is empty"
        raise UserError(f"{folder}: no sample has both audio and text: {first}")
    write_rows(result.manifest, COLUMNS, rows.values())
    return result


def _rows(tar: Path, link: Path, result: ImportedTars) -> Iterator[tuple[str, ...]]:
    """The fields of COLUMNS of every sample. Raises ArchiveError or OSError."""
    with open_file(tar) as file:
        entries = TarReader(file, math.inf)
        members = (member for member in entries if member.isreg() and not member.issparse())
        for key, files in groupby(members, key=lambda member: _split(member.name)[0]):
            where = f"{tar.name}: {short(key)[1:-1]}"
            try:
                if len(key) > MAX_NAME:
                    raise ValueError(f"its name is longer than {MAX_NAME} characters")
                sample = list(islice(files, MAX_KINDS))
                name, speaker, *fields = _row(entries, sample, link / tar.name, result.manifest)
                speaker = speaker or name or f"{tar.name}: {key}"
                row = (name or f"{tar.stem}-{key}", speaker, *fields)
                check_names(*row[:2])
                join_fields(row)
            except (AudioError, ValueError) as error:
                result.skipped.append(f"{where}: {error}")
            else:
                yield row


def _row(
    tar: TarReader, files: list[tarfile.TarInfo], path: Path, manifest: Path
) -> tuple[str, ...]:
    """The fields of COLUMNS of one sample; id and speaker are empty if it has none.

    Raises AudioError or ValueError for a sample that cannot be an utterance.
    """
    audio, about = _audio(files), _description(tar, files)
    text = " ".join(about.get("text", "").split())
    if audio is None or not text:
        raise ValueError(f"has no {'text' if audio else 'audio'}")
    # The name in the block right before the content, which holds only a part of a long name.
    tar.file.seek(audio.offset_data - BLOCK)
    header = tarfile.TarInfo.frombuf(tar.file.read(BLOCK), "utf-8", "surrogateescape")
    if header.size != audio.size:
        raise ValueError("its audio is too large for a plain header")
    place = path / f"{header.name}@{audio.offset_data}+{audio.size}"
    given = about.get("seconds", about.get("duration"))
    seconds = seconds_field(audio_seconds(place) if given is None else parse_seconds(given))
    name, speaker = (" ".join(about.get(key, "").split()) for key in ("id", "speaker"))
    return name, speaker, audio_field(place, manifest), seconds, text


def _audio(files: list[tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The recording of a sample. Raises ValueError if there are two files of a kind."""
    kinds = [_split(member.name)[1] for member in files]
    recordings = [i for i, kind in enumerate(kinds) if kind in AUDIO]
    most = max(len(recordings), *map(kinds.count, TEXT))
    if most > 1:
        raise ValueError(f"{most} files of one kind; names must differ before their first point")
    return files[recordings[0]] if recordings else None


def _description(tar: TarReader, files: list[tarfile.TarInfo]) -> dict[str, str]:
    """The contents of the sample's .txt and .json. Raises ValueError if one cannot be read."""
    about: dict[str, str] = {}
    for member in files:
        kind = _split(member.name)[1]
        if kind in TEXT:
            if member.size > MAX_TEXT:
                raise ValueError(f"its .{kind} has more than {MAX_TEXT} bytes")
            try:
                content = b"".join(tar.content(member)).decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"its .{kind} is not UTF-8 text ({error.reason})") from None
            about |= {"text": content} if kind == "txt" else _parse(content)
    return about


def _parse(content: str) -> dict[str, str]:
    try:
        about = parse_json(content)
    except ValueError:
        raise ValueError("its .json cannot be read as JSON") from None
    items = about.items() if isinstance(about, dict) else ()
    return {key: str(value) for key, value in items if isinstance(value, str | int | float)}


def _split(name: str) -> tuple[str, str]:
    """a/b.c.flac -> a/b, flac: the sample's name, and the kind of the file."""
    path = PurePosixPath(name)
    if not path.name:  # the entry "." or "/", or one without a name
        return name, ""
    key, _, kind = path.name.partition(".")
    return str(path.with_name(key or path.name)), kind.rpartition(".")[2].lower()

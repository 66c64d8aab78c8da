"""Tars in the layout of the webdataset library: a manifest of the samples in them.

A sample is consecutive files with one name up to its first point: audio, and the text as .txt or as
"text" in .json, which may also give id, speaker and seconds (or duration). Names with more points,
such as times, may merge several recordings into one sample, which is skipped: its texts cannot be
assigned.
"""

import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path, PurePosixPath

from asr.data.importers.rows import Fault, Row, Split, split_of
from asr.errors import UserError
from asr.features.tar import BLOCK
from asr.io import open_file, parse_json

AUDIO = {"wav", "flac", "ogg", "opus", "mp3"}
TEXT = {"txt", "json"}
MAX_TEXT = 1 << 18  # bytes of a .txt or .json
MAX_NAME = 4096  # characters of a file's name, as systems allow
MAX_KINDS = 1000  # files of a sample


def recognise(source: Path) -> bool:
    """Whether there are tars in the folder."""
    return source.is_dir() and any(source.glob("*.tar"))


def read(source: Path) -> list[Split]:
    """The splits that tars are named after, as train-00000.tar; one of the folder's name where all
    tars are of one. Raises UserError if there is no tar.
    """
    if not recognise(source):
        raise UserError(f"{source}: there is no .tar in it")
    tars: dict[str, list[Path]] = {}
    for tar in sorted(source.glob("*.tar")):
        tars.setdefault(split_of(tar.stem), []).append(tar)
    name = source.resolve().name
    return [
        Split(split if split and len(tars) > 1 else name, source, source, partial(_rows, those))
        for split, those in tars.items()
    ]


def _rows(tars: Sequence[Path]) -> Iterator[Row | Fault]:
    """The samples; of a damaged tar those before the damage, and a fault."""
    for tar in tars:
        try:
            yield from _samples(tar)
        except (tarfile.TarError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            yield Fault(tar, 0, f"damaged, or no uncompressed tar: {reason}")


def _samples(tar: Path) -> Iterator[Row | Fault]:
    """Raises TarError or OSError."""
    with open_file(tar) as file, tarfile.open(fileobj=file, mode="r:") as entries:
        samples = groupby(_files(entries), key=lambda member: _split(member.name)[0])
        for number, (key, files) in enumerate(samples, start=1):
            try:
                if len(key) > MAX_NAME:
                    raise ValueError(f"its name is longer than {MAX_NAME} characters")
                yield _row(entries, list(islice(files, MAX_KINDS)), tar, number, key)
            except ValueError as error:
                yield Fault(tar, number, f"sample {key[:200]!r}: {error}")


def _files(entries: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files in a tar. Raises ReadError where it is damaged."""
    for member in entries:
        if member.isreg() and not member.issparse():
            yield member
        entries.members.clear()  # tarfile remembers all that it has read
    entries.fileobj.seek(entries.offset)
    if entries.fileobj.read(BLOCK).strip(b"\0"):  # tarfile takes a damaged header for the end
        raise tarfile.ReadError(f"has no valid header at byte {entries.offset}")


def _row(
    entries: tarfile.TarFile, files: list[tarfile.TarInfo], tar: Path, number: int, key: str
) -> Row:
    """Raises ValueError for a sample that cannot be an utterance."""
    audio, fields = _audio(files), _description(entries, files)
    text = fields.get("text", "")
    if audio is None or not text.strip():
        raise ValueError(f"has no {'text' if audio else 'audio'}")
    # The name in the block right before the content, which holds only a part of a long name.
    entries.fileobj.seek(audio.offset_data - BLOCK)
    header = tarfile.TarInfo.frombuf(entries.fileobj.read(BLOCK), "utf-8", "surrogateescape")
    if header.size != audio.size:
        raise ValueError("its audio is too large for a plain header")
    location = f"{tar.name}/{header.name}@{audio.offset_data}+{audio.size}"
    name, speaker = (" ".join(fields.get(field, "").split()) for field in ("id", "speaker"))
    seconds = fields.get("seconds", fields.get("duration", ""))
    return Row(tar, number, name or f"{tar.stem}-{key}", location, text, speaker, seconds)


def _audio(files: list[tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The recording of a sample. Raises ValueError if there are two files of a kind."""
    kinds = [_split(member.name)[1] for member in files]
    recordings = [i for i, kind in enumerate(kinds) if kind in AUDIO]
    most = max(len(recordings), *map(kinds.count, TEXT))
    if most > 1:
        raise ValueError(f"{most} files of one kind; names must differ before their first point")
    return files[recordings[0]] if recordings else None


def _description(tar: tarfile.TarFile, files: list[tarfile.TarInfo]) -> dict[str, str]:
    """The contents of the sample's .txt and .json. Raises ValueError if one cannot be read."""
    fields: dict[str, str] = {}
    for member in files:
        kind = _split(member.name)[1]
        if kind in TEXT:
            if member.size > MAX_TEXT:
                raise ValueError(f"its .{kind} has more than {MAX_TEXT} bytes")
            try:
                content = tar.extractfile(member).read().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"its .{kind} is not UTF-8 text ({error.reason})") from None
            fields |= {"text": content} if kind == "txt" else _parse(content)
    return fields


def _parse(content: str) -> dict[str, str]:
    try:
        fields = parse_json(content)
    except ValueError:
        raise ValueError("its .json cannot be read as JSON") from None
    items = fields.items() if isinstance(fields, dict) else ()
    return {key: str(value) for key, value in items if isinstance(value, str | int | float)}


def _split(name: str) -> tuple[str, str]:
    """a/b.c.flac -> a/b, flac: the sample's name, and the kind of the file."""
    path = PurePosixPath(name)
    if not path.name:  # the entry "." or "/", or one without a name
        return name, ""
    key, _, kind = path.name.partition(".")
    return str(path.with_name(key or path.name)), kind.rpartition(".")[2].lower()

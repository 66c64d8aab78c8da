"""Utterances and the manifests that list them.

A manifest is a UTF-8 table with a header, columns parted by tabs, one utterance a line:

    id  speaker  audio  seconds  text

More columns are allowed and ignored. `audio` is relative to the manifest and must stay below its
folder. That rule is about the text of the path: a symbolic link in the folder may lead elsewhere,
because a link is made by whoever owns the folder (asr.prepare makes `NAME.audio` beside
`NAME.tsv`) and not by the table. So a manifest from a stranger cannot name a file of yours.

Legend: N utterances.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asr.errors import UserError

COLUMNS = ("id", "speaker", "audio", "seconds", "text")


@dataclass(frozen=True, slots=True)
class Utterance:
    """One recording and what is said in it; `seconds` is its length as the manifest gives it."""

    id: str
    speaker: str
    audio: Path
    seconds: float
    text: str


class Corpus:
    """Utterances in the order of their manifest. Iterable; `corpus[i]` is an Utterance."""

    def __init__(self, utterances: Sequence[Utterance], path: Path | None = None) -> None:
        self.path = path
        self.seconds = np.array([u.seconds for u in utterances], dtype=np.float32)  # (N,)
        self._utterances = list(utterances)

    def __len__(self) -> int:
        return len(self._utterances)

    def __getitem__(self, index: int) -> Utterance:
        return self._utterances[index]

    def __iter__(self) -> Iterator[Utterance]:
        return iter(self._utterances)

    @property
    def ids(self) -> list[str]:
        return [u.id for u in self._utterances]

    @property
    def speakers(self) -> list[str]:
        return [u.speaker for u in self._utterances]

    @property
    def texts(self) -> list[str]:
        return [u.text for u in self._utterances]


def read_manifest(path: str | Path, allow_outside: bool = False) -> Corpus:
    """Reads a manifest; `allow_outside` also accepts audio that is not below its folder.

    The audio files themselves are not looked at: a corpus may have a million.
    Raises UserError with file and line for the first row that is wrong, and for a manifest that is
    missing, empty or lacks a column.
    """
    path = Path(path)
    utterances: list[Utterance] = []
    seen: dict[str, int] = {}
    for line, row in read_rows(path, required=COLUMNS):
        where = f"{path}:{line}"
        first = seen.setdefault(row["id"], line)
        if first != line:
            raise UserError(f"{where}: id {row['id']!r} stands in line {first} already")
        utterances.append(_utterance(row, path.parent, where, allow_outside))
    return Corpus(utterances, path)


def _utterance(row: Mapping[str, str], root: Path, where: str, allow_outside: bool) -> Utterance:
    if not row["id"] or not row["audio"]:
        raise UserError(f"{where}: every row needs an id and an audio file")
    if not allow_outside and leaves(row["audio"], root):
        raise UserError(
            f"{where}: audio {row['audio']!r} lies outside the manifest's folder; "
            "data.outside=true reads it if you trust this table, and `python -m asr.prepare tsv "
            "--audio FOLDER` makes a manifest with a link to that folder"
        )
    try:
        seconds = parse_seconds(row["seconds"])
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return Utterance(row["id"], row["speaker"], root / row["audio"], seconds, row["text"])


def parse_seconds(field: str) -> float:
    """A length above 0; ValueError (for the caller to add file and line) for anything else."""
    try:
        seconds = float(field)
    except ValueError:
        raise ValueError(f"seconds is {field!r}, not a number") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds is {field!r}; a length must be above 0")
    return seconds


def leaves(audio: str, root: Path) -> bool:
    """Whether the path, by its text alone, leads out of `root`. Links are not followed."""
    if ".." in audio and ".." in Path(audio).parts:
        return True
    if not os.path.isabs(audio):  # noqa: PTH117 (a million rows: a Path each costs seconds)
        return False
    return not Path(audio).is_relative_to(os.path.abspath(root))  # noqa: PTH100 (not resolved)


def read_rows(
    path: Path, required: Sequence[str], faults: dict[int, str] | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table as (line number, {column: field}); empty lines are passed over.

    Raises UserError where the file is missing, not UTF-8, lacks a required column or has no rows.
    A row with another number of fields than the header is noted in `faults` by its line, or raises
    UserError where there is no such note-book.
    """
    lines = _lines(path)
    header = next(lines, (1, []))[1]
    missing = [name for name in required if name not in header]
    if missing:
        raise UserError(
            f"{path}: no column {', '.join(missing)}; the first line must name the columns "
            f"{' '.join(required)}, parted by tabs"
        )
    line = None
    for line, fields in lines:
        if len(fields) == len(header):
            yield line, dict(zip(header, fields, strict=True))
            continue
        fault = f"{len(fields)} fields where the header has {len(header)}"
        if faults is None:
            raise UserError(f"{path}:{line}: {fault}")
        faults[line] = fault
    if line is None:
        raise UserError(f"{path}: the manifest is empty; it needs one line per utterance")


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    # utf-8-sig: spreadsheets put a byte-order mark before the first column's name.
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, [field.strip() for field in line.rstrip("\n").split("\t")]
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Writes utterances whose audio lies below the manifest's folder, whole or not at all.

    Raises UserError for a field with a tab or a line break and for audio outside the folder.
    """
    path = Path(path)
    rows = (
        (u.id, u.speaker, audio_field(u.audio, path), f"{u.seconds:.3f}", u.text)
        for u in utterances
    )
    write_rows(path, COLUMNS, rows)


def audio_field(audio: Path, manifest: Path) -> str:
    """The path as the manifest writes it, relative to its folder."""
    try:
        return audio.relative_to(manifest.parent).as_posix()
    except ValueError:
        raise UserError(f"{manifest}: audio {audio} lies outside the manifest's folder") from None


def link_audio(manifest: Path, audio: Path) -> Path:
    """A folder below the manifest's that shows `audio`: itself, or the link NAME.audio to it.

    Raises UserError where NAME.audio is no link of ours to change, or links cannot be made.
    """
    folder, audio = manifest.parent.resolve(), audio.resolve()
    if audio.is_relative_to(folder):
        return manifest.parent / audio.relative_to(folder)
    link = manifest.with_suffix(".audio")
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link}: in the way; a link to {audio} shall stand there")
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        manifest.parent.mkdir(parents=True, exist_ok=True)
        fresh.symlink_to(audio, target_is_directory=True)
        fresh.replace(link)
    except OSError as error:
        raise UserError(
            f"{link}: cannot be made a link to {audio}: {error.strerror}; "
            "or let --to be a folder that holds the audio"
        ) from None
    return link


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table beside its place and renames it, so that no half of it is ever seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            for row in (header, *rows):
                file.write(_line(row, path))
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)  # mkstemp makes it private; a corpus is often shared
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _line(fields: Sequence[str], path: Path) -> str:
    if any(mark in field for field in fields for mark in "\t\n\r"):
        raise UserError(f"{path}: {fields[0]!r} has a tab or a line break in a field")
    return "\t".join(fields) + "\n"

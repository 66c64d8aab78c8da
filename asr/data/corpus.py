"""Utterances, and the corpora that manifests list; a large manifest is read from a line_index.

N utterances.
"""

import hashlib
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asr.data.line_index import Lines, open_lines
from asr.data.manifest import COLUMNS, check_row, read_blocks, write_rows
from asr.errors import UserError
from asr.io import sha256_of_files


@dataclass(frozen=True, slots=True)
class Utterance:
    """One recording with its transcript; `seconds` is the duration that the manifest gives."""

    id: str
    speaker: str
    audio: "Path | ExampleAudio"
    seconds: float
    text: str


@dataclass(frozen=True, eq=False)
class ExampleAudio:
    """The audio of one example of a program's Dataset (examples.py), read where it is used."""

    examples: Any
    index: int
    name: str  # of the Dataset, in messages

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"

    def read(self) -> Any:
        """A path, or {"array": samples, "sampling_rate": Hz}."""
        return self.examples[self.index]["audio"]


class Corpus:
    """Utterances in the order of their manifest: any sequence, also one that makes them lazily.

    `corpus[i]` is an Utterance, `corpus[a:b]` a Corpus; `seconds` (N,) are the durations.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        path: Path | None = None,
        seconds: np.ndarray | None = None,
    ) -> None:
        self.path, self._utterances = path, utterances
        if seconds is None:
            seconds = np.array([u.seconds for u in utterances], dtype=np.float32)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self._utterances)

    def __getitem__(self, index: int | slice) -> "Utterance | Corpus":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self._utterances[index]

    def __iter__(self) -> Iterator[Utterance]:
        return iter(self._utterances)

    def take(self, rows: np.ndarray) -> "Corpus":
        """The utterances of these numbers (n,), in their order."""
        chosen = _Chosen(self._utterances, rows.astype(np.uint32))
        return Corpus(chosen, self.path, self.seconds[rows])

    def sample(self, count: int) -> "Corpus":
        """At most `count` utterances, evenly spread."""
        if len(self) <= count:
            return self
        return self.take(np.linspace(0, len(self) - 1, count).astype(np.int64))

    def unreadable(self, reason: str = "") -> str:
        """The message if none of its audio can be read; reason: of the first."""
        count = f"none of its {len(self)} utterances could be read{reason and ': '}{reason}"
        return f"{self.path}: {count}; {audio_remedy(self.path)}"

    def sha256(self) -> str:
        """Of the manifest, or of ids, texts and durations where there is none."""
        if self.path and self.path.is_file():
            return sha256_of_files([self.path])
        rows = "\n".join(f"{u.id}\t{u.speaker}\t{u.seconds:.3f}\t{u.text}" for u in self)
        return hashlib.sha256(rows.encode()).hexdigest()

    # These lists are made at every call: of a large corpus take a sample first.

    @property
    def ids(self) -> list[str]:
        return [u.id for u in self]

    @property
    def speakers(self) -> list[str]:
        return [u.speaker for u in self]

    @property
    def texts(self) -> list[str]:
        return [u.text for u in self]


@dataclass(frozen=True)
class _Chosen(Sequence[Utterance]):
    utterances: Sequence[Utterance]
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Utterance:  # type: ignore[override]
        return self.utterances[int(self.rows[index])]


@dataclass(frozen=True)
class _Listed(Sequence[Utterance]):
    """The utterances of a manifest in the folder `root`."""

    rows: Lines
    root: Path
    allow_outside: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Utterance:  # type: ignore[override]
        row = self.rows[index].split("\t")
        # Checked again: an index that came with a manifest may name other files.
        check_row(row, self.root, f"row {index} of the index", self.allow_outside)
        name, speaker, audio, seconds, text = row
        return Utterance(name, speaker or name, self.root / audio, float(seconds), text)


def read_manifest(path: str | Path, allow_outside: bool = False) -> Corpus:
    """The corpus of a manifest; `allow_outside` accepts audio that is not below its folder.

    The audio files are not opened. Raises UserError with file and line for the first invalid row,
    and for a manifest that is missing, empty or lacks a column.
    """
    path = Path(path)
    read = partial(read_blocks, path, allow_outside)
    rows = open_lines(path, ".index", read, variant=int(allow_outside))
    return Corpus(_Listed(rows, path.parent, allow_outside), path, rows.seconds)


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write utterances whose audio is below the manifest's folder, atomically.

    Raises UserError for a field with a tab or a line break and for audio outside the folder.
    """
    path = Path(path)

    def fields(u: Utterance) -> tuple[str, ...]:
        return u.id, u.speaker, audio_field(u.audio, path), f"{u.seconds:.3f}", u.text

    write_rows(path, COLUMNS, map(fields, utterances))


def audio_remedy(manifest: Path | None) -> str:
    """What to run where audio of a manifest cannot be read: it names all that is faulty."""
    manifest = manifest or Path("MANIFEST.tsv")
    if manifest.suffix != ".tsv":  # examples of a program
        return f"check the examples of {manifest}"
    return f"to list them: python -m asr.prepare table {shlex.quote(str(manifest))} --to FOLDER"


def audio_field(audio: Path, manifest: Path) -> str:
    """The path as the manifest writes it, relative to its folder."""
    try:
        return audio.relative_to(manifest.parent).as_posix()
    except ValueError:
        raise UserError(f"{manifest}: audio {audio} is outside the manifest's folder") from None


def linked_folder(manifest: Path, audio: Path) -> Path:
    """The path below the manifest's folder that `link_audio` will give. Raises as it does."""
    folder, audio = manifest.parent.resolve(), audio.resolve()
    if audio.is_relative_to(folder):
        return manifest.parent / audio.relative_to(folder)
    link = manifest.with_suffix(".audio")
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link}: in the way; a link to {audio} belongs there")
    return link


def link_audio(manifest: Path, audio: Path) -> Path:
    """A path to the folder `audio` below the manifest's folder: itself, or the link NAME.audio.

    Raises UserError if NAME.audio is no link, or links cannot be made.
    """
    link, audio = linked_folder(manifest, audio), audio.resolve()
    if audio.is_relative_to(manifest.parent.resolve()):
        return link
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        manifest.parent.mkdir(parents=True, exist_ok=True)
        fresh.symlink_to(audio, target_is_directory=True)
        fresh.replace(link)
    except OSError as error:
        fault = f"cannot be made a link to {audio}: {error.strerror}"
        remedy = "or let --to be a folder that holds the audio"
        raise UserError(f"{link}: {fault}; {remedy}") from None
    return link

"""Utterances and the manifests that list them.

A manifest is a UTF-8 table with a header, columns parted by tabs, one utterance a line:

    id  speaker  audio  seconds  text

More columns are allowed and ignored. Where no speaker is told, every utterance has its own. `audio`
is relative to the manifest and must stay below its folder. That rule is about the text of the path:
a symbolic link in the folder may lead elsewhere, because a link is made by whoever owns the folder
(asr.prepare makes `NAME.audio` beside `NAME.tsv`) and not by the table. So a manifest from a
stranger cannot name a file of yours.

Legend: N utterances.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from asr.data.index import Rows, open_rows
from asr.data.manifest import COLUMNS, check_row
from asr.data.table import write_rows
from asr.errors import UserError


@dataclass(frozen=True, slots=True)
class Utterance:
    """One recording and what is said in it; `seconds` is its length as the manifest gives it."""

    id: str
    speaker: str
    audio: Path
    seconds: float
    text: str


class Corpus:
    """Utterances in the order of their manifest. Iterable; `corpus[i]` is an Utterance.

    The utterances may be any sequence, and one that makes them as they are asked for is not turned
    into a list; `seconds` (N,) is what it knows of their lengths. `corpus[a:b]` is a Corpus.
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
        self.seconds = seconds  # (N,)

    def __len__(self) -> int:
        return len(self._utterances)

    @overload
    def __getitem__(self, index: int) -> Utterance: ...

    @overload
    def __getitem__(self, index: slice) -> "Corpus": ...

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
        """At most `count` utterances, evenly spread; all of them where there are no more."""
        if len(self) <= count:
            return self
        return self.take(np.linspace(0, len(self) - 1, count).astype(np.int64))

    @property
    def unreadable(self) -> str:
        """What to say where none of its audio could be read."""
        return f"{self.path}: none of its {len(self)} utterances could be read"

    @property
    def ids(self) -> list[str]:
        """Made anew at every call, as the other two lists: of a large corpus take a sample."""
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

    rows: Rows
    root: Path
    allow_outside: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Utterance:  # type: ignore[override]
        row = self.rows[index]
        # Once more: an index that a stranger's manifest came with may hold what no check has seen.
        check_row(row, self.root, f"row {index} of the index", self.allow_outside)
        name, speaker, audio, seconds, text = row
        return Utterance(name, speaker or name, self.root / audio, float(seconds), text)


def read_manifest(path: str | Path, allow_outside: bool = False) -> Corpus:
    """Reads a manifest; `allow_outside` also accepts audio that is not below its folder.

    The audio files themselves are not looked at: a corpus may have ten million. Of one over 16 MB
    an index is kept (index.py).
    Raises UserError with file and line for the first row that is wrong, and for a manifest that is
    missing, empty or lacks a column.
    """
    path = Path(path)
    rows = open_rows(path, allow_outside)
    return Corpus(_Listed(rows, path.parent, allow_outside), path, rows.seconds)


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

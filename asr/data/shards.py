"""Pack a manifest's audio into some large tars, and write a manifest that gives each one's place.

Ids, durations, texts and further columns stay, so batches, their order and resuming are the same
(features/audio.py reads the audio). Each tar holds for every utterance its audio file, unchanged,
and a .json of the same name with id, speaker, seconds and text: the layout of the webdataset
library, which can stream these tars.
"""

import json
import math
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

from rich.console import Console
from rich.progress import track

from asr.data.corpus import Corpus, Utterance, read_manifest
from asr.data.manifest import COLUMNS, read_rows, write_rows
from asr.errors import UserError
from asr.io import atomic_writer
from features.audio import BLOCK, PackedError, member_of, read_member

SUFFIXES = {b"fLaC": ".flac", b"RIFF": ".wav", b"OggS": ".ogg"}  # by the first four bytes


def pack(
    manifest: str | Path, to: str | Path, megabytes: float = 1000.0, allow_outside: bool = False
) -> Path:
    """Write TO/NAME-00000.tar, ... and, once these are complete, TO/NAME.tsv -> its path.

    `allow_outside` also packs audio that is not below the manifest's folder. Raises UserError for a
    faulty manifest, an audio file that cannot be read, or if TO/NAME.tsv exists.
    """
    manifest = Path(manifest)
    packed = Path(to) / manifest.name
    if packed.exists():
        raise UserError(f"{packed}: already exists; remove it or give --to another folder")
    if not (math.isfinite(megabytes) and megabytes > 0):
        raise UserError(f"--megabytes {megabytes:g}: must be above 0")
    corpus = read_manifest(manifest, allow_outside)
    header = list(next(row for _, row in read_rows(manifest, COLUMNS)))
    write_rows(packed, header, _packed_rows(corpus, manifest, packed, megabytes * 1e6))
    return packed


def _packed_rows(
    corpus: Corpus, manifest: Path, packed: Path, max_bytes: float
) -> Iterator[list[str]]:
    """The rows of the new manifest, each once its audio is written."""
    console, title = Console(stderr=True), f"packing {manifest.name}"
    pairs = zip(read_rows(manifest, COLUMNS), corpus, strict=True)
    rows = track(pairs, title, len(corpus), console=console, disable=not console.is_terminal)
    with _TarWriter(packed.with_suffix(""), max_bytes) as tars:
        for number, ((line, row), utterance) in enumerate(rows):
            try:
                member = member_of(utterance.audio)
                content = read_member(member) if member else utterance.audio.read_bytes()
            except (OSError, PackedError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise UserError(f"{manifest}:{line}: {utterance.audio}: {reason}") from None
            yield list((row | {"audio": tars.add(number, utterance, content)}).values())


class _TarWriter:
    """Writes STEM-00000.tar and so on, of at most `max_bytes` (one utterance at least)."""

    def __init__(self, stem: Path, max_bytes: float) -> None:
        self.stem, self.max_bytes, self.count = stem, max_bytes, 0
        self._open_next()

    def __enter__(self) -> "_TarWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._current.__exit__(*error)

    def add(self, number: int, utterance: Utterance, content: bytes) -> str:
        """Pack one utterance -> its place as the manifest names it."""
        if self._file.tell() and self._file.tell() + len(content) > self.max_bytes:
            self._current.close()
            self._open_next()
        name = f"{number:09d}{_suffix(utterance.audio, content)}"
        offset = self._add_file(name, content)
        about = {"id": utterance.id, "speaker": utterance.speaker}
        about |= {"seconds": utterance.seconds, "text": utterance.text}
        self._add_file(f"{number:09d}.json", json.dumps(about, ensure_ascii=False).encode())
        return f"{self._path.name}/{name}@{offset}+{len(content)}"

    def _add_file(self, name: str, content: bytes) -> int:
        """Add a file to the tar -> the byte at which its content begins."""
        header = tarfile.TarInfo(name)
        header.size = len(content)
        offset = self._file.tell() + BLOCK
        self._tar.addfile(header, BytesIO(content))
        self._tar.members.clear()  # tarfile remembers all that it has written
        return offset

    def _open_next(self) -> None:
        self._path = self.stem.with_name(f"{self.stem.name}-{self.count:05d}.tar")
        self._current = ExitStack()
        self._file = self._current.enter_context(atomic_writer(self._path))
        # USTAR: one header of one block before every file, so its place is known.
        tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        self._tar = self._current.enter_context(tar)
        self.count += 1


def _suffix(audio: Path, content: bytes) -> str:
    """The file's own; a long name in another tar may have lost it."""
    named = audio if member_of(audio) is None else Path(str(audio).rpartition("@")[0])
    return named.suffix.lower() or SUFFIXES.get(content[:4], ".mp3")

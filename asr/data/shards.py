"""A manifest's audio packed into some large tars, and a manifest that says where each lies in them.

Nothing else changes: ids, lengths, texts and further columns stay, so that batches, their order
and resuming are what they were (features/packed.py reads the audio). In each tar stand, for every
utterance, its audio file as it was and a .json with id, speaker, seconds and text, both of one
name: the layout of the webdataset library, which can stream them.
"""

import json
import math
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from rich.console import Console
from rich.progress import track

from asr.data.corpus import Corpus, Utterance, read_manifest
from asr.data.manifest import COLUMNS
from asr.data.table import read_rows, write_rows
from asr.errors import UserError
from features.packed import BLOCK, PackedError, member_of, read_member

BEGINNINGS = {b"fLaC": ".flac", b"RIFF": ".wav", b"OggS": ".ogg"}


def pack(
    manifest: str | Path,
    to: str | Path,
    megabytes: float = 1000.0,
    allow_outside: bool = False,
) -> Path:
    """Writes TO/NAME-00000.tar, ... and, once they are whole, TO/NAME.tsv, whose path it returns.

    `allow_outside` also packs audio that is not below the manifest's folder.

    Raises UserError where the manifest is faulty, an audio file cannot be read, or TO/NAME.tsv is
    there already.
    """
    manifest = Path(manifest)
    made = Path(to) / manifest.name
    if made.exists():
        raise UserError(f"{made}: is there already; remove it or give --to another folder")
    if not (math.isfinite(megabytes) and megabytes > 0):
        raise UserError(f"--megabytes {megabytes:g}: must be above 0")
    corpus = read_manifest(manifest, allow_outside)
    header = list(next(row for _, row in read_rows(manifest, COLUMNS)))
    write_rows(made, header, _packed(corpus, manifest, made, megabytes * 1e6))
    return made


def _packed(corpus: Corpus, manifest: Path, made: Path, most: float) -> Iterator[list[str]]:
    """The rows of the new manifest, each once its audio is written."""
    console = Console(stderr=True)
    rows = track(
        zip(read_rows(manifest, COLUMNS), corpus, strict=True),
        f"packing {manifest.name}",
        len(corpus),
        console=console,
        disable=not console.is_terminal,
    )
    with _Tars(made.with_suffix(""), most) as tars:
        for number, ((line, row), utterance) in enumerate(rows):
            try:
                content = _content(utterance.audio)
            except (OSError, PackedError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise UserError(f"{manifest}:{line}: {utterance.audio}: {reason}") from None
            yield list((row | {"audio": tars.add(number, utterance, content)}).values())


def _content(audio: Path) -> bytes:
    member = member_of(audio)
    return audio.read_bytes() if member is None else read_member(member)


class _Tars:
    """STEM-00000.tar and so on; each is there once it is whole."""

    def __init__(self, stem: Path, most: float) -> None:
        self.stem, self.most, self.count = stem, most, 0
        self._open()

    def __enter__(self) -> "_Tars":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close(whole=kind is None)

    def add(self, number: int, utterance: Utterance, content: bytes) -> str:
        """Packs one utterance -> its audio as the manifest names it."""
        if self._file.tell() and self._file.tell() + len(content) > self.most:
            self._close(whole=True)
            self._open()
        name = f"{number:09d}{_suffix(utterance.audio, content)}"
        offset = self._add(name, content)
        about = {"id": utterance.id, "speaker": utterance.speaker}
        about |= {"seconds": utterance.seconds, "text": utterance.text}
        self._add(f"{number:09d}.json", json.dumps(about, ensure_ascii=False).encode())
        return f"{self._path.name}/{name}@{offset}+{len(content)}"

    def _add(self, name: str, content: bytes) -> int:
        """-> where the content begins."""
        header = tarfile.TarInfo(name)
        header.size = len(content)
        offset = self._file.tell() + BLOCK
        self._tar.addfile(header, BytesIO(content))
        self._tar.members.clear()  # a library's memory of all it has written
        return offset

    def _open(self) -> None:
        self._path = self.stem.with_name(f"{self.stem.name}-{self.count:05d}.tar")
        self._part = self._path.with_name(f".{self._path.name}.part")
        self._file = self._part.open("wb")
        # USTAR: one header of one block before every file, so its place is known.
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        self.count += 1

    def _close(self, whole: bool) -> None:
        self._tar.close()
        self._file.close()
        if whole:
            self._part.replace(self._path)
        else:
            self._part.unlink()


def _suffix(audio: Path, content: bytes) -> str:
    """The file's own; a long name in another tar may have lost it."""
    named = audio if member_of(audio) is None else Path(str(audio).rpartition("@")[0])
    return named.suffix.lower() or BEGINNINGS.get(content[:4], ".mp3")

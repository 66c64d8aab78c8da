"""Pack a manifest's audio into a few large tars, and write a manifest that gives its locations.

Ids, durations, texts and further columns stay, so batches, their order and resuming are the same
(features/tar.py reads the audio). Each tar holds for every utterance its audio file, unchanged,
and a .json of the same name with id, speaker, seconds and text: the layout of the webdataset
library, which can stream these tars.
"""

import json
import math
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

from rich.console import Console
from rich.progress import track

from asr.data.corpus import Corpus, Utterance, read_manifest
from asr.data.manifest import COLUMNS, read_header, read_rows, write_rows
from asr.errors import UserError, terminal
from asr.features.tar import BLOCK, PackedError, member_of, read_member
from asr.io import atomic_writer, open_file

SMALLEST = 0.01  # megabytes: tars are padded to 10 kB
MAX_AUDIO = 1 << 30  # bytes of one utterance
SUFFIXES = {b"fLaC": ".flac", b"RIFF": ".wav", b"OggS": ".ogg"}  # by the first four bytes


def pack(
    manifest: str | Path, to: str | Path, megabytes: float = 1000.0, allow_outside: bool = False
) -> Path:
    """Write TO/NAME-00000.tar, ... and, once these are complete, TO/NAME.tsv -> its path.

    `allow_outside` also packs audio that is not below the manifest's folder. Raises UserError for a
    faulty manifest, an audio file that cannot be read, or if a file exists that would be written.
    An error leaves none of the files.
    """
    manifest = Path(manifest)
    packed = Path(to) / manifest.name
    if os.path.lexists(packed):
        raise _in_the_way(packed)
    if not SMALLEST <= megabytes < math.inf:
        raise UserError(f"--megabytes {megabytes:g}: must be {SMALLEST:g} or more")
    corpus = read_manifest(manifest, allow_outside)
    header = read_header(manifest, COLUMNS)
    packed.parent.mkdir(parents=True, exist_ok=True)
    with TarWriter(packed.with_suffix(""), megabytes * 1e6) as tars:
        write_rows(packed, header, _packed_rows(corpus, manifest, tars))
    return packed


def _packed_rows(corpus: Corpus, manifest: Path, tars: "TarWriter") -> Iterator[list[str]]:
    """The rows of the new manifest, each once its audio is written; at the end all of it is."""
    console, title = Console(file=terminal(sys.stderr)), f"packing {manifest.name}"
    pairs = zip(read_rows(manifest, COLUMNS), corpus, strict=True)
    rows = track(pairs, title, len(corpus), console=console, disable=not console.is_terminal)
    for number, ((line, row), utterance) in enumerate(rows):
        try:
            content = _content(utterance.audio)
        except (OSError, UserError, PackedError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"{manifest}:{line}: {utterance.audio}: {reason}") from None
        yield list((row | {"audio": tars.add(number, utterance, content)}).values())
    tars.finish()


def _content(audio: Path) -> bytes:
    member = member_of(audio)
    if member is None:
        with open_file(audio, MAX_AUDIO) as file:
            return file.read(MAX_AUDIO)
    if member.size > MAX_AUDIO:
        raise PackedError(f"larger than {MAX_AUDIO} bytes")
    return read_member(member)


class TarWriter:
    """Writes STEM-00000.tar and so on, of at most `max_bytes` (one utterance at least).

    They are removed if the block fails.
    """

    def __init__(self, stem: Path, max_bytes: float) -> None:
        self.stem, self.max_bytes = stem, max_bytes
        self._written: list[Path] = []
        self._open_next()

    def __enter__(self) -> "TarWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self._current.__exit__(kind, *error)
        finally:
            for path in self._written if kind else ():
                path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Complete the last tar."""
        self._current.close()

    def add(self, number: int, utterance: Utterance, content: bytes) -> str:
        """Pack one utterance -> its location as the manifest names it."""
        if self._file.tell() and self._file.tell() + len(content) > self.max_bytes:
            self.finish()
            self._open_next()
        name = f"{number:09d}{_suffix(utterance.audio, content)}"
        offset = self._add_file(name, content)
        metadata = {"id": utterance.id, "speaker": utterance.speaker}
        metadata |= {"seconds": utterance.seconds, "text": utterance.text}
        self._add_file(f"{number:09d}.json", json.dumps(metadata, ensure_ascii=False).encode())
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
        path = self.stem.with_name(f"{self.stem.name}-{len(self._written):05d}.tar")
        if os.path.lexists(path):
            raise _in_the_way(path)
        self._path = path
        self._written.append(path)
        self._current = ExitStack()
        self._file = self._current.enter_context(atomic_writer(path))
        # USTAR: one header of one block before every file, so its position is known.
        tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        self._tar = self._current.enter_context(tar)


def _in_the_way(path: Path) -> UserError:
    return UserError(f"{path}: already exists; remove it or give --to another folder")


def _suffix(audio: Path, content: bytes) -> str:
    """That of the file; a long name in another tar may have lost it, or have an odd one."""
    named = audio if member_of(audio) is None else Path(str(audio).rpartition("@")[0])
    ending = named.suffix.lower()
    return ending if re.fullmatch(r"\.[a-z0-9]{1,8}", ending) else SUFFIXES.get(content[:4], ".mp3")

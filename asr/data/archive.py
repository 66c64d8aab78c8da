"""Unpacking .tar.gz files that a stranger may have made.

Only folders and plain files come out, only below the folder that is named, and only up to a size:
no links, devices or sparse files, no absolute or climbing names, no name twice. Rights and owners
in the archive mean nothing. tarfile's own `filter="data"` is not in every Python 3.10 and limits no
size.
"""

import gzip
import struct
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

from asr.errors import UserError

CHUNK = 1 << 18  # bytes
# tarfile reads an extended header whole: a few kB in honest archives, a bomb otherwise.
MAX_READ = 1 << 20
MAX_FILES = 1_000_000

BROKEN = (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error, struct.error)


class _Hostile(Exception):
    """What an archive does that an honest one does not."""


class _Guarded:
    """The unpacked stream, which never gives more than `max_bytes` in all nor MAX_READ at once."""

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ:
            raise _Hostile("has a header of more than a megabyte")
        self._bound(self._stream.tell())
        return self._stream.read(size)

    def seek(self, offset: int) -> int:
        self._bound(offset)
        return self._stream.seek(offset)

    def tell(self) -> int:
        return self._stream.tell()

    def _bound(self, offset: int) -> None:
        if offset > self._max_bytes:
            raise _Hostile(f"unpacks to more than {self._max_bytes} bytes")


def unpack(archive: str | Path, to: str | Path, max_bytes: int, max_files: int = MAX_FILES) -> None:
    """Unpacks a .tar.gz into the folder `to`, which it makes and which must be new.

    Raises UserError naming archive and entry for one that breaks a rule, and for one that is
    broken. What was unpacked until then stays in `to`, for the caller to remove.
    """
    archive, to = Path(archive), Path(to)
    try:
        to.mkdir(parents=True)
        with gzip.open(archive) as stream:
            guarded = _Guarded(stream, max_bytes)
            with tarfile.open(fileobj=guarded, mode="r:") as tar:  # type: ignore[call-overload]
                _unpack_all(tar, to, max_files)
            while guarded.read(CHUNK):  # to the end, where the checksum stands
                pass
    except _Hostile as error:
        raise UserError(f"{archive}: {error}; it is not unpacked") from None
    except BROKEN as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{archive}: cannot be unpacked: {reason}") from None


def _unpack_all(tar: tarfile.TarFile, to: Path, max_files: int) -> None:
    for number, member in enumerate(tar, start=1):
        if number > max_files:
            raise _Hostile(f"has more than {max_files} entries")
        path = to.joinpath(*_parts(member.name))
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
        elif member.isreg() and not member.issparse():
            path.parent.mkdir(parents=True, exist_ok=True)
            _copy(tar, member, path)
        else:
            raise _Hostile(f"entry {member.name!r} is neither a file nor a folder")


def _parts(name: str) -> tuple[str, ...]:
    parts = PurePosixPath(name).parts
    # A backslash or a colon parts folders and drives elsewhere.
    if name.startswith("/") or ".." in parts or any(c in name for c in "\\:\0"):
        raise _Hostile(f"entry {name!r} leads out of its folder")
    return parts


def _copy(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(member)
    if source is None:
        raise _Hostile(f"entry {member.name!r} has no content")
    try:
        file = path.open("xb")
    except FileExistsError:
        raise _Hostile(f"entry {member.name!r} comes twice") from None
    with source, file:
        while chunk := source.read(CHUNK):
            file.write(chunk)
        if file.tell() != member.size:
            raise _Hostile(f"entry {member.name!r} ends early")

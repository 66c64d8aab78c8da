"""Read tars and unpack archives that may be damaged or made to do harm.

Unpack: only folders and plain files, only below that folder, and only up to a size: no links,
devices or sparse files, no absolute or climbing names, no name twice. Rights and owners in the
archive are ignored. tarfile's `filter="data"` is not in every Python 3.10 and limits no size.
"""

import gzip
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from asr.errors import UserError
from asr.io import open_file

CHUNK = 1 << 18  # bytes
MAX_HEADERS = 1 << 16  # bytes of one entry's headers: a few kB in honest archives
MAX_FILES = 1_000_000
MAX_FOLDERS = 64  # one in another
# tarfile's expressions need quadratic time for more (CVE-2024-6232, not mended in every Python).
MANY_DIGITS = re.compile(rb"[0-9]{1000}")
DAMAGED = (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error, struct.error)


class ArchiveError(Exception):
    """One line: what is damaged in an archive, or what no honest archive has."""


@contextmanager
def _reading() -> Iterator[None]:
    """Raise ArchiveError for all that tarfile, gzip and the system raise."""
    try:
        yield
    except RecursionError:  # an extended header of an extended header of another
        raise ArchiveError("has headers of headers, too many") from None
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ArchiveError(reason) from None


class TarReader:
    """The entries of an open tar, in bounded memory: `for entry in TarReader(file)`.

    max_bytes: that may be read of the tar. Raises ArchiveError.
    """

    def __init__(self, file: IO[bytes], max_bytes: float) -> None:
        self.file, self.max_bytes = file, max_bytes
        self._allowed, self._last = MAX_HEADERS, b""  # what tarfile may still read, and has read

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        position = -1
        with _reading(), tarfile.open(fileobj=self, mode="r:") as tar:
            for member in tar:
                if member.size < 0 or member.offset <= position:
                    raise ArchiveError(f"entry {short(member.name)} has a negative size")
                position, self._allowed = member.offset, MAX_HEADERS
                yield member
                tar.members.clear()  # tarfile remembers all that it has read
                tar.pax_headers.clear()
        if self._last.strip(b"\0"):  # tarfile takes a damaged header for the tar's end
            raise ArchiveError(f"has no valid header after byte {position}")

    def content(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        """The content of an entry in blocks of at most CHUNK bytes."""
        rest = member.size
        with _reading():
            self.file.seek(member.offset_data)
            while rest:
                self._check(self.file.tell())
                block = self.file.read(min(CHUNK, rest))
                if not block:
                    raise ArchiveError(f"entry {short(member.name)} ends early")
                rest -= len(block)
                yield block

    def finish(self) -> None:
        """Read on to the end of the file, where gzip has its checksum."""
        with _reading():
            while self.file.read(CHUNK):
                self._check(self.file.tell())

    # What follows is the file that tarfile sees.

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, offset: int) -> int:
        self._check(offset)
        return self.file.seek(offset)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._allowed:
            raise ArchiveError(f"has headers of more than {MAX_HEADERS} bytes")
        self._check(self.tell())
        self._allowed -= size
        self._last = self.file.read(size)
        if MANY_DIGITS.search(self._last):
            raise ArchiveError("has a header with a number of more than 1000 digits")
        return self._last

    def _check(self, offset: int) -> None:
        if offset > self.max_bytes:
            raise ArchiveError(f"unpacks to more than {self.max_bytes} bytes")


def short(name: str) -> str:
    """A name of any length for a message."""
    return repr(name if len(name) <= 200 else f"{name[:200]}...")


def unpack(archive: str | Path, to: str | Path, max_bytes: int, max_files: int = MAX_FILES) -> None:
    """Unpack a .tar.gz into the folder `to`, which must not exist.

    Raises UserError with archive and entry if one breaks a rule, and if the archive is broken; what
    was unpacked until then stays in `to`.
    """
    archive, to = Path(archive), Path(to)
    try:
        to.mkdir(parents=True)
        with open_file(archive) as packed, gzip.open(packed) as file:
            tar = TarReader(file, max_bytes)
            for number, member in enumerate(tar, start=1):
                if number > max_files:
                    raise ArchiveError(f"has more than {max_files} entries")
                _unpack(tar, member, to.joinpath(*_parts(member.name)))
            tar.finish()
    except (ArchiveError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{archive}: cannot be unpacked: {reason}") from None


def _parts(name: str) -> tuple[str, ...]:
    parts = PurePosixPath(name).parts
    # On other systems a backslash or a colon separates folders and drives.
    if name.startswith("/") or ".." in parts or any(c in name for c in "\\:\0"):
        raise ArchiveError(f"entry {short(name)} leads out of its folder")
    if len(parts) > MAX_FOLDERS:
        raise ArchiveError(f"entry {short(name)} is more than {MAX_FOLDERS} folders deep")
    return parts


def _unpack(tar: TarReader, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    if not member.isreg() or member.issparse():
        raise ArchiveError(f"entry {short(member.name)} is neither a file nor a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("xb")
    except FileExistsError:
        raise ArchiveError(f"entry {short(member.name)} comes twice") from None
    with file:
        file.writelines(tar.content(member))

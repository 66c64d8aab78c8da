"""Files inside a plain tar, named by their location: FOLDER/x.tar/NAME@OFFSET+BYTES.

OFFSET is where the content begins, BYTES how long it is (asr.prepare shards writes both). They are
read in any order.
"""

import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath
from typing import NamedTuple

from asr.features.files import Window, open_regular

BLOCK = 512  # bytes: what precedes a member in a tar is a header of this size
_PLACE = re.compile(r"(.+\.tar)/(.+)@(\d{1,18})\+(\d{1,18})", re.DOTALL)


class PackedError(Exception):
    """One line: what is wrong with the tar at that location."""


class TarMember(NamedTuple):
    """The location of one file's content in a tar."""

    tar: str
    name: str
    offset: int
    size: int


def member_of(path: str | os.PathLike[str]) -> TarMember | None:
    """The location that a path of the form above names; None for any other path."""
    match = _PLACE.fullmatch(os.fspath(path)) if "@" in os.fspath(path) else None
    return TarMember(match[1], match[2], int(match[3]), int(match[4])) if match else None


def read_member(member: TarMember) -> bytes:
    """The content. Raises PackedError if the tar has no such file there or cannot be read."""
    with open_member(member) as window:
        return window.file.read(member.size)


@contextmanager
def open_member(member: TarMember) -> Iterator[Window]:
    """The content, open for reading. Raises PackedError as read_member does."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(member.tar))
            size = os.fstat(file.fileno()).st_size
            if member.offset < BLOCK or member.offset + member.size > size:
                raise PackedError(f"the tar ends before it, at {size} bytes")
            file.seek(member.offset - BLOCK)
            header = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
        except OSError as error:
            raise PackedError(f"the tar cannot be read: {error.strerror}") from None
        except tarfile.HeaderError:
            raise PackedError("the tar is damaged: no file begins there") from None
        same = PurePosixPath(header.name) == PurePosixPath(member.name)  # a path has lost its ./
        if not header.isreg() or header.size != member.size or not same:
            other = f"another file there, {header.name!r}"
            raise PackedError(f"the tar has {other}; was it packed anew?")
        yield Window(file, member.offset, member.size)

"""Audio inside a plain tar, found by its place: FOLDER/x.tar/NAME@OFFSET+BYTES.

Storage that hates small files holds a corpus as some large tars. A manifest names the byte at which
a member's content begins and how long it is (asr.prepare shards writes both), so an utterance is
one seek and one read, in any order: batches of like length, an epoch's order and resuming stay what
they are with single files, which a tar that is streamed from its start, as the webdataset library
does it, cannot give.
"""

import os
import re
import tarfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

BLOCK = 512  # bytes: what precedes a member in a tar is a header of this size
_PLACE = re.compile(r"(.+\.tar)/(.+)@(\d{1,18})\+(\d{1,18})", re.DOTALL)


class PackedError(Exception):
    """One line: what is wrong with the tar at that place."""


class Member(NamedTuple):
    """Where the content of one file lies in a tar."""

    tar: str
    name: str
    offset: int
    size: int


def member_of(path: str | os.PathLike[str]) -> Member | None:
    """What such a path says; None for any other."""
    found = _PLACE.fullmatch(os.fspath(path)) if "@" in os.fspath(path) else None
    return Member(found[1], found[2], int(found[3]), int(found[4])) if found else None


def read_member(member: Member) -> bytes:
    """The content. PackedError where the tar has no such file there, or is not to be read."""
    try:
        with Path(member.tar).open("rb") as file:
            there = os.fstat(file.fileno()).st_size
            if member.offset < BLOCK or member.offset + member.size > there:
                raise PackedError(f"the tar ends before it, at {there} bytes")
            file.seek(member.offset - BLOCK)
            block = file.read(BLOCK + member.size)
    except OSError as error:
        raise PackedError(f"the tar cannot be read: {error.strerror}") from None
    try:
        header = tarfile.TarInfo.frombuf(block[:BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        raise PackedError("the tar is damaged: no file begins there") from None
    same = PurePosixPath(header.name) == PurePosixPath(member.name)  # a path has lost its ./
    if not header.isreg() or header.size != member.size or not same:
        raise PackedError(f"the tar has another file there, {header.name!r}; was it packed anew?")
    return block[BLOCK:]

"""Where the streams of an audio file begin and how long they are, by its bytes alone.

libsndfile reads one stream up to the length that its header states. Files that hold more are found
here: several Ogg or FLAC streams one after another (`cat a.ogg b.ogg`, a recorded radio stream),
and WAV or AU whose header was never completed; in mp3.py those of MP3. Each stream is read by
libsndfile as a separate file, behind a header that states its true length.
"""

import re
import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

from asr.features.files import Window

READ = 1 << 20  # bytes searched at once


class Stream(NamedTuple):
    """A stream of a file: `size` of its bytes from `offset`, to be read behind `head`.

    stated: the bytes of samples by its header, if there are more.
    """

    offset: int
    size: int
    head: bytes = b""
    stated: int | None = None


# An Ogg page that begins a logical stream (RFC 3533), and the first block of a FLAC (RFC 9639).
BEGINNINGS = {
    "OGG": re.compile(rb"OggS\0[\2\3]", re.DOTALL),
    "FLAC": re.compile(rb"fLaC[\0\x80]\0\0\x22", re.DOTALL),
}


def chained_streams(window: Window, kind: str) -> list[Stream]:
    """The streams of an OGG or FLAC file, of which it may hold several in a row."""
    begins: list[int] = []
    adjacent = -1  # where an Ogg page would begin a stream beside the one before it
    for position in places_of(window, BEGINNINGS[kind]):
        if position != adjacent:
            begins.append(position)
        if kind == "OGG":
            (count,) = window.read_at(position + 26, 1) or b"\0"  # at the end of a cut file
            sizes = window.read_at(position + 27, count)
            adjacent = position + 27 + len(sizes) + sum(sizes)
    ends = [*begins[1:], window.size]
    return [Stream(begin, end - begin) for begin, end in zip(begins, ends, strict=True)]


MAX_PAGE = 27 + 255 + 255 * 255  # bytes of an Ogg page


def ogg_end(window: Window, end: int) -> Literal["complete", "open", "cut"]:
    """How an Ogg stream ends at a byte: with the page that is marked as its last one, with another
    page (recordings that were broken off, and some encoders), or within a page.
    """
    begin = max(0, end - MAX_PAGE)
    tail = window.read_at(begin, end - begin)
    page = tail[tail.rfind(b"OggS\0") :]
    sizes = page[27 : 27 + page[26]] if len(page) > 26 else b""
    if len(page) < 27 or len(sizes) < page[26] or len(page) < 27 + len(sizes) + sum(sizes):
        return "cut"
    return "complete" if page[5] & 4 else "open"


def places_of(window: Window, pattern: re.Pattern[bytes], begin: int = 0) -> Iterator[int]:
    """Where the pattern, of at most 32 bytes, occurs from a position on."""
    rest = b""
    while block := window.read_at(begin + len(rest), READ):
        block = rest + block
        found = list(pattern.finditer(block))
        yield from (begin + match.start() for match in found)
        kept = max(len(block) - 31, found[-1].end() if found else 0)
        begin, rest = begin + kept, block[kept:]


# WAV and AU.


USUAL_HEAD, MOST_HEAD = 1 << 12, 1 << 20  # bytes before the samples
UNKNOWN_SIZE = 0xFFFFFFFF
TOLERANCE = 0.1  # seconds between header and content: lossy coders pad


def unfinished_stream(window: Window) -> list[Stream]:
    """The stream of a WAV (also RF64) or AU whose header states fewer bytes than follow; none for
    all others. Chunks behind the samples of a WAV are not samples.
    """
    head = window.read_at(0, USUAL_HEAD)
    if head[:4] in (b"RIFF", b"RF64") and not _data_chunk(head):
        head = window.read_at(0, MOST_HEAD)
    if head[:4] == b".snd" and len(head) >= 24:
        begin, stated, _, rate, channels = struct.unpack(">5I", head[4:24])
        least = rate * channels * TOLERANCE
        head = head[:8] + struct.pack(">I", UNKNOWN_SIZE) + head[12:begin]
    elif head[:4] in (b"RIFF", b"RF64") and (found := _data_chunk(head)):
        begin, stated, per_second = found
        least = per_second * TOLERANCE if stated else 0
        head = _wav_head(head[:begin], window.size - begin)
    else:
        return []
    end = begin + stated
    if window.size - end <= least or _is_chunk(window, end + end % 2):
        return []
    return [Stream(begin, window.size - begin, head, stated)]


def _data_chunk(head: bytes) -> tuple[int, int, int] | None:
    """Where the samples of a WAV begin, how many bytes they have, and how many a second has."""
    position, long, per_second = 12, 0, 0
    while position + 8 <= len(head):
        name, size = struct.unpack("<4sI", head[position : position + 8])
        position += 8
        if name == b"ds64":
            long = int.from_bytes(head[position + 8 : position + 16], "little")
        if name == b"fmt ":
            per_second = int.from_bytes(head[position + 8 : position + 12], "little")
        if name == b"data":
            is_long = head[:4] == b"RF64" and size == UNKNOWN_SIZE
            return position, long if is_long else size, per_second
        position += size + size % 2
    return None


def _wav_head(head: bytes, size: int) -> bytes:
    """The head of a WAV for all of `size` bytes of samples."""
    if size < UNKNOWN_SIZE:
        return b"RIFF" + head[4:-4] + struct.pack("<I", UNKNOWN_SIZE)
    sizes = struct.pack("<4sIQQQI", b"ds64", 28, size + len(head) + 28, size, 0, 0)
    old = 36 if head[12:16] == b"ds64" else 0
    unknown = struct.pack("<I", UNKNOWN_SIZE)
    return b"RF64" + unknown + b"WAVE" + sizes + head[12 + old : -4] + unknown


def _is_chunk(window: Window, position: int) -> bool:
    """Whether a chunk with a printable name begins there and ends in the file, as samples of audio
    do by chance once in a million files. An AU has none.
    """
    head = window.read_at(position, 8)
    size = int.from_bytes(head[4:], "little")
    named = head[:4].isascii() and head[:4].decode().isprintable()
    return len(head) == 8 and named and position + 8 + size <= window.size

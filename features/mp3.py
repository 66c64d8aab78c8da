"""The streams of an MP3, found by its frames, which libsndfile guesses from the first ones.

ISO 11172-3 and 13818-3 (frame headers); the Xing frame and its extension by LAME, which states the
encoder's delay and padding, as libmpg123 reads them. A stream may have no Xing frame, or one that
states another number of frames.
"""

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from asr.features.files import Window
from asr.features.streams import READ, Stream, places_of

# kbit/s of layer III for the indices 1 to 14: of MPEG-1, of MPEG-2 and 2.5.
BITRATES_1 = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
BITRATES_2 = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
# The first three bytes of a frame's header.
SYNC = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef]", re.DOTALL)
TAGS = (b"TAG", b"APETAGEX", b"ID3", b"LYRICSBEGIN")  # what may follow the last frame
CONFIRMED = 3  # frames in a row that are not other bytes by chance
DECODER_DELAY = 529  # samples, beside the delay that the encoder states
# Silent frames before the first: libmpg123 adds in an order that repeats every 4 or 8 frames.
SILENT = 8


class Frame(NamedTuple):
    """What the header of a frame of layer III states."""

    kind: tuple[int, int, bool]  # version, rate, mono: one stream has one
    rate: int
    channels: int
    samples: int
    size: int  # bytes
    info: int  # offset of a Xing frame's content


@lru_cache(maxsize=1 << 14)
def _frame(header: bytes) -> Frame | None:
    """The frame of a header's 4 bytes; None if they are none, or of free format."""
    if len(header) < 4 or header[0] != 0xFF or header[1] < 0xE0:
        return None
    version, layer = header[1] >> 3 & 3, 4 - (header[1] >> 1 & 3)  # 3: MPEG-1, 2: 2, 0: 2.5
    index, column, mono = header[2] >> 4, header[2] >> 2 & 3, header[3] >> 6 == 3
    if version == 1 or layer != 3 or index in (0, 15) or column == 3:
        return None
    rate = (44_100, 48_000, 32_000)[column] // (4, 0, 2, 1)[version]
    bits = 1000 * (BITRATES_1 if version == 3 else BITRATES_2)[index - 1]  # a second
    samples = 1152 if version == 3 else 576
    size = samples // 8 * bits // rate + (header[2] >> 1 & 1)
    side = (17 if mono else 32) if version == 3 else (9 if mono else 17)
    return Frame((version, column, mono), rate, 2 - mono, samples, size, 4 + side)


@dataclass(frozen=True)
class Mp3Stream:
    """A stream: its frames and the part of their samples that was encoded."""

    header: bytes  # of its first frame
    frame: Frame
    begin: int  # of the first frame with samples
    end: int
    count: int  # frames
    stated: int  # frames by its Xing frame, 0 without
    delay: int  # samples to drop at the start, and
    padding: int  # at the end

    @property
    def samples(self) -> int:
        """The number of samples (a channel), without delay and padding."""
        return max(0, self.count * self.frame.samples - self.delay - self.padding)

    def whole(self) -> tuple[Stream, int]:
        """The stream behind a head that states its length; the samples to drop at its start."""
        head = _xing_head(self.header, self.count)
        skip = self.delay + SILENT * self.frame.samples - DECODER_DELAY
        return Stream(self.begin, self.end - self.begin, head), skip


def mp3_streams(window: Window) -> list[Mp3Stream]:
    """The streams of an MP3; none if of free format.

    A stream ends where its frames do: at a tag, at another Xing frame, at other bytes. The last
    frame of a truncated file is skipped.
    """
    streams, position = [], _next_frame(window, 0)
    while position is not None and (stream := _walk(window, position)).count:
        streams.append(stream)
        position = _next_frame(window, stream.end)
    return streams


def _walk(window: Window, position: int) -> Mp3Stream:
    """The stream whose first frame, perhaps a Xing frame, begins at the position."""
    base, block = position, window.read_at(position, READ)
    header = block[:4]
    first = _frame(header)
    stated, delay, padding = 0, 0, 0
    if content := _xing_content(block, first):
        stated, delay, padding = _read_xing(content)
        position += first.size
    kind, info, begin, count = first.kind, first.info, position, 0
    while True:
        at = position - base
        if at + 64 > len(block) and base + len(block) < window.size:
            base, at, block = position, 0, window.read_at(position, READ)
        frame = _frame(block[at : at + 4])
        if frame is None or frame.kind != kind or position + frame.size > window.size:
            break
        if block[at + info : at + info + 4] in XING and count:
            break
        count += 1
        position += frame.size
    if stated != count:  # the last frames are others
        padding = 0
    return Mp3Stream(header, first, begin, position, count, stated, delay, padding)


XING = (b"Xing", b"Info")


def _xing_content(block: bytes, frame: Frame) -> bytes:
    """What follows the name in a Xing frame; empty if it is none."""
    name, content = block[frame.info : frame.info + 4], block[frame.info + 4 : frame.size]
    return content if name in XING and not any(block[4 : frame.info]) else b""


def _read_xing(content: bytes) -> tuple[int, int, int]:
    """The number of frames, and samples to drop at start and end; 0 for what is not stated."""
    flags, frames = struct.unpack(">II", content[:8].ljust(8, b"\0"))
    # Each of the flags 1, 2, 4 and 8 stands for a field before the extension.
    rest = content[4 + sum(size for bit, size in enumerate((4, 4, 100, 4)) if flags >> bit & 1) :]
    if not flags & 1 or not frames:
        return 0, 0, 0
    both = int.from_bytes(rest[21:24], "big") if len(rest) >= 24 and rest[0] else 0
    return frames, (both >> 12) + DECODER_DELAY, max(0, (both & 0xFFF) - DECODER_DELAY)


def _xing_head(header: bytes, count: int) -> bytes:
    """A Xing frame for that many frames, and silent frames, since behind a Xing frame
    libmpg123 drops DECODER_DELAY samples.
    """
    header = bytes([0xFF, header[1] | 1, 0xE0 | header[2] & 0x0C, header[3]])  # no checksum
    frame = _frame(header)
    xing = header.ljust(frame.info, b"\0") + XING[0] + struct.pack(">II", 1, count + SILENT)
    return xing.ljust(frame.size, b"\0") + SILENT * header.ljust(frame.size, b"\0")


def _next_frame(window: Window, position: int) -> int | None:
    """Where the next frame begins that others of its kind follow, behind tags and other bytes."""
    while tag := _tag_size(window.read_at(position, 32)):
        position += tag
    if _begins(window, position):
        return position
    return next(
        (found for found in places_of(window, SYNC, position) if _begins(window, found)), None
    )


def _tag_size(start: bytes) -> int:
    """The bytes of a tag of that start; 0 if it is none."""
    if start[:3] == b"ID3" and len(start) >= 10:
        size = sum((byte & 127) << 7 * (3 - i) for i, byte in enumerate(start[6:10]))
        return size + (20 if start[5] & 16 else 10)
    if start[:8] == b"APETAGEX" and len(start) == 32:
        return 32 + int.from_bytes(start[12:16], "little")
    return 128 if start[:3] == b"TAG" else 0


def _begins(window: Window, position: int) -> bool:
    """Whether CONFIRMED frames of a kind begin at the position, or as many as the file has."""
    kinds = set()
    for number in range(CONFIRMED):
        start = window.read_at(position, 11)
        frame = _frame(start[:4])
        if frame is None:
            return number > 0 and (not start or start.startswith(TAGS))
        kinds.add(frame.kind)
        position += frame.size
    return len(kinds) == 1

"""Regular files, their names in messages, and windows of their bytes."""

import errno
import os
import stat
from typing import IO

AUDIO_SUFFIXES = {".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au"}
# features/containers.py
FFMPEG_SUFFIXES = {".3gp", ".m4a", ".m4b", ".m4v", ".mka", ".mkv", ".mov", ".mp4", ".webm"}
RECORDING_SUFFIXES = AUDIO_SUFFIXES | FFMPEG_SUFFIXES
UNREAD_SUFFIXES = {".aac", ".ac3", ".amr", ".avi", ".flv", ".mp2", ".mpeg", ".mpg", ".wma", ".wmv"}
CONVERSION = "convert it to FLAC: ffmpeg -i FILE FILE.flac"


Source = str | os.PathLike[str] | bytes  # a file, a location in a tar, or a file's content
IN_MEMORY = "the audio"  # the name of a content in messages


def name_of(source: Source) -> str:
    """For messages: the path on one line, quoted, with escapes, if it has a line break or no
    printable text.
    """
    if isinstance(source, bytes):
        return IN_MEMORY
    text = os.fspath(source)
    return text if text.isprintable() else ascii(text)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A regular file, open for reading. OSError for a FIFO or a device, which might never end."""

    def opener(path: str, flags: int) -> int:
        handle = os.open(path, flags | os.O_NONBLOCK)  # else a FIFO waits for its other end
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file")
        return handle

    return open(path, "rb", opener=opener)


class Window:
    """`size` bytes of an open file from `offset`, behind `head`, as soundfile reads a file.

    errors: what ended a reading early, which soundfile would print with a traceback.
    """

    def __init__(self, file: IO[bytes], offset: int, size: int, head: bytes = b"") -> None:
        self.file, self.offset, self.size, self.head = file, offset, len(head) + size, head
        self.position = 0
        self.errors: list[OSError] = []

    def part(self, offset: int, size: int, head: bytes = b"") -> "Window":
        """A part of a window without a head, behind a head; both share their errors."""
        part = Window(self.file, self.offset + offset, size, head)
        part.errors = self.errors
        return part

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position from the start, from the present one, or from the end; -> it."""
        position += (0, self.position, self.size)[whence]
        self.position = max(0, min(position, self.size))
        return self.position

    def tell(self) -> int:
        """The position, in bytes from the start of the window."""
        return self.position

    def readinto(self, buffer: bytearray) -> int:
        """Fill the buffer as far as the window goes; -> the number of bytes."""
        view = memoryview(buffer)[: self.size - self.position]
        start = self.head[self.position : self.position + len(view)]
        view[: len(start)] = start
        try:
            self.file.seek(self.offset + max(0, self.position - len(self.head)))
            count = len(start) + self.file.readinto(view[len(start) :])
        except OSError as error:
            self.errors.append(error)
            return 0
        self.position += count
        return count

    def read_at(self, position: int, size: int) -> bytes:
        """At most `size` bytes from a position. Does not move the window's position."""
        before, self.position = self.position, min(position, self.size)
        buffer = bytearray(min(size, self.size - self.position))
        count = self.readinto(buffer)
        self.position = before
        return bytes(buffer[:count])

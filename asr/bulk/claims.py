"""Which process works on which piece: a lock on one byte of a shared file for each.

Locks of this kind (fcntl, not flock) hold over NFS too, and go when their holder ends, however it
ends. Each belongs to a process: two claims within one do not exclude each other.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Claims:
    """Claims on pieces 0, 1, ... through the file; `work` is whether its file system has locks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = True

    def __enter__(self) -> "Claims":
        self._file: IO[bytes] = self.path.open("ab")
        with self.claim(1 << 40):
            return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @contextmanager
    def claim(self, piece: int) -> Iterator[bool]:
        """Whether the piece is this process's own within the block; where no locks are, always."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, piece)
        except (BlockingIOError, PermissionError):  # another's; systems differ in how they say it
            yield False
            return
        except OSError:
            self.work = False
            yield True
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, piece)

"""One training at a time in a run folder.

The lock is the process's own: it goes when that ends, however it ends, and the loader's workers do
not inherit it, so a run that was killed can be resumed at once. Who only reads a run takes none.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from asr.errors import UserError

LOCK = "train.lock"  # who trains here, while somebody does


@contextmanager
def only_training(run: Path) -> Iterator[None]:
    """Holds the run folder, which it makes; one that nothing was put into goes again.

    Raises UserError where another process trains in it.
    """
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    run.mkdir(parents=True, exist_ok=True)
    path = run / LOCK
    try:
        with _taken(path):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()


def _taken(path: Path) -> IO[str]:
    """The locked file, open; another one where its last holder has removed it meanwhile."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _lock(file, path)
            if os.fstat(file.fileno()).st_nlink:
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: IO[str], path: Path) -> None:
    try:
        # Not flock, which workers would inherit and hold for seconds after a kill.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # another's; systems differ in how they say it
        file.seek(0)
        holder = file.read(200) or "another process"
        raise UserError(
            f"{path.parent}: {holder} is training in it; wait for its end, end it, or choose "
            "another --run"
        ) from None
    except OSError:
        return  # a file system without locks: better to train than not

"""Files: atomic writes, checked reads, locks and checksums.

An atomic write goes to a hidden file beside the target, which a rename then replaces: a reader sees
the old content or the new one, never a part, and a failed write leaves nothing behind.

A file that somebody else may have made is checked as it is opened: no FIFO or device, which might
block or never end, and no more bytes than its kind can need. Where a command writes, it follows no
symbolic link, which could lead out of the folder that the user named.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from asr.errors import UserError, writing

CHUNK = 1 << 20  # bytes
LOCK = "train.lock"  # in a run folder while a process trains in it


@contextmanager
def atomic_writer(path: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` when the block ends, and is removed when the block fails.

    sync: flush it to the disk before the rename, so that a power failure leaves old or new content.
    """
    # Not tempfile: that makes files private, where the user's umask decides.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with writing(path):
            with part.open("xb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Write every text as UTF-8, then rename all to their names, in the order given."""
    with ExitStack() as files:  # which closes, and so renames, the last opened first
        for name, text in reversed(contents.items()):
            file = files.enter_context(atomic_writer(folder / name))
            file.write(text.encode())
            file.flush()  # a full disk must show before the first rename


def atomic_write(path: Path, text: str) -> None:
    """Write one text as UTF-8."""
    write_files(path.parent, {path.name: text})


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` to fill and rename to it; removed if the block does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")  # as in atomic_writer
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder; those made are removed again where they are left empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def usable_cores() -> int:
    """Those of this process; in a container often fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_cache() -> Path:
    """This project's folder in the user's cache. Raises RuntimeError for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "layernorm-asr"


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_file(path: Path, limit: int | None = None) -> IO[bytes]:
    """A regular file, open for reading.

    Raises UserError for a FIFO, a device, a name with a null character, or a file of more than
    `limit` bytes.
    """
    try:
        file = io.BufferedReader(_Unblocked(path, opener=_open_regular))
    except ValueError:
        raise UserError(f"{str(path)!a}: no file can have this name") from None
    if limit is not None and os.fstat(file.fileno()).st_size > limit:
        file.close()
        raise UserError(f"{path}: larger than {limit} bytes")
    return file


class _Unblocked(io.FileIO):
    """A file that raises OSError in place of waiting, as for the system's /proc/kmsg."""

    def readinto(self, buffer: Any) -> int:
        """Bytes read into the buffer; 0 at the end."""
        if (count := super().readinto(buffer)) is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self.name))
        return count


def read_small_file(path: Path, limit: int = 16 << 20) -> str:
    """The UTF-8 text of a regular file of bounded size, such as a recipe or a JSON description.

    Raises UserError as open_file does, ValueError for other encodings.
    """
    with open_file(path, limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # files of the system have a size of 0
        raise UserError(f"{path}: larger than {limit} bytes")
    return content.decode()


def read_json(path: Path, limit: int = 16 << 20) -> Any:
    """The value of a JSON file. Raises UserError as open_file does, ValueError as parse_json."""
    return parse_json(read_small_file(path, limit))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises ValueError for what is not JSON or not UTF-8, is nested too deeply, has too long a
    number, or has a surrogate, which is no character and cannot be written again.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("has a lone surrogate, which is no character") from None
    return value


def open_append(path: Path) -> IO[bytes]:
    """A regular file, open for appending, made if need be.

    Raises UserError for a symbolic link, a file with another name elsewhere (a hard link), a FIFO
    or a device.
    """
    return open(path, "a+b", opener=_open_own)


def _open_regular(path: str, flags: int) -> int:
    try:
        handle = os.open(path, flags | os.O_NONBLOCK, 0o666)  # else a FIFO waits for its other end
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise UserError(f"{path}: not a regular file") from None
        raise
    mode = os.fstat(handle).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # Python itself refuses folders
        os.close(handle)
        raise UserError(f"{path}: not a regular file")
    return handle


def _open_own(path: str, flags: int) -> int:
    try:
        handle = _open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path}: {_LINK}") from None
        raise
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise UserError(f"{path}: a file with another name elsewhere (a hard link); copy it")
    return handle


def check_run_folder(run: Path) -> None:
    """Raise UserError if a run folder has a member that is neither a file nor a folder.

    Through a link, writing into the folder would change what is elsewhere; a FIFO would block. The
    path of the folder itself may be a link, which its user has made, but must be UTF-8.
    """
    try:
        os.fspath(run).encode()
    except UnicodeEncodeError:  # safetensors and torch cannot open such files
        raise UserError(f"{run}: its name is not UTF-8; rename it") from None
    waiting = [run] if run.is_dir() else []
    while waiting:
        # Other processes may rename what they write meanwhile; kinds are read with the names.
        with suppress(FileNotFoundError), os.scandir(waiting.pop()) as members:
            for member in members:
                if member.is_dir(follow_symlinks=False):
                    waiting.append(Path(member.path))
                elif not member.is_file(follow_symlinks=False):
                    fault = _LINK if member.is_symlink() else "not a regular file; remove it"
                    raise UserError(f"{member.path}: {fault}")


_LINK = "a symbolic link, through which nothing is written; replace it by what it points to"


def sha256_of_files(paths: Iterable[Path], limit: int | None = None) -> str:
    """The SHA256 of the files' bytes, one file after another: a second for a gigabyte.

    Raises UserError as open_file does.
    """
    return _hash_files(paths, hashlib.sha256(), limit)


def md5_of_file(path: Path) -> str:
    """The MD5 of a file, as archives publish it: against damage, not against an attacker."""
    return _hash_files([path], hashlib.md5(usedforsecurity=False))


def _hash_files(paths: Iterable[Path], digest: Any, limit: int | None = None) -> str:
    for path in paths:
        with open_file(path, limit) as file:
            while block := file.read(CHUNK):
                digest.update(block)
    return digest.hexdigest()


def try_lock(file: IO[Any], start: int = 0, length: int = 0, inherited: bool = False) -> bool:
    """Lock an open file, or `length` bytes from `start`; False where another process holds it.

    The lock belongs to this process, works over NFS and ends with the process, however it ends.
    inherited: it belongs to the open file instead, so child processes that inherit the file keep
    it. Raises OSError on a file system without locks.
    """
    try:
        if inherited:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):  # systems differ in the error
        return False
    return True


def unlock(file: IO[Any], start: int = 0, length: int = 0) -> None:
    """Give up a lock of this process."""
    fcntl.lockf(file, fcntl.LOCK_UN, length, start)


@contextmanager
def lock_file(path: Path, refusal: str | None) -> Iterator[IO[bytes]]:
    """Hold a lock file, which child processes may inherit.

    If another process holds it, raises UserError(refusal), or with None waits. Raises UserError
    also as open_append does.
    """
    with open_append(path) as file:
        if refusal is None:
            fcntl.flock(file, fcntl.LOCK_EX)
        elif not try_lock(file, inherited=True):
            raise UserError(refusal)
        yield file


@contextmanager
def lock_run_folder(run: Path) -> Iterator[None]:
    """Hold a run folder for training. Creates it, and removes it if nothing was written into it.

    The loader's workers do not inherit the lock, so a killed run can be resumed at once.
    Raises UserError where another process trains in the folder, and as check_run_folder does.
    """
    check_run_folder(run)
    with made_folder(run), _training_lock(run / LOCK):
        yield


@contextmanager
def _training_lock(path: Path) -> Iterator[None]:
    """Hold the lock file of a run folder, which names its holder; removed at the end."""
    while True:
        with open_append(path) as file:
            locked = True  # also on a file system without locks: better to train than not
            with suppress(OSError):
                locked = try_lock(file)
            if not locked:
                file.seek(0)
                holder = file.read(200).decode(errors="replace") or "another process"
                remedy = "wait for its end, end it, or choose another --run"
                raise UserError(f"{path.parent}: {holder} is training in it; {remedy}")
            if os.fstat(file.fileno()).st_nlink:  # else its last holder has just removed it
                holder = f"process {os.getpid()} on {socket.gethostname()}"
                try:
                    with writing(path):
                        file.truncate(0)
                        os.write(file.fileno(), holder.encode())
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return

"""Files: atomic writes, checked reads, locks and checksums.

An atomic write goes to a hidden file beside the target, which a rename then replaces: a reader sees
the old content or the new one, never a part, and a failed write leaves nothing behind.

A file from somebody else is checked when it is opened: it must not be a FIFO or device, which might
block or never end, and not be larger than its kind needs. Commands never write through a symbolic
link, which could lead out of the folder that the user named.
"""

import errno
import fcntl
import hashlib
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
    # Not tempfile, which ignores the umask and makes files private.
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
    """Write every text as UTF-8, then rename all files in the order of `contents`."""
    with ExitStack() as files:  # closes, and so renames, the last opened file first
        for name, text in reversed(contents.items()):
            file = files.enter_context(atomic_writer(folder / name))
            file.write(text.encode())
            file.flush()  # a full disk must raise before the first rename


def atomic_write(path: Path, text: str) -> None:
    """Write one text as UTF-8."""
    write_files(path.parent, {path.name: text})


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, to fill and rename; removed if it was not renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")  # as in atomic_writer
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; new ones that are still empty at the end are removed."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def check_writable(folder: Path) -> Path:
    """The folder. UserError where it cannot be written into or made; it is not made yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise UserError(f"{folder}: {existing} cannot be written into; choose another --out")
    return folder


def usable_cores() -> int:
    """The cores this process may use; in a container often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_cache() -> Path:
    """This project's cache folder. Raises RuntimeError for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "layernorm-asr"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_file(path: Path, limit: int | None = None) -> IO[bytes]:
    """A regular file, open for reading.

    Raises UserError for a FIFO, a device, a name with a null character, or more than `limit` bytes.
    """
    try:
        file = open(path, "rb", opener=_open_regular)  # noqa: SIM115 (the caller closes it)
    except ValueError:
        raise UserError(f"{str(path)!a}: no file can have this name") from None
    if limit is not None and os.fstat(file.fileno()).st_size > limit:
        file.close()
        raise UserError(f"{path}: larger than {limit} bytes")
    return file


def read_small_file(path: Path, limit: int = 16 << 20) -> str:
    """The UTF-8 text of a regular file of bounded size, such as a recipe or a JSON description.

    Raises UserError as open_file does, ValueError for other encodings.
    """
    with open_file(path, limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # files in /proc have a size of 0
        raise UserError(f"{path}: larger than {limit} bytes")
    return content.decode()


def read_front_matter(path: Path) -> tuple[Any, str]:
    """The YAML between two lines of --- at the start of a text, {} if there is none, and the rest.

    Raises UserError as open_file does, ValueError or yaml.YAMLError for what cannot be read.
    """
    import yaml  # here, since few commands read one

    text = read_small_file(path).strip()
    if not text.startswith("---\n"):
        return {}, text
    head, _, rest = text.removeprefix("---\n").partition("\n---")
    return yaml.safe_load(head), rest.strip()


def read_json(path: Path, limit: int = 16 << 20) -> Any:
    """The value of a JSON file. Raises UserError as open_file does, ValueError as parse_json."""
    return parse_json(read_small_file(path, limit))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises ValueError if it is not JSON or not UTF-8, is nested too deeply, or has a number that is
    too long or a lone surrogate, which cannot be written again.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("has a lone surrogate, which is not a character") from None
    return value


def open_append(path: Path) -> IO[bytes]:
    """A regular file, open for appending; created if missing.

    Raises UserError for a symbolic link, a file with several names (hard links), a FIFO or a
    device.
    """
    return open(path, "a+b", opener=_open_without_links)


def _open_regular(path: str, flags: int) -> int:
    try:
        # Without O_NONBLOCK a FIFO waits for its other end.
        handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise UserError(f"{path}: not a regular file") from None
        raise
    mode = os.fstat(handle).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # Python itself refuses folders
        os.close(handle)
        raise UserError(f"{path}: not a regular file")
    return handle


def _open_without_links(path: str, flags: int) -> int:
    try:
        handle = _open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path}: {_LINK}") from None
        raise
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise UserError(f"{path}: a file with several names (hard links); copy it")
    return handle


def check_run_folder(run: Path) -> None:
    """Raise UserError if a run folder has a member that is neither a file nor a folder.

    Writing through a link would change files elsewhere; a FIFO would block. The path of the folder
    itself may be a link, since the user has made it, but must be UTF-8.
    """
    try:
        os.fspath(run).encode()
    except UnicodeEncodeError:  # safetensors and torch cannot open such files
        raise UserError(f"{run}: its name is not UTF-8; rename it") from None
    folders = [run] if run.is_dir() else []
    while folders:
        # Other processes may rename files meanwhile; scandir reads kinds together with names.
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as members:
            for member in members:
                if member.is_dir(follow_symlinks=False):
                    folders.append(Path(member.path))
                elif not member.is_file(follow_symlinks=False):
                    fault = _LINK if member.is_symlink() else "not a regular file; remove it"
                    raise UserError(f"{member.path}: {fault}")


_LINK = "a symbolic link, which is not written through; replace it with its target"


def sha256_of_files(paths: Iterable[Path], limit: int | None = None) -> str:
    """The SHA256 of the concatenated files; a gigabyte takes a second.

    Raises UserError as open_file does.
    """
    return _hash_files(paths, hashlib.sha256(), limit)


def md5_of_file(path: Path) -> str:
    """The MD5 of a file, as archives publish it: it detects damage, not attacks."""
    return _hash_files([path], hashlib.md5(usedforsecurity=False))


def _hash_files(paths: Iterable[Path], digest: Any, limit: int | None = None) -> str:
    for path in paths:
        with open_file(path, limit) as file:
            while block := file.read(CHUNK):
                digest.update(block)
    return digest.hexdigest()


def try_lock(file: IO[Any], start: int = 0, length: int = 0, inherited: bool = False) -> bool:
    """Lock an open file, or `length` bytes from `start`; False if another process holds the lock.

    The lock belongs to this process, works over NFS and ends with the process, even if it is
    killed. inherited: the lock belongs to the open file instead, so child processes that inherit
    the file keep it. Raises OSError on a file system without locks.
    """
    try:
        if inherited:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):  # the error depends on the system
        return False
    return True


def locked_by_another(file: IO[Any], inherited: bool = False) -> bool:
    """Whether another process holds the lock of an open file, which try_lock takes otherwise.

    Never on a file system without locks, so that one can work there.
    """
    try:
        return not try_lock(file, inherited=inherited)
    except OSError:
        return False


def unlock(file: IO[Any], start: int = 0, length: int = 0) -> None:
    """Release a lock of this process."""
    fcntl.lockf(file, fcntl.LOCK_UN, length, start)


@contextmanager
def lock_file(path: Path, refusal: str | None) -> Iterator[bool]:
    """Hold a lock file, which child processes may inherit; False on a file system without locks.

    If another process holds it, raises UserError(refusal), or with None waits. Raises UserError
    also as open_append does.
    """
    with open_append(path) as file:
        locked = True
        try:
            if refusal is None:
                fcntl.flock(file, fcntl.LOCK_EX)
            elif not try_lock(file, inherited=True):
                raise UserError(refusal)
        except OSError:
            locked = False
        yield locked


@contextmanager
def lock_run_folder(run: Path) -> Iterator[None]:
    """Lock a run folder for training. Creates it, and removes it if nothing was written into it.

    The loader's workers do not inherit the lock, so a killed run can be resumed immediately.
    Raises UserError if another process trains in the folder, and as check_run_folder does.
    """
    check_run_folder(run)
    with made_folder(run), _training_lock(run / LOCK):
        yield


@contextmanager
def _training_lock(path: Path) -> Iterator[None]:
    """Lock a run folder with a file that names the process; it is removed at the end."""
    while True:
        with open_append(path) as file:
            if locked_by_another(file):
                file.seek(0)
                holder = file.read(200).decode(errors="replace") or "another process"
                remedy = "wait until it ends, stop it, or choose another --run"
                raise UserError(f"{path.parent}: {holder} is training in it; {remedy}")
            if os.fstat(file.fileno()).st_nlink:  # otherwise its last holder just removed it
                holder = f"process {os.getpid()} on {socket.gethostname()}"
                try:
                    with writing(path):
                        file.truncate(0)
                        os.write(file.fileno(), holder.encode())
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return

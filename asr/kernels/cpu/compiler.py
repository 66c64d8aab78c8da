"""Compiles the C++ kernels once per machine and version, and loads them.

The library is stored in $LAYERNORM_LSTM_CACHE, else in ~/.cache/layernorm-asr, or, where that is
not writable or full, in a temporary folder owned by this user. Its name is a hash of the sources,
the flags and the processor's features, and it is renamed to it once it is on the disk as a whole.
Where several processes need it, one compiles under a file lock, which the system releases with the
process; the others wait.

$CXX names the compiler (c++). $LAYERNORM_LSTM_MARCH overrides the processor to compile for
(-march): x86-64-v3 is AVX2.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from asr.errors import UserError
from asr.io import lock_file, sync, user_cache

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
SHARED = ("-shared", "-fPIC", "-pthread")
TRIAL_LIMIT, TIME_LIMIT = 30.0, 600.0  # seconds; compiling takes 20 on two cores
ROOM = 4 << 20  # bytes that compiling needs in the folder of the library
# In a compiler's messages: other flags would fail, too.
HOPELESS = re.compile("No space left|quota exceeded|signal terminated|Killed|[Oo]ut of memory")


class BuildError(Exception):
    """The kernels could not be compiled or loaded; the message is one line with the reason."""


_loaded: list[ctypes.CDLL | str] = []  # the first load's library, or why there is none


def load() -> ctypes.CDLL:
    """The compiled kernels. Raises BuildError; a failure is final for the process."""
    if not _loaded:
        try:
            _loaded.append(ctypes.CDLL(str(_compiled())))
        except (BuildError, OSError, RuntimeError, UserError) as error:
            _loaded.append(_first_error(str(error)) or type(error).__name__)
    if isinstance(_loaded[0], str):
        raise BuildError(_loaded[0])
    return _loaded[0]


def obstacle() -> str | None:
    """Why the kernels cannot be compiled here; None where they can be, or already are.

    Whether the compiler works is not tried.
    """
    if _loaded:
        return _loaded[0] if isinstance(_loaded[0], str) else None
    try:
        if not _library_path().exists():
            _compiler()
    except (BuildError, OSError, RuntimeError) as error:
        return _first_error(str(error))
    return None


def _compiler() -> list[str]:
    """The compiler with its first arguments: CXX may be `ccache c++`. BuildError without one."""
    named = os.environ.get("CXX") or "c++"
    try:
        command = shlex.split(named)
    except ValueError:  # quotes that do not end
        command = [named]
    if shutil.which(command[0]) is None:
        raise BuildError(f"no C++ compiler ({command[0]}) on the PATH")
    return command


def _compiled() -> Path:
    target = _library_path()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(target.with_suffix(".lock"), refusal=None):
            if not target.exists():
                _compile(target)
    return target


def _compile(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        _check_compiler(folder)
        print(f"compiling the CPU kernels into {target.parent}, once", file=sys.stderr)
        try:
            built = _build(folder, [_march(), "-fopenmp"])
        except RuntimeError as error:  # some compilers support neither flag
            print(f"compiling again, for any processor: {error}", file=sys.stderr)
            built = _build(folder, [])
        sync(built)
        built.replace(target)


def _check_compiler(folder: Path) -> None:
    """Compile and load an empty library. BuildError where that fails, or takes TRIAL_LIMIT."""
    source, library = folder / "trial.cpp", folder / "trial.so"
    source.write_text("int trial;\n")
    try:
        _run([[*_compiler(), *SHARED, str(source), "-o", str(library)]], folder, TRIAL_LIMIT)
        ctypes.CDLL(str(library))
    except (OSError, RuntimeError) as error:
        raise BuildError(f"the C++ compiler does not work: {error}") from None


def _build(folder: Path, flags: Sequence[str]) -> Path:
    """The library, with these flags besides FLAGS.

    Raises RuntimeError where the compiler refuses, and BuildError where others would not help: it
    hangs, is killed, or the disk is full.
    """
    sources, library = sorted(SOURCES.glob("*.cpp")), folder / "kernels.so"
    objects = [str(folder / f"{path.stem}.o") for path in sources]
    compile_one = [*_compiler(), *FLAGS, *flags, "-fPIC", "-c"]
    commands = [
        [*compile_one, str(path), "-o", out] for path, out in zip(sources, objects, strict=True)
    ]
    _run(commands, folder, TIME_LIMIT)
    openmp = [flag for flag in flags if flag == "-fopenmp"]
    link = [*_compiler(), *SHARED, *openmp, *objects, "-o", str(library)]
    _run([link], folder, TIME_LIMIT)
    return library


def _run(commands: Sequence[Sequence[str]], folder: Path, limit: float) -> None:
    """Run compilers at the same time. Raises RuntimeError and BuildError as _build does."""
    end, started = time.monotonic() + limit, []
    try:
        for number, command in enumerate(commands):
            with (folder / f"messages{number}").open("wb") as messages:  # a pipe could fill up
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=messages,
                    stderr=messages,
                    env={**os.environ, "LC_ALL": "C"},
                    start_new_session=True,  # so that what it has started can be ended with it
                )
            started.append(process)
        for number, process in enumerate(started):
            if code := process.wait(max(0.0, end - time.monotonic())):
                text = (folder / f"messages{number}").read_text(errors="replace")
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                )
                reason = _first_error(text) or f"{process.args[0]} {how}"
                raise (BuildError if code < 0 or HOPELESS.search(text) else RuntimeError)(reason)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{commands[0][0]} has not ended after {limit:g} s") from None
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _first_error(messages: str) -> str:
    """The compiler's first error, else its first line."""
    lines = [line.strip()[:200] for line in messages.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), (lines or [""])[0])


def _march() -> str:
    return f"-march={os.environ.get('LAYERNORM_LSTM_MARCH') or 'native'}"


@functools.lru_cache(maxsize=1)
def _library_path() -> Path:
    """Where the library is, or is to be compiled. BuildError where both disks are full."""
    parts = [platform.machine(), _processor(), _march(), *FLAGS]
    parts += [path.read_text() for path in sorted(SOURCES.glob("*.[hc]*")) if path.suffix != ".py"]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folders = []
    for folder in (cache_folder, _temporary_folder):
        folders.append(folder())
        library = folders[-1] / f"layernorm_lstm_{key}.so"
        if library.exists() or _has_room(library.parent):
            return library
    raise BuildError(f"no room for the compiled kernels in {folders[0]} and {folders[1]}")


def _has_room(folder: Path) -> bool:
    """Whether the library can be compiled there; quotas show in writing alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def cache_folder() -> Path:
    """Where the kernels are stored. Raises OSError or RuntimeError where there is no such place."""
    if chosen := os.environ.get("LAYERNORM_LSTM_CACHE"):
        return Path(chosen)
    try:
        folder = user_cache()
        folder.parent.mkdir(exist_ok=True)
        if os.access(folder.parent, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return _temporary_folder()


def _temporary_folder() -> Path:
    return _own_folder(Path(tempfile.gettempdir()) / f"layernorm_asr_{os.getuid()}")


def _own_folder(folder: Path) -> Path:
    """Rejects a folder that another user made or can write: its library would run as this user."""
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise RuntimeError(f"{folder} is not ours alone; set LAYERNORM_LSTM_CACHE to another one")
    return folder


def _processor() -> str:
    """The processor's features, which -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))

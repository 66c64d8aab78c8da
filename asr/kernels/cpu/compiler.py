"""Compiles the C++ kernels once per machine and version, and loads them.

The library is stored in $LAYERNORM_LSTM_CACHE, else in ~/.cache/layernorm-asr, or, where that is
not writable, in a temporary folder owned by this user. Its name is a hash of the sources, the
flags, torch's version and the processor's features. Where several processes need it, one compiles
under a file lock, which the system releases with the process; the others wait.

$LAYERNORM_LSTM_MARCH overrides the processor to compile for (-march): x86-64-v3 is AVX2.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import torch

from asr.io import user_cache

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")


class BuildError(Exception):
    """The kernels could not be compiled or loaded; the message is one line with the reason."""


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The compiled kernels. Raises BuildError; a failure is final for the process."""
    if _failures:
        raise BuildError(_failures[0])
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, ImportError) as error:
        _failures.append(_reason(error))
        raise BuildError(_failures[0]) from error


_failures: list[str] = []


def obstacle() -> str | None:
    """Why the kernels cannot be compiled here; None where they can be, or already are."""
    if _failures:
        return _failures[0]
    try:
        if _library_path().exists():
            return None
    except (OSError, RuntimeError) as error:
        return _reason(error)
    tools = {os.environ.get("CXX", "c++"): "C++ compiler", "ninja": "ninja"}
    for tool, role in tools.items():
        if shutil.which(tool) is None:
            return f"no {role} ({tool}) on the PATH"
    return None


def _compiled() -> Path:
    target = _library_path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    if missing := obstacle():
        raise RuntimeError(missing)
    print(f"compiling the CPU kernels, once, into {target.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            built = _build(target.stem, folder, [_march(), "-fopenmp"])
        except RuntimeError as error:  # some compilers support neither flag
            print(f"compiling again, for any processor: {_reason(error)}", file=sys.stderr)
            built = _build(f"{target.stem}_any", folder, [])
        built.replace(target)  # a rename is atomic: no process loads half a library


def _build(name: str, folder: str, flags: list[str]) -> Path:
    from torch.utils import cpp_extension  # slow to import, rarely needed

    cpp_extension.load(
        name=name,
        sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=[*FLAGS, *flags],
        extra_ldflags=["-pthread", *(flag for flag in flags if flag == "-fopenmp")],
        build_directory=folder,
        is_python_module=False,
    )
    return Path(folder) / f"{name}.so"


def _march() -> str:
    return f"-march={os.environ.get('LAYERNORM_LSTM_MARCH') or 'native'}"


@functools.lru_cache(maxsize=1)
def _library_path() -> Path:
    parts = [torch.__version__, platform.machine(), _processor(), _march(), *FLAGS]
    parts += [path.read_text() for path in sorted(SOURCES.glob("*.[hc]*")) if path.suffix != ".py"]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"layernorm_lstm_{key}.so"


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


def _reason(error: Exception) -> str:
    """The compiler's first error, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines or [type(error).__name__])[0]

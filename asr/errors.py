"""Errors of users, and the exit codes of commands.

A user's mistake is one line on standard error and exit code 2, without a traceback. The other exit
codes: 0 success, 3 a signal stopped the training, which is saved, 130 Ctrl-C with nothing to save.
If the reader of standard output has ended (`| head`, a closed terminal), long commands drop their
output and continue. File names and texts may contain characters that control a terminal or reorder
text; they are printed as escapes.
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from asr.features import AudioError, StatisticsError

if sys.platform == "win32":  # Python has no fcntl there
    sys.exit("error: Windows is not supported: install in WSL, the Windows Subsystem for Linux")

EXIT_USER_ERROR = 2
EXIT_STOPPED = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells do
LONGEST = 2000  # characters of an error; one that quotes a file can have any length

# torch's message, from its loader or, after a signal, from any line of the trainer.
WORKER_EXITED = re.compile(r"DataLoader worker \(pid.*(killed|exited)")
KILLED = (
    "a data loader process was killed: the system has too little memory, or /dev/shm is full; "
    "lower data.workers and start again, a training with --resume"
)
# Module -> package, for the packages of the extra `asr` of setup.cfg.
ASR_PACKAGES = {
    "google": "protobuf",  # of tensorboard
    "jiwer": "jiwer",
    "matplotlib": "matplotlib",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic",
    "rich": "rich",
    "safetensors": "safetensors",
    "schedulefree": "schedulefree",
    "scipy": "scipy",
    "sentencepiece": "sentencepiece",
    "sklearn": "scikit-learn",
    "soundfile": "soundfile",
    "tensorboard": "tensorboard",
    "torchaudio": "torchaudio",
    "yaml": "PyYAML",
}
# torchaudio 2.11.1 needs torch 2.13, which its wheel does not declare.
TORCHAUDIO = (
    "the installed torchaudio cannot be loaded with the installed torch: "
    "pip install torchaudio==2.11.0 (a CPU-only torch needs the torchaudio of its package index)"
)
# The messages of CUDA and of the CPU's allocator.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")

# Control characters except tab (9) and line feed (10), and the embeddings, overrides and isolates
# of Unicode's bidirectional algorithm; its marks are part of ordinary text.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
_CONTROL |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


class UserError(Exception):
    """Ends a command with its message and exit code 2, without a traceback."""


def check_list(name: str, values: object) -> None:
    """Raise UserError for one text or path instead of a list of them."""
    if isinstance(values, str | os.PathLike):
        text = os.fspath(values)
        raise UserError(f"{name} = {text!r}: must be a list, [{text!r}]")


class WorkerKilled(UserError):
    """A data loader's worker was killed: the model is intact, the next batches are lost."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the path to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            error.filename = str(path)
        raise


def print_line(text: str) -> None:
    """Print one line and flush it; if the reader is gone, discard all further output."""
    try:
        print(text, flush=True)
    except OSError:
        discard_stdout()


def discard_stdout() -> None:
    """Redirect standard output to the null device."""
    try:
        with Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
    except (OSError, ValueError):  # in a notebook it has no file descriptor
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (to the end of the process)


def printable(text: str) -> str:
    """The text with control characters except tab and line break as escapes: \\x1b, \\u202e."""
    return text.translate(_CONTROL)


def one_line(message: str) -> str:
    """The message without line breaks, its middle omitted beyond LONGEST characters."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


class _PrintableStream(TextIOWrapper):
    """Writes to the file of another stream, with control characters as escapes."""

    def __init__(self, stream: TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",  # for characters that the locale lacks and surrogates
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self.unescaped = stream

    def write(self, text: str) -> int:
        """Write the text; -> its length."""
        super().write(printable(text))
        return len(text)


def terminal(stream: TextIO | None = None) -> TextIO:
    """The stream (standard output) without escapes, for a progress bar that moves the cursor."""
    stream = stream or sys.stdout
    return getattr(stream, "unescaped", stream)


@contextmanager
def _printable_streams() -> Iterator[None]:
    """Let sys.stdout and sys.stderr escape control characters."""
    before = sys.stdout, sys.stderr
    streams = [s if not isinstance(s, TextIOWrapper) else _PrintableStream(s) for s in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            if isinstance(stream, _PrintableStream):
                with suppress(OSError, ValueError):  # its reader is gone, or it is closed
                    stream.flush()
                    stream.detach()


def is_started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's main and exit with what it returns, 0 for None."""
    try:
        os.environ["MPLBACKEND"] = "agg"  # no command opens a window; another value may not exist
        with _printable_streams():
            code = _exit_code(main)
            if is_started_by_torchrun():
                # Immediately, since connections between ranks may abort when Python exits.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    except KeyboardInterrupt:  # before main or after it
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _exit_code(main: Callable[[], int | None]) -> int:
    try:
        return main() or 0
    except BrokenPipeError:  # `| head` has ended
        discard_stdout()
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print the error in one line; -> the exit code. Raises it again if it is our bug."""
    cause: BaseException = error
    while (cause := cause.__context__) is not None:
        if isinstance(cause, KeyboardInterrupt):  # the clean-up after it failed
            return EXIT_INTERRUPTED
    message = _user_message(error)
    if message is None:
        raise error
    with suppress(OSError):  # standard error is closed
        print(f"error: {one_line(message)}", file=sys.stderr)
    return EXIT_USER_ERROR


def _user_message(error: Exception) -> str | None:
    """One line for an error that a user can act on; None for our bugs."""
    if isinstance(error, UserError | AudioError | StatisticsError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return missing_asr_package(error)
    cause = error.__context__
    if isinstance(error, RuntimeError) and getattr(cause, "errno", None) == errno.ELOOP:
        error = cause  # Path.resolve with a link loop, up to Python 3.12
    if isinstance(error, OSError):
        if "libtorchaudio" in str(error):
            return TORCHAUDIO
        name = error.filename or "the system"
        if isinstance(name, bytes):
            name = os.fsdecode(name)
        return f"{name}: {error.strerror or error}"
    if is_killed(error):
        return KILLED
    if isinstance(error, RuntimeError) and "no kernel image" in str(error):
        return (
            "this build of torch has no kernels for this GPU: install a build that has (for V100 "
            "and older one for CUDA 12), or hide the GPU with CUDA_VISIBLE_DEVICES=''"
        )
    if is_out_of_memory(error):
        reason = str(error).split(". ")[0][:200] or type(error).__name__
        return (
            "out of memory: make the model or its input smaller (decode.batch_seconds where speech "
            f"is validated or decoded): {reason}"
        )
    return None


def missing_asr_package(error: ModuleNotFoundError) -> str | None:
    """As missing_package, where the module is of the extra `asr`."""
    package = ASR_PACKAGES.get((error.name or "").partition(".")[0])
    return package and missing_package(package, "asr")


def missing_package(package: str, extra: str) -> str:
    """One line: a package is not installed, and the extra of setup.cfg that installs it.

    layernorm-asr is on no package index, so the remedy does not name it.
    """
    remedy = f"pip install {package}, or in the checkout pip install '.[{extra}]'"
    return f"the package {package} is not installed: {remedy}"


def is_killed(error: Exception) -> bool:
    """Whether torch reports that a data loader's worker was killed."""
    return isinstance(error, RuntimeError) and bool(WORKER_EXITED.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the exception reports a lack of memory, of the CPU or of a GPU."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)

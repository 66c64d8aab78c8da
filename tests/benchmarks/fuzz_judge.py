"""Run one case of the fuzz test, a command in a process of its own, and find its faults.

A command is forked from a process that has imported everything (forked_commands.py), with the
case's folder as HOME, TMPDIR and current folder, and its output goes through pipes. It is faulty if

- it ends in a traceback or a warning, or with a code other than 0 (success), 2 (refused), 3
  (stopped by a signal) and 130 (Ctrl-C), or with 2 and not exactly one line `error: ...`;
- it takes more than 10 seconds of the processor, a minute of time, or 2 GB of memory, or leaves a
  process behind;
- it prints a control character;
- it changes, adds or removes anything outside the parts of the case's folder that it may write to,
  also through links: kind, size, time and content of all other files are compared;
- it leaves a hidden file there, which is half-written output;
- it does not print, or write, what the case expects in spite of the bad input.
"""

import gc
import hashlib
import os
import re
import resource
import selectors
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from asr import errors
from asr.io import user_cache

# Compiled kernels and lists of fonts, which take a minute: once for all cases.
KERNELS = os.environ.get("LAYERNORM_LSTM_CACHE", str(user_cache()))
FONTS = str(Path.home() / ".cache" / "matplotlib")
CPU, CLOCK, MEMORY = 10, 60.0, 2 << 30  # seconds, seconds, bytes
SPACE = 6 << 30  # bytes of address space: imports take more than half of it
# Folders in TMPDIR: torch's, made as it is imported, and compiled kernels, without a home.
CACHES = ("torchinductor_", "layernorm_asr_")
PATIENCE = 2.0  # seconds in which the processes that a command has started must end
MOST_OUTPUT = 8 << 20  # bytes
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
WARNING = re.compile(r"^\S+:\d+: \w*Warning: |Exception ignored|terminate called|\[W\d+", re.M)
# Of torch, where a recipe asks for more workers than there are processors: a fair remark.
WORKERS = re.compile(r"^\S+: UserWarning: This DataLoader will create .*\n.*\n", re.M)
# Of the OpenMP library, as it is loaded with an invalid OMP_NUM_THREADS: before any code of ours.
OPENMP = re.compile(r"^\n?libgomp: Invalid value for environment variable .*\n", re.M)


@dataclass
class Case:
    """A command, what it may write, and what is expected of it."""

    module: ModuleType
    arguments: list[str]
    may_write: tuple[str, ...] = ()  # names in the case's folder
    expected: tuple[tuple[str, str], ...] = ()  # a file, or stdout, and a text that it must have
    before: list[Callable[[], object]] = field(default_factory=list)  # called in the process
    environment: dict[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (0, 2)
    many_lines: bool = False  # of errors: one for each faulty row or file
    needs_line: bool = True  # with exit code 2
    may_need_memory: bool = False  # an honest recipe may ask for a large model
    may_leave: bool = False  # a killed process cannot remove its hidden files
    cpu: float = CPU
    new_interpreter: bool = False  # python -m: for variables that Python itself reads at its start
    again: "Case | None" = None  # must succeed after a command that failed


@dataclass
class Result:
    """What a command did; code None: it did not end in time."""

    code: int | None
    out: str
    err: str
    cpu: float
    clock: float
    memory: int
    left_processes: bool


def run(case: Case, folder: Path) -> Result:
    """Run the case's command in the folder, to its end or its limit."""
    out, err = os.pipe(), os.pipe()
    gc.freeze()  # else the garbage collector of each process copies all imported objects
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _become(case, folder, out[1], err[1])
    os.close(out[1]), os.close(err[1])
    with suppress(OSError):
        os.setpgid(pid, pid)  # whichever process is first
    texts, ended = _read_until_end(pid, out[0], err[0], began + CLOCK)
    if not ended:
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return Result(
        os.waitstatus_to_exitcode(status) if ended else None,
        *(bytes(text).decode("utf-8", "backslashreplace") for text in texts),
        usage.ru_utime + usage.ru_stime,
        time.monotonic() - began,
        usage.ru_maxrss << 10,
        _kill_rest(pid),
    )


def _read_until_end(
    pid: int, out: int, err: int, end: float
) -> tuple[tuple[bytearray, bytearray], bool]:
    texts = {out: bytearray(), err: bytearray()}
    process = os.pidfd_open(pid)
    with selectors.DefaultSelector() as waiting:
        for handle in (process, out, err):
            waiting.register(handle, selectors.EVENT_READ)
        ended = False
        while not ended and time.monotonic() < end:
            ready = {key.fd for key, _ in waiting.select(end - time.monotonic())}
            ended = process in ready
            for handle in texts if ended else ready & texts.keys():
                os.set_blocking(handle, False)
                with suppress(BlockingIOError, KeyError):  # no more now; it has ended already
                    while block := os.read(handle, 1 << 16):
                        texts[handle] += block[: MOST_OUTPUT - len(texts[handle])]
                    waiting.unregister(handle)
    for handle in (process, out, err):
        os.close(handle)
    return (texts[out], texts[err]), ended


def _kill_rest(group: int) -> bool:
    """Whether processes of the group still run PATIENCE seconds after its first has ended."""
    end = time.monotonic() + PATIENCE
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.01)
        os.killpg(group, signal.SIGKILL)
        return True
    return False


def _become(case: Case, folder: Path, out: int, err: int) -> None:
    """In the new process: the command. Does not return."""
    code = 70  # no command of this project exits with it
    try:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        for handle, number in ((null, 0), (out, 1), (err, 2)):
            os.dup2(handle, number)
        os.closerange(3, 64)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cpu = int(case.cpu)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder / "work")
        own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        own |= {"LAYERNORM_LSTM_CACHE": KERNELS, "MPLCONFIGDIR": FONTS}
        environment = {"PATH": os.environ["PATH"], "MPLBACKEND": "Agg"} | own | case.environment
        if case.new_interpreter:
            line = [sys.executable, "-m", case.module.__name__, *case.arguments]
            os.execve(sys.executable, line, environment | {"PYTHONPATH": _root()})
        resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8") for n in (1, 2))  # noqa: PTH123, SIM115
        sys.argv = [case.module.__name__, *case.arguments]
        for prepare in case.before:
            prepare()
        errors.run_command(case.module.main)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.setprofile(None)
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _root() -> str:
    return str(Path(errors.__file__).parent.parent)


def fault_of(case: Case, folder: Path, watched: tuple[Path, ...]) -> tuple[str | None, Result]:
    """Run a case -> the first fault found, if any, and what the command did."""
    before = dict(_contents((folder, *watched), folder, case.may_write))
    hidden = _hidden(case, folder)
    result = run(case, folder)
    after = dict(_contents((folder, *watched), folder, case.may_write))
    hidden = _hidden(case, folder) - hidden
    changed = [p for p in before.keys() | after.keys() if before.get(p) != after.get(p)]
    checks = (_time_fault, _end_fault, _text_fault)
    fault = next((f for check in checks if (f := check(case, result))), None)
    if not fault and changed:
        fault = f"changed {', '.join(map(str, sorted(changed)[:4]))}"
    if not fault and hidden and not case.may_leave:
        fault = f"leaves {', '.join(map(str, sorted(hidden)[:4]))}"
    fault = fault or _missing(case, folder, result)
    if not fault and case.again and result.code != 0:
        fault, second = fault_of(case.again, folder, watched)
        if not fault and second.code:
            fault = f"the next command fails: {second.err}"
        fault = fault and f"afterwards: {fault}"
    return fault, result


def _time_fault(case: Case, result: Result) -> str | None:
    if result.code is None:
        return f"runs for more than {CLOCK:g} s"
    if result.code == -signal.SIGXCPU or result.cpu > case.cpu:
        return f"takes more than {case.cpu:g} s of the processor"
    if result.memory > MEMORY:
        return f"takes {result.memory >> 20} MB of memory"
    if "out of memory" in result.err and not case.may_need_memory:
        return "is refused for want of memory"
    return "leaves processes behind" if result.left_processes else None


def _end_fault(case: Case, result: Result) -> str | None:
    lines = OPENMP.sub("", result.err).splitlines()
    if "Traceback (most recent" in result.out + result.err:
        return "traceback"
    if result.code not in case.codes:
        return f"exit code {result.code}"
    if result.code == 2 and case.needs_line:
        if not (lines and lines[-1].startswith("error: ")):
            return "no error line"
        if len(lines) != 1 and not case.many_lines:
            return f"{len(lines)} lines of error"
        if max(map(len, lines)) > 4000:
            return "a line of error of more than 4000 characters"
    return "a warning" if WARNING.search(WORKERS.sub("", result.err)) else None


def _text_fault(case: Case, result: Result) -> str | None:
    if found := CONTROL.search(result.out + result.err):
        return f"prints the control character {found[0]!r}"
    return "endless output" if len(result.out + result.err) >= MOST_OUTPUT else None


def _missing(case: Case, folder: Path, result: Result) -> str | None:
    """Which expected text is neither printed nor written."""
    for name, text in case.expected:
        path = folder / name
        content = path.read_text(errors="replace") if path.is_file() else ""
        if text not in (result.out if name == "stdout" else content):
            return f"{name} lacks {text!r}"
    return None


def _hidden(case: Case, folder: Path) -> set[Path]:
    """Hidden files where the command may write: what is half written."""
    found = {path for name in case.may_write for path in (folder / name).rglob(".*")}
    return {path for path in found if path.name != ".launch"}


def _contents(
    tops: tuple[Path, ...], folder: Path, may_write: tuple[str, ...]
) -> Iterator[tuple[Path, tuple]]:
    """Kind, size, time and content of everything that a command may not change."""
    waiting = [*tops]
    while waiting:
        path = waiting.pop()
        try:
            about = path.lstat()
        except FileNotFoundError:
            continue
        if (path.parent == folder and path.name in may_write) or path.name.startswith(CACHES):
            continue
        if stat.S_ISDIR(about.st_mode):
            yield path, (stat.S_IFMT(about.st_mode),)
            waiting += path.iterdir()
        elif ".index" not in path.name or "victim" in path.parts:  # beside a manifest, or the cache
            yield path, (about.st_mode, about.st_size, about.st_mtime_ns, _digest(path, about))


def _digest(path: Path, about: os.stat_result) -> str:
    if stat.S_ISLNK(about.st_mode):
        return str(path.readlink())
    small = stat.S_ISREG(about.st_mode) and about.st_size < 1 << 20
    return hashlib.sha256(path.read_bytes()).hexdigest() if small else ""

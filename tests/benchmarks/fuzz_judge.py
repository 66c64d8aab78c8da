"""Run one case of the fuzz test, a command in a process of its own, and find its faults.

A command is forked from a process that has imported everything (forked_commands.py), with the
case's folder as HOME, TMPDIR and current folder. It is faulty if

- it ends in a traceback or a warning, or with a code other than 0 (success), 2 (refused), 3
  (stopped by a signal) and 130 (Ctrl-C), or with 2 and not exactly one line `error: ...`;
- it takes more than 10 seconds of the processor or a minute of time, runs out of memory, writes a
  file of more than 64 MB, or leaves a process behind;
- it prints a control character;
- it changes, adds or removes anything outside the parts of the case's folder that it may write to,
  also through links: kind, size, time and content of all other files are compared;
- it leaves a hidden file there, which is half-written output;
- it does not print, or write, what the case expects in spite of the bad input.
"""

import hashlib
import os
import re
import resource
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

from forked_commands import fork

from asr.io import user_cache

# Compiled kernels and lists of fonts, which take a minute: once for all cases.
CACHES = {
    "LAYERNORM_LSTM_CACHE": os.environ.get("LAYERNORM_LSTM_CACHE", str(user_cache())),
    "MPLCONFIGDIR": str(Path.home() / ".cache" / "matplotlib"),
}
CPU, CLOCK = 10, 60.0  # seconds
SPACE = 6 << 30  # bytes of address space: imports take more than half of it
LARGEST = 64 << 20  # bytes of a file
# Folders in TMPDIR: torch's, made as it is imported, and compiled kernels, without a home.
TEMPORARY = ("torchinductor_", "layernorm_asr_")
PATIENCE = 2.0  # seconds in which the processes that a command has started must end
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
WARNING = re.compile(r"^\S+:\d+: \w*Warning: |Exception ignored|terminate called|\[W\d+", re.M)
# Of torch, where a recipe asks for more workers than there are processors: a fair remark.
WORKERS = re.compile(r"^\S+: UserWarning: This DataLoader will create .*\n.*\n", re.M)


@dataclass
class Case:
    """A command, what it may write, and what is expected of it."""

    module: ModuleType
    arguments: list[str]
    may_write: tuple[str, ...] = ()  # names in the case's folder
    expected: tuple[tuple[str, str], ...] = ()  # a file, or stdout, and a text that it must have
    before: list[Callable[[], object]] = field(default_factory=list)  # called in the process
    codes: tuple[int, ...] = (0, 2)
    many_lines: bool = False  # of errors: one for each faulty row or file
    needs_line: bool = True  # with exit code 2
    may_need_memory: bool = False  # an honest recipe may ask for a large model
    may_leave: bool = False  # a killed process cannot remove its hidden files
    cpu: float = CPU
    again: "Case | None" = None  # must succeed after a command that failed


@dataclass
class Result:
    """What a command did; code None: it did not end in time."""

    code: int | None
    out: str
    err: str
    left_processes: bool


def run(case: Case, folder: Path) -> Result:
    """Run the case's command in the folder, to its end or its limit."""

    def main() -> object:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder / "work")
        own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        os.environ.clear()
        os.environ.update({"PATH": os.defpath, "MPLBACKEND": "Agg"} | own | CACHES)
        tempfile.tempdir = None
        for prepare in case.before:
            prepare()
        return case.module.main()

    texts = [folder / "stdout", folder / "stderr"]
    for path in texts:
        path.write_text("")
    limits = {resource.RLIMIT_CPU: int(case.cpu), resource.RLIMIT_CORE: 0}
    limits |= {resource.RLIMIT_AS: SPACE, resource.RLIMIT_FSIZE: LARGEST}
    command = SimpleNamespace(main=main, __name__=case.module.__name__)
    process = fork(command, case.arguments, *texts, limits)
    code = process.wait(CLOCK)
    if code is None:
        process.kill()
    out, err = (path.read_text("utf-8", "backslashreplace") for path in texts)
    return Result(code, out, err, _kill_rest(process.pid))


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


def fault_of(case: Case, folder: Path, watched: tuple[Path, ...]) -> tuple[str | None, Result]:
    """Run a case -> the first fault found, if any, and what the command did."""
    kept = (*case.may_write, "stdout", "stderr")
    before = dict(_contents((folder, *watched), folder, kept))
    hidden = _hidden(case, folder)
    result = run(case, folder)
    after = dict(_contents((folder, *watched), folder, kept))
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
    if result.code == -signal.SIGKILL:
        return f"takes more than {case.cpu:g} s of the processor"
    if "out of memory" in result.err and not case.may_need_memory:
        return "is refused for want of memory"
    return "leaves processes behind" if result.left_processes else None


def _end_fault(case: Case, result: Result) -> str | None:
    lines = result.err.splitlines()
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
    return "endless output" if len(result.out) >= LARGEST else None


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
        if (path.parent == folder and path.name in may_write) or path.name.startswith(TEMPORARY):
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

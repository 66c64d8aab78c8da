"""Commands of ours as processes of their own, forked from one that has imported everything.

Whoever forks must not compute with torch before: its threads do not live on in the child.
"""

import gc
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch._dynamo  # noqa: F401 (Adam imports it, for seconds: not in every process)

from asr import command


@dataclass
class Process:
    """A child of this process."""

    pid: int

    def wait(self, seconds: float) -> int | None:
        """Its exit code, negative for a signal, or None where it still runs after that time."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= end:
                return None
            time.sleep(0.0002)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def fork(
    module: ModuleType,
    arguments: list[str],
    out: Path,
    err: Path | None = None,
    limits: dict[int, int] | None = None,
) -> Process:
    """`python -m MODULE ARGUMENTS`; what it says is added to the files, stderr to `out` by default.

    limits: resource.RLIMIT_... -> value.
    """
    with out.open("a") as said, (err or out).open("a") as complained:
        gc.freeze()  # or each child's collector reads, and so copies, all that was imported
        pid = os.fork()
        if pid:
            return Process(pid)
        code = 70  # no command of ours ends with it
        os.setpgid(0, 0)  # with its workers a group of its own, as a shell makes one
        try:
            for kind, value in (limits or {}).items():
                resource.setrlimit(kind, (value, value))
            os.dup2(said.fileno(), 1)
            os.dup2(complained.fileno(), 2)
            sys.argv = [module.__name__, *arguments]
            command.run(module.main)
        except SystemExit as error:
            code = error.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

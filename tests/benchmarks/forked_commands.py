"""Run commands in processes forked from one that has imported everything.

The parent must not compute with torch before the fork: its threads do not exist in the child.
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

import torch._dynamo  # noqa: F401 (Adam imports it, which takes seconds: not in every process)

# Commands import these while they run, for seconds: not in every process.
import asr.images.task
import asr.inference.bulk
import asr.inference.evaluation
import asr.models.las
import asr.models.transformer
import asr.tasks.language
import asr.tasks.speech
import asr.training.debug
import asr.training.inspection
import asr.training.trainer  # noqa: F401
from asr import errors


@dataclass
class Process:
    """A child of this process."""

    pid: int

    def wait(self, seconds: float) -> int | None:
        """Its exit code, negative for a signal, or None if it still runs after that time."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= end:
                return None
            time.sleep(0.001)

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
    """`python -m MODULE ARGUMENTS`; output is appended to the files, stderr to `out` by default.

    limits: resource.RLIMIT_... -> value.
    """
    with out.open("a") as out_file, (err or out).open("a") as err_file:
        gc.freeze()  # otherwise each child's garbage collector copies all imported objects
        pid = os.fork()
        if pid:
            return Process(pid)
        code = 70  # no command of this project exits with it
        os.setpgid(0, 0)  # a process group with its workers, as in a shell
        try:
            for kind, value in (limits or {}).items():
                resource.setrlimit(kind, (value, value))
            os.dup2(out_file.fileno(), 1)
            os.dup2(err_file.fileno(), 2)
            sys.argv = [module.__name__, *arguments]
            errors.run_command(module.main)
        except SystemExit as error:
            code = error.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

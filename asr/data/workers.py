"""The processes that read batches ahead of the model, and what is said where one is killed."""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from asr.errors import UserError

# How torch says it, from its loader or, by a signal, from wherever the trainer is.
GONE = re.compile(r"DataLoader worker \(pid.*(killed|exited)")
KILLED = (
    "a process that reads data was killed, as the system does where memory is short; lower "
    "data.workers and start again, a training with --resume"
)


class WorkerKilled(UserError):
    """The model is sound; what was to be read next is lost."""


def read(loader: DataLoader) -> Iterator[Any]:
    """The batches, whose reading begins at once. Raises WorkerKilled where a process is gone."""
    batches = iter(loader)
    return _guarded(batches) if loader.num_workers else batches


def _guarded(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and not is_killed(error):
            raise
        raise WorkerKilled(KILLED) from None


def is_killed(error: Exception) -> bool:
    """Whether torch says that the system has ended a worker."""
    return bool(GONE.search(str(error)))


def start_worker(worker: int) -> None:
    """One thread: more threads than cores made a step twenty times slower. No Ctrl-C, no SIGHUP.

    A signal to the whole group of processes is the trainer's to answer, which still needs a batch
    for the step it is in. Ended by SIGTERM, a worker leaves without the noise of a crash.
    """
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

"""Stop a run on SIGTERM (a cluster, `kill`), SIGINT (Ctrl-C) or SIGHUP (a closed terminal).

The first signal lets the current step finish, the second ends the process at once. SIGHUP counts
only once, since both shell and system send it, and not at all under nohup. Under torchrun SIGTERM
counts only once, since a cluster sends it to all processes, and torchrun to its workers again.
Worker processes of the loader handle signals themselves (asr/data/loader.py).
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from torch.nn.modules.module import register_module_forward_pre_hook

from asr.errors import WorkerKilled, is_started_by_torchrun
from asr.training.distributed import gather

Result = TypeVar("Result")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """Raised within Stop.interruptible after a signal."""


class Stop:
    """As a context it handles the signals; `signal` is then the name of the first one received.

    Outside of the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._handlers: dict[signal.Signals, Any] = {}  # those before

    def __enter__(self) -> "Stop":
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
        with suppress(ValueError):  # not the main thread
            self._handlers = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """For work that changes nothing: after a signal its next call of a module raises Stopped.

        The handler itself raises nothing. It runs between any two lines: in a fork's hooks and in
        __del__ its exception would be lost, and elsewhere it could leave a queue half changed.
        """
        self._check()
        try:
            with register_module_forward_pre_hook(self._check):
                yield
        except (RuntimeError, WorkerKilled):
            self._check()  # a signal ends the loader's processes, too
            raise

    def _check(self, *call: object) -> None:
        if self.signal:
            raise Stopped

    def interruptible_on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """The result of such work; raises Stopped on all ranks if a signal interrupts it on one.

        The work itself must not communicate with other ranks.
        """
        results = []
        with suppress(Stopped), self.interruptible():
            results.append(work())
        if not all(gather(bool(results))):
            raise Stopped
        return results[0]

    def requested_on_any_rank(self) -> bool:
        """Whether a rank received a signal; then `signal` is its name on all ranks."""
        names = [name for name in gather(self.signal) if name]
        self.signal = self.signal or next(iter(names), None)
        return bool(names)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The system itself handles the second one: Python would first finish a backward pass.
        once = {signal.SIGHUP}
        if is_started_by_torchrun():
            once.add(signal.SIGTERM)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN if each in once else signal.SIG_DFL)
        self.signal = signal.Signals(number).name

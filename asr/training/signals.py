"""Ending a run when somebody asks for it: SIGTERM (a cluster, `kill`), SIGINT (Ctrl-C) or SIGHUP.

The first signal lets the step that is under way finish, the second ends the process at once. Only
SIGHUP, of a terminal that is closed, is heard once, for shell and system both send it; and not at
all under nohup. A child process inherits no wish: the loader's workers see to themselves
(asr/data/workers.py).
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, TypeVar

from asr.training.distributed import gather

Result = TypeVar("Result")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """Raised in the middle of what may be broken off: see Stop.broken_off."""


class Stop:
    """Used as a context, it takes the signals; `asked` is the name of the one that came.

    In a thread that is not the main one Python delivers no signals, so there it does nothing.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._may_raise = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
        try:
            self._before = {number: signal.signal(number, self._take) for number in heard}
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def broken_off(self) -> Iterator[None]:
        """For what changes nothing and may take minutes, such as validation: Stopped ends it."""
        if self.asked:
            raise Stopped
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def broken_off_by_any(self, work: Callable[[], Result]) -> Result:
        """What such work gives; Stopped, on all ranks, where a signal broke it off on one.

        The work itself must call nothing that waits for the other ranks.
        """
        done = []
        with suppress(Stopped), self.broken_off():
            done.append(work())
        if not all(gather(bool(done))):
            raise Stopped
        return done[0]

    def asked_any(self) -> bool:
        """Whether a signal asked one of the ranks to stop; then `asked` is its name on all."""
        names = [name for name in gather(self.asked) if name]
        self.asked = self.asked or next(iter(names), None)
        return bool(names)

    def _take(self, number: int, frame: FrameType | None) -> None:
        # Left to the system, the second one waits for no Python: a backward pass may take a minute.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        self.asked = signal.Signals(number).name
        if self._may_raise:
            self._may_raise = False
            raise Stopped

"""What a run says while it trains: on the console, in train.log and in TensorBoard."""

import errno
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from asr import console
from asr.errors import UserError
from asr.training.checkpoint import NotSaved
from asr.training.given import Step
from asr.training.objective import Sum, add, means
from asr.training.position import Position

FULL = (errno.ENOSPC, errno.EDQUOT)


class Log:
    """One run's log. Use it as a context, so that the files are closed whatever happens.

    On a terminal a progress bar, elsewhere one line every `every` steps. The console is a copy of
    train.log for whoever watches: a run goes on where that breaks off. Leaving the context raises
    UserError where a full disk is why.
    """

    def __init__(self, run: Path, every: int, total_steps: int, step: int = 0) -> None:
        self.run = run
        self.every = every
        self.total = total_steps
        self.lines = _line_logger(run / "train.log")
        # What a killed run wrote behind its last checkpoint would overlap: purge it.
        self.board = SummaryWriter(str(run), purge_step=step + 1)
        self.progress = _progress() if sys.stdout and sys.stdout.isatty() else None
        self.task = (
            self.progress.add_task("", total=total_steps, completed=step) if self.progress else None
        )
        self._clear()

    def __enter__(self) -> "Log":
        self.before = threading.excepthook
        threading.excepthook = self._in_thread
        with self._console():
            if self.progress:
                self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._console():
            if self.progress:
                self.progress.stop()
        try:
            if isinstance(error, Exception):
                self.lines.info(f"ended: {str(error).partition(chr(10))[0]}")
            self.board.close()
            for handler in list(self.lines.handlers):
                handler.close()
                self.lines.removeHandler(handler)
        except OSError as broken:
            error = error or broken
        threading.excepthook = self.before
        why = str(error) if isinstance(error, NotSaved) else None
        if isinstance(error, OSError) and error.errno in FULL:
            why = f"{self.run}: its log cannot be written ({error.strerror})"
        if why:
            raise UserError(
                f"{why}; the last checkpoint is whole: make room, then go on with --resume"
            ) from None

    def note(self, *texts: str) -> None:
        """Lines on the console and in train.log."""
        for text in texts:
            self.lines.info(text)
            with self._console():
                if self.progress:
                    self.progress.console.print(text, markup=False, highlight=False)
                else:
                    print(text, flush=True)

    def step(self, position: Position, step: Step, last: bool = False) -> None:
        """Count a step in; every so many, and behind the last one, say how it goes."""
        self.steps += 1
        self.audio += step.seconds
        if step.finite:  # one that is not was not used, and would make the whole mean NaN
            add(self.sums, step.sums)
            self.norm = max(self.norm, step.norm)
        # The total is a plan, as if all epochs had as many steps as the first.
        self.total = position.step if last else max(self.total, position.step)
        if position.step % self.every == 0 or last:
            self._report(position, step)
            self._clear()

    def flush(self) -> None:
        """Everything said so far goes to the disk."""
        self.board.flush()

    def pause(self, seconds: float) -> None:
        """Leave time that went into validation out of the throughput."""
        self.since += seconds

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Curves `group/name`, one point each."""
        for name, value in values.items():
            self.board.add_scalar(f"{group}/{name}", value, step)

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        """pixels (height, width, 3) uint8."""
        self.board.add_image(name, pixels, step, dataformats="HWC")

    def text(self, name: str, text: str, step: int) -> None:
        """Markdown."""
        self.board.add_text(name, text, step)

    def recipe(self, yaml: str, flat: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """The resolved recipe as text, and as hparams beside the run's final figures."""
        self.board.add_text("recipe", f"```yaml\n{yaml}```", 0)
        plain = {
            k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in flat.items()
        }
        # A group of their own, which TensorBoard sorts behind the curves: no point on any curve.
        final = {name.replace("/", "_final/"): value for name, value in metrics.items()}
        self.board.add_hparams(plain, final, run_name=".", global_step=0)

    def _in_thread(self, failed: threading.ExceptHookArgs) -> None:
        """TensorBoard's own thread failed: its next write says so where the run can be ended."""
        if not isinstance(failed.exc_value, OSError):
            self.before(failed)

    def _report(self, position: Position, step: Step) -> None:
        now = means(self.sums)
        passed = max(time.perf_counter() - self.since, 1e-9)
        rate = self.audio / passed
        self.scalars("train", now, position.step)
        health = {"learning_rate": step.lr, "gradient_norm": self.norm, "audio_per_second": rate}
        passed_so_far = {
            "epoch": position.epoch,
            "audio_hours": position.audio_seconds / 3600,
            "train_seconds": position.train_seconds,
        }
        self.scalars("run", health | passed_so_far, position.step)
        loss = "  ".join(f"{name} {value:.4f}" for name, value in now.items()) or "no step used"
        place = f"step {position.step}/{self.total}  epoch {position.epoch}"
        speed = f"{rate:.0f}x real time" if rate else f"{self.steps / passed:.1f} steps/s"
        line = f"{place}  {loss}  {speed}"
        self.lines.info(line)
        with self._console():
            if self.progress:
                places = {"completed": position.step, "total": self.total}
                self.progress.update(self.task, description=f"{loss}  {speed}", **places)
            else:
                left = (self.total - position.step) * passed / self.steps
                print(f"{line}  {left / 60:.1f} min left", flush=True)

    @contextmanager
    def _console(self) -> Iterator[None]:
        """For what is written there, which may be gone."""
        try:
            yield
        except OSError as error:
            console.silence()
            self.lines.info(f"the console is gone ({error.strerror}); the run goes on")

    def _clear(self) -> None:
        self.sums: dict[str, Sum] = {}
        self.steps = 0
        self.audio = 0.0
        self.norm = 0.0
        self.since = time.perf_counter()


class Silence:
    """The log of every rank but the first, which speaks for all."""

    def __enter__(self) -> "Silence":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def _progress() -> Progress:
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.description}"), transient=True)


class _Lines(logging.FileHandler):
    """A line that cannot be written ends the run; logging would print a traceback and go on."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where writing has just failed."""
        error = sys.exc_info()[1]
        if error:
            raise error


def _line_logger(path: Path) -> logging.Logger:
    logger = logging.getLogger(f"asr.run.{path.parent.resolve()}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = _Lines(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    return logger

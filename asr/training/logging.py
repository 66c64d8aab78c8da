"""The log of a run: console, train.log and TensorBoard."""

import errno
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from asr.errors import UserError, discard_stdout
from asr.training.checkpoint import NotSaved
from asr.training.losses import Sum, add, means
from asr.training.trainer import Step, TrainState

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Log:
    """The log of a run, used as a context, which closes its files.

    On a terminal it shows a progress bar, elsewhere one line every `every` steps. train.log has all
    lines; a run continues where its console is gone. Leaving the context raises UserError if a full
    disk ended the run.
    """

    def __init__(self, run: Path, every: int, total_steps: int, step: int = 0) -> None:
        self.run = run
        self.every = every
        self.total = total_steps
        self.lines = _line_logger(run / "train.log")
        # Hides the points that a killed run wrote after its last checkpoint.
        self.board = SummaryWriter(str(run), purge_step=step + 1)
        self.progress = _progress() if sys.stdout and sys.stdout.isatty() else None
        if self.progress:
            self.task = self.progress.add_task("", total=total_steps, completed=step)
        self._reset()

    def __enter__(self) -> "Log":
        self.thread_hook = threading.excepthook
        threading.excepthook = self._thread_failed
        with self._console():
            if self.progress:
                self.progress.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        except OSError as failed:
            error = error or failed
        threading.excepthook = self.thread_hook
        reason = str(error) if isinstance(error, NotSaved) else None
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            reason = f"{self.run}: its log cannot be written ({error.strerror})"
        if reason:
            raise UserError(
                f"{reason}; the last checkpoint is complete: make room, then resume with --resume"
            ) from None

    def info(self, *texts: str) -> None:
        """Lines on the console and in train.log."""
        for text in texts:
            self.lines.info(text)
            with self._console():
                if self.progress:
                    self.progress.console.print(text, markup=False, highlight=False)
                else:
                    print(text, flush=True)

    def step(self, state: TrainState, step: Step, last: bool = False) -> None:
        """Add a step to the means; report them every `every` steps and after the last one."""
        self.steps += 1
        self.audio += step.seconds
        if step.finite:  # others were not used, and would make the mean NaN
            add(self.sums, step.sums)
            self.norm = max(self.norm, step.norm)
        # The planned total assumes that all epochs have as many steps as the first.
        self.total = state.step if last else max(self.total, state.step)
        if state.step % self.every == 0 or last:
            self._report(state, step)
            self._reset()

    def flush(self) -> None:
        """Write all curves to the disk."""
        self.board.flush()

    def exclude(self, seconds: float) -> None:
        """Exclude the time of a validation from the throughput."""
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
        """The resolved recipe as text, and as hparams with the final figures of the run."""
        self.board.add_text("recipe", f"```yaml\n{yaml}```", 0)
        simple = bool | int | float | str
        plain = {k: v if isinstance(v, simple) else str(v) for k, v in flat.items()}
        # In groups of their own, so that they add no point to a curve.
        final = {name.replace("/", "_final/"): value for name, value in metrics.items()}
        self.board.add_hparams(plain, final, run_name=".", global_step=0)

    def _thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """Ignore a failed write of TensorBoard's thread: its next write raises in ours."""
        if not isinstance(failed.exc_value, OSError):
            self.thread_hook(failed)

    def _report(self, state: TrainState, step: Step) -> None:
        losses = means(self.sums)
        elapsed = max(time.perf_counter() - self.since, 1e-9)
        rate = self.audio / elapsed
        self.scalars("train", losses, state.step)
        figures = {
            "learning_rate": step.lr,
            "gradient_norm": self.norm,
            "audio_per_second": rate,
            "epoch": state.epoch,
            "audio_hours": state.audio_seconds / 3600,
            "train_seconds": state.train_seconds,
        }
        self.scalars("run", figures, state.step)
        loss = "  ".join(f"{name} {value:.4f}" for name, value in losses.items()) or "no step used"
        speed = f"{rate:.0f}x real time" if rate else f"{self.steps / elapsed:.1f} steps/s"
        line = f"step {state.step}/{self.total}  epoch {state.epoch}  {loss}  {speed}"
        self.lines.info(line)
        with self._console():
            if self.progress:
                shown = {"total": self.total, "description": f"{loss}  {speed}"}
                self.progress.update(self.task, completed=state.step, **shown)
            else:
                left = (self.total - state.step) * elapsed / self.steps
                print(f"{line}  {left / 60:.1f} min left", flush=True)

    @contextmanager
    def _console(self) -> Iterator[None]:
        """For writes to the console: if its reader is gone, all further output is discarded."""
        try:
            yield
        except OSError as error:
            discard_stdout()
            self.lines.info(f"the console is gone ({error.strerror}); the run continues")

    def _reset(self) -> None:
        self.sums: dict[str, Sum] = {}
        self.steps, self.audio, self.norm = 0, 0.0, 0.0
        self.since = time.perf_counter()


class NullLog:
    """The log of all ranks but 0; it writes nothing."""

    def __enter__(self) -> "NullLog":
        return self

    def __exit__(self, *error: object) -> None:
        """It has no files to close."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def _progress() -> Progress:
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.description}"), transient=True)


class _Lines(logging.FileHandler):
    """Raises where a line cannot be written; logging would only print a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called in the except clause of a failed write."""
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

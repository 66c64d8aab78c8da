"""The log of a run: console, train.log, TensorBoard and other trackers."""

import errno
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from asr.errors import UserError, discard_stdout, printable, terminal
from asr.io import open_append
from asr.training.checkpoint import NotSaved, checkpoint_folders
from asr.training.losses import Sum, add, means
from asr.training.scalars import explanation, first_charts
from asr.training.state import TrainState

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Figures that are fractions: texts show them in percent, TensorBoard as they are.
RATES = {"wer": "WER", "ctc_wer": "CTC WER", "accuracy": "accuracy"}
BEST = ("wer", "nll", "accuracy", "perplexity")  # figures of the best checkpoint to show


def figure_texts(figures: Mapping[str, float]) -> list[str]:
    """`nll 2.1697`, and of a rate `WER 405.2 %`."""
    return [
        f"{RATES[name]} {100 * value:.1f} %" if name in RATES else f"{name} {value:.4f}"
        for name, value in figures.items()
    ]


@dataclass(frozen=True)
class Step:
    """Results of one training step, over all ranks."""

    sums: dict[str, Sum]
    norm: float  # of the gradient, before clipping
    lr: float
    finite: bool = True  # False: the weights were not updated


class Log:
    """The log of a run, used as a context, which opens and closes its files.

    On a terminal it shows a progress bar, elsewhere one line every `every` steps. train.log has all
    lines; a run continues where its console is gone. The context raises UserError if a full disk or
    the removal of the run folder ended the run.
    """

    def __init__(
        self,
        run: Path,
        every: int,
        total_steps: int,
        step: int = 0,
        trackers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.run = run
        self.trackers = None
        if trackers:
            from asr.training.trackers import Trackers  # which few runs need

            self.trackers = Trackers(trackers, run.resolve().name, params or {}, self.info)
        self.every = every
        self.total, self.first = total_steps, step + 1
        self.names: set[str] = set()  # of the scalars written
        self.charted: set[str] = set()  # those known when the charts were last chosen
        self.progress = _progress() if sys.stdout and sys.stdout.isatty() else None
        if self.progress:
            self.task = self.progress.add_task("", total=total_steps, completed=step, figures=[])
        self._reset()

    def __enter__(self) -> "Log":
        with ExitStack() as files:  # closed in reverse order, also where one cannot be opened
            files.enter_context(self._reported())
            files.enter_context(self._thread_errors())
            self.lines = _Lines(files.enter_context(open_append(self.run / "train.log")))
            files.enter_context(self._warnings())
            # Hides the points that a killed run wrote after its last checkpoint.
            board = SummaryWriter(str(self.run), purge_step=self.first)
            self.board = files.enter_context(closing(board))
            self.board.add_text("about/scalars", explanation(), 0)
            if self.trackers:
                files.enter_context(self.trackers)
            if self.progress:
                with self._console():
                    self.progress.start()
                files.callback(self._stop_progress, self.progress)
            self._files = files.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            with suppress(OSError, UserError):
                self.lines.write(f"ended: {str(error).partition(chr(10))[0]}")
        self._files.__exit__(kind, error, trace)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Raise UserError for a failed write of the log or of a checkpoint."""
        try:
            yield
        except (OSError, NotSaved) as error:
            if not self.run.is_dir():
                reason = f"{self.run}: removed while training wrote into it"
                raise UserError(f"{reason}; train again, into a folder that stays") from None
            reason = str(error)
            if isinstance(error, OSError):
                if error.errno not in DISK_FULL:
                    raise
                reason = f"{self.run}: its log cannot be written ({error.strerror})"
            saved = checkpoint_folders(self.run)
            state = f"step {int(saved[-1].name)} is saved" if saved else "no step is saved yet"
            remedy = "resume with --resume" if saved else "start again with the same command"
            raise UserError(f"{reason}; {state}: make room, then {remedy}") from None

    @contextmanager
    def _thread_errors(self) -> Iterator[None]:
        """Ignore a failed write of TensorBoard's thread: its next write raises in ours."""
        before = threading.excepthook

        def failed(thread: threading.ExceptHookArgs) -> None:
            if not isinstance(thread.exc_value, OSError):
                before(thread)

        threading.excepthook = failed
        try:
            yield
        finally:
            threading.excepthook = before

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        """Log the warnings of asr's modules, as that of a slower backend."""
        handler, logger = logging.Handler(), logging.getLogger("asr")
        handler.emit = lambda record: self.info(record.getMessage())
        before, logger.propagate = logger.propagate, False
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = before

    def _stop_progress(self, progress: Progress) -> None:
        with self._console():
            progress.stop()

    def record(self, *texts: str) -> None:
        """Lines in train.log that are on the console already."""
        for text in texts:
            self.lines.write(text)

    def info(self, *texts: str) -> None:
        """Lines on the console and in train.log."""
        for text in texts:
            self.lines.write(text)
            timed = _timed(text)
            with self._console():
                if self.progress:
                    encoding = self.progress.console.encoding
                    shown = printable(timed).encode(encoding, "backslashreplace").decode(encoding)
                    self.progress.console.print(shown, markup=False, highlight=False)
                else:
                    print(timed, flush=True)

    def step(self, state: TrainState, step: Step, audio: float, last: bool = False) -> None:
        """Add a step to the means; report them every `every` steps and after the last one.

        audio: its seconds.
        """
        self.steps += 1
        self.audio += audio
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
        points = {f"{group}/{name}": value for name, value in values.items()}
        for name, value in points.items():
            self.board.add_scalar(name, value, step)
        self.names |= points.keys()
        if group == "valid" and self.names != self.charted:
            self.charted = set(self.names)
            self.board.file_writer.add_summary(first_charts(self.names), step)
        if self.trackers:
            self.trackers.log(points, step)

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        """pixels (height, width, 3) uint8."""
        self.board.add_image(printable(name), pixels, step, dataformats="HWC")

    def text(self, name: str, paragraphs: Iterable[str], step: int) -> None:
        """Plain text, each paragraph on a line; TensorBoard shows it as it is, not as Markdown."""
        self.board.add_text(printable(name), "\n\n".join(map(_plain, paragraphs)), step)

    def finish(
        self, yaml: str, flat: Mapping[str, Any], best: Mapping[str, float], step: int
    ) -> None:
        """The resolved recipe as text; settings and best figures for TensorBoard's page HParams.

        best: valid/NAME -> value, of which the main ones become curves best/NAME of one point,
        since the page shows the last points of all curves, sorted by name.
        """
        self.board.add_text("recipe", f"```yaml\n{yaml}```", 0)
        known = {name: best[f"valid/{name}"] for name in BEST if f"valid/{name}" in best}
        self.scalars("best", known, step)
        simple = bool | int | float | str
        plain = {k: v if isinstance(v, simple) else str(v) for k, v in flat.items()}
        # Without the first summary, which lists settings and figures of this run, the page has the
        # settings of all runs, those that differ first. With it, only those of one run.
        for summary in hparams(plain, {})[1:]:
            self.board.file_writer.add_summary(summary, 0)
        if self.trackers:
            self.trackers.finished = True

    def _report(self, state: TrainState, step: Step) -> None:
        losses = means(self.sums)
        elapsed = max(time.perf_counter() - self.since, 1e-9)
        rate = self.audio / elapsed
        figures = {"learning_rate": step.lr, "epoch": state.epoch}
        figures |= {"gradient_norm": self.norm} if losses else {}  # none of a step that is not used
        self.scalars("train", losses | figures, state.step)
        cost = {"audio_hours": state.audio_seconds / 3600, "train_seconds": state.train_seconds}
        if rate:
            cost["audio_per_second"], speed = rate, f"{rate:.0f}x real time"
        else:
            cost["steps_per_second"] = steps = self.steps / elapsed
            speed = f"{steps:.1f} steps/s"
        self.scalars("speed", cost, state.step)
        first, *others = figure_texts(losses) or ["no step used"]
        position = f"step {state.step}/{self.total}", f"epoch {state.epoch}"
        line = "  ".join([*position, first, *others, speed])
        self.lines.write(line)
        with self._console():
            if self.progress:
                shown = {
                    "total": self.total,
                    "figures": [first, position[0], *others, speed, position[1]],
                }
                self.progress.update(self.task, completed=state.step, **shown)
            else:
                left = (self.total - state.step) * elapsed / self.steps
                print(_timed(f"{line}  {left / 60:.1f} min left"), flush=True)

    @contextmanager
    def _console(self) -> Iterator[None]:
        """For writes to the console: if its reader is gone, all further output is discarded."""
        try:
            yield
        except OSError as error:
            discard_stdout()
            self.lines.write(f"the console is gone ({error.strerror}); the run continues")

    def _reset(self) -> None:
        self.sums: dict[str, Sum] = {}
        self.steps, self.audio, self.norm = 0, 0.0, 0.0
        self.since = time.perf_counter()


def _timed(line: str) -> str:
    return f"{time.strftime('%H:%M:%S')}  {line}"


class NullLog:
    """The log of all ranks but 0; it writes nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def _progress() -> Progress:
    console = Console(file=terminal())
    return Progress(
        BarColumn(console.width // 4),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        _Figures(console),
        console=console,
        transient=True,
        # These would print what others print without escapes.
        redirect_stdout=False,
        redirect_stderr=False,
    )


class _Figures(ProgressColumn):
    """The first of the figures, and as many of the others as the terminal's width allows."""

    FIXED = 16  # characters of percentage, time left and the spaces; the bar has a fourth of all

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self.console = console

    def render(self, task: Task) -> Text:
        """The figures in one line."""
        shown, *others = task.fields["figures"] or [""]
        room = self.console.width * 3 // 4 - self.FIXED
        for text in others:
            if len(longer := f"{shown}  {text}") > room:
                break
            shown = longer
        return Text(shown)


MARKUP = re.compile(r"[\\`*_{}\[\]()<>#+\-.!|~&=]")


def _plain(text: str) -> str:
    """The text in Markdown, its markup as entities: a line of a table or code would be none."""
    line = " ".join(printable(text).split())  # four spaces at the begin are code
    return MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", line)


class _Lines:
    """train.log: lines with their time."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def write(self, text: str) -> None:
        """Append a line; where the disk is full, none of it."""
        now = time.time()
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        line = f"{date},{int(1000 * (now % 1)):03d} {printable(text)}\n"
        rest, size = line.encode(errors="backslashreplace"), self.file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[os.write(self.file.fileno(), rest) :]
        except OSError:
            with suppress(OSError):
                self.file.truncate(size)
            raise

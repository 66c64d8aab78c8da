"""A grid of runs: python -m asr.sweep RECIPE key=a,b,c seed=1,2,3 [--out DIR] [--jobs N]

Every run is a process of its own, `python -m asr.train ... --resume`, in its own folder under
--out, so a sweep that was stopped goes on where it stopped when the same command is given again.
"""

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from asr import command, corpora
from asr.console import say
from asr.errors import UserError
from asr.recipe import flat
from asr.runs.cost import print_estimate
from asr.runs.folder import CONSOLE, finished, last_error, recipe_of
from asr.runs.grid import Trial, read_grid
from asr.scoring.files import evaluation_name
from asr.scoring.groups import value_text
from asr.settings import ImageRecipe, Recipe, SpeechRecipe

LOCK = ".lock"
PYTHON = (sys.executable, "-m")  # what every command begins with
_PATIENCE = 600.0  # seconds that a stopped run has to end its step and save


def main() -> int:
    """Check the whole grid, then run what is not done yet. 1 where a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.sweep",
        description="Train every combination of the values given.",
        epilog="Commas within brackets belong to the value: features.speed=[0.9,1.1],[1.0]",
    )
    parser.add_argument("recipe", type=Path, help="a recipe, e.g. recipes/demo.yaml")
    parser.add_argument("grid", nargs="*", metavar="key.path=a,b,c")
    parser.add_argument("--out", type=Path, help="folder of the runs (runs/RUN_sweep)")
    parser.add_argument("--jobs", default="1", help="so many runs at a time")
    parser.add_argument("--evaluate", metavar="SPLIT", help="score each run on this split")
    parser.add_argument("--dry-run", action="store_true", help="print the grid and what it costs")
    args = parser.parse_intermixed_args()
    if not args.jobs.isdecimal() or int(args.jobs) < 1:
        raise UserError(f"--jobs {args.jobs}: must be a whole number from 1 up")
    trials = read_grid(args.recipe, args.grid)
    out = args.out or Path("runs") / f"{trials[0].recipe.run}_sweep"
    for trial in trials:
        check_folder(trial, out / trial.name)
    if args.evaluate:
        check_split(trials[0].recipe, args.evaluate)
    if args.dry_run:
        print_estimate(args.recipe, trials, out, int(args.jobs))
        return 0
    jobs = [Job(args.recipe, trial, out / trial.name, args.evaluate) for trial in trials]
    before = signal.signal(signal.SIGTERM, _interrupt)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with (out / LOCK).open("w") as lock:  # this process's own: gone when it is killed
            take(lock, f"{out}: another sweep is at work in it; wait for its end, or end it")
            return sweep(jobs, int(args.jobs), out)
    finally:
        signal.signal(signal.SIGTERM, before)


def take(lock: IO[str], refusal: str) -> None:
    """Hold the open file alone. UserError with the text where another process does."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(refusal) from None


def check_split(recipe: Recipe, split: str) -> None:
    """UserError, before hours of training, where --evaluate could not do with this split."""
    if isinstance(recipe, SpeechRecipe):
        corpora.split(recipe.data, split)
    elif not (isinstance(recipe, ImageRecipe) and split == "test"):
        raise UserError(
            f"--evaluate {split}: runs of the task {recipe.task} have no such split; "
            "images have test, a language model is measured on its validation text alone"
        )


def check_folder(trial: Trial, run: Path) -> None:
    """UserError where the folder holds a run of another recipe.

    Decoding that the grid does not name may be another: asr.evaluate --tune writes it there.
    """
    if not (run / "recipe.yaml").exists():
        return
    there, wanted = (flat(r) for r in (recipe_of(run), trial.recipe))
    named = [change.partition("=")[0] for change in trial.overrides]
    other = [
        key
        for key in {**there, **wanted}
        if there.get(key) != wanted.get(key) and (key in named or not key.startswith("decode."))
    ]
    if other:
        was, now = (value_text(recipe.get(other[0])) for recipe in (there, wanted))
        raise UserError(
            f"{run}: holds a run of another recipe ({other[0]} = {was}, now {now}); "
            "choose another --out"
        )


@dataclass
class Job:
    """One run of the grid and the process that works on it."""

    recipe: Path
    trial: Trial
    folder: Path
    split: str | None = None
    process: subprocess.Popen[bytes] | None = None
    begun: float = field(default_factory=time.monotonic)

    def next_command(self) -> list[str] | None:
        """Training, then evaluation; None where both are done."""
        if finished(self.folder) is None:
            overrides = [*self.trial.overrides, "--run", str(self.folder), "--resume"]
            return [*PYTHON, "asr.train", str(self.recipe), *overrides]
        if self.split and not self._score().exists():
            return [*PYTHON, "asr.evaluate", str(self.folder), "--split", self.split]
        return None

    def start(self, threads: int) -> bool:
        """Start what comes next; False where nothing is left. UserError where it is in use."""
        if (arguments := self.next_command()) is None:
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        # The process inherits the lock: it holds as long as that lives, even if this one is killed.
        with (self.folder / LOCK).open("w") as lock, (self.folder / CONSOLE).open("ab") as console:
            take(lock, "another process is training in its folder")
            console.write(f"$ {' '.join(arguments)}\n".encode())
            console.flush()
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(lock.fileno(),),
            )
        return True

    def _score(self) -> Path:
        return self.folder / "evaluate" / evaluation_name(self.split or "") / "score.json"


def sweep(jobs: Sequence[Job], at_once: int, out: Path) -> int:
    """Run the jobs, so many at a time; whatever fails, the rest goes on. 1 where one failed."""
    threads = max(1, _cores() // at_once)
    waiting, running, failed = deque(jobs), [], {}
    done = [job for job in jobs if job.next_command() is None]
    say(f"{len(jobs)} runs in {out}, {len(done)} of them done already")
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.popleft()
                job.begun = time.monotonic()
                if job not in done and _begin(job, threads, failed):
                    say(f"{job.trial.name}: begun")
                    running.append(job)
            running = [job for job in running if _goes_on(job, threads, failed)]
            time.sleep(0.1)
    except KeyboardInterrupt as asked:
        processes = [job.process for job in running if job.process]
        say(f"{len(processes)} runs save and end; once more ends them at once")
        stop(processes, told=not asked.args)  # a terminal's has no name
        say("stopped; the same command goes on from here")
        raise
    _report(jobs, failed, out)
    return 1 if failed else 0


def stop(processes: Sequence[subprocess.Popen[bytes]], told: bool) -> None:
    """End the processes; `told`: a terminal's Ctrl-C has reached them too, another signal has not.

    A training saves after the first signal that it gets, and a second one ends it unsaved.
    """
    words = (subprocess.Popen.terminate, subprocess.Popen.kill)
    try:
        for word in (subprocess.Popen.poll, *words) if told else words:
            for process in processes:
                word(process)
            end = time.monotonic() + _PATIENCE
            while time.monotonic() < end and any(p.poll() is None for p in processes):
                time.sleep(0.05)
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


def _begin(job: Job, threads: int, failed: dict[str, str]) -> bool:
    try:
        return job.start(threads)
    except (UserError, OSError) as error:
        failed[job.trial.name] = str(error)
        return False


def _goes_on(job: Job, threads: int, failed: dict[str, str]) -> bool:
    """Whether the job still runs, perhaps with its next command; says so when it has ended."""
    code = job.process.poll() if job.process else 0
    if code is None:
        return True
    passed, name = time.monotonic() - job.begun, job.trial.name
    if code and job.next_command():
        reason = last_error(job.folder).strip(" ()") or f"exit code {code}"
        failed[name] = f"{reason}; see {job.folder / CONSOLE}"
        say(f"{name}: FAILED after {passed:.0f} s: {failed[name]}")
        return False
    if finished(job.folder) is None:
        failed[name] = f"ended without finishing; see {job.folder / CONSOLE}"
        return False
    if _begin(job, threads, failed):
        return True
    left_out = f"; not all could be decoded, see {job.folder / CONSOLE}" if code else ""
    say(f"{name}: done after {passed:.0f} s{left_out}")
    return False


def _report(jobs: Sequence[Job], failed: dict[str, str], out: Path) -> None:
    say(f"{len(jobs) - len(failed)} of {len(jobs)} runs are done")
    for name, reason in failed.items():
        say(f"failed: {name}: {reason}")
    say(f"compare:     python -m asr.compare {out}\nTensorBoard: tensorboard --logdir {out}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    command.run(main)

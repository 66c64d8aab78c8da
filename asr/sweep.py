"""A grid of runs: python -m asr.sweep RECIPE key=a,b,c seed=1,2,3 [--out DIR] [--jobs N]

Every combination of the values is a run, named after the keys with several values. Commas within
brackets, braces or quotes belong to a value: features.speed_perturb=[0.9,1.1],[1.0] has two values.
Keys joined by + have equal values: model.listener.norm+model.speller.norm=none,ba is two runs.

Every run is a separate process, `python -m asr.train ... --resume`, with a folder under --out, so
the same command resumes a sweep that was stopped. On Linux the processes get SIGTERM when the sweep
ends, even if it is killed, and a training then saves.
"""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from asr.arguments import CommandParser, key_of, positive
from asr.errors import UserError, print_line, run_command
from asr.io import check_run_folder, lock_file, locked_by_another, open_append, usable_cores

if TYPE_CHECKING:  # functions import the modules that load pydantic or numpy
    from asr.config.schema import Recipe

LOCK = ".lock"
PYTHON = (sys.executable, "-m")  # the start of every command
# The process gets SIGTERM when its parent ends (PR_SET_PDEATHSIG), then it becomes the command. Not
# a preexec_fn, which may deadlock if the parent has threads, such as those of torch.
_ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("error: the sweep has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""
_LONGEST_NAME = 200  # bytes; file systems allow 255
_MOST_RUNS = 10_000
_PATIENCE = 600.0  # seconds for a stopped run to finish its step and save


@dataclass(frozen=True)
class SweepRun:
    """One run of the grid."""

    name: str  # of its folder
    overrides: tuple[str, ...]  # key.path=value
    recipe: "Recipe"


def read_grid(recipe: Path, arguments: Sequence[str]) -> list[SweepRun]:
    """Every run of the grid, each recipe validated; the last key varies fastest.

    Raises UserError for the first argument or combination that cannot be used.
    """
    from asr.config.loader import RecipeError, flat, read_recipe

    if not arguments:
        example = f"python -m asr.sweep {recipe} model.listener.norm=none,ba seed=1,2,3"
        raise UserError(
            f"command line: no grid: name keys with several values, e.g. {example}; one run is "
            f"trained by python -m asr.train {recipe}"
        )
    axes = dict(map(_axis, arguments))
    keys = [key for argument in arguments for key in _joined_keys(key_of(argument))]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(f"command line: {twice}: given twice; write {twice}=a,b,c")
    size = math.prod(map(len, axes.values()))
    if size > _MOST_RUNS:
        raise UserError(f"command line: a grid of {size} runs; at most {_MOST_RUNS} are allowed")
    rows = [tuple(zip(axes, row, strict=True)) for row in product(*axes.values())]
    overrides = [
        tuple(f"{key}={value}" for keys, value in row for key in _joined_keys(keys)) for row in rows
    ]
    recipes = []
    for changes in overrides:
        try:
            recipes.append(read_recipe(recipe, changes))
        except RecipeError as error:
            raise UserError(f"{error} (of {' '.join(changes) or 'the recipe itself'})") from None
    names = _names(axes, rows, flat(recipes[0]))
    return [SweepRun(*parts) for parts in zip(names, overrides, recipes, strict=True)]


def split_values(text: str) -> list[str]:
    """Split at commas outside of brackets, braces and quotes: "[1,2],3" -> ["[1,2]", "3"]."""
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        depth += (sign in "[{") - (sign in "]}") if not quote else 0
        if sign == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += sign
    return [value.strip() for value in values]


def _joined_keys(keys: str) -> list[str]:
    """a+b -> a, b: keys with equal values."""
    return [key.strip() for key in keys.split("+")]


def _axis(argument: str) -> tuple[str, list[str]]:
    key, equals, text = argument.partition("=")
    key, values = key.strip(), split_values(text)
    if not equals or not key:
        raise UserError(f"command line: {argument!r} is not of the form key.path=a,b,c")
    if "" in values:
        raise UserError(f"command line: {argument!r} has an empty value; write {key}=a,b,c")
    if len(set(values)) < len(values):
        raise UserError(f"command line: {argument!r} has a value twice")
    if len(values) > 1 and any(part.startswith("decode.") for part in _joined_keys(key)):
        raise UserError(
            f"command line: {argument} would train the same model {len(values)} times; train it "
            f"once, then give {key}=... and --out to python -m asr.evaluate RUN"
        )
    if "run" in _joined_keys(key):
        raise UserError("command line: a sweep names its runs; choose their folder with --out")
    return key, values


def _names(
    axes: dict[str, list[str]], rows: Iterable[tuple[tuple[str, str], ...]], keys: Iterable[str]
) -> list[str]:
    """A folder name for every row of (key, value): a number if it is too long or not unique."""
    from asr.analysis.runs import short_names

    varying = [key for key, values in axes.items() if len(values) > 1]
    parts = [part for key in varying for part in _joined_keys(key)]
    short = short_names(parts, {*keys, *parts})
    labels = {key: "+".join(short[part] for part in _joined_keys(key)) for key in varying}
    names = []
    for number, row in enumerate(rows):
        parts = [f"{labels[key]}={value}" for key, value in row if key in labels]
        name = re.sub(r"[^\w.,+=\[\]-]", "-", ",".join(parts)) or "run"
        unusable = name in names or len(name.encode()) > _LONGEST_NAME
        names.append(f"{number:04d}" if unusable else name)
    return names


def check_split(recipe: "Recipe", split: str) -> None:
    """Raise UserError, before hours of training, if --evaluate cannot use this split."""
    from asr.analysis.score_files import evaluation_name
    from asr.data import splits

    evaluation_name(split)
    if recipe.task == "speech":
        splits.load_split(recipe.data, split)
    elif not (recipe.task == "images" and split == "test"):
        raise UserError(
            f"--evaluate {split}: runs of the task {recipe.task} have no such split; "
            "images have test, a language model is only measured on its validation text"
        )


def check_training(recipe: "Recipe") -> None:
    """Raise UserError if training lacks its device, its data or the run that it starts from.

    A built-in corpus is made, as by training.
    """
    from asr.training.distributed import check_device
    from asr.training.warm_start import starting_weights

    data = recipe.data
    check_device(recipe.train.device)
    if recipe.train.init:
        starting_weights(recipe.train.init, recipe)
    if recipe.task == "images":
        from asr.images.task import read

        read(data)
    elif recipe.task == "language":
        from asr.tasks.language import read_texts

        for role in ("train", "valid"):
            read_texts(data, role)
    else:
        from asr.data.splits import load_split_manifest

        for role in ("train", "valid"):
            load_split_manifest(data, getattr(data, role), role)


def find_folders(runs: Sequence[SweepRun], out: Path) -> list[SweepRun]:
    """The runs, those of an equal recipe that `out` has under another name by that name.

    A sweep that had fewer keys or seeds named its runs otherwise.
    """
    names, others = {run.name for run in runs}, {}
    for path in sorted(out.glob("*/recipe.yaml")):
        if path.parent.name not in names:
            with suppress(UserError):  # of another version
                others[path.parent.name] = list(_recipes_of(path.parent))
    found = []
    for run in runs:
        if not (out / run.name).exists():
            equal = (
                name
                for name, recipes in others.items()
                if not all(_changed_keys(run, old) for old in recipes)
            )
            run = replace(run, name=next(equal, run.name))
            others.pop(run.name, None)
        found.append(run)
    return found


def check_folder(run: SweepRun, folder: Path) -> None:
    """Raise UserError if the folder has a run of another recipe, or a link.

    decode.* keys outside the grid may differ: asr.evaluate --tune writes them there.
    """
    from asr.analysis.runs import value_text
    from asr.config.loader import flat

    if folder.is_symlink():
        raise UserError(f"{folder}: a symbolic link; replace it by the folder it points to")
    check_run_folder(folder)
    if not (folder / "recipe.yaml").exists():
        return
    for old in _recipes_of(folder):
        changed = _changed_keys(run, old)
        if not changed:
            return
    key = changed[0]
    change = f"{key} = {value_text(old.get(key))}, now {value_text(flat(run.recipe).get(key))}"
    raise UserError(f"{folder}: has a run of another recipe ({change}); choose another --out")


def _recipes_of(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The recipe of a run's folder, which has the vocabulary that is used, and that with which the
    run was begun, with the decode settings of the first.
    """
    from asr.analysis.runs import recipe_of
    from asr.config.loader import flat
    from asr.training.resume import asked_recipe

    used = flat(recipe_of(folder))
    yield used
    if asked := asked_recipe(folder):
        yield flat(asked) | {key: used[key] for key in used if key.startswith("decode.")}


def _changed_keys(run: SweepRun, old: Mapping[str, Any]) -> list[str]:
    """The keys whose change makes another run: those of what is learned, and decode.* in the grid,
    since the evaluation reads the settings in the folder.
    """
    from asr.config.loader import flat
    from asr.training.resume import NOT_LEARNING, is_among

    new, grid = flat(run.recipe), set(map(key_of, run.overrides))
    return [
        key
        for key in old | new
        if old.get(key) != new.get(key)
        and (not is_among(key, NOT_LEARNING) or (key.startswith("decode.") and key in grid))
    ]


@dataclass
class SweepProcess:
    """One run of the grid and the process that trains or evaluates it."""

    recipe: Path
    run: SweepRun
    folder: Path
    split: str | None = None
    process: subprocess.Popen[bytes] | None = None
    gpu: str | None = None  # the only one it sees; None: all
    waits: bool = False  # for a process of another sweep
    started: float = field(default_factory=time.monotonic)

    @property
    def console(self) -> Path:
        """The file with the output of its processes."""
        from asr.analysis.runs import CONSOLE

        return self.folder / CONSOLE

    def next_command(self) -> list[str] | None:
        """Training, then evaluation; None if both are done."""
        from asr.analysis.runs import finished
        from asr.analysis.score_files import evaluation_name

        if finished(self.folder) is None:
            overrides = [*self.run.overrides, "--run", str(self.folder), "--resume"]
            return [*PYTHON, "asr.train", str(self.recipe), *overrides]
        if self.split:
            score = self.folder / "evaluate" / evaluation_name(self.split) / "score.json"
            if not score.exists():
                return [*PYTHON, "asr.evaluate", str(self.folder), "--split", self.split]
        return None

    def start(self, threads: int) -> bool:
        """Start the next command; False if there is none.

        If the folder is in use, nothing is started: a process of a killed sweep may still save.
        """
        if (arguments := self.next_command()) is None:
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        check_run_folder(self.folder)
        env = {"OMP_NUM_THREADS": str(threads), **os.environ}
        env |= {"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {}
        # The process inherits the lock and keeps it, even if this process is killed.
        with open_append(self.folder / LOCK) as lock, open_append(self.console) as console:
            if locked_by_another(lock, inherited=True):
                if not self.waits:
                    print_line(f"{self.run.name}: waiting for the process that uses its folder")
                self.waits = True
                return True
            console.write(f"$ {' '.join(arguments)}\n".encode(errors="backslashreplace"))
            console.flush()
            streams = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": subprocess.STDOUT}
            line = [sys.executable, "-ISc", _ENDS_WITH_PARENT, str(os.getpid()), *arguments]
            # In a session of its own no signal of the terminal reaches it: the sweep sends one.
            self.process = subprocess.Popen(
                line, env=env, pass_fds=[lock.fileno()], start_new_session=True, **streams
            )
        return True


def sweep(jobs: Sequence[SweepProcess], parallel: int, out: Path) -> int:
    """Run the jobs, `parallel` at a time; all are run even if one fails. -> 1 if one failed."""
    threads, gpus = max(1, usable_cores() // parallel), shared_gpus(jobs) if parallel > 1 else []
    waiting, running, failed = deque(jobs), [], {}
    done = sum(job.next_command() is None for job in jobs)
    print_line(f"{len(jobs)} runs in {out}, {done} of them done already")
    if len(jobs) == 1:
        print_line("no key has several values, so there is one run; a grid is KEY=a,b seed=1,2,3")
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.popleft()
                job.started = time.monotonic()
                used = Counter(other.gpu for other in running)
                job.gpu = min(gpus, key=lambda gpu: used[gpu], default=None)
                if _start(job, threads, failed):
                    print_line(f"{job.run.name}: started")
                    running.append(job)
            running = [job for job in running if _continues(job, threads, failed)]
            time.sleep(0.1)
    except KeyboardInterrupt:
        print_line(f"{len(running)} runs save and end; a second signal kills them")
        stop([job.process for job in running if job.process])
        print_line("stopped; the same command resumes it")
        raise
    print_line(f"{len(jobs) - len(failed)} of {len(jobs)} runs are done")
    for name, reason in failed.items():
        print_line(f"failed: {name}: {reason}")
    print_line(f"compare:     python -m asr.compare {out}\nTensorBoard: tensorboard --logdir {out}")
    return 1 if failed else 0


def shared_gpus(jobs: Iterable[SweepProcess]) -> list[str]:
    """The GPUs to share out, as CUDA_VISIBLE_DEVICES names them; none if a recipe names one."""
    if not {job.run.recipe.train.device for job in jobs} <= {"auto", "cuda"}:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    from torch.cuda import device_count

    return list(map(str, range(device_count())))


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes; a training finishes its step and saves."""
    try:
        for action in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in processes:
                action(process)
            end = time.monotonic() + _PATIENCE
            while time.monotonic() < end and any(p.poll() is None for p in processes):
                time.sleep(0.05)
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


def _start(job: SweepProcess, threads: int, failed: dict[str, str]) -> bool:
    try:
        return job.start(threads)
    except (UserError, OSError) as error:
        failed[job.run.name] = str(error)
        return False


def _continues(job: SweepProcess, threads: int, failed: dict[str, str]) -> bool:
    """Whether the job still runs, perhaps its next command; reports its end."""
    from asr.analysis.runs import finished, last_error

    if job.process is None:
        return _start(job, threads, failed)
    if (code := job.process.poll()) is None:
        return True
    seconds, name = time.monotonic() - job.started, job.run.name
    if code and job.next_command():
        reason = last_error(job.folder)[2:-1] or f"exit code {code}"
        failed[name] = f"{reason}; see {job.console}"
        print_line(f"{name}: FAILED after {seconds:.0f} s: {failed[name]}")
        return False
    if finished(job.folder) is None:
        failed[name] = f"ended without finishing; see {job.console}"
        return False
    if _start(job, threads, failed):
        return True
    unread = f"; not all could be decoded, see {job.console}" if code else ""
    print_line(f"{name}: done after {seconds:.0f} s{unread}")
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A closed terminal sends SIGHUP to all of its processes, perhaps more than once.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """Check the whole grid, then run what is not done yet. Exit code 1 if a run failed."""
    parser = CommandParser(
        prog="python -m asr.sweep",
        description="Train every combination of the values.",
        epilog="Commas within brackets belong to the value: features.speed_perturb=[0.9,1.1],[1.0]."
        " Keys joined by + have equal values: model.listener.norm+model.speller.norm=none,ba",
    )
    add = parser.add_argument
    add("recipe", type=Path, help="a recipe, or the name of a shipped one: demo")
    add("grid", nargs="*", metavar="key.path=a,b,c")
    add("--out", type=Path, help="folder of the runs (runs/RUN_sweep)")
    add("--jobs", type=positive, default=1, help="runs at a time, each on one of the GPUs")
    add("--evaluate", metavar="SPLIT", help="score each run on this split")
    add("--dry-run", action="store_true", help="print the names of the runs and exit")
    args = parser.parse()
    from asr.analysis.runs import finished

    grid = read_grid(args.recipe, args.grid)
    out = args.out or Path("runs") / f"{grid[0].recipe.run}_sweep"
    runs = find_folders(grid, out)
    for run in runs:
        check_folder(run, out / run.name)
    if args.evaluate:
        check_split(runs[0].recipe, args.evaluate)
    if args.dry_run:
        print(*(run.name for run in runs), sep="\n")
        return 0
    unfinished = [run.recipe for run in runs if finished(out / run.name) is None]
    needs = {repr((r.data, r.train.device, r.train.init)): r for r in unfinished}
    for recipe in needs.values():
        check_training(recipe)
    jobs = [SweepProcess(args.recipe, run, out / run.name, args.evaluate) for run in runs]
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _interrupt)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # of nohup
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _interrupt)
    out.mkdir(parents=True, exist_ok=True)
    try:
        busy = f"{out}: another sweep uses it; wait until it ends, or stop it"
        with lock_file(out / LOCK, busy):
            return sweep(jobs, args.jobs, out)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    run_command(main)

"""Training runs killed at random moments and resumed: number of runs that differ in any bit.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/kills.py [--kills N --saves N --stops N]

The trainings use a small corpus of tones, accumulation, speed perturbation, SpecAugment, dropout
and noise, and alternate between both model families and 0, 1 and 2 workers. A trial starts the run,
kills it with SIGKILL at a random moment, resumes it with another number of workers and compares
weights, Adam's moments, random state, position and curves with those of an uninterrupted run, bit
for bit. With --saves the kill happens while a checkpoint is being written: the trial waits for its
hidden folder and counts only if that folder still exists afterwards. With --stops the training and
its workers get SIGTERM or SIGINT instead and must exit with code 3.

Each training is forked from a process that has imported everything (forked_commands.py), which
saves seconds of imports before every kill; --fresh N starts the first N in new interpreters
instead.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parent.parent))
from forked_commands import Process, fork
from tiny_speech import make_corpus, make_recipe

from asr import train
from asr.errors import EXIT_STOPPED
from asr.training.checkpoint import list_checkpoints

COMMON = ["train.epochs=3", "train.save_every=2", "train.samples=0", "train.keep=1"]
FAMILIES = {
    "las": [],
    "transformer": [
        "model={kind: transformer, d_model: 8, heads: 2, feed_forward: 11, encoder_layers: 1, "
        "decoder_layers: 1, dropout: 0.1}"
    ],
}
GIVE_UP = 900.0  # seconds after which a training counts as hanging; generous, for busy machines


def start(arguments: list[str], output: Path, fresh: bool) -> Process:
    """`python -m asr.train ARGUMENTS`, as a new interpreter or forked from this one."""
    if not fresh:
        return fork(train, arguments, output)
    with output.open("a") as file:
        line = [sys.executable, "-m", "asr.train", *arguments]
        process = subprocess.Popen(line, stdout=file, stderr=file)
    process.returncode = 0  # its pid is waited for
    return Process(process.pid)


def state(run: Path) -> dict[str, object]:
    """The state to compare: flat names to tensors and numbers."""
    folder = list_checkpoints(run)[-1].folder
    training = torch.load(folder / "training.pt", weights_only=True)
    training["position"].pop("train_seconds")  # measured time
    moments = {
        f"adam.{number}.{key}": value
        for number, one in training["optimizer"]["state"].items()
        for key, value in one.items()
    }
    board = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    curves = {
        name: [(point.step, point.value) for point in board.Scalars(name)]
        for name in ("train/nll", "valid/nll", "valid/wer", "run/learning_rate")
    }
    weights = load_file(folder / "model.safetensors")
    return {**weights, **moments, **training["position"], **curves, "r": training["random"]["cpu"]}


def differences(actual: dict[str, object], expected: dict[str, object]) -> list[str]:
    """The names whose values differ between two states."""
    return [
        name
        for name in sorted(actual.keys() | expected.keys())
        if not _same(actual.get(name), expected.get(name))
    ]


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other


class Trials:
    """Kills and their results."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        make_corpus(folder)
        self.recipe = make_recipe(folder)
        self.expected, self.seconds, self.wrong = {}, {}, []
        self.resumed = 0  # trials with a checkpoint to resume from

    def undisturbed(self, family: str) -> None:
        """The run that the others are compared with."""
        overrides = FAMILIES[family]
        run, begin = self.folder / family, time.monotonic()
        code = self._start(run, overrides).wait(GIVE_UP)
        assert code == 0, (self.folder / f"{run.name}.txt").read_text()
        self.expected[family] = state(run)
        self.seconds[family] = time.monotonic() - begin

    def _start(self, run: Path, overrides: list[str], fresh: bool = False) -> Process:
        line = [str(self.recipe), *COMMON, *overrides, "--run", str(run), "--resume"]
        return start(line, self.folder / f"{run.name}.txt", fresh)

    def trial(self, number: int, how: str, fresh: bool = False) -> bool:
        """One kill, one resume, one comparison; False if the run ended before the kill."""
        family = list(FAMILIES)[number % 2]
        if family not in self.expected:
            self.undisturbed(family)
        run = self.folder / f"run{number}"
        overrides = [*FAMILIES[family], f"data.workers={number % 3}"]
        training = self._start(run, overrides, fresh)
        if how == "while saving":
            hit = self._kill_in_save(training, run)
        elif how == "by a signal to all":
            hit = self._stop(training, run, family)
        else:
            hit = self._kill(training, family, fresh)
        if hit:
            self.resumed += bool(list_checkpoints(run))
            overrides[-1] = f"data.workers={(number + 1) % 3}"
            code = self._start(run, overrides).wait(GIVE_UP)
            wrong = (
                [f"exit code {code}"] if code else differences(state(run), self.expected[family])
            )
            rubbish = [path.name for path in (run / "checkpoints").glob(".*")]
            if wrong or rubbish:
                self.wrong.append(f"{run.name} ({family}): {wrong} {rubbish}")
                print(self.wrong[-1], (self.folder / f"{run.name}.txt").read_text()[-2000:])
        shutil.rmtree(run, ignore_errors=True)
        return hit

    def _kill(self, training: Process, family: str, fresh: bool) -> bool:
        span = self.seconds[family] + (8.0 if fresh else 0.0)
        if training.wait(self.random.uniform(0.0, span)) is not None:
            return False
        training.kill()
        return True

    def _stop(self, training: Process, run: Path, family: str) -> bool:
        """Send a signal between the first log line and the end of the training."""
        while not (run / "train.log").exists():
            if training.wait(0.001) is not None:
                return False
        if training.wait(self.random.uniform(0.0, 0.7 * self.seconds[family])) is not None:
            return False
        os.killpg(training.pid, self.random.choice((signal.SIGTERM, signal.SIGINT)))
        code = training.wait(GIVE_UP)
        if code not in (0, EXIT_STOPPED):
            self.wrong.append(f"{run.name}: exit code {code} at a signal")
        return code == EXIT_STOPPED

    def _kill_in_save(self, training: Process, run: Path) -> bool:
        skip = self.random.randrange(4)  # saves before the kill
        folder, seen = run / "checkpoints", set()
        while len(seen) <= skip:
            if training.wait(0.0) is not None:
                return False
            with contextlib.suppress(FileNotFoundError):
                seen |= {path.stat().st_ino for path in folder.glob(".*.part")}
        time.sleep(self.random.uniform(0.0, 0.01))
        training.kill()
        return any(folder.glob(".*.part")) or any(folder.glob(".*.old"))


def main() -> int:
    """Print the figures; exit code 1 if anything differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--fresh", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder), args.seed)
        number = 0
        plan = {
            "at random moments": args.kills,
            "while saving": args.saves,
            "by a signal to all": args.stops,
        }
        for how, wanted in plan.items():
            done = 0
            while done < wanted:
                done += trials.trial(number, how, fresh=number < args.fresh)
                number += 1
                if done % 10 == 0:
                    print(f"{done} of {wanted}, {len(trials.wrong)} different", flush=True)
            print(f"{done} ended {how}: {len(trials.wrong)} different so far", flush=True)
        print(
            f"{sum(plan.values())} ended in {number} trainings, {trials.resumed} resumed "
            f"from a checkpoint; final weights, moments, position and curves differ in "
            f"{len(trials.wrong)}"
        )
    return 1 if trials.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

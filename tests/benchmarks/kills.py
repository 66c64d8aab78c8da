"""Trainings ended at random moments and resumed: number of runs that differ in any bit.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/kills.py [--kills N --saves N --stops N]

The trainings use a small corpus of tones, accumulation, speed perturbation, SpecAugment, dropout,
LayerDrop and noise. They alternate between both model families and 0, 1 and 2 workers; every fifth
has two ranks. A trial starts the run, ends it, resumes it with another number of workers and
compares weights, Adam's moments, random state, position and curves with those of an uninterrupted
run, bit for bit. Exit codes, the output (no traceback), hidden files and remaining processes are
checked, too. How it ends:

--kills: SIGKILL to the training, at a random moment or in a validation.
--saves: SIGKILL while a checkpoint is being written. The trial waits for its hidden folder and
         counts only if that folder still exists afterwards.
--stops: SIGTERM or SIGINT, at a random moment or in a validation, to the training (with two ranks,
         one of them) or to its workers, too.
--torchrun: SIGKILL to a rank of torchrun, which restarts all (rank_kills.py).

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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import rank_kills
from forked_commands import Process, fork
from run_state import differences, faults, state
from tiny_speech import make_corpus, make_recipe

from asr import train
from asr.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from asr.training import trainer
from asr.training.checkpoint import list_checkpoints

COMMON = ["train.epochs=3", "train.save_every=2", "train.keep=1"]
FAMILIES = {
    "las": [],
    "transformer": [
        "model={kind: transformer, d_model: 8, heads: 2, feed_forward: 11, encoder_layers: 2, "
        "decoder_layers: 1, dropout: 0.1, layer_drop: 0.3}"
    ],
}
GIVE_UP = 900.0  # seconds after which a training counts as hanging; generous, for busy machines
LEAVE = 30.0  # seconds in which the workers of an ended training must end


def start(arguments: list[str], output: Path, fresh: bool, before: Callable[[], None]) -> Process:
    """`python -m asr.train ARGUMENTS`, as a new interpreter or forked from this one."""
    if not fresh:

        def main() -> int:
            before()
            return train.main()

        return fork(SimpleNamespace(__name__="asr.train", main=main), arguments, output)
    with output.open("a") as file:
        line = [sys.executable, "-m", "asr.train", *arguments]
        process = subprocess.Popen(line, stdout=file, stderr=file, process_group=0)
    process.returncode = 0  # its pid is waited for
    return Process(process.pid)


def mark_validation(marker: Path) -> None:
    """Let validations of this process create the file."""
    validate = trainer.validate

    def marked(*arguments: object) -> object:
        marker.touch()
        return validate(*arguments)

    trainer.validate = marked


class Training:
    """One training, of one or two ranks."""

    def __init__(self, line: list[str], output: Path, ranks: int = 1, fresh: bool = False) -> None:
        self.validating = output.with_suffix(".validating")
        self.validating.unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def before(rank: int) -> None:
            mark_validation(self.validating)
            if ranks > 1:
                variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ |= {key: str(value) for key, value in variables.items()}

        self.processes = [
            start(line, output, fresh, lambda rank=rank: before(rank)) for rank in range(ranks)
        ]
        self.codes: dict[int, int] = {}  # of ended ranks

    def wait(self, seconds: float) -> list[int] | None:
        """The exit codes, or None if a rank still runs after that time."""
        end = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:
                code = process.wait(max(0.0, end - time.monotonic()))
                if code is None:
                    return None
                self.codes[rank] = code
        return [self.codes[rank] for rank in range(len(self.processes))]

    def kill(self) -> None:
        """SIGKILL to all ranks, but not to their workers."""
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:
                os.kill(process.pid, signal.SIGKILL)
        self.wait(GIVE_UP)

    def remaining(self) -> bool:
        """Whether processes remain LEAVE seconds after the ranks' end."""
        end = time.monotonic() + LEAVE
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < end:
                    os.killpg(process.pid, 0)
                    time.sleep(0.01)
                return True
        return False


class Trials:
    """Ended trainings and their results."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        make_corpus(folder)
        self.recipe = make_recipe(folder)
        self.expected, self.seconds, self.wrong = {}, {}, []
        self.resumed = 0  # trials with a checkpoint to resume from
        self.ends: dict[str, int] = {}  # how trainings ended

    def undisturbed(self, family: str, ranks: int) -> None:
        """The run that the others are compared with."""
        run, begin = self.folder / f"{family}{ranks}", time.monotonic()
        training = self._start(run, FAMILIES[family], ranks)
        codes = training.wait(GIVE_UP)
        assert codes == [0] * ranks, (self.folder / f"{run.name}.txt").read_text()
        self.expected[family, ranks] = state(run)
        self.seconds[family, ranks] = time.monotonic() - begin

    def _start(self, run: Path, overrides: list[str], ranks: int, fresh: bool = False) -> Training:
        line = [str(self.recipe), *COMMON, *overrides, "--run", str(run), "--resume"]
        return Training(line, self.folder / f"{run.name}.txt", ranks, fresh)

    def trial(self, number: int, how: str, fresh: bool = False) -> bool:
        """One end, one resume, one comparison; False if the run ended before it was ended."""
        family, ranks = list(FAMILIES)[number % 2], 2 if number % 5 == 4 and not fresh else 1
        if (family, ranks) not in self.expected:
            self.undisturbed(family, ranks)
        run = self.folder / f"run{number}"
        overrides = [*FAMILIES[family], f"data.workers={number % 3}"]
        training = self._start(run, overrides, ranks, fresh)
        if how == "while saving":
            hit = self._kill_in_save(training, run)
        else:
            span = self.seconds[family, ranks] + (8.0 if fresh else 0.0)
            first = how == "by a signal" and ranks > 1  # a rank that ends sooner lets others wait
            hit = self._wait_for_moment(training, run, span, first)
            hit = hit and (self._stop(training) if how == "by a signal" else self._kill(training))
        wrong = [hit] if isinstance(hit, str) else []
        if hit:
            self.resumed += bool(list_checkpoints(run))
            if training.remaining():
                wrong.append("processes remain")
            overrides[-1] = f"data.workers={(number + 1) % 3}"
            codes = self._start(run, overrides, ranks).wait(GIVE_UP)
            expected = self.expected[family, ranks]
            wrong += differences(state(run), expected) if codes == [0] * ranks else [f"{codes}"]
            wrong += [path.name for path in (run / "checkpoints").glob(".*")]
        output = self.folder / f"{run.name}.txt"
        wrong += faults(output)
        if wrong:
            self.wrong.append(f"{run.name} ({family}, {ranks} ranks, {how}): {wrong}")
            print(self.wrong[-1], output.read_text()[-3000:], flush=True)
        shutil.rmtree(run, ignore_errors=True)
        return bool(hit)

    def _wait_for_moment(self, training: Training, run: Path, span: float, first: bool) -> bool:
        """Wait for a moment of a run of `span` seconds, or of its validation; False at its end.

        first: wait for the first step before.
        """
        while first and not any(" step 1/" in line for line in _lines(run / "train.log")):
            if training.wait(0.001) is not None:
                return False
        if not first and self.random.random() < 0.6:
            return training.wait(self.random.uniform(0.0, span)) is None
        while not training.validating.exists():
            if training.wait(0.001) is not None:
                return False
        return training.wait(self.random.uniform(0.0, 0.3)) is None

    def _kill(self, training: Training) -> bool:
        training.kill()
        return self._ended("SIGKILL")

    def _stop(self, training: Training) -> bool | str:
        """Send a signal; whether the run was saved, or interrupted before it trained."""
        number = (signal.SIGTERM, signal.SIGINT)[sum(self.ends.values()) % 2]
        process = self.random.choice(training.processes)
        if self.random.random() < 0.5:
            os.kill(process.pid, number)
        else:
            for each in training.processes:
                os.killpg(each.pid, number)
        codes = training.wait(GIVE_UP)
        if codes is None:
            training.kill()
        early = -number if number == signal.SIGTERM else EXIT_INTERRUPTED
        if codes == [0] * len(training.processes):
            return False
        if set(codes or ()) == {EXIT_STOPPED} or codes == [early]:
            return self._ended(f"{number.name} {codes[0]}")
        return f"{number.name}: {codes}"

    def _ended(self, how: str) -> bool:
        self.ends[how] = self.ends.get(how, 0) + 1
        return True

    def _kill_in_save(self, training: Training, run: Path) -> bool:
        skip = self.random.randrange(4)  # saves before the kill
        folder, seen = run / "checkpoints", set()
        while len(seen) <= skip:
            if training.wait(0.0) is not None:
                return False
            with contextlib.suppress(FileNotFoundError):
                seen |= {path.stat().st_ino for path in folder.glob(".*.part")}
        time.sleep(self.random.uniform(0.0, 0.01))
        training.kill()
        hit = any(folder.glob(".*.part")) or any(folder.glob(".*.old"))
        return hit and self._ended("SIGKILL in a save")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def main() -> int:
    """Print the figures; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--saves", type=int, default=15)
    parser.add_argument("--stops", type=int, default=35)
    parser.add_argument("--torchrun", type=int, default=10)
    parser.add_argument("--fresh", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder), args.seed)
        number = 0
        plan = {
            "at a random moment": args.kills,
            "while saving": args.saves,
            "by a signal": args.stops,
        }
        for how, wanted in plan.items():
            done = 0
            while done < wanted:
                done += trials.trial(number, how, fresh=number < args.fresh)
                number += 1
                if done % 10 == 0:
                    print(f"{done} of {wanted}, {len(trials.wrong)} wrong", flush=True)
            print(f"{done} ended {how}: {len(trials.wrong)} wrong so far", flush=True)
        print(trials.ends)
        if args.torchrun:
            trials.wrong += rank_kills.trial(trials.folder, args.torchrun, 2, trials.random)
        print(
            f"{sum(plan.values())} of {number} trainings were ended, and {args.torchrun} of "
            f"torchrun's ranks; {trials.resumed} resumed from a checkpoint; exit codes, output, "
            f"final weights, moments, position and curves are wrong in {len(trials.wrong)}"
        )
    return 1 if trials.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

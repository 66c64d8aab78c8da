"""Time of asr.compare on 100 runs of 10,000 points, in seconds of clock and of CPU.

    .venv/bin/python tests/benchmarks/compare.py [--runs 100] [--points 10000] [--keep DIR]

Twenty settings of five seeds; every run has a training and a validation curve of that many points
each, its cost at every hundredth, and a curve that is not read. Writing the files is not timed; the
command runs in a separate process.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml
from tensorboard.compat.proto.event_pb2 import Event

from asr.analysis.runs import HOURS, SECONDS, TRAIN, VALID
from asr.config.loader import read_recipe, write_recipe

sys.path.insert(0, str(Path(__file__).parent.parent))
from event_files import scalar_event, write_events

SEEDS = 5
RECIPE = {
    "run": "made",
    "data": {"train": "train.tsv", "valid": "valid.tsv"},
    "model": {"kind": "las", "listener": {}, "speller": {}},
}


def make_runs(folder: Path, runs: int, points: int) -> None:
    """Losses that fall to a floor per setting, with noise per seed."""
    base = folder / "base.yaml"
    base.write_text(yaml.safe_dump(RECIPE))
    for number in range(runs):
        run = folder / "sweep" / f"run-{number:03d}"
        run.mkdir(parents=True)
        overrides = [f"model.listener.hidden={8 + number // SEEDS}", f"seed={number % SEEDS}"]
        write_recipe(read_recipe(base, overrides), run / "recipe.yaml")
        (run / "train.log").write_text(f"now finished at step {10 * points}; here\n")
        write_events(run / "events.out.tfevents.1.made", curves(number, points))
        print(f"\rmade {number + 1} of {runs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def curves(number: int, points: int) -> Iterator[Event]:
    """The events of one run, in the order in which training would write them."""
    random = np.random.default_rng(number)
    steps = 10 * np.arange(1, points + 1)
    falling = 0.3 + 0.01 * (number // SEEDS) + 3 * np.exp(-4 * steps / steps[-1])
    losses = (falling * random.normal(1, 0.01, size=(2, points))).T
    for place, (step, (train, valid)) in enumerate(
        zip(steps.tolist(), losses.tolist(), strict=True)
    ):
        clock = 1e9 + step
        for name, value in ((TRAIN, train), (VALID, valid), ("train/learning_rate", 1e-3)):
            yield scalar_event(name, step, value, clock)
        if place % 100 == 0:
            yield scalar_event(HOURS, step, step / 1000, clock)
            yield scalar_event(SECONDS, step, step / 3, clock)


def timed(folder: Path) -> tuple[float, float]:
    """Seconds of clock and of CPU of the command, including start and imports."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "asr.compare", str(folder / "sweep")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begin, spent.ru_utime + spent.ru_stime


def main() -> None:
    """Make the runs, time the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="make the runs here, or use existing ones")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        if not (folder / "sweep").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_runs(folder, args.runs, args.points)
        seconds, processor = timed(folder)
    print(f"asr.compare, {args.runs} runs x {args.points} points: {seconds:.1f} s,")
    print(f"{processor:.1f} s of them on the processor (more is other work on the machine)")


if __name__ == "__main__":
    main()

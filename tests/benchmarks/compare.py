"""asr.compare on 100 runs of 10,000 points: the whole command under 20 s.

    .venv/bin/python tests/benchmarks/compare.py [--runs 100] [--points 10000] [--keep DIR]

Twenty settings of five seeds; every run has a training and a validation curve of so many points
each, its cost at every hundredth, and a curve nobody asks for. The files are written first, which
is not timed; then the command runs in a process of its own. The same points through TensorBoard's
EventAccumulator, for comparison, are timed on one run.
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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

from asr.recipe import read_recipe, write_recipe
from asr.runs.reading import HOURS, SECONDS, TRAIN, VALID
from asr.scoring.events import read_scalars, scalar_event, write_events

SEEDS, LIMIT = 5, 20.0
RECIPE = {
    "run": "made",
    "data": {"train": "train.tsv", "valid": "valid.tsv"},
    "model": {"kind": "las", "listener": {}, "speller": {}},
}


def make_runs(folder: Path, runs: int, points: int) -> None:
    """Losses that fall towards a floor of their setting, with noise of their seed."""
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
        for name, value in ((TRAIN, train), (VALID, valid), ("run/learning_rate", 1e-3)):
            yield scalar_event(name, step, value, clock)
        if place % 100 == 0:
            yield scalar_event(HOURS, step, step / 1000, clock)
            yield scalar_event(SECONDS, step, step / 3, clock)


def timed(folder: Path) -> tuple[float, float]:
    """Seconds of clock and of processor that the command takes, start and import included."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "asr.compare", str(folder / "sweep")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begin, spent.ru_utime + spent.ru_stime


def readers(run: Path) -> tuple[float, float]:
    """Seconds that our reader and TensorBoard's take for one run."""
    begin = time.perf_counter()
    ours = read_scalars(run, [TRAIN, VALID])
    middle = time.perf_counter()
    theirs = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload().Scalars(VALID)
    end = time.perf_counter()
    assert [point.value for point in theirs] == ours[VALID].values.tolist()
    return middle - begin, end - middle


def main() -> None:
    """Make the runs, time the command, say whether it is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="make the runs here, or use those that are there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        if not (folder / "sweep").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_runs(folder, args.runs, args.points)
        ours, theirs = readers(folder / "sweep" / "run-000")
        print(f"one run: {ours:.3f} s; EventAccumulator {theirs:.3f} s")
        seconds, processor = timed(folder)
    print(f"asr.compare, {args.runs} runs x {args.points} points: {seconds:.1f} s of {LIMIT:g},")
    print(f"{processor:.1f} s of them on the processor (more is other work on the machine)")
    sys.exit(seconds > LIMIT)


if __name__ == "__main__":
    main()

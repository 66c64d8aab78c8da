"""What a grid will cost: measured on runs of it that exist, else on a few steps of a probe."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from asr.runs.folder import finished
from asr.runs.grid import Trial

_STEP = re.compile(
    r"(\S+ \S+) step (\d+)/(\d+)  .*?(?:  ([\d.]+)x real time)?(?:  [\d.]+ steps/s)?$"
)
_PROBE_STEPS, _PROBE_SECONDS = 12, 120.0
_NEVER = 10**9  # steps


@dataclass(frozen=True)
class Pace:
    """How fast a run trains."""

    total: int  # steps it will take
    step: int  # steps done
    seconds: float  # per step, without validation
    audio: float  # seconds of it per step


def print_estimate(recipe: Path, trials: Sequence[Trial], out: Path, at_once: int) -> None:
    """The grid, each run with its steps, audio-hours and training time, and what is left to do."""
    known: dict[tuple[str, ...], Pace | None] = {}
    for trial in trials:  # runs that exist serve all seeds of the same settings
        known[_kind(trial)] = known.get(_kind(trial)) or pace(out / trial.name)
    probed: set[tuple[str, ...]] = set()
    left_seconds = left_hours = 0.0
    width = max(len(trial.name) for trial in trials)
    print(f"{'run':{width}}  {'steps':>9}  {'audio-hours':>11}  {'time':>8}  state")
    for trial in trials:
        kind, own = _kind(trial), pace(out / trial.name)
        if known[kind] is None and kind not in probed:
            probed.add(kind)
            known[kind] = probe(recipe, trial)
        here = own or known[kind]
        done = finished(out / trial.name) is not None
        state = "done" if done else f"stopped at step {own.step}" if own else "to do"
        if here is None:
            print(f"{trial.name:{width}}  {'?':>9}  {'?':>11}  {'?':>8}  {state}; the probe failed")
            continue
        rest = 0 if done else here.total - (own.step if own else 0)
        left_seconds += rest * here.seconds
        left_hours += rest * here.audio / 3600
        hours, spent = here.total * here.audio / 3600, duration(here.total * here.seconds)
        print(f"{trial.name:{width}}  {here.total:>9,}  {hours:>11.2f}  {spent:>8}  {state}")
    print(
        f"{len(trials)} runs; left: {left_hours:.2f} audio-hours, about "
        f"{duration(left_seconds / at_once)} with {at_once} at a time, validation apart"
    )


def pace(run: Path) -> Pace | None:
    """From a run's log: the lines that follow each other without a validation between them."""
    try:
        lines = (run / "train.log").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    found = [_STEP.match(line) for line in lines]
    seconds = audio = steps = 0.0
    for before, after in pairwise(found):
        if before and after and int(after[2]) > int(before[2]):
            passed = (_clock(after[1]) - _clock(before[1])).total_seconds()
            seconds, steps = seconds + passed, steps + int(after[2]) - int(before[2])
            audio += passed * float(after[4] or 0)
    if not steps:
        return None
    last = next(match for match in reversed(found) if match)
    return Pace(int(last[3]), int(last[2]), seconds / steps, audio / steps)


def probe(recipe: Path, trial: Trial) -> Pace | None:
    """A few steps of the run in a folder that is thrown away; None where they cannot be taken."""
    print(f"measuring a few steps of {trial.name}", file=sys.stderr, flush=True)
    quiet = ["train.log_every=1", f"train.validate_every={_NEVER}", f"train.save_every={_NEVER}"]
    with tempfile.TemporaryDirectory(prefix="asr-probe-") as folder:
        start = [sys.executable, "-m", "asr.train", str(recipe), *trial.overrides, *quiet]
        process = subprocess.Popen(
            [*start, "--run", folder], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        end = time.monotonic() + _PROBE_SECONDS
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                found = pace(Path(folder))
                if found and found.step >= _PROBE_STEPS:
                    return found
            return pace(Path(folder))
        finally:
            process.kill()
            _, said = process.communicate()
            if process.returncode > 0:
                print(said.decode(errors="replace").strip().rpartition("\n")[2], file=sys.stderr)


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _kind(trial: Trial) -> tuple[str, ...]:
    return tuple(change for change in trial.overrides if not change.startswith("seed="))


def _clock(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f")

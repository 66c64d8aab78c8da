"""What a grid will cost: from the curves of runs of it that exist, else from a few steps tried."""

import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asr.errors import UserError
from asr.runs.folder import finished, recipe_of
from asr.runs.grid import Trial
from asr.runs.reading import HOURS, SECONDS, VALID
from asr.scoring.events import Curve, read_scalars
from asr.settings import Recipe

_TOTAL = re.compile(r"step \d+/(\d+)  ")  # in a run's log; no curve has it
_EPOCH = re.compile(r" (\d+) batches an epoch(?:.* (\d+) ranks$)?", re.MULTILINE)
_PROBE_STEPS = 12
_PROBE_SECONDS, _LAST_SECONDS = 180.0, 60.0  # a probe may take, and then to save what it knows
_NEVER = 10**9  # steps


@dataclass(frozen=True)
class Pace:
    """How fast a run trains."""

    total: int  # steps it will take
    step: int  # steps done
    seconds: float  # per step
    audio: float  # seconds of it per step
    validation: float = 0.0  # seconds of one
    validations: int = 0  # that it will take
    epoch: int | None = None  # steps of one, where the run says so

    def left(self, step: int) -> tuple[float, float]:
        """Seconds by the clock and audio-hours from a step to the end."""
        rest = self.total - step
        validations = self.validations * rest / self.total
        return rest * self.seconds + validations * self.validation, rest * self.audio / 3600


def print_estimate(recipe: Path, trials: Sequence[Trial], out: Path, at_once: int) -> None:
    """The grid, each run with its steps, audio-hours and time, what is left, and how one knows."""
    own = {trial.name: pace(out / trial.name) for trial in trials}
    known: dict[tuple[str, ...], Pace | None] = {}
    for trial in trials:  # runs that exist serve all seeds of the same settings
        known[_kind(trial)] = known.get(_kind(trial)) or own[trial.name]
    probed: set[tuple[str, ...]] = set()
    seconds = hours = 0.0
    width = max(len(trial.name) for trial in trials)
    print(f"{'run':{width}}  {'steps':>9}  {'audio-hours':>11}  {'time':>10}  state")
    for trial in trials:
        kind, here = _kind(trial), own[trial.name]
        if known[kind] is None and kind not in probed:
            probed.add(kind)
            known[kind] = probe(recipe, trial)
        cells, *left = _row(out / trial.name, here, here or known[kind])
        seconds, hours = seconds + left[0], hours + left[1]
        print(f"{trial.name:{width}}  {cells}")
    print(
        f"{len(trials)} runs; left: {hours:.2f} audio-hours, about {duration(seconds / at_once)} "
        f"with {at_once} at a time; validations are in it, starting and --evaluate are not"
    )
    there = sum(found is not None for found in own.values())
    print(_basis(there, sum(known[kind] is not None for kind in probed)))


def _row(run: Path, own: Pace | None, known: Pace | None) -> tuple[str, float, float]:
    """A run's cells, and the seconds and audio-hours that are left."""
    done, step = finished(run) is not None, own.step if own else 0
    state = "done" if done else f"stopped at step {step}" if own else "to do"
    if known is None:
        return f"{'?':>9}  {'?':>11}  {'?':>10}  {state}; the probe failed", 0.0, 0.0
    seconds, hours = known.left(0)
    cells = f"{known.total:>9,}  {hours:>11.2f}  {duration(seconds):>10}  {state}"
    return (cells, 0.0, 0.0) if done else (cells, *known.left(step))


def _basis(runs: int, probes: int) -> str:
    """What the times rest on."""
    parts = [f"the curves of {runs} of these runs, and what else the machine did then"] * bool(runs)
    if probes:
        parts += [
            f"{_PROBE_STEPS} steps and one validation of {probes} settings, trained just now and "
            "thrown away"
        ]
    return f"measured on: {'; '.join(parts) or 'nothing, no run could be measured'}"


def pace(run: Path) -> Pace | None:
    """From a run's curves of its cost; None where it has none, or never said how long it will be.

    Validations are timed by the clock from the last point of training to their own point.
    """
    try:
        log = (run / "train.log").read_text(encoding="utf-8", errors="replace")
        totals, recipe = _TOTAL.findall(log), recipe_of(run)
    except (FileNotFoundError, UserError):
        return None
    curves = read_scalars(run, {HOURS, SECONDS, VALID})
    hours, seconds = curves[HOURS], curves[SECONDS]
    if not (len(hours) and len(seconds) and totals):
        return None
    step, total = int(seconds.steps[-1]), int(totals[-1])
    per_step = float(seconds.values[-1]) / step
    audio = 3600 * float(hours.values[-1]) / int(hours.steps[-1])
    each = _validation_seconds(seconds, curves[VALID], per_step)
    epoch = _epoch_steps(log, recipe)
    return Pace(total, step, per_step, audio, each, _validations(recipe, total, epoch), epoch)


def _epoch_steps(log: str, recipe: Recipe) -> int | None:
    if not (said := _EPOCH.search(log)):
        return None
    return math.ceil(int(said[1]) / (recipe.train.accumulate * int(said[2] or 1)))


def _validation_seconds(seconds: Curve, valid: Curve, per_step: float) -> float:
    """The median, as a run that was stopped meanwhile would spoil a mean; 0 if there was none."""
    before = np.searchsorted(seconds.steps, valid.steps, side="right") - 1
    passed = valid.times - seconds.times[before]
    steps = valid.steps - seconds.steps[before]
    known = (passed - steps * per_step)[before >= 0]
    return max(0.0, float(np.median(known))) if len(known) else 0.0


def _validations(recipe: Recipe, total: int, epoch: int | None) -> int:
    """Every so many steps and at the end, or after every epoch, which train.steps may cut off."""
    train = recipe.train
    every = train.validate_every or (train.steps and epoch)
    return math.ceil(total / every) if every else train.epochs


def probe(recipe: Path, trial: Trial) -> Pace | None:
    """A few steps and a validation in a folder that is thrown away; None where they fail."""
    print(f"measuring {_PROBE_STEPS} steps of {trial.name}", file=sys.stderr, flush=True)
    every = f"train.validate_every={_PROBE_STEPS}"
    quick = ["train.log_every=1", every, f"train.save_every={_NEVER}"]
    with tempfile.TemporaryDirectory(prefix="asr-probe-") as folder:
        start = [sys.executable, "-m", "asr.train", str(recipe), *trial.overrides, *quick]
        process = subprocess.Popen(
            [*start, "--run", folder], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _wait(process, Path(folder))
            found = pace(Path(folder))
        finally:
            process.kill()
            _, said = process.communicate()
        if process.returncode > 0:
            print(said.decode(errors="replace").strip().rpartition("\n")[2], file=sys.stderr)
    if not found:
        return None
    return replace(found, validations=_validations(trial.recipe, found.total, found.epoch))


def _wait(process: subprocess.Popen[bytes], run: Path) -> None:
    """Until there is a validation's point, or the time is over and the run has saved its curves."""
    end = time.monotonic() + _PROBE_SECONDS
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
        if len(read_scalars(run, {VALID})[VALID]):
            return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_SECONDS)


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _kind(trial: Trial) -> tuple[str, ...]:
    return tuple(change for change in trial.overrides if not change.startswith("seed="))

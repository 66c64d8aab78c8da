"""Scalar curves of a run: read from TensorBoard's event files, and compared between runs.

R runs (seeds) of one setting, N points on the common grid of steps.
"""

import logging
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One scalar's points in the order of their steps: steps, values and clock times, (N,)."""

    steps: NDArray[np.int64]
    values: Values
    times: Values  # seconds since 1970

    def __len__(self) -> int:
        return len(self.steps)


def read_scalars(folder: Path, names: Collection[str]) -> dict[str, Curve]:
    """The named curves from the event files of a folder; a missing one has no points.

    A run resumed at a step replaces all points beyond it. Of several points at one step the last
    counts. An incomplete record at the end of a file is skipped.
    """
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every resumed run
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()  # 0: keep all
    present = events.Tags()["scalars"]
    return {name: _curve(events.Scalars(name) if name in present else []) for name in names}


def _curve(points: Iterable[Any]) -> Curve:
    last = {point.step: point for point in points}
    rows = [(step, last[step].value, last[step].wall_time) for step in sorted(last)]
    steps, values, times = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return Curve(steps.astype(np.int64), values, times)


def start_times(folder: Path) -> list[int]:
    """When each event file of a folder was created, by its name: seconds since 1970."""
    stamps = (re.search(r"\.tfevents\.(\d+)", path.name) for path in folder.glob("*.tfevents.*"))
    return [int(stamp[1]) for stamp in stamps if stamp]


@dataclass(frozen=True)
class Band:
    """Mean of several runs and the range from the lowest to the highest: (N,) each."""

    steps: NDArray[np.int64]
    mean: Values
    low: Values
    high: Values


def finite(curve: Curve) -> Curve:
    """The curve without NaN and infinities."""
    good = np.isfinite(curve.values)
    return Curve(curve.steps[good], curve.values[good], curve.times[good])


def first_below(curve: Curve, level: float) -> int | None:
    """The step of the first point at or below the level, not interpolated; None without one."""
    passed = np.flatnonzero(curve.values <= level)
    return int(curve.steps[passed[0]]) if len(passed) else None


def median_reached(places: Sequence[float | None]) -> float | None:
    """The median over runs of the step or cost at which each reached a level.

    None, for a run that never did, ranks last, and is the result where half of the runs or more
    failed: a mean over the others would favour a setting for its failures.
    """
    reached = [math.inf if place is None else place for place in places]
    middle = float(np.median(reached)) if reached else math.inf
    return middle if math.isfinite(middle) else None


def choose_levels(groups: Sequence[Sequence[Curve]]) -> list[float]:
    """Three losses at which the groups' curves are compared, the highest first.

    half  halfway from the median first loss to `all`
    all   the highest of the groups' median best losses: the typical run of every group reaches it
    best  the lowest of them

    Each is rounded up to three digits, so that the runs that define it pass it. Equal ones are
    merged; there are none where no curve has a point.
    """
    curves = [[c for c in map(finite, group) if len(c)] for group in groups]
    medians = [float(np.median([c.values.min() for c in group])) for group in curves if group]
    if not medians:
        return []
    first = float(np.median([c.values[0] for group in curves for c in group]))
    worst, best = max(medians), min(medians)
    levels = {_rounded_up(value) for value in ((first + worst) / 2, worst, best)}
    return sorted(levels, reverse=True)


def band(curves: Iterable[Curve], points: int = 400) -> Band | None:
    """Mean and range over runs on a common grid of at most `points` steps.

    The grid covers the steps that all runs have, so every mean is over all runs. A run is
    interpolated linearly between its points; where it has more points than the grid, a grid point
    is the mean of its neighbourhood. None where the runs share no step.
    """
    good = [c for c in map(finite, curves) if len(c)]
    if not good:
        return None
    first, last = max(c.steps[0] for c in good), min(c.steps[-1] for c in good)
    steps = np.unique(np.concatenate([c.steps for c in good]))
    steps = steps[(steps >= first) & (steps <= last)]
    if not len(steps):
        return None
    rows = np.stack([np.interp(steps, c.steps, c.values) for c in good])  # (R, N)
    edges = np.unique(np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int))
    sizes = np.diff(edges)
    rows = np.add.reduceat(rows, edges[:-1], axis=1) / sizes
    middle = np.add.reduceat(steps, edges[:-1]) // sizes
    return Band(middle, rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0))


def _rounded_up(value: float) -> float:
    """Rounded up to three significant digits."""
    if value == 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    # Six digits first: the last bit of 3 * 0.1 must not round it up.
    return float(f"{math.ceil(round(value / digit, 6)) * digit:.6g}")

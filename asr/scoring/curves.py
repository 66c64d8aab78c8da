"""What a loss curve says: when it first passes a level, where it ends, and the mean over seeds.

R runs (seeds) of one setting, G groups of runs, N points on the common grid of steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asr.scoring.events import Curve

Values = NDArray[np.float64]


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
    """The step of the first point at or below the level; None where there is none.

    It is known to the spacing of the points: nothing is read in between them.
    """
    passed = np.flatnonzero(curve.values <= level)
    return int(curve.steps[passed[0]]) if len(passed) else None


def median_reached(places: Sequence[float | None]) -> float | None:
    """The median over runs of when each got there, where None comes after all others.

    With at least half of the runs never there (of an even number, half) it is None: a mean over
    those that arrived would praise a setting for its failures.
    """
    known = [math.inf if place is None else place for place in places]
    middle = float(np.median(known)) if known else math.inf
    return middle if math.isfinite(middle) else None


def choose_levels(groups: Sequence[Sequence[Curve]]) -> list[float]:
    """Three levels at which the groups' curves can be compared, the highest first.

    half  halfway from the median first loss to `all`
    all   what the typical run of every group reaches: the highest of the groups' median best loss
    best  what the typical run of the best group reaches

    Each is rounded up to three digits, so that the runs which set it pass it. Fewer are left where
    they coincide; none where no curve has a point.
    """
    curves = [[c for c in map(finite, group) if len(c)] for group in groups]
    medians = [float(np.median([c.values.min() for c in group])) for group in curves if group]
    if not medians:
        return []
    begin = float(np.median([c.values[0] for group in curves for c in group]))
    everyone, best = max(medians), min(medians)
    levels = {_rounded_up(value) for value in ((begin + everyone) / 2, everyone, best)}
    return sorted(levels, reverse=True)


def band(curves: Iterable[Curve], points: int = 400) -> Band | None:
    """Mean and range over runs on a common grid of at most `points` steps.

    The grid reaches from where the last run begins to where the first ends, so every mean is over
    all runs; between its points a run is a straight line, and where the grid is coarser than a run,
    a point of the grid is the mean of what lies around it. None where the runs share no step.
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


def thinned(curve: Curve, points: int = 1000) -> Curve:
    """At most so many of its points, the last among them."""
    chosen = np.unique(np.linspace(0, len(curve) - 1, min(points, len(curve))).astype(int))
    return Curve(curve.steps[chosen], curve.values[chosen], curve.times[chosen])


def _rounded_up(value: float) -> float:
    """To three significant digits, upwards."""
    if value == 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    # Six digits, or 3 * 0.1 would be rounded up for its last bit.
    return float(f"{math.ceil(round(value / digit, 6)) * digit:.6g}")

"""Means over a few seeds: t intervals, the paired t test, and Holm's correction for many tests.

Student's distribution has, for a whole number of degrees of freedom, a closed form: Abramowitz &
Stegun 1964, 26.7.3 and 26.7.4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asr.scoring.bootstrap import LEVEL


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several runs. `sd` and `interval` are None where there is one run only."""

    count: int
    mean: float
    sd: float | None  # of the sample: divided by count - 1
    interval: tuple[float, float] | None  # of the mean, 95 %, by Student's distribution


def spread(values: Sequence[float]) -> Spread:
    """Mean, standard deviation and t interval of one figure per seed. Needs at least one."""
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return Spread(count, mean, None, None)
    sd = float(np.std(values, ddof=1))
    half = t_quantile((1 + LEVEL) / 2, count - 1) * sd / math.sqrt(count)
    return Spread(count, mean, sd, (mean - half, mean + half))


@dataclass(frozen=True, slots=True)
class PairedT:
    """The mean difference, second minus first, with its 95 % interval and two-sided p."""

    mean: float
    interval: tuple[float, float]
    p: float
    pairs: int


def paired_t(first: Sequence[float], second: Sequence[float]) -> PairedT | None:
    """Student's test of pairs (same seed in both). None for fewer than two pairs.

    Differences that are all the same leave no doubt: p is 0, or 1 where they are all zero.
    """
    differences = spread([b - a for a, b in zip(first, second, strict=True)] or [0.0])
    if differences.sd is None or differences.interval is None:
        return None
    if differences.sd == 0:
        p = 0.0 if differences.mean else 1.0
    else:
        t = differences.mean / differences.sd * math.sqrt(differences.count)
        p = 1 - _within(abs(t), differences.count - 1)
    return PairedT(differences.mean, differences.interval, p, differences.count)


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): below 0.05 holds for all of them at once, in 95 % of cases."""
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[place]))
        adjusted[place] = largest
    return adjusted


def t_quantile(share: float, freedom: int) -> float:
    """The t below which `share` (above one half) of Student's distribution lies."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < 2 * share - 1:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 2 * share - 1 else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """The probability between -t and t."""
    angle = math.atan2(t, math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total

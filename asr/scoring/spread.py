"""Means over a few seeds: t intervals, the paired t test with its power, and Holm's correction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtr, stdtr, stdtrit

from asr.scoring.bootstrap import LEVEL

POWER = 0.8  # of a planned experiment, as is usual (Cohen 1988)
MOST_SEEDS = 1000
ROUNDING = 1e-9  # of a mean: differences that vary by less are all the same


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
    half = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * sd / math.sqrt(count)
    return Spread(count, mean, sd, (mean - half, mean + half))


@dataclass(frozen=True, slots=True)
class PairedT:
    """The mean difference, second minus first, with its 95 % interval and two-sided p.

    Where all differences are the same their spread is not known: sd is 0, interval None.
    """

    mean: float
    interval: tuple[float, float] | None
    p: float
    pairs: int
    sd: float  # of the differences


def paired_t(first: Sequence[float], second: Sequence[float]) -> PairedT | None:
    """Student's test of pairs (same seed in both). None for fewer than two pairs.

    Error rates are counts, whose differences over a few seeds may well be all the same; t would be
    infinite, and one word more in two runs proof. There p is the sign test's, 2^(1 - pairs), or 1
    where they are all zero.
    """
    differences = spread([b - a for a, b in zip(first, second, strict=True)] or [0.0])
    mean, sd, count = differences.mean, differences.sd, differences.count
    if sd is None:
        return None
    if sd <= ROUNDING * abs(mean):
        return PairedT(mean, None, 2.0 ** (1 - count) if mean else 1.0, count, 0.0)
    p = 2 * float(stdtr(count - 1, -abs(mean / sd * math.sqrt(count))))
    return PairedT(mean, differences.interval, p, count, sd)


def seeds_needed(mean: float, sd: float) -> int | None:
    """The fewest pairs of seeds with which the paired t test would show such a difference.

    Shown: p below 1 - LEVEL in a share POWER of all repetitions, where `mean` and `sd` are truly
    those of the differences, sd above 0. None above MOST_SEEDS.
    """
    counts = np.arange(2, MOST_SEEDS + 1)
    limit = stdtrit(counts - 1, (1 + LEVEL) / 2)
    away = np.minimum(abs(mean) / sd * np.sqrt(counts), 1e4)  # nctdtr overflows far beyond
    # A difference of the other sign is shown so seldom that it counts for nothing here.
    power = 1 - nctdtr(counts - 1, away, limit)
    enough = np.flatnonzero(power >= POWER)
    return int(counts[enough[0]]) if len(enough) else None


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): below 0.05 holds for all of them at once, in 95 % of cases."""
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[place]))
        adjusted[place] = largest
    return adjusted

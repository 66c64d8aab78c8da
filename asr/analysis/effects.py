"""Effects of factors in a grid of runs: of each over all others, and interactions of two.

A factor is a setting with several values, a cell one run's settings and seed. Pairs of runs differ
in one factor alone, not in the seed: a factorial experiment in blocks, the seeds (Fisher 1935, The
Design of Experiments). Each seed gives one value, the mean of its pairs, to the t test: runs of one
seed share their initial weights and the order of the data, so its pairs are no independent repeats
(Hurlbert 1984, Pseudoreplication).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from asr.analysis.statistics import PairedT, corrected, paired_t

ALPHA = 0.05  # a smaller p is significant
Cell = tuple[tuple[tuple[str, str], ...], int]  # factors with their values; the seed
Contrast = tuple[str, str, str]  # a factor and two of its values


@dataclass(frozen=True)
class Effect:
    """The second value of a factor minus the first, over all other factors, then over seeds."""

    factor: str
    first: str
    second: str
    seeds: int
    test: PairedT  # p is corrected for all effects (Holm)


@dataclass(frozen=True)
class Interaction:
    """The effect of a factor at two values of another."""

    factor: str
    first: str
    second: str
    other: str
    values: tuple[str, str]  # of `other`
    effects: tuple[float, float]  # of `factor`, at these
    crosses: bool  # both factors' effects change their sign with the other's value
    test: PairedT | None  # of their difference, over seeds if there are two; p as in Effect


def effects(cells: Mapping[Cell, float]) -> list[Effect]:
    """The effect of every factor that varies beside several settings of the others, and seeds.

    cells: one figure of all runs. One seed allows no conclusion about others.
    """
    found, tests = [], []
    for factor, first, second in _contrasts(cells):
        starts = [cell for cell in cells if (factor, first) in cell[0]]
        pairs = [(cell, end) for cell in starts if (end := _with(cell, factor, second)) in cells]
        means = _means_of_seeds(cells, pairs)
        if len(means) > 1 and len({settings for (settings, _), _ in pairs}) > 1:
            found.append((factor, first, second, len(means)))
            tests.append(paired_t(*means.T))
    return [Effect(*one, test) for one, test in zip(found, corrected(tests), strict=True)]


def large_interactions(cells: Mapping[Cell, float]) -> list[Interaction]:
    """Those that are significant, or that change the sign of both factors' effects."""
    found, tests = [], []
    contrasts = [(effect.factor, effect.first, effect.second) for effect in effects(cells)]
    for one, two in combinations(contrasts, 2):
        if one[0] == two[0] or not (squares := _squares(cells, one, two)):
            continue
        a, b, c, d = means = _means_of_seeds(cells, squares).T
        tests.append(paired_t(b - a, d - c))
        a, b, c, d = means.mean(axis=1).tolist()
        crosses = (b - a) * (d - c) < 0 and (c - a) * (d - b) < 0
        found.append((*one, two[0], two[1:], (b - a, d - c), crosses))
    all_tested = (Interaction(*i, test) for i, test in zip(found, corrected(tests), strict=True))
    return [i for i in all_tested if i.crosses or (i.test and i.test.p < ALPHA)]


def _contrasts(cells: Iterable[Cell]) -> list[Contrast]:
    values: dict[str, dict[str, None]] = {}  # as an ordered set
    for settings, _ in cells:
        for factor, value in settings:
            values.setdefault(factor, {})[value] = None
    return [(factor, *two) for factor, known in values.items() for two in combinations(known, 2)]


def _squares(cells: Mapping[Cell, float], one: Contrast, two: Contrast) -> list[tuple[Cell, ...]]:
    """Four cells each, which differ in two factors: those of `one` at each value of `two`."""
    squares = []
    for cell in cells:
        if one[:2] in cell[0] and two[:2] in cell[0]:
            columns = (cell, _with(cell, two[0], two[2]))
            squares.append(tuple(_with(c, one[0], value) for c in columns for value in one[1:]))
    return [square for square in squares if all(corner in cells for corner in square)]


def _means_of_seeds(cells: Mapping[Cell, float], rows: Iterable[tuple[Cell, ...]]) -> np.ndarray:
    """Rows of K cells of one seed each -> the mean figures of each seed's rows (seeds, K)."""
    by_seed: dict[int, list[list[float]]] = {}
    for row in rows:
        by_seed.setdefault(row[0][1], []).append([cells[cell] for cell in row])
    return np.array([np.mean(figures, axis=0) for figures in by_seed.values()])


def _with(cell: Cell, factor: str, value: str) -> Cell:
    """The cell with another value of a factor."""
    settings, seed = cell
    return tuple((name, value if name == factor else v) for name, v in settings), seed

"""Bootstrap sums and percentile intervals (Efron 1979; for WER: Bisani & Ney, ICASSP 2004)."""

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
_DRAWN_AT_ONCE = 1 << 20  # 8 MB of indices at a time, whatever the number of units


def resampled_sums(units: NDArray[np.int64], draws: int, seed: int) -> NDArray[np.int64]:
    """Draw N units with replacement and sum them, `draws` times over.

    units (N, C), C counts of each of N units -> sums (draws, C). The same N, draws and seed draw
    the same units, whatever the counts.
    """
    size = len(units)
    generator = np.random.default_rng(seed)
    sums = np.empty((draws, units.shape[1]), dtype=np.int64)
    step = max(1, _DRAWN_AT_ONCE // size)
    for start in range(0, draws, step):
        chosen = generator.integers(size, size=(min(step, draws - start), size))
        for column, counts in enumerate(units.T):
            sums[start : start + step, column] = np.take(counts, chosen).sum(axis=1)
    return sums


def percentile_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of bootstrap values (draws,)."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def summed_by(labels: list[str], counts: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
    """Sum rows that share a label: labels (N), counts (N, C) -> sorted names (G), sums (G, C)."""
    names, group = np.unique(np.array(labels, dtype=object), return_inverse=True)
    sums = np.zeros((len(names), counts.shape[1]), dtype=np.int64)
    np.add.at(sums, group, counts)
    return list(names), sums

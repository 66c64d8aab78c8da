"""How often a classifier is right, with what certainty, and what it takes for what.

N things, K classes.
"""

from math import sqrt

import numpy as np
from numpy.typing import NDArray

_QUANTILE = 1.959963984540054  # of the standard normal distribution at 0.975


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """95 % interval of a share, hits of count (Wilson 1927): sound near 0 and 1 too."""
    share, z = hits / count, _QUANTILE**2 / count
    middle = share + z / 2
    spread = sqrt(z * share * (1 - share) + z * z / 4)
    low, high = (middle - spread) / (1 + z), (middle + spread) / (1 + z)
    # Rounding shall not leave the share itself outside: of n hits in n, the upper end is 1.
    return max(min(low, share), 0.0), min(max(high, share), 1.0)


def mean_interval(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """95 % interval of the mean of many values (N,), by the normal distribution; None of one."""
    if len(values) < 2:
        return None
    mean, error = float(values.mean()), float(values.std(ddof=1)) / sqrt(len(values))
    return mean - _QUANTILE * error, mean + _QUANTILE * error


def confusion(
    truth: NDArray[np.int64], found: NDArray[np.int64], classes: int
) -> NDArray[np.int64]:
    """truth (N,), found (N,) -> counts (K, K), a row for each true class."""
    return np.bincount(truth * classes + found, minlength=classes**2).reshape(classes, classes)

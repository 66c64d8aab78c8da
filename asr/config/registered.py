"""Norms of the user's program, by the names that recipes of this process may use.

A recipe holds names, never code: `asr.register_norm` (asr/nn/norm.py) is called from Python alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class RegisteredNorm(NamedTuple):
    """make(size) -> a module or function that normalises rows (N, size)."""

    make: Callable[[int], Callable[[Any], Any]]
    has_weights: bool
    obstacle: str | None  # why an LSTM cannot use it


REGISTERED: dict[str, RegisteredNorm] = {}

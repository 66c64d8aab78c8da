"""Norms of the user's program, by the names that recipes of this process may use.

A recipe holds names, never code: `asr.register_norm` (asr/nn/norm.py) is called from Python alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class RegisteredNorm(NamedTuple):
    """make(size) -> a module or function that normalises rows (N, size)."""

    make: Callable[[int], Callable[[Any], Any]]
    has_weights: bool
    obstacle: str | None  # why an LSTM cannot use it


REGISTERED: dict[str, RegisteredNorm] = {}
_ANY_NAME: ContextVar[bool] = ContextVar("any_name", default=False)


@contextmanager
def any_name() -> Iterator[None]:
    """Within the block recipes may have norms that this process has not registered: a comparison of
    runs needs no more than their names.
    """
    token = _ANY_NAME.set(True)
    try:
        yield
    finally:
        _ANY_NAME.reset(token)


def is_registered(name: Any) -> bool:
    """Whether a recipe may have the norm `name` besides those of this library."""
    if not isinstance(name, str):
        return False
    return name in REGISTERED or (_ANY_NAME.get() and name.isidentifier())

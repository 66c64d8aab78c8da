"""The one error a user can make: its message is one line with place, value and remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Ends a command with its message and exit code 2, without a traceback."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError within names the path where it names none, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            error.filename = str(path)
        raise

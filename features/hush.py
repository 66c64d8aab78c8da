"""Silence for C code that writes to stderr by itself.

libmpg123, by which libsndfile decodes MP3, prints a line for every damaged frame, and libsndfile
does not pass on the switch that would stop it.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2
_one_at_a_time = threading.Lock()


@contextmanager
def hushed() -> Iterator[None]:
    """What is written to stderr meanwhile goes nowhere: that of the other threads too, so be short.

    Threads take turns, else one would keep the other's silence as the stderr to come back to.
    """
    with _one_at_a_time:
        try:
            kept = os.dup(STDERR)
        except OSError:  # a process without any
            yield
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDERR)
        os.close(nowhere)
        try:
            yield
        finally:
            os.dup2(kept, STDERR)
            os.close(kept)

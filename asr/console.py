"""What a long command says on standard output, whose reader may go before the command ends.

`| head` has seen enough, `tee` dies with the connection it was started from, a terminal is closed:
none of that is a reason to lose hours of work.
"""

import os
import sys
from pathlib import Path


def say(text: str) -> None:
    """One line, where somebody reads it."""
    try:
        print(text, flush=True)
    except OSError:
        silence()


def silence() -> None:
    """Standard output leads nowhere from here on."""
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except (OSError, ValueError):  # a notebook's is no file of the system
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (to the end of the process)

"""How every command begins and ends: a user's mistake is one line and exit code 2."""

import os
import sys
from collections.abc import Callable

from asr.errors import UserError
from features.audio import AudioError
from features.normalize import StatisticsError


def run(main: Callable[[], int | None]) -> None:
    """Run a command's main and exit with what it returns, 0 for None."""
    try:
        code = main() or 0
    except (UserError, AudioError, StatisticsError) as error:
        code = _say(str(error))
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = _say(f"{error.filename or 'the system'}: {error.strerror or error}")
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _say(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2

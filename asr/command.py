"""How every command begins and ends: a user's mistake is one line and exit code 2.

Other exit codes: 0 all is well; 3 a signal ended training, which is saved
(asr/runs/training_run.py); 130 Ctrl-C where there is nothing to save.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper

from asr import console
from asr.data.workers import KILLED, is_killed
from asr.errors import UserError
from asr.training.memory import is_out_of_memory
from features.normalize import StatisticsError
from features.samples import AudioError


def run(main: Callable[[], int | None]) -> None:
    """Run a command's main and exit with what it returns, 0 for None."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a locale may lack a character, a name be no text
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main() or 0
    except (UserError, AudioError, StatisticsError) as error:
        code = _say(str(error))
    except BrokenPipeError:  # `| head` has seen enough
        console.silence()
        code = 0
    except OSError as error:
        code = _say(f"{error.filename or 'the system'}: {error.strerror or error}")
    except KeyboardInterrupt:
        code = 130
    except (MemoryError, RuntimeError) as error:
        if is_killed(error):
            code = _say(KILLED)
        elif is_out_of_memory(error):
            code = _say(
                "out of memory: make the model or what it is given smaller (decode.batch_seconds "
                f"where speech is validated or decoded): {_first(error)}"
            )
        else:
            raise
    _leave(code)


def _leave(code: int) -> None:
    """Under torchrun at once: what connects the ranks may abort while Python takes it down."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _first(error: Exception) -> str:
    return str(error).split(". ")[0][:200] or type(error).__name__


def _say(message: str) -> int:
    with suppress(OSError):  # nobody is there to read it
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2

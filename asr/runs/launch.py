"""Which launch of torchrun a run is of: what --max-restarts starts again goes on with that alone.

torchrun starts all ranks anew when one has failed. If one had refused to train into a folder that
holds an earlier run, the next attempt must refuse as well, though it was never told to resume.
"""

import json
import os
from pathlib import Path

from asr.scoring.files import replace_files
from asr.training.distributed import gather, is_first

LAUNCH = ".launch"  # in the run folder: who began or resumed it last


def started_again(run: Path) -> bool:
    """Whether torchrun has started anew what its same launch had begun in the run folder.

    All ranks must call it, in that order with `keep`.
    """
    counts = gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))  # only of who failed
    agents = gather(_agent())
    return any(gather(is_first() and max(counts) > 0 and _began(run, agents)))


def keep(run: Path) -> None:
    """Note, on the first rank, that this launch has the run folder. All ranks must call it."""
    agents = [agent for agent in gather(_agent()) if agent]
    if agents and is_first():
        replace_files(run, {LAUNCH: json.dumps(agents) + "\n"})


def _agent() -> str:
    """The torchrun process of this machine, by the folder that it makes for itself; "" without.

    RUN_ABCDEF/attempt_0/RANK/error.json: its last part is made up at every launch.
    """
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    return str(folders[2]) if len(folders) > 2 else ""


def _began(run: Path, agents: list[str]) -> bool:
    """On one of several machines the agent may be another by now; where none is known, say yes."""
    try:
        there = json.loads((run / LAUNCH).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        there = []
    return not any(agents) or bool(set(there) & set(agents))

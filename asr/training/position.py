"""Where a run stands and what it would draw next: with weights and optimiser, all that resuming
needs.

The schedule is a function of the step, the loader's draws are functions of seed, epoch and
utterance, and bf16 needs no loss scaler, so none of these has a state.
"""

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Position:
    """The place in the corpus, and what was read so far."""

    step: int = 0
    epoch: int = 1
    batch: int = 0  # batches of this epoch that are done
    audio_seconds: float = 0.0
    utterances: int = 0
    broken: int = 0
    train_seconds: float = 0.0  # spent in steps and loading, over all resumes


def position_state(position: Position) -> dict[str, Any]:
    """A Position as plain numbers."""
    return asdict(position)


def random_state() -> dict[str, Any]:
    """All generators of the process: torch's, which dropout draws from, Python's and numpy's.

    Plain numbers and tensors only, so that it can be read back without running code.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (whoever draws from it)
    return {
        "cpu": torch.get_rng_state(),
        "cuda": cuda,
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Back to where random_state was taken."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002

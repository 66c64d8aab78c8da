"""What a training leaves behind, to compare two runs bit for bit."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asr.training.checkpoint import list_checkpoints

FAULTS = ("Traceback", "Exception ignored", "Error in")  # of Python, in what a command prints


def state(run: Path) -> dict[str, object]:
    """The state to compare: flat names to tensors and numbers."""
    folder = list_checkpoints(run)[-1].folder
    training = torch.load(folder / "training.pt", weights_only=True)
    training["position"].pop("train_seconds")  # measured time
    moments = {
        f"adam.{number}.{key}": value
        for number, one in training["optimizer"]["state"].items()
        for key, value in one.items()
    }
    board = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    curves = {
        name: [(point.step, point.value) for point in board.Scalars(name)]
        for name in ("train/nll", "valid/nll", "valid/wer", "train/learning_rate")
    }
    weights = load_file(folder / "model.safetensors")
    return {**weights, **moments, **training["position"], **curves, "r": training["random"]["cpu"]}


def differences(actual: dict[str, object], expected: dict[str, object]) -> list[str]:
    """The names whose values differ between two states."""
    return [
        name
        for name in sorted(actual.keys() | expected.keys())
        if not _same(actual.get(name), expected.get(name))
    ]


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def faults(output: Path) -> list[str]:
    """The lines of a command's output that Python prints for a fault of the program."""
    lines = output.read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith(FAULTS)]

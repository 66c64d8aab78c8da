"""What is kept of a step whose gradient is not finite: enough to look at it again."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from asr.training.checkpoint import WEIGHTS, named_tensors, why_unwritten
from asr.training.distributed import is_first, rank
from asr.training.given import Batch


def keep_evidence(folder: Path, group: Sequence[Batch], objective: nn.Module) -> str:
    """Batches, weights and a report of where the numbers end into the folder; -> a line on it.

    The gradients of the step must still stand in the parameters. Of several ranks each keeps its
    own batches, the first the weights.
    """
    mine = "" if is_first() else f"-rank{rank()}"
    group = [batch for batch in group if len(batch)]  # the others were unreadable, not bad
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if is_first():
            (folder / WEIGHTS).write_bytes(save(named_tensors(objective.model)))
        torch.save([_plain(batch) for batch in group], folder / f"batch{mine}.pt")
        (folder / f"report{mine}.txt").write_text("\n".join(_report(group, objective)) + "\n")
    except (OSError, RuntimeError) as error:  # torch has its own word for a full disk
        return f"The evidence could not be kept: {why_unwritten(error, folder)}."
    return (
        f"To look at it: {folder}/report{mine}.txt names what is not finite; batch{mine}.pt beside "
        f"it (torch.load, weights_only=True) and {WEIGHTS} are what the step was taken with."
    )


def _plain(batch: Any) -> dict[str, Any]:
    """A batch without any class, so that it can be read without running code."""
    whole = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in whole.items() if name != "broken"}


def _report(group: Sequence[Batch], objective: nn.Module) -> Iterable[str]:
    named = list(objective.named_parameters())
    yield _line("weights", [name for name, p in named if not p.isfinite().all()])
    grads = [name for name, p in named if p.grad is not None and not p.grad.isfinite().all()]
    yield _line("gradients", grads)
    for batch in group:
        for name, value in _plain(batch).items():
            if isinstance(value, Tensor) and value.is_floating_point() and len(value):
                rows = value.isfinite().reshape(len(value), -1).all(dim=1).tolist()
                bad = [id for id, fine in zip(batch.ids, rows, strict=True) if not fine]
                yield _line(f"{name} of a batch of {len(batch)}", bad)


def _line(what: str, names: list[str]) -> str:
    return f"{what}: {'not finite: ' + ' '.join(names) if names else 'all finite'}"

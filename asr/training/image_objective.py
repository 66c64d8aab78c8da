"""What the small image tasks minimise: a class's cross-entropy, and DRAW's variational bound.

B images, T glimpses.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.data.images import ImageBatch
from asr.training.objective import Sum


class ClassObjective(nn.Module):
    """Label-smoothed cross-entropy per image."""

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def set_step(self, step: int) -> None:
        """Tell the model which training step, counted from 0, comes next."""
        self.model.set_step(step)

    def forward(self, batch: ImageBatch) -> dict[str, Sum]:
        """-> objective, nats, accuracy."""
        logits = self.model(batch.images).float()
        loss = functional.cross_entropy(
            logits, batch.labels, reduction="sum", label_smoothing=self.label_smoothing
        )
        nats = functional.cross_entropy(logits.detach(), batch.labels, reduction="sum")
        right = (logits.argmax(dim=1) == batch.labels).sum()
        count = torch.tensor(len(batch), device=logits.device)
        return {
            "objective": Sum(loss, count),
            "nats": Sum(nats, count),
            "accuracy": Sum(right, count),
        }


class BoundObjective(nn.Module):
    """The variational bound per image; `nats` is the bound itself, beside its two parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def set_step(self, step: int) -> None:
        """Tell the model which training step, counted from 0, comes next."""
        self.model.set_step(step)

    def forward(self, batch: ImageBatch) -> dict[str, Sum]:
        """-> objective, nats, reconstruction, divergence."""
        reconstruction, divergence = (part.float() for part in self.model(batch.images))
        count = torch.tensor(len(batch), device=reconstruction.device)
        bound = reconstruction.sum() + divergence.sum()
        parts = {"nats": bound, "reconstruction": reconstruction.sum(), "divergence": divergence}
        logged = {name: Sum(total.detach().sum(), count) for name, total in parts.items()}
        return {"objective": Sum(bound, count), **logged}


def bound_of(model: nn.Module, images: Tensor) -> Tensor:
    """The bound of each image on its own, in nats: (B, R, C) -> (B,)."""
    drawing = model(images)
    return drawing.reconstruction + drawing.divergence.sum(dim=1)

"""The weights that are validated, saved and decoded, where they are not those that are trained.

    train.ema           an exponential mean of the weights over the steps (Polyak & Juditsky 1992)
    schedule_free       the average that the optimizer keeps (Defazio et al. 2024)
    batch statistics    of several ranks: their mean

Without any of these, both are the same and nothing is copied.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from asr.training.distributed import gather, rank
from asr.training.optim import is_finite_tensor, kind_of


class EvaluationWeights:
    """The weights of `model` for evaluation, and those in training while it has the former.

    decay: of the exponential mean, None without one. In step t it is at most (1 + t) / (10 + t), so
    that the first weights, which are random, soon have no part in it.
    """

    def __init__(self, model: nn.Module, optimizer: Any, decay: float | None) -> None:
        self.optimizer, self.decay = optimizer, decay
        self.schedule_free = kind_of(optimizer.param_groups[0]) == "schedule_free"
        self.parameters = dict(model.named_parameters())
        self.statistics = {n: b for n, b in model.named_buffers() if n.endswith(_STATISTICS)}
        self.tensors = self.parameters | self.statistics
        self.mean = _copies(self.parameters) if decay is not None else {}
        self.trained: dict[str, Tensor] | None = None  # while the model has the others

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step`, counted from 1, to the exponential mean."""
        if self.decay is not None:
            weight = 1 - min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(self.mean.values()), list(self.parameters.values()), weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model has the weights for evaluation. All ranks must enter and leave it."""
        averages = self._averages()
        self.trained = _copies({name: self.tensors[name] for name in averages})
        try:
            self._set(averages)
            yield
        finally:
            self._set(self.trained)
            self.trained = None

    def state(self) -> list[dict[str, Tensor]]:
        """Within `applied`, on all ranks: the tensors that a resume needs beside the model's.

        On rank 0 an entry for each rank. Parameters, equal on all ranks, are in the first alone.
        """
        trained = {name: tensor.cpu() for name, tensor in sorted((self.trained or {}).items())}
        ranks = gather({name: trained[name] for name in self.statistics if name in trained})
        return [trained, *ranks[1:]]

    def load(self, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        """Resume: the model has the weights for evaluation; `ranks` are from `state`.

        Raises ValueError for weights of another model.
        """
        trained = {**ranks[0], **ranks[min(rank(), len(ranks) - 1)]} if ranks else {}
        for name, tensor in trained.items():
            if name not in self.tensors or not is_finite_tensor(tensor, self.tensors[name].shape):
                raise ValueError(f"trained: {name!r} does not fit the model")
        if self.decay is not None:
            self.mean = _copies(self.parameters)
        self._set(trained)

    @torch.no_grad()
    def _averages(self) -> dict[str, Tensor]:
        averages = dict(self.mean)
        if self.schedule_free and not averages:
            averages = self._schedule_free_average()
        if not self.statistics:
            return averages
        every = gather({name: buffer.cpu() for name, buffer in self.statistics.items()})
        if len(every) > 1:
            names = self.statistics
            averages |= {n: torch.stack([buffers[n] for buffers in every]).mean(0) for n in names}
        return averages

    def _schedule_free_average(self) -> dict[str, Tensor]:
        before = _copies(self.parameters)
        self.optimizer.eval()
        averages = _copies(self.parameters)
        self._set(before)  # not by optimizer.train(), which would round
        for group in self.optimizer.param_groups:
            group["train_mode"] = True
        return averages

    @torch.no_grad()
    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)


_STATISTICS = ("running_mean", "running_var")


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}

"""Deferred weight gradient: one product over all steps of a loop instead of one in each step.

A loop multiplies by the same weight (N, K) in every step. Plain autograd then computes a gradient
of the weight's size in each step and adds them up; with a few rows per step this moves more memory
than the rest of the step. DeferredWeight stores the rows x and dy of each step during the backward
pass instead. _Gather wraps the weight once before the loop, so autograd runs its backward after
that of every step; it returns the gradient as the single product dy^T x over all stored rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asr.kernels.double_backward import needs_operators

Rows = list[tuple[int, Tensor, Tensor]]  # number of the backward pass, x and dy of a step


class DeferredWeight:
    """A weight (N, K) for the length of one loop, or one per utterance, (B, N, K)."""

    def __init__(self, weight: Tensor) -> None:
        self.rows: Rows = []
        learns = torch.is_grad_enabled() and weight.requires_grad
        self.weight = _Gather.apply(weight, self.rows) if learns else weight
        self._matrix = self.weight.detach()

    def linear(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x (..., K) -> x weight^T (..., N), multiplied in the dtype that deferred_linear uses."""
        dtype = dtype or autocast_dtype(x.device.type) or x.dtype
        if torch.is_grad_enabled():
            return _Linear.apply(x.to(dtype), self.weight, self).to(x.dtype)
        return product(x, self.matrix(dtype).mT)

    def add(self, x: Tensor, dy: Tensor) -> None:
        """Stores a step's rows; drops those of an earlier backward pass that did not reach _Gather,
        because it asked for other gradients only.
        """
        now = torch._C._current_graph_task_id()
        if self.rows and self.rows[0][0] != now:
            self.rows.clear()
        self.rows.append((now, x, dy))

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight detached, converted once."""
        if self._matrix.dtype != dtype:
            self._matrix = self.weight.detach().to(dtype)
        return self._matrix


def deferred_linear(
    x: Tensor, weight: Tensor | DeferredWeight, dtype: torch.dtype | None = None
) -> Tensor:
    """x (..., K) times weight (N, K) transposed -> (..., N) of x's dtype.

    Multiplied in `dtype`; None is autocast's dtype where it is enabled, else x's own.
    """
    if isinstance(weight, DeferredWeight):
        return weight.linear(x, dtype)
    dtype = dtype or autocast_dtype(x.device.type)
    return functional.linear(x, weight) if dtype is None else product(x, weight.to(dtype).mT)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on that kind of device, None where it is off or does not exist."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, multiplied in b's dtype, the result in a's."""
    return (a.to(b.dtype) @ b).to(a.dtype)


class _Gather(torch.autograd.Function):
    """The weight itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.dtype = rows, weight.dtype
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, direct: Tensor | None) -> tuple[Tensor | None, None]:
        """direct: the part that a graph of gradients adds, None elsewhere."""
        now = torch._C._current_graph_task_id()
        rows = [(x, dy) for task, x, dy in ctx.rows if task == now]
        ctx.rows.clear()  # backward may run again through the same graph
        if not rows:
            return direct, None
        x, dy = (torch.cat(parts, dim=-2) for parts in zip(*rows, strict=True))
        stored = (dy.mT @ x).to(ctx.dtype)
        return stored if direct is None else stored + direct, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredWeight) -> Tensor:
        """In the dtype of x."""
        ctx.deferred = deferred
        # The weight is saved for its version: changing it in place before backward is an error.
        ctx.save_for_backward(x, weight)
        return x @ deferred.matrix(x.dtype).mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        if needs_operators(dy):  # stored rows would have no graph
            return dy @ weight.to(dy.dtype), (dy.mT @ x).to(weight.dtype), None
        ctx.deferred.add(x, dy)
        return dy @ ctx.deferred.matrix(dy.dtype), None, None

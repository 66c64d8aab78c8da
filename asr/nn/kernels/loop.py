"""A matrix that a loop multiplies by at every step, its gradient one product over all steps.

Autograd alone makes a gradient of the weight's own size in each step and adds them up; with a few
rows per step that moves far more memory than all else that the step does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class LoopWeight:
    """weight (N, K) for the length of one loop, or one for each utterance, (B, N, K)."""

    def __init__(self, weight: Tensor) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []  # of each step backwards: x, gradient of y
        self._pass = -1
        learns = torch.is_grad_enabled() and weight.requires_grad
        self.weight = _Gather.apply(weight, self.rows) if learns else weight
        self._matrix = self.weight.detach()

    def linear(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x (..., K) -> x weight^T (..., N), multiplied in `dtype`."""
        if torch.is_grad_enabled():
            return _Linear.apply(x, self.weight, self, dtype)
        return product(x, self.matrix(dtype).mT)

    def add(self, x: Tensor, dy: Tensor) -> None:
        """A step of the backward pass that runs now.

        A pass before it that asked for other gradients alone has left its steps here.
        """
        now = torch._C._current_graph_task_id()
        if now != self._pass:
            self.rows.clear()
        self._pass = now
        self.rows.append((x, dy))

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight without its history, converted once."""
        if self._matrix.dtype != dtype:
            self._matrix = self.weight.detach().to(dtype)
        return self._matrix


def linear(x: Tensor, weight: Tensor | LoopWeight, dtype: torch.dtype | None = None) -> Tensor:
    """x (..., K) times weight (N, K) transposed -> (..., N) of x's dtype, in a loop or outside.

    Multiplied in `dtype`, else as autocast says, else in x's own.
    """
    if dtype is None and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    if isinstance(weight, LoopWeight):
        return weight.linear(x, dtype or x.dtype)
    return functional.linear(x, weight) if dtype is None else product(x, weight.to(dtype).mT)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, multiplied in b's dtype, the result in a's."""
    return (a.to(b.dtype) @ b).to(a.dtype)


class _Gather(torch.autograd.Function):
    """The weight itself; its backward runs when that of every step has."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.rows, ctx.dtype = rows, weight.dtype
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: None) -> tuple[Tensor, None]:
        x, dy = (torch.cat(parts, dim=-2) for parts in zip(*ctx.rows, strict=True))
        ctx.rows.clear()  # the graph may be gone through again
        return (dy.mT @ x).to(ctx.dtype), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, of: LoopWeight, dtype: torch.dtype) -> Tensor:
        matrix = of.matrix(dtype)
        ctx.of, ctx.dtype = of, dtype
        # The weight is saved for its version: changing it in place before backward is an error.
        ctx.save_for_backward(x.to(matrix.dtype), weight)
        return product(x, matrix.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x, _ = ctx.saved_tensors
        matrix = ctx.of.matrix(ctx.dtype)
        ctx.of.add(x, dy.to(matrix.dtype))
        return product(dy, matrix), None, None, None

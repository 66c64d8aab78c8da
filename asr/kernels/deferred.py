"""Products with a matrix that all steps of a loop share, and their deferred gradient.

A loop multiplies by the same matrix (N, K) in every step: the weights of a decoder's cells, or the
encoder's states, which its attention reads. Plain autograd then computes a gradient of the matrix's
size in each step and adds them up; with a few rows per step this moves more memory than the rest of
the step. LoopMatrix stores the rows x and dy of each step during the backward pass instead. _Gather
wraps the matrix once before the loop, so autograd runs its backward after that of every step; it
returns the gradient as the single product dy^T x over all stored rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asr.kernels.double_backward import needs_operators

Rows = list[tuple[int, Tensor, Tensor]]  # number of the backward pass, x and dy of a step


class LoopMatrix:
    """A matrix (N, K) for the length of one loop, or one per utterance, (B, N, K)."""

    def __init__(self, matrix: Tensor) -> None:
        self.rows: Rows = []
        learns = torch.is_grad_enabled() and matrix.requires_grad
        self.tracked = _Gather.apply(matrix, self.rows) if learns else matrix
        self._converted = self.tracked.detach()

    def linear(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x (..., K) times matrix^T -> (..., N), in the dtype that deferred_linear uses."""
        dtype = dtype or autocast_dtype(x.device.type) or x.dtype
        if torch.is_grad_enabled():
            return _Linear.apply(x.to(dtype), self.tracked, self).to(x.dtype)
        return product(x, self.converted(dtype).mT)

    def add(self, x: Tensor, dy: Tensor) -> None:
        """Stores a step's rows; drops those of an earlier backward pass that did not reach _Gather,
        because it asked for other gradients only.
        """
        now = torch._C._current_graph_task_id()
        if self.rows and self.rows[0][0] != now:
            self.rows.clear()
        self.rows.append((now, x, dy))

    def converted(self, dtype: torch.dtype) -> Tensor:
        """The matrix detached, converted once."""
        if self._converted.dtype != dtype:
            self._converted = self.tracked.detach().to(dtype)
        return self._converted


def deferred_linear(
    x: Tensor, matrix: Tensor | LoopMatrix, dtype: torch.dtype | None = None
) -> Tensor:
    """x (..., K) times matrix (N, K) transposed -> (..., N) of x's dtype.

    Multiplied in `dtype`; None is autocast's dtype where it is enabled, else that of x.
    """
    if isinstance(matrix, LoopMatrix):
        return matrix.linear(x, dtype)
    dtype = dtype or autocast_dtype(x.device.type)
    return functional.linear(x, matrix) if dtype is None else product(x, matrix.to(dtype).mT)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on that kind of device, None where it is off or does not exist."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, multiplied in b's dtype, the result in a's."""
    return (a.to(b.dtype) @ b).to(a.dtype)


class _Gather(torch.autograd.Function):
    """The matrix itself."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.dtype = rows, matrix.dtype
        ctx.set_materialize_grads(False)
        return matrix.view_as(matrix)

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
    def forward(ctx: Any, x: Tensor, tracked: Tensor, matrix: LoopMatrix) -> Tensor:
        """In the dtype of x."""
        ctx.matrix = matrix
        # Saved for its version: changing the matrix in place before backward is an error.
        ctx.save_for_backward(x, tracked)
        return x @ matrix.converted(x.dtype).mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, tracked = ctx.saved_tensors
        if needs_operators(dy):  # stored rows would have no graph
            return dy @ tracked.to(dy.dtype), (dy.mT @ x).to(tracked.dtype), None
        ctx.matrix.add(x, dy)
        return dy @ ctx.matrix.converted(dy.dtype), None, None

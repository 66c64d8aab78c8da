"""Dropout (Srivastava et al. 2014) that is cheap on a CPU.

torch's CPU dropout spends 6 ns an element on its Bernoulli draws, a sixth of a small Transformer's
training step. Here one 64-bit draw serves four elements, 16 bits each: 1 ns, and 2 bytes an element
kept for the backward pass instead of 4. The rate is thereby rounded to a multiple of 2^-16; the
factor 1 / (1 - rate) uses the rounded rate, so the expectation is exact.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_LEVELS = 2**16


def check_rate(name: str, rate: float) -> float:
    """`rate` where it lies in [0, 1); otherwise ValueError names it."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"{name} {rate} is not a rate: it must be at least 0 and below 1")
    return rate


class Dropout(nn.Module):
    """In training, zeroes each element with probability `rate` and scales the others to match."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = check_rate("dropout", rate)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same shape."""
        if not self.training or self.rate == 0.0:
            return x
        if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
            return _CpuDropout.apply(x, self.rate)
        return functional.dropout(x, self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def draw_mask(like: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
    """What dropout multiplies by: 0 with probability `rate`, else 1 / (1 - rate)."""
    return Dropout(rate)(like.new_ones(shape))


class _CpuDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.dropped = min(round(rate * _LEVELS), _LEVELS - 1)  # of all levels
        draws = _draws(x.shape)
        ctx.save_for_backward(draws)
        return _drop(x, draws, ctx.dropped)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _drop(grad, *ctx.saved_tensors, ctx.dropped), None


def _draws(shape: torch.Size) -> Tensor:
    """Uniform int16 of this shape, from torch's own generator."""
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[:count].view(shape)


def _drop(x: Tensor, draws: Tensor, dropped: int) -> Tensor:
    """0 where dropped, else x / (1 - rate)."""
    keep = torch.empty(draws.shape, dtype=x.dtype)
    # Written straight into floats: a boolean mask costs three times as much to make and to apply.
    torch.ge(draws, dropped - _LEVELS // 2, out=keep)
    # The factor comes last, as a number of full precision: within `keep` bf16 would round it.
    return keep.mul_(x).mul_(_LEVELS / (_LEVELS - dropped))

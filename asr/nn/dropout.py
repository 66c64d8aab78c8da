"""Dropout (Srivastava et al. 2014) that is cheap on a CPU, DropHead and LayerDrop.

torch's CPU dropout spends 6 ns per element on its Bernoulli draws, a sixth of a small Transformer's
training step. Here one 64-bit draw is used for four elements, 16 bits each, which takes 1 ns and
saves 2 bytes per element for the backward pass instead of 4. The rate is rounded to a multiple of
2^-16; the factor 1 / (1 - rate) uses the rounded rate, so the expectation is exact.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.kernels import dispatch
from asr.kernels.double_backward import needs_operators

_LEVELS = 2**16


def check_rate(name: str, rate: float) -> float:
    """Return `rate`. Raises ValueError unless it is in [0, 1)."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"{name} {rate} is not a rate: it must be at least 0 and below 1")
    return rate


class Dropout(nn.Module):
    """In training, zeroes each element with probability `rate` and scales the others to match."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = check_rate("dropout", rate)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same shape."""
        if not self.training or self.rate == 0.0:
            return x
        eager = x.device.type == "cpu" and not dispatch.is_traced(x)
        if eager and x.dtype in (torch.float32, torch.bfloat16):
            return _CpuDropout.apply(x, self.rate)
        return functional.dropout(x, self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def draw_mask(like: Tensor, shape: tuple[int, ...], rate: float) -> Tensor | None:
    """Factors of dropout: 0 with probability `rate`, else 1 / (1 - rate); None at rate 0."""
    return Dropout(rate)(like.new_ones(shape)) if rate > 0.0 else None


class _CpuDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.dropped = min(round(rate * _LEVELS), _LEVELS - 1)  # of all levels
        count = x.numel()
        words = torch.empty(-(-count // 4), dtype=torch.int64, device=x.device)
        words.random_(-(2**63), None)
        draws = words.view(torch.int16)[:count].view(x.shape)
        ctx.save_for_backward(draws)
        return _drop(x, draws, ctx.dropped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (draws,) = ctx.saved_tensors
        if needs_operators(grad):
            ones = torch.ones_like(draws, dtype=grad.dtype)
            return grad * _drop(ones, draws, ctx.dropped), None
        return _drop(grad, draws, ctx.dropped), None


def _drop(x: Tensor, draws: Tensor, dropped: int) -> Tensor:
    """0 if dropped, else x / (1 - rate)."""
    keep = torch.empty(draws.shape, dtype=x.dtype, device=x.device)
    # Written directly into floats: making and applying a boolean mask takes three times as long.
    torch.ge(draws, dropped - _LEVELS // 2, out=keep)
    # The factor is applied last, since bf16 would round it within `keep`.
    return keep.mul_(x).mul_(_LEVELS / (_LEVELS - dropped))


class DropHead(nn.Module):
    """Drops whole attention heads in training (Zhou et al. 2020, arXiv:2004.13342).

    Each utterance has a separate mask; kept heads are multiplied by H / kept. If all would be
    dropped, the head with the highest draw is kept.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, heads: Tensor) -> Tensor:
        """heads (B, H, ...) -> the same shape."""
        if not self.training or self.rate == 0.0:
            return heads
        draws = torch.rand(heads.shape[:2], device=heads.device)  # (B, H)
        kept = (draws >= self.rate) | (draws == draws.amax(1, keepdim=True))
        factor = kept * (kept.size(1) / kept.sum(1, keepdim=True))
        return heads * factor.to(heads.dtype).reshape(*kept.shape, *(1,) * (heads.dim() - 2))


class LayerDrop(nn.Module):
    """In training, skips each layer with probability `rate`, for the whole batch.

    Fan, Grave & Joulin 2019, arXiv:1909.11556. Nothing is rescaled.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.draw: Callable[[], float] | None = None  # uniform in [0, 1); None: torch's generator

    def seed(self, *numbers: int) -> None:
        """Draw from a new generator with this seed from now on.

        So processes that train one model together skip the same layers.
        """
        self.draw = np.random.default_rng(numbers).random

    def passing(self, layers: Iterable[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
        """The layers of one pass by number from 1: in training without those that it skips."""
        rate = self.rate if self.training else 0.0
        for number, layer in enumerate(layers, start=1):
            if rate == 0.0 or (self.draw() if self.draw else torch.rand(())) >= rate:
                yield number, layer

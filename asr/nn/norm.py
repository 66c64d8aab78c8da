"""The norms of a Transformer: layer, rms and scale, chosen by name.

    layer   (x - mean(x)) / sqrt(var(x) + eps) * g + b    Ba, Kiros & Hinton 2016
    rms     x / sqrt(mean(x^2) + eps) * g                 Zhang & Sennrich 2019, eq. 4
    scale   g * x / |x|, one g for the whole vector       Nguyen & Salazar 2019, eq. 5

All work on the last dimension, of `size`. Statistics are taken in float32 or better, so that
bf16 activations lose nothing in them.
"""

import math

import torch
from torch import Tensor, nn

EPS = 1e-6  # the Transformer's; the LSTM has its own


class RMSNorm(nn.Module):
    """x (..., size) -> (..., size): divided by its root mean square, with a gain per element."""

    def __init__(self, size: int, eps: float = EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = _at_least_float32(x)
        scaled = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (scaled * self.weight).to(x.dtype)


class ScaleNorm(nn.Module):
    """x (..., size) -> (..., size): brought to length g, which starts at sqrt(size).

    With |x| below eps the output shrinks with x instead of dividing by zero.
    """

    def __init__(self, size: int, eps: float = EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.tensor(math.sqrt(size)))

    def forward(self, x: Tensor) -> Tensor:
        wide = _at_least_float32(x)
        length = (wide.square().sum(-1, keepdim=True) + self.eps**2).sqrt()
        return (wide * (self.weight / length)).to(x.dtype)


def make_norm(kind: str, size: int, eps: float = EPS) -> nn.Module:
    """The norm called `kind` (layer, rms or scale) over a last dimension of `size`.

    Raises ValueError for any other kind.
    """
    kinds = {"layer": nn.LayerNorm, "rms": RMSNorm, "scale": ScaleNorm}
    if kind not in kinds:
        raise ValueError(f"norm {kind!r} is not known; choose one of {', '.join(kinds)}")
    return kinds[kind](size, eps=eps)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

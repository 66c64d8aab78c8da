"""The Transformer's norms (layer, rms, scale) and its word embedding.

    layer   (x - mean(x)) / sqrt(var(x) + eps) * g + b    Ba, Kiros & Hinton 2016
    rms     x / sqrt(mean(x^2) + eps) * g                 Zhang & Sennrich 2019, eq. 4
    scale   g * x / |x|, one g for the whole vector       Nguyen & Salazar 2019, eq. 5

All normalise the last dimension, of `size`. Statistics are computed in float32 or better, so that
bf16 activations lose no precision there.

FixNorm (Nguyen & Chiang 2018; Nguyen & Salazar 2019) uses every embedding row w as w / |w|. Tied to
the output and after a ScaleNorm of gain g, the logits become g cos(h, w).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-6  # the LSTM's norms have others


class RMSNorm(nn.Module):
    """x (..., size) -> (..., size): divided by its root mean square, with a gain per element."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = _at_least_float32(x)
        scaled = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (scaled * self.weight).to(x.dtype)


class ScaleNorm(nn.Module):
    """x (..., size) -> (..., size): rescaled to length g, which starts at sqrt(size).

    With |x| below eps the output shrinks with x instead of dividing by zero.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.tensor(math.sqrt(size)))

    def forward(self, x: Tensor) -> Tensor:
        wide = _at_least_float32(x)
        length = (wide.square().sum(-1, keepdim=True) + self.eps**2).sqrt()
        return (wide * (self.weight / length)).to(x.dtype)


def make_norm(kind: str, size: int, eps: float = EPS) -> nn.Module:
    """The norm called `kind`: layer, rms or scale. Raises ValueError for any other."""
    kinds = {"layer": nn.LayerNorm, "rms": RMSNorm, "scale": ScaleNorm}
    if kind not in kinds:
        raise ValueError(f"norm {kind!r} is not known; choose one of {', '.join(kinds)}")
    return kinds[kind](size, eps=eps)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class WordEmbedding(nn.Module):
    """A row per token; the input is the row times sqrt(E) (Vaswani et al. 2017, section 3.4)."""

    def __init__(self, vocabulary: int, size: int, fixnorm: bool) -> None:
        super().__init__()
        # Rows of length about 1: inputs of unit variance, and tied logits that start moderate.
        self.weight = nn.Parameter(torch.randn(vocabulary, size) * size**-0.5)
        self.fixnorm = fixnorm

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., E)."""
        rows = functional.embedding(tokens, self.weight)
        rows = functional.normalize(rows, dim=-1) if self.fixnorm else rows
        return rows * math.sqrt(rows.size(-1))

    def logits(self, x: Tensor) -> Tensor:
        """The tied output layer, without bias: x (..., E) -> (..., V)."""
        rows = functional.normalize(self.weight, dim=-1) if self.fixnorm else self.weight
        return functional.linear(x, rows)

"""The norms of Transformer and Conformer, and the word embedding.

    layer   (x - mean(x)) / sqrt(var(x) + eps) * g + b    Ba, Kiros & Hinton 2016
    rms     x / sqrt(mean(x^2) + eps) * g                 Zhang & Sennrich 2019, eq. 4
    scale   s * x / |x|                                   Nguyen & Salazar 2019, eq. 5
    bias    s * x / sqrt(mean((x - b)^2) + eps)           Yao et al. 2024 (arXiv:2310.11230), eq. 4
    dyt     tanh(a x) * g + b                             Zhu et al. 2025 (arXiv:2503.10622)
    derf    erf(a x + c) * g + b                          Chen et al. 2025 (arXiv:2512.10938)
    batch   (x - m) / sqrt(v + eps) * g + b               Ioffe & Szegedy 2015

g and b have a value per element; a, c and s are scalars. All except `batch` normalise each vector
of the last dimension (`size` elements) separately; dyt and derf compute no statistics. m and v are
the mean and variance of an element over the valid frames of a batch, so `batch` is only for the
Conformer's convolution. Statistics are computed in float32 or better, so that bf16 activations lose
no precision there.

FixNorm (Nguyen & Chiang 2018; Nguyen & Salazar 2019) uses every embedding row w as w / |w|. Tied to
the output and after a ScaleNorm of gain g, the logits become g cos(h, w).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.config.registered import REGISTERED, RegisteredNorm

EPS = 1e-6  # not that of the LSTM's norms


class RMSNorm(nn.RMSNorm):
    """x (..., size) -> (..., size): x by its root mean square, with a gain per element."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(at_least_float32(x)).to(x.dtype)


class ScaleNorm(nn.Module):
    """x (..., size) -> (..., size): rescaled to length g, which starts at sqrt(size).

    With |x| below eps the output shrinks with x instead of dividing by zero.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.tensor(math.sqrt(size)))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        length = (wide.square().sum(-1, keepdim=True) + self.eps**2).sqrt()
        return (wide * (self.weight / length)).to(x.dtype)


class BiasNorm(nn.Module):
    """x (..., size) -> (..., size): x by the root mean square of x - b.

    The Zipformer's norm; the learned scale is exp(log_scale). Its authors add no eps.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.bias = nn.Parameter(torch.zeros(size))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        power = (wide - self.bias).square().mean(-1, keepdim=True) + self.eps
        return (wide * (power.rsqrt() * self.log_scale.exp())).to(x.dtype)


class DynamicTanh(nn.Module):
    """x (..., size) -> (..., size): DyT, a learned tanh instead of a norm; a starts at 0.5."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        squashed = (self.alpha * at_least_float32(x)).tanh()
        return torch.addcmul(self.bias, squashed, self.weight).to(x.dtype)


class DynamicErf(nn.Module):
    """x (..., size) -> (..., size): Derf, DyT with erf and a learned shift, which starts at 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        squashed = (self.alpha * at_least_float32(x) + self.shift).erf()
        return torch.addcmul(self.bias, squashed, self.weight).to(x.dtype)


class BatchNorm(nn.Module):
    """x (B, T, size) -> (B, T, size): statistics over the valid frames of the batch.

    Evaluation uses an exponential mean of the statistics in training, as nn.BatchNorm1d, so that
    utterances do not influence each other. So does training if `weight` is frozen.
    """

    MOMENTUM = 0.1

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """valid (B, T) bool: the frames in the statistics."""
        wide = at_least_float32(x)
        mean, variance = self.running_mean, self.running_var
        if self.training and self.weight.requires_grad:
            count = valid.sum()
            mean, variance = valid_moments(wide, valid, count)
            self._track(mean.detach(), variance.detach(), count)
        scale = (variance + self.eps).rsqrt() * self.weight
        return ((wide - mean) * scale + self.bias).to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        unbiased = variance * (count / (count - 1).clamp_min(1))
        # A batch without frames changes nothing, nor one of values whose step is skipped.
        sound = (mean.sum() + unbiased.sum()).isfinite() & (count > 0)
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(torch.where(sound, new.to(running), running), self.MOMENTUM)


def valid_moments(x: Tensor, valid: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (size,) of the `count` frames of x (B, T, size) in valid (B, T).

    In two passes over all frames, since selecting the valid ones would wait for the device.
    """
    padding, count = ~valid.unsqueeze(2), count.clamp_min(1)
    mean = x.masked_fill(padding, 0.0).sum((0, 1)) / count
    variance = (x - mean).masked_fill(padding, 0.0).square().sum((0, 1)) / count
    return mean, variance


# Norms with statistics of each vector, and so an eps; squashing functions instead of norms.
ROW_NORMS = {"layer": nn.LayerNorm, "rms": RMSNorm, "scale": ScaleNorm, "bias": BiasNorm}
SQUASHING = {"dyt": DynamicTanh, "derf": DynamicErf}


class RowNorm(nn.Module):
    """x (..., size) -> (..., size) by a registered norm of rows, with a gain and a bias per element
    where it has no weights.
    """

    def __init__(self, norm: Callable[[Tensor], Tensor], size: int, affine: bool) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.ones(size)) if affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.flatten(0, -2)).view_as(x)
        return y if self.weight is None else torch.addcmul(self.bias, y, self.weight)


def register_norm(name: str, make: Callable[[int], Callable[[Tensor], Tensor]]) -> None:
    """Let recipes of this process use a norm by `name`.

    make(size) -> an nn.Module or a function that normalises rows, (N, size) -> (N, size), each by
    itself. `model.norm` and `model.convolution_norm` of Transformer and Conformer can then be
    `name`; and if it has no weights, `norm_kind` of LSTMs. A norm without weights gets a gain and a
    bias per element, as LayerNorm has.

    A repeated call replaces the norm in models made later, and in all LSTMs: they look the name up
    at every call. Raises ValueError for the name of a norm of this library, and for a norm that
    changes the shape or the type, gives NaN, passes no gradient, or depends on other rows.
    """
    if not name.isidentifier() or name in (*ROW_NORMS, *SQUASHING, "batch"):
        raise ValueError(f"norm {name!r}: must be an identifier that no norm of this library has")
    size = 960  # which many numbers of groups divide
    x = torch.linspace(-3, 5, 7 * size).sin().view(7, size).requires_grad_()
    try:
        norm = make(size)
        y = norm(x)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"norm {name!r}: make must be a function of the size that gives the norm, "
            f"`lambda size: ...`: {error}"
        ) from error
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(
            f"norm {name!r}: changes {tuple(x.shape)} {x.dtype} to {y.shape} {y.dtype}"
        )
    if not y.isfinite().all():
        raise ValueError(f"norm {name!r}: gives NaN or infinite values")
    if not y.requires_grad:
        raise ValueError(f"norm {name!r}: passes no gradient")
    fault = f"norm {name!r}: a row depends on the other rows of a batch"
    try:
        alone = torch.cat([norm(row) for row in x.split(1)])
    except ValueError as error:  # as nn.BatchNorm1d
        raise ValueError(f"{fault}: {error}") from error
    if not torch.allclose(alone, y, atol=1e-5):
        raise ValueError(fault)
    has_weights = isinstance(norm, nn.Module) and any(True for _ in norm.parameters())
    REGISTERED[name] = RegisteredNorm(make, has_weights, _obstacle_in_lstm(norm, size))


def _obstacle_in_lstm(norm: Callable[[Tensor], Tensor], size: int) -> str | None:
    """Why LSTMs cannot use a norm; their layers share one that is in no layer's state."""
    if isinstance(norm, nn.Module) and norm.state_dict():
        return "has weights or buffers, but an LSTM's norms have the gains of its layer alone"
    zeros = torch.zeros(1, size, requires_grad=True)
    y = norm(zeros)
    (gradient,) = torch.autograd.grad(y.sum(), zeros)
    if y.isfinite().all() and gradient.isfinite().all():
        return None
    return "gives NaN for a row of zeros, the first state of an LSTM: add eps within the root"


def make_norm(kind: str, size: int) -> nn.Module:
    """The norm `kind` of the last dimension. Raises ValueError for an unknown kind."""
    if kind in REGISTERED:
        registered = REGISTERED[kind]
        return RowNorm(registered.make(size), size, affine=not registered.has_weights)
    if kind in SQUASHING:
        return SQUASHING[kind](size)
    if kind not in ROW_NORMS:
        known = ", ".join([*ROW_NORMS, *SQUASHING])
        raise ValueError(f"norm {kind!r} is not known; choose one of {known}")
    return ROW_NORMS[kind](size, eps=EPS)


def at_least_float32(x: Tensor) -> Tensor:
    """For statistics and logarithms, which bf16 rounds too much."""
    return x if x.dtype == torch.float64 else x.float()


class WordEmbedding(nn.Module):
    """A row per token; the input is the row times sqrt(E) (Vaswani et al. 2017, section 3.4)."""

    def __init__(self, vocabulary: int, size: int, fixnorm: bool) -> None:
        super().__init__()
        # Rows of length near 1: inputs of unit variance, and tied logits that start moderate.
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

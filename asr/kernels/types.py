"""Arguments and results of the kernels: what the models fill in and every backend reads.

Legend: B utterances, K hypotheses per utterance, T frames, U tokens, I input size, H hidden size,
E encoder size, M embedding size, A attention size, D directions, L layers.
The gates have nn.LSTM's order i, f, g, o along a dimension of 4H.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asr.kernels.deferred import DeferredWeight

State = tuple[Tensor, Tensor]  # h and c, (B, H) each

NORMS = ("none", "ba", "raw", "thesis", "per_gate", "cell")
# What the gates' norm takes, as in cell.h and triton_step.py. 0: nothing; 1: each product; 2: their
# sum, gate by gate.
MODES = {"none": 0, "cell": 0, "ba": 1, "raw": 1, "thesis": 1, "per_gate": 2}

# Each paper's or code's own eps (docs/normalization.md); per_gate's TensorFlow original used 1e-12.
DEFAULT_EPS = {"none": 0.0, "ba": 1e-5, "raw": 1e-3, "thesis": 1e-3, "per_gate": 1e-5, "cell": 1e-5}


class LSTMOptions(NamedTuple):
    """Which LSTM: the norm, its eps, and whether rows without any variance are guarded.

    guard: a row of exactly zero variance is normalised to 0 and passes no gradient. The true
    gradient there is 1/sqrt(eps), which overflows when it is multiplied over some silent frames;
    near such a row it is just as large, so the guarded gradient jumps at that one point. The C++
    kernel also guards rows whose spread is rounding, at most 4.8e-7 of the mean (float64: 8.9e-16).
    precision: the dtype of the matrix products, "fp32" (the weights' own) or "bf16".
    """

    norm: str
    eps: float
    guard: bool = True
    precision: str = "fp32"

    def product_dtype(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which matrices of dtype `own` are multiplied."""
        return torch.bfloat16 if self.precision == "bf16" and own == torch.float32 else own


def make_setting(norm: str, eps: float | None, zero_variance: str, precision: str) -> LSTMOptions:
    """Checked options. Raises ValueError naming the value that is not known."""
    for name, value, allowed in (
        ("norm", norm, NORMS),
        ("zero_variance", zero_variance, ("guard", "raw")),
        ("precision", precision, ("fp32", "bf16")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} {value!r} is not known; choose one of {', '.join(allowed)}")
    if eps is not None and eps < 0:
        raise ValueError(f"eps is {eps}; it must not be negative")
    chosen = DEFAULT_EPS[norm] if eps is None else eps
    return LSTMOptions(norm, chosen, zero_variance == "guard", precision)


class Weights(NamedTuple):
    """One direction of one layer. Both biases are added after the norms, as one sum."""

    weight_ih: Tensor | DeferredWeight  # (4H, I)
    weight_hh: Tensor | DeferredWeight  # (4H, H)
    bias_ih: Tensor  # (4H,)
    bias_hh: Tensor  # (4H,)
    gain_ih: Tensor | None = None  # (4H,)  on LN(W_x x): ba
    gain_hh: Tensor | None = None  # (4H,)  on LN(W_h h): ba
    gain_gates: Tensor | None = None  # (4H,)  on each gate's LN(W_x x + W_h h): per_gate
    gain_c: Tensor | None = None  # (H,)   on LN(c): all but none
    bias_c: Tensor | None = None  # (H,)


def weight_shapes(norm: str, input_size: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that `norm` has, in the order of Weights."""
    gates = 4 * hidden_size
    gains = {"ba": ("gain_ih", "gain_hh"), "per_gate": ("gain_gates",)}
    shapes = {"weight_ih": (gates, input_size), "weight_hh": (gates, hidden_size)}
    shapes |= dict.fromkeys(("bias_ih", "bias_hh", *gains.get(norm, ())), (gates,))
    if norm != "none":
        shapes |= {"gain_c": (hidden_size,), "bias_c": (hidden_size,)}
    return shapes


def check_shape(name: str, part: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError where a part has another shape. C++ would not notice."""
    if part.shape != expected:
        raise ValueError(f"{name} has shape {tuple(part.shape)}; expected {expected}")


class LayerInput(NamedTuple):
    """The input of one layer. lengths: B frame counts on the CPU, None where all are T."""

    x: Tensor  # (B, T, I)
    lengths: list[int] | None
    h: Tensor  # (D, B, H)  the initial state
    c: Tensor  # (D, B, H)
    mask: Tensor | None  # (D, B, H)  recurrent dropout: factors of the candidate g


class LayerOutput(NamedTuple):
    """The output of one layer: zero in padded frames; h, c at each utterance's last frame."""

    output: Tensor  # (B, T, D * H)
    h: Tensor  # (D, B, H)
    c: Tensor  # (D, B, H)


class AttentionInput(NamedTuple):
    """One attention step (asr/nn/attention.py): C filters of W taps over the past weights."""

    keys: Tensor  # (B, T, A)
    query: Tensor  # (B, K, A)  projected
    v: Tensor | None  # (1, A), None in dot-product attention
    past_weights: Tensor  # (B, K, T)
    past_total: Tensor  # (B, K, T)
    place: Tensor | None = None  # (A, C), None without location
    conv: Tensor | None = None  # (C, 2, W), None without location


class DecoderInput(NamedTuple):
    """What a LAS decoder reads along given tokens, and the weights of its attention."""

    embedded: Tensor  # (U, B, M)
    states: Tensor  # (B, T, E)
    keys: Tensor  # (B, T, A)
    weight_query: Tensor  # (A, H)
    v: Tensor  # (1, A)
    place: Tensor | None  # (A, C), None without location
    conv: Tensor | None  # (C, 2, W), None without location


class DecoderConstants(NamedTuple):
    """The decoder's arguments that have no gradient."""

    setting: LSTMOptions
    valid: Tensor  # (B, T)
    first: Tensor  # (B, T)  attention weights before the first step
    masks: tuple[Tensor | None, ...]  # recurrent dropout, (B, H) per layer
    keep: Tensor | None  # (L, U, B, H)  dropout: factors of each layer's h


class DecoderOutput(NamedTuple):
    """All steps: the last layer's h after dropout, the context vectors, the attention weights."""

    output: Tensor  # (U, B, H)
    context: Tensor  # (U, B, E)
    weights: Tensor  # (U, B, T)

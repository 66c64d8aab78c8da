"""What every backend of the LayerNorm-LSTM is given: a setting, weights and a batch.

Legend: B utterances, T frames, I input size, H hidden size, D directions.
The gates stand in nn.LSTM's order i, f, g, o along a dimension of 4H.
"""

from typing import NamedTuple

from torch import Tensor

from asr.nn.kernels.loop import LoopWeight

NORMS = ("none", "ba", "raw", "thesis", "per_gate", "cell")

# Each paper's or code's own eps (DESIGN.md); per_gate's TensorFlow original used 1e-12.
DEFAULT_EPS = {"none": 0.0, "ba": 1e-5, "raw": 1e-3, "thesis": 1e-3, "per_gate": 1e-5, "cell": 1e-5}


class Setting(NamedTuple):
    """Which LSTM: the norm, its eps, and whether rows without any variance are guarded.

    guard: a row of exactly zero variance is normalised to 0 and passes no gradient. The true
    gradient there is 1/sqrt(eps), which repeated over some silent frames overflows; next to such
    a row it is just as large, so the guarded gradient jumps at that one point. The C++ kernel
    also guards rows whose spread is rounding, at most 4.8e-7 of the mean (in float64 8.9e-16).
    precision: the dtype of the matrix products, "fp32" (the weights' own) or "bf16".
    """

    norm: str
    eps: float
    guard: bool = True
    precision: str = "fp32"


class Weights(NamedTuple):
    """One direction of one layer. Both biases are added after the norms, as one sum."""

    weight_ih: Tensor | LoopWeight  # (4H, I)
    weight_hh: Tensor | LoopWeight  # (4H, H)
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
    shapes: dict[str, tuple[int, ...]] = {
        "weight_ih": (gates, input_size),
        "weight_hh": (gates, hidden_size),
        "bias_ih": (gates,),
        "bias_hh": (gates,),
    }
    gains = {"ba": ("gain_ih", "gain_hh"), "per_gate": ("gain_gates",)}
    shapes |= dict.fromkeys(gains.get(norm, ()), (gates,))
    if norm != "none":
        shapes |= {"gain_c": (hidden_size,), "bias_c": (hidden_size,)}
    return shapes


class Batch(NamedTuple):
    """The input of one layer. lengths: B frame counts on the CPU, None where all are T."""

    x: Tensor  # (B, T, I)
    lengths: list[int] | None
    h: Tensor  # (D, B, H)  the initial state
    c: Tensor  # (D, B, H)
    mask: Tensor | None  # (D, B, H)  recurrent dropout: what the candidate g is multiplied by


class Result(NamedTuple):
    """The output of one layer: zero in padded frames; h, c at each utterance's last frame."""

    output: Tensor  # (B, T, D * H)
    h: Tensor  # (D, B, H)
    c: Tensor  # (D, B, H)

"""Arguments and results of the kernels: what the models fill in and every backend reads.

Legend: B utterances, K hypotheses per utterance, T frames, U tokens, I input size, H hidden size,
E encoder size, M embedding size, A attention size, D directions, L layers.
The gates have nn.LSTM's order i, f, g, o along a dimension of 4H.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asr.kernels.deferred import DeferredWeight

State = tuple[Tensor, Tensor]  # h and c, (B, H) each


class NamedCell(NamedTuple):
    """What a value of `norm` fixes: the fields of LSTMOptions with these names."""

    gates: str  # a key of MODES, or another word, which `reference` alone computes
    affine: bool
    cell_norm: str
    eps: float
    swap: bool = False


# Each paper's or code's own eps (docs/normalization.md); per_gate's TensorFlow original used 1e-12.
CELLS = {
    "none": NamedCell("none", affine=False, cell_norm="none", eps=0.0),
    "ba": NamedCell("split", affine=True, cell_norm="output", eps=1e-5),
    "raw": NamedCell("split", affine=False, cell_norm="output", eps=1e-3),
    "thesis": NamedCell("split", affine=False, cell_norm="output", eps=1e-3, swap=True),
    "per_gate": NamedCell("per_gate", affine=True, cell_norm="carried", eps=1e-5),
    "cell": NamedCell("none", affine=False, cell_norm="output", eps=1e-5),
    "joined": NamedCell("joined", affine=True, cell_norm="none", eps=1e-5),
}
CELL_NORMS = ("none", "output", "carried", "state")
# The values of `gates` that all backends compute, as numbers in cell.h and triton_step.py. A layer
# with another one runs on `reference`.
MODES = {"none": 0, "split": 1, "per_gate": 2, "joined": 3}


class LSTMOptions(NamedTuple):
    """Which LSTM: what each of its norms takes, and how a norm and a matrix product are computed.

    guard: a row of exactly zero variance (rms: of zeros) is normalised to 0 and passes no gradient.
    The true gradient there is 1/sqrt(eps), which overflows when it is multiplied over some silent
    frames; near such a row it is just as large, so the guarded gradient jumps at that one point.
    The C++ kernel also guards rows whose spread is rounding, at most 4.8e-7 of the mean (float64:
    8.9e-16).
    """

    norm: str  # a name in CELLS, for messages: backends read the other fields
    gates: str  # the gates' norms take: none; split: each product; joined: their sum; per_gate
    affine: bool  # the gates' norms have gains
    swap: bool  # a step reads h as its cell and c as its h
    cell_norm: str  # none; output: tanh reads N(c); carried: N(c) is the state too; state: only so
    hidden_norm: bool  # h is N(o tanh(c)), as output and as recurrent input
    norm_kind: str  # layer; rms: no mean is subtracted
    eps: float
    guard: bool = True
    precision: str = "fp32"  # dtype of the matrix products: fp32 (the weights' own) or bf16

    @property
    def norms_sum(self) -> bool:
        """Do the gates' norms take W_x x + W_h h?"""
        return self.gates in ("joined", "per_gate")

    @property
    def norms_cell(self) -> bool:
        """Is there a norm of c?"""
        return self.cell_norm != "none"

    @property
    def shows_norm(self) -> bool:
        """Does the output read the normed c?"""
        return self.cell_norm in ("output", "carried")

    @property
    def carries_norm(self) -> bool:
        """Is the normed c the next cell state?"""
        return self.cell_norm in ("carried", "state")

    def product_dtype(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which matrices of dtype `own` are multiplied."""
        return torch.bfloat16 if self.precision == "bf16" and own == torch.float32 else own


def make_setting(
    norm: str,
    eps: float | None,
    zero_variance: str,
    precision: str,
    cell_norm: str | None,
    hidden_norm: bool,
    norm_kind: str,
) -> LSTMOptions:
    """Options of known values; None is what `norm` fixes. ValueError names one not known."""
    for name, value, allowed in (
        ("norm", norm, tuple(CELLS)),
        ("cell_norm", "none" if cell_norm is None else cell_norm, CELL_NORMS),
        ("norm_kind", norm_kind, ("layer", "rms")),
        ("zero_variance", zero_variance, ("guard", "raw")),
        ("precision", precision, ("fp32", "bf16")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} {value!r} is not known; choose one of {', '.join(allowed)}")
    if eps is not None and not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps}; it must be above 0 and finite")
    own = CELLS[norm]
    return LSTMOptions(
        norm=norm,
        gates=own.gates,
        affine=own.affine,
        swap=own.swap,
        cell_norm=own.cell_norm if cell_norm is None else cell_norm,
        hidden_norm=hidden_norm,
        norm_kind=norm_kind,
        eps=own.eps if eps is None else eps,
        guard=zero_variance == "guard",
        precision=precision,
    )


class Weights(NamedTuple):
    """One direction of one layer. Both biases are added after the norms, as one sum."""

    weight_ih: Tensor | DeferredWeight  # (4H, I)
    weight_hh: Tensor | DeferredWeight  # (4H, H)
    bias_ih: Tensor  # (4H,)
    bias_hh: Tensor  # (4H,)
    gain_ih: Tensor | None = None  # (4H,)  on N(W_x x): split gates
    gain_hh: Tensor | None = None  # (4H,)  on N(W_h h): split gates
    gain_gates: Tensor | None = None  # (4H,)  on N(W_x x + W_h h), of all gates or of each
    gain_c: Tensor | None = None  # (H,)   on N(c)
    bias_c: Tensor | None = None  # (H,)
    gain_hidden: Tensor | None = None  # (H,)   on N(h)
    bias_hidden: Tensor | None = None  # (H,)

    @property
    def gain_recurrent(self) -> Tensor | None:
        """The gain (4H,) of the norm that reads W_h h, alone or in a sum."""
        return self.gain_hh if self.gain_gates is None else self.gain_gates


def weight_shapes(
    setting: LSTMOptions, input_size: int, hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the setting has, in the order of Weights."""
    gates = 4 * hidden_size
    gains = ("gain_gates",) if setting.norms_sum else ("gain_ih", "gain_hh")
    shapes = {"weight_ih": (gates, input_size), "weight_hh": (gates, hidden_size)}
    shapes |= dict.fromkeys(("bias_ih", "bias_hh"), (gates,))
    shapes |= dict.fromkeys(gains if setting.affine else (), (gates,))
    shapes |= dict.fromkeys(("gain_c", "bias_c") if setting.norms_cell else (), (hidden_size,))
    own = ("gain_hidden", "bias_hidden") if setting.hidden_norm else ()
    return shapes | dict.fromkeys(own, (hidden_size,))


def check_shape(name: str, part: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError where a part has another shape. C++ would not notice."""
    if part.shape != expected:
        raise ValueError(f"{name} has shape {tuple(part.shape)}; expected {expected}")


def check_lengths(lengths: Tensor | Sequence[int], B: int, T: int) -> list[int] | None:
    """Frame counts as a list, None where all are T. ValueError unless there are B in 1 .. T."""
    counts = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if len(counts) != B:
        raise ValueError(f"{len(counts)} lengths for a batch of {B} utterances")
    for row, count in enumerate(counts):
        if not 1 <= count <= T:
            raise ValueError(f"length {count} of utterance {row} is not within 1 to {T} frames")
    return None if min(counts, default=T) == T else [int(count) for count in counts]


class LayerInput(NamedTuple):
    """The input of one layer. lengths: B frame counts, None where all are T; a tensor in a graph
    that torch records, where their values are not known.
    """

    x: Tensor  # (B, T, I)
    lengths: list[int] | Tensor | None
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

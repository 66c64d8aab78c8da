"""Arguments and results of the kernels: what the models fill in and every backend reads.

Legend: B utterances, K hypotheses per utterance, T frames, U tokens, I input size, H hidden size,
E encoder size, M embedding size, A attention size, D directions, L layers.
The gates have nn.LSTM's order i, f, g, o along a dimension of 4H.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.kernels.deferred import LoopMatrix

State = tuple[Tensor, Tensor]  # h and c, (B, H) each


# The values of `gates` that all backends compute, as numbers in cell.h and triton_step.py. A layer
# with another one runs on `reference`.
MODES = {"none": 0, "split": 1, "per_gate": 2, "joined": 3}


class Weights(NamedTuple):
    """One direction of one layer. Both biases are added after the norms, as one sum."""

    weight_ih: Tensor | LoopMatrix  # (4H, I)
    weight_hh: Tensor | LoopMatrix  # (4H, H)
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
    settings: CellSettings, input_size: int, hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the settings have, in the order of Weights."""
    gates = 4 * hidden_size
    gains = ("gain_gates",) if settings.norms_sum else ("gain_ih", "gain_hh")
    shapes = {"weight_ih": (gates, input_size), "weight_hh": (gates, hidden_size)}
    shapes |= dict.fromkeys(("bias_ih", "bias_hh"), (gates,))
    shapes |= dict.fromkeys(gains if settings.affine else (), (gates,))
    shapes |= dict.fromkeys(("gain_c", "bias_c") if settings.norms_cell else (), (hidden_size,))
    of_hidden = ("gain_hidden", "bias_hidden") if settings.hidden_norm else ()
    return shapes | dict.fromkeys(of_hidden, (hidden_size,))


def check_shape(name: str, part: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError where a part has another shape. C++ would not notice."""
    if part.shape != expected:
        raise ValueError(f"{name} has shape {tuple(part.shape)}; expected {expected}")


def check_weight(name: str, weight: Tensor, expected: tuple[int, ...], like: Tensor) -> None:
    """As check_shape, also for another dtype or device than that of `like`."""
    check_shape(name, weight, expected)
    if weight.dtype != like.dtype or weight.device != like.device:
        found, expected = (f"{t.dtype} on {t.device}" for t in (weight, like))
        raise ValueError(f"{name} is {found}; expected {expected}")


def check_weights(weights: Weights, settings: CellSettings, input_size: int, hidden: int) -> None:
    """Raises ValueError unless a cell has the settings' weights, as check_weight."""
    shapes = weight_shapes(settings, input_size, hidden)
    for name, weight in weights._asdict().items():
        if (weight is None) != (name not in shapes):
            verb = "is missing" if weight is None else "does not belong to these settings"
            raise ValueError(f"{name} {verb}: {settings}")
        if weight is not None:
            check_weight(name, weight, shapes[name], weights.weight_hh)


def check_lengths(lengths: Tensor | Sequence[int], B: int, T: int) -> list[int] | None:
    """Frame counts as a list, None where all are T. ValueError unless there are B in 1 .. T."""
    flags = isinstance(lengths, Tensor) and lengths.dtype == torch.bool
    try:
        given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        counts = [operator.index(None if flags else count) for count in given]
    except TypeError:  # fractions (SpeechBrain has parts of the longest), rows, one number
        raise ValueError("lengths must be (B,) whole numbers of frames") from None
    if len(counts) != B:
        raise ValueError(f"{len(counts)} lengths for a batch of {B} utterances")
    for row, count in enumerate(counts):
        if not 1 <= count <= T:
            raise ValueError(f"length {count} of utterance {row} is not within 1 to {T} frames")
    return None if min(counts, default=T) == T else counts


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
    weight_loc: Tensor | None = None  # (A, C), None without location
    conv: Tensor | None = None  # (C, 2, W), None without location


class DecoderInput(NamedTuple):
    """What a LAS decoder reads along known tokens, and the weights of its attention."""

    embedded: Tensor  # (U, B, M)
    states: Tensor  # (B, T, E)
    keys: Tensor  # (B, T, A)
    weight_query: Tensor  # (A, H)
    v: Tensor | None  # (1, A), None in dot-product attention
    weight_loc: Tensor | None  # (A, C), None without location
    conv: Tensor | None  # (C, 2, W), None without location


class DecoderConstants(NamedTuple):
    """The decoder's arguments that have no gradient."""

    valid: Tensor  # (B, T)
    first: Tensor  # (B, T)  attention weights before the first step
    masks: tuple[Tensor | None, ...]  # recurrent dropout, (B, H) per layer
    keep: Tensor | None  # (L, U, B, H)  dropout: factors of each layer's h


class DecoderOutput(NamedTuple):
    """All steps: the last layer's h after dropout, the context vectors, the attention weights."""

    output: Tensor  # (U, B, H)
    context: Tensor  # (U, B, E)
    weights: Tensor  # (U, B, T)


def check_decoder(inputs: DecoderInput, cells: list[Weights], constants: DecoderConstants) -> None:
    """Raises ValueError for a wrong shape or dtype. Kernels would not notice."""
    (U, B, M), (_, T, E) = inputs.embedded.shape, inputs.states.shape
    A, H = inputs.weight_query.shape
    C, _, W = (1, 2, 1) if inputs.conv is None else inputs.conv.shape
    shapes = [(U, B, M), (B, T, E), (B, T, A), (A, H), (1, A), (A, C), (C, 2, W)]
    parts = [*zip(DecoderInput._fields, inputs, shapes, strict=True)]
    parts += [("valid", constants.valid, (B, T)), ("first", constants.first, (B, T))]
    parts.append(("keep", constants.keep, (len(cells), U, B, H)))
    for index, (w, mask) in enumerate(zip(cells, constants.masks, strict=True)):
        parts.append((f"weight_ih of cell {index}", w.weight_ih, (4 * H, H if index else M + E)))
        parts.append((f"weight_hh of cell {index}", w.weight_hh, (4 * H, H)))
        parts.append((f"mask of cell {index}", mask, (B, H)))
    for name, tensor, shape in parts:
        if tensor is None:
            continue
        check_shape(name, tensor, shape)
        dtype = torch.bool if name == "valid" else inputs.states.dtype
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}; expected {dtype}")
        if 0 in shape:
            raise ValueError(f"{name} has shape {shape}: no tokens or no frames")

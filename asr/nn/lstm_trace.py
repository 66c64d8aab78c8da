"""A LayerNorm-LSTM step by step, with all that its backends keep to themselves.

For looking inside only: what enters each norm, the gates before their activation, the state after
each step, on autograd's graph. The states are the reference backend's own; dropout is left out.

Legend: B utterances, T frames, I input size, H hidden size, D directions, N rows that still run.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asr.nn.kernels import reference
from asr.nn.kernels.problem import Batch, Setting, Weights
from asr.nn.lstm import LayerNormLSTM, check_lengths
from asr.nn.lstm_cell import State, get_weights

GATES = ("input", "forget", "candidate", "output")  # in the order of their 4H pre-activations


class Look(NamedTuple):
    """Inside one time step."""

    gates: Tensor  # (N, 4H)  pre-activations, after norms and biases
    entering: dict[str, Tensor]  # norm -> the rows (M, size) that it was given


class Frame(NamedTuple):
    """One time step of one direction of one layer."""

    place: str  # "l0" or "l0_reverse", as the weights are called
    time: int  # the frame read; a reverse run of shorter utterances stands elsewhere in those
    look: Look
    x: Tensor  # (N, I)  what it read; of all tensors here its gradient is found last
    h: Tensor  # (N, H)  after the step
    c: Tensor  # (N, H)


def look(x: Tensor, state: State, weights: Weights, setting: Setting) -> Look:
    """x (N, I), the state before the step -> the inside of kernels/reference.py's step."""
    h, c = reversed(state) if setting.norm == "thesis" else state
    from_x = functional.linear(x, weights.weight_ih)
    from_h = functional.linear(h, weights.weight_hh)
    bias = weights.bias_ih + weights.bias_hh
    entering = {}
    if setting.norm == "per_gate":
        entering = {"gates": (from_x + from_h).unflatten(-1, (4, -1))}  # (N, 4, H)
        gates = _norm(entering["gates"], setting).flatten(-2) * weights.gain_gates + bias
    elif setting.norm in ("ba", "raw", "thesis"):
        entering = {"x": from_x, "h": from_h}
        normed_x, normed_h = _norm(from_x, setting), _norm(from_h, setting)
        if weights.gain_ih is not None and weights.gain_hh is not None:
            normed_x, normed_h = normed_x * weights.gain_ih, normed_h * weights.gain_hh
        gates = normed_x + normed_h + bias
    else:
        gates = from_x + from_h + bias
    if setting.norm != "none":
        i, f, g, _ = gates.chunk(4, dim=-1)
        entering["c"] = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return Look(gates, {name: rows.flatten(0, -2) for name, rows in entering.items()})


def trace(
    lstm: LayerNormLSTM, x: Tensor, lengths: Tensor | None = None, state: State | None = None
) -> tuple[Tensor, list[Frame]]:
    """What lstm(x, lengths, state) computes, without dropout -> output (B, T, D * H), all frames.

    The frames stand in the order in which they are computed.
    """
    B, D = x.shape[0], lstm.directions
    counts = None if lengths is None else check_lengths(lengths, B, x.shape[1])
    zeros = x.new_zeros(lstm.num_layers * D, B, lstm.hidden_size)
    h, c = (zeros, zeros) if state is None else state
    frames: list[Frame] = []
    for layer in range(lstm.num_layers):
        now = slice(layer * D, (layer + 1) * D)
        batch = Batch(x, counts, h[now], c[now], None)
        outputs = []
        for d, place in enumerate([f"l{layer}", f"l{layer}_reverse"][:D]):
            weights = get_weights(lstm, lstm.setting.norm, f"_{place}")
            found = list(_direction(batch, d, place, weights, lstm.setting))
            outputs.append(_output(batch, d, found))
            frames += found
        x = torch.cat(outputs, dim=-1)
    return x, frames


def _direction(
    batch: Batch, d: int, place: str, weights: Weights, setting: Setting
) -> Iterator[Frame]:
    packed = reference.pack(batch, reverse=d == 1)
    rows = batch.x.flatten(0, 1)[packed.frames]
    h, c = batch.h[d][packed.order], batch.c[d][packed.order]
    start = 0
    for time, size in enumerate(packed.sizes):
        x, before = rows[start : start + size], (h[:size], c[:size])
        inside = look(x, before, weights, setting)
        h, c = reference.step(x, before, None, weights, setting)
        yield Frame(place, len(packed.sizes) - 1 - time if d else time, inside, x, h, c)
        start += size


def _output(batch: Batch, d: int, frames: list[Frame]) -> Tensor:
    B, T, _ = batch.x.shape
    outputs = torch.cat([frame.h for frame in frames])
    padded = outputs.new_zeros(B * T, outputs.shape[-1])
    places = reference.pack(batch, reverse=d == 1).frames
    return padded.index_copy(0, places, outputs).view(B, T, -1)


def _norm(rows: Tensor, setting: Setting) -> Tensor:
    return reference.normalise(rows, setting.eps, setting.guard)

"""Backend "reference": the definition of the LayerNorm-LSTM, differentiated by autograd.

With LN(z) = (z - mean z) / sqrt(var z + eps), the variance biased, and b the sum of both biases:

    none      [i f g o] = W_x x + W_h h + b
    ba        [i f g o] = gx * LN(W_x x) + gh * LN(W_h h) + b          Ba et al. 2016, eq. 20-22
    raw       [i f g o] = LN(W_x x) + LN(W_h h) + b
    thesis    raw, reading (h, c) swapped, as the code of that thesis does (docs/normalization.md)
    per_gate  each gate = g * LN(W_x x + W_h h) + b                    TensorFlow contrib's cell
    cell      [i f g o] = W_x x + W_h h + b

    c' = sigmoid(f) * c + sigmoid(i) * tanh(g) * mask,   h' = sigmoid(o) * tanh(C)

where C is c' (none) or gc * LN(c') + bc (the others); in per_gate C is also the next cell state.

Padding is never read: the valid frames are packed by time step, the longest utterance first.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asr.kernels.deferred import deferred_linear
from asr.kernels.types import LayerInput, LayerOutput, LSTMOptions, State, Weights


def normalise(x: Tensor, eps: float, guard: bool) -> Tensor:
    """LN over the last dimension, no gain: x (..., N) -> (..., N)."""
    normed = functional.layer_norm(x, x.shape[-1:], eps=eps)
    if not guard:
        return normed
    flat = (x == x[..., :1]).all(dim=-1, keepdim=True)
    return normed.masked_fill(flat, 0.0)


def input_part(product: Tensor, weights: Weights, setting: LSTMOptions) -> Tensor:
    """W_x x (..., 4H) -> the part of the gates that depends on the input only."""
    if setting.norm == "per_gate":  # its norm and bias follow the sum
        return product
    if setting.norm in ("ba", "raw", "thesis"):
        product = normalise(product, setting.eps, setting.guard)
    if weights.gain_ih is not None:
        product = product * weights.gain_ih
    return product + (weights.bias_ih + weights.bias_hh)


def add_state(gates: Tensor, h: Tensor, weights: Weights, setting: LSTMOptions) -> Tensor:
    """The result of input_part and h (B, H) as W_h reads it -> all pre-activations (B, 4H)."""
    pre = deferred_linear(h, weights.weight_hh)
    if setting.norm == "per_gate":
        pre = (gates + pre).unflatten(-1, (4, -1))
        normed = normalise(pre, setting.eps, setting.guard).flatten(-2)
        return normed * weights.gain_gates + (weights.bias_ih + weights.bias_hh)
    if setting.norm in ("ba", "raw", "thesis"):
        pre = normalise(pre, setting.eps, setting.guard)
    return gates + (pre if weights.gain_hh is None else pre * weights.gain_hh)


def _recur(
    gates: Tensor, state: State, mask: Tensor | None, weights: Weights, setting: LSTMOptions
) -> State:
    h, c = reversed(state) if setting.norm == "thesis" else state
    i, f, g, o = add_state(gates, h, weights, setting).chunk(4, dim=-1)  # each (B, H)
    candidate = g.tanh() if mask is None else g.tanh() * mask
    c = f.sigmoid() * c + i.sigmoid() * candidate
    shown = c
    if setting.norm != "none":
        shown = normalise(c, setting.eps, setting.guard) * weights.gain_c + weights.bias_c
    return o.sigmoid() * shown.tanh(), shown if setting.norm == "per_gate" else c


def step(
    x: Tensor, state: State, mask: Tensor | None, weights: Weights, setting: LSTMOptions
) -> State:
    """One time step: x (B, I), state of two (B, H) -> the next state."""
    gates = input_part(deferred_linear(x, weights.weight_ih), weights, setting)
    return _recur(gates, state, mask, weights, setting)


class Packed(NamedTuple):
    """The valid frames of a batch in the order in which one direction reads them."""

    order: Tensor  # (B,)  the utterances, longest first
    frames: Tensor  # (N,)  valid frames as rows of (B * T), by time step, then by `order`
    sizes: list[int]  # utterances that have a frame in each time step


def pack(batch: LayerInput, reverse: bool) -> Packed:
    """The order in which one direction reads the valid frames."""
    B, T, _ = batch.x.shape
    lengths = torch.tensor(batch.lengths or [T] * B)
    order = lengths.argsort(descending=True, stable=True)
    lengths = lengths[order]
    times = torch.arange(int(lengths[0]))[:, None]
    running = times < lengths  # (T, B)
    at = lengths - 1 - times if reverse else times.expand_as(running)
    frames = (order * T + at)[running]
    device = batch.x.device
    return Packed(order.to(device), frames.to(device), running.sum(dim=1).tolist())


def run_packed(
    batch: LayerInput, weights: list[Weights], run: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> LayerOutput:
    """run(packed, x, h, c, mask, *weights) for each direction, on packed rows and sorted states.

    x (N, I), the others (B, H) -> output rows (N, H) and the final h and c (B, H).
    """
    B, T, _ = batch.x.shape
    outputs, states = [], []
    for d, w in enumerate(weights):
        packed = pack(batch, reverse=d == 1)
        x = batch.x.flatten(0, 1)[packed.frames]
        mask = None if batch.mask is None else batch.mask[d][packed.order]
        rows, h, c = run(packed, x, batch.h[d][packed.order], batch.c[d][packed.order], mask, *w)
        padded = rows.new_zeros(B * T, rows.shape[-1])
        outputs.append(padded.index_copy(0, packed.frames, rows).view(B, T, -1))
        back = packed.order.argsort()
        states.append((h[back], c[back]))
    h, c = (torch.stack(parts) for parts in zip(*states, strict=True))
    return LayerOutput(torch.cat(outputs, dim=-1), h, c)


def _run_direction(
    setting: LSTMOptions,
    packed: Packed,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    mask: Tensor | None,
    *flat: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = Weights(*flat)
    gates = input_part(deferred_linear(x, weights.weight_ih), weights, setting)  # (N, 4H)
    outputs, ended, start = [], [], 0
    for size in packed.sizes:
        ended.append((h[size:], c[size:]))
        now = None if mask is None else mask[:size]
        part = gates[start : start + size]
        h, c = _recur(part, (h[:size], c[:size]), now, weights, setting)
        outputs.append(h)
        start += size
    ended.append((h, c))
    h, c = (torch.cat(parts[::-1]) for parts in zip(*ended, strict=True))
    return torch.cat(outputs), h, c


def layer(batch: LayerInput, weights: list[Weights], setting: LSTMOptions) -> LayerOutput:
    """All directions of one layer, one after the other."""
    return run_packed(batch, weights, functools.partial(_run_direction, setting))

"""The LayerNorm-LSTM written as its definition, differentiated by autograd: judge of all others.

With LN(z) = (z - mean z) / sqrt(var z + eps), the variance biased, b both biases together:

    none      [i f g o] = W_x x + W_h h + b
    ba        [i f g o] = gx * LN(W_x x) + gh * LN(W_h h) + b          Ba et al. 2016, eq. 20-22
    raw       [i f g o] = LN(W_x x) + LN(W_h h) + b
    thesis    raw, reading (h, c) swapped, as the code of that thesis did
    per_gate  each gate = g * LN(W_x x + W_h h) + b                    TensorFlow contrib's cell
    cell      [i f g o] = W_x x + W_h h + b

    c' = sigmoid(f) * c + sigmoid(i) * tanh(g) * mask,   h' = sigmoid(o) * tanh(C)

where C is c' (none) or gc * LN(c') + bc (the others); per_gate carries C on as its state.

Padding never enters: the valid frames are packed, time step by time step, longest first.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asr.nn.kernels.loop import linear
from asr.nn.kernels.problem import Batch, Result, Setting, Weights

State = tuple[Tensor, Tensor]


def layer(batch: Batch, weights: list[Weights], setting: Setting) -> Result:
    """All directions of one layer, one after the other."""
    runs = [_direction(batch, d, w, setting) for d, w in enumerate(weights)]
    outputs, h, c = zip(*runs, strict=True)
    return Result(torch.cat(outputs, dim=-1), torch.stack(h), torch.stack(c))


def step(x: Tensor, state: State, mask: Tensor | None, weights: Weights, setting: Setting) -> State:
    """One time step: x (B, I), state of two (B, H) -> the next state."""
    return _recur(_input_part(x, weights, setting), state, mask, weights, setting)


def normalise(x: Tensor, eps: float, guard: bool) -> Tensor:
    """LN over the last dimension, no gain: x (..., N) -> (..., N)."""
    normed = functional.layer_norm(x, x.shape[-1:], eps=eps)
    if not guard:
        return normed
    flat = (x == x[..., :1]).all(dim=-1, keepdim=True)
    return normed.masked_fill(flat, 0.0)


def _direction(batch: Batch, d: int, weights: Weights, setting: Setting) -> tuple[Tensor, ...]:
    packed = pack(batch, reverse=d == 1)
    B, T, _ = batch.x.shape
    frames = batch.x.flatten(0, 1)[packed.frames]  # (N, I)
    gates = _input_part(frames, weights, setting)  # (N, 4H): one product for all time steps
    h, c = batch.h[d][packed.order], batch.c[d][packed.order]
    mask = None if batch.mask is None else batch.mask[d][packed.order]
    outputs, ended, start = [], [], 0
    for size in packed.sizes:
        ended.append((h[size:], c[size:]))
        now = None if mask is None else mask[:size]
        part = gates[start : start + size]
        h, c = _recur(part, (h[:size], c[:size]), now, weights, setting)
        outputs.append(h)
        start += size
    ended.append((h, c))
    padded = outputs[0].new_zeros(B * T, h.shape[-1])
    output = padded.index_copy(0, packed.frames, torch.cat(outputs)).view(B, T, -1)
    h, c = (torch.cat(parts[::-1])[packed.order.argsort()] for parts in zip(*ended, strict=True))
    return output, h, c


class Packed(NamedTuple):
    """The valid frames of a batch in the order in which one direction reads them."""

    order: Tensor  # (B,)  the utterances, longest first
    frames: Tensor  # (N,)  valid frames as rows of (B * T), by time step, then in that order
    sizes: list[int]  # utterances that are still running in each time step


def pack(batch: Batch, reverse: bool) -> Packed:
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


def _input_part(x: Tensor, weights: Weights, setting: Setting) -> Tensor:
    """All that depends on the input alone: (N, I) -> (N, 4H)."""
    gates = linear(x, weights.weight_ih)
    if setting.norm == "per_gate":  # its norm and so its bias come after the sum
        return gates
    if setting.norm in ("ba", "raw", "thesis"):
        gates = normalise(gates, setting.eps, setting.guard)
    if weights.gain_ih is not None:
        gates = gates * weights.gain_ih
    return gates + (weights.bias_ih + weights.bias_hh)


def _recur(
    gates: Tensor, state: State, mask: Tensor | None, weights: Weights, setting: Setting
) -> State:
    h, c = reversed(state) if setting.norm == "thesis" else state
    pre = linear(h, weights.weight_hh)  # (B, 4H)
    if setting.norm == "per_gate":
        pre = _norm_per_gate(gates + pre, weights, setting)
    elif setting.norm in ("ba", "raw", "thesis"):
        pre = normalise(pre, setting.eps, setting.guard)
        pre = gates + (pre if weights.gain_hh is None else pre * weights.gain_hh)
    else:
        pre = gates + pre
    i, f, g, o = pre.chunk(4, dim=-1)  # each (B, H)
    candidate = g.tanh() if mask is None else g.tanh() * mask
    c = f.sigmoid() * c + i.sigmoid() * candidate
    shown = c
    if setting.norm != "none":
        shown = normalise(c, setting.eps, setting.guard) * weights.gain_c + weights.bias_c
    return o.sigmoid() * shown.tanh(), shown if setting.norm == "per_gate" else c


def _norm_per_gate(pre: Tensor, weights: Weights, setting: Setting) -> Tensor:
    normed = normalise(pre.unflatten(-1, (4, -1)), setting.eps, setting.guard).flatten(-2)
    return normed * weights.gain_gates + (weights.bias_ih + weights.bias_hh)

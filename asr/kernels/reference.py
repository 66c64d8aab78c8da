"""Backend "reference": the definition of the LayerNorm-LSTM, differentiated by autograd.

With b the sum of both biases and N one of

    layer     LN(z) = (z - mean z) / sqrt(var z + eps), the variance biased
    rms       z / sqrt(mean z^2 + eps)

the pre-activations [i f g o] of all gates are

    none      W_x x + W_h h + b                            `norm` none, cell
    split     gx * N(W_x x) + gh * N(W_h h) + b            ba (Ba et al. 2016, eq. 20-22)
              N(W_x x) + N(W_h h) + b                      raw; thesis, which reads (h, c) swapped
    joined    g * N(W_x x + W_h h) + b                     joined (Zeineldeen et al. 2020)
    per_gate  joined, with a separate N for each gate   per_gate (TensorFlow contrib's cell)

and with C = gc * N(c') + bc the step is

    c' = sigmoid(f) * c + sigmoid(i) * tanh(g) * mask

    none      h' = sigmoid(o) * tanh(c')   the next state is c'    `cell_norm`
    output    h' = sigmoid(o) * tanh(C)    c'
    carried   h' = sigmoid(o) * tanh(C)    C
    state     h' = sigmoid(o) * tanh(c')   C

`hidden_norm` replaces h' by gn * N(h') + bn.

Padding is never read: the valid frames are packed by time step, the longest utterance first.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asr.config.cell import CellSettings
from asr.config.registered import REGISTERED, RegisteredNorm
from asr.kernels.deferred import deferred_linear
from asr.kernels.types import (
    AttentionInput,
    DecoderConstants,
    DecoderInput,
    DecoderOutput,
    LayerInput,
    LayerOutput,
    State,
    Weights,
)


def widened(x: Tensor) -> Tensor:
    """x in float32 at least, for statistics: squares overflow or vanish in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normalise(x: Tensor, settings: CellSettings) -> Tensor:
    """N over the last dimension, no gain: x (..., N) -> (..., N)."""
    if registered := REGISTERED.get(settings.norm_kind):
        return _made(registered, x.shape[-1])(x.flatten(0, -2)).view_as(x)
    if settings.norm_kind == "rms":
        wide = widened(x)
        square = wide.square().mean(dim=-1, keepdim=True)
        normed = (wide * (square + settings.eps).rsqrt()).to(x.dtype)
        flat = (x == 0).all(dim=-1, keepdim=True)
    elif settings.norm_kind == "layer":
        size = int(x.shape[-1])  # torch.onnx.export needs a constant
        normed = functional.layer_norm(x, (size,), eps=settings.eps)
        flat = (x == x[..., :1]).all(dim=-1, keepdim=True)
    else:  # unpickled settings are not checked again
        raise ValueError(
            f"norm_kind {settings.norm_kind!r} is not registered in this process: "
            "call asr.register_norm first"
        )
    return normed.masked_fill(flat, 0.0) if settings.guard else normed


@functools.cache
def _made(registered: RegisteredNorm, size: int) -> Callable[[Tensor], Tensor]:
    return registered.make(size)


def input_part(product: Tensor, weights: Weights, settings: CellSettings) -> Tensor:
    """W_x x (..., 4H) -> the part of the gates that depends on the input only."""
    if settings.norms_sum:  # the norm and the bias follow the sum
        return product
    if settings.gates == "split":
        product = normalise(product, settings)
    if weights.gain_ih is not None:
        product = product * weights.gain_ih
    return product + (weights.bias_ih + weights.bias_hh)


def norm_rows(total: Tensor, settings: CellSettings) -> Tensor:
    """W_x x + W_h h (..., 4H) -> the rows that the gates' norm takes: itself, or (..., 4, H)."""
    return total.unflatten(-1, (4, -1)) if settings.gates == "per_gate" else total


def add_product(gates: Tensor, pre: Tensor, weights: Weights, settings: CellSettings) -> Tensor:
    """The result of input_part and W_h h (B, 4H) -> all pre-activations (B, 4H)."""
    if settings.norms_sum:
        total = gates + pre
        normed = normalise(norm_rows(total, settings), settings).reshape(total.shape)
        return normed * weights.gain_gates + (weights.bias_ih + weights.bias_hh)
    if settings.gates == "split":
        pre = normalise(pre, settings)
    return gates + (pre if weights.gain_hh is None else pre * weights.gain_hh)


class Recurred(NamedTuple):
    """The results (B, H) of the gates: c and h before their norms, and the next cell state."""

    c: Tensor
    h: Tensor
    state: Tensor


def recur(
    gates: Tensor, c: Tensor, mask: Tensor | None, weights: Weights, settings: CellSettings
) -> Recurred:
    """All pre-activations (B, 4H) and the cell state (B, H), without the norm of h."""
    i, f, g, o = gates.chunk(4, dim=-1)  # each (B, H)
    candidate = g.tanh() if mask is None else g.tanh() * mask
    c = normed = f.sigmoid() * c + i.sigmoid() * candidate
    if settings.norms_cell:
        normed = normalise(c, settings) * weights.gain_c + weights.bias_c
    h = o.sigmoid() * (normed if settings.shows_norm else c).tanh()
    return Recurred(c, h, normed if settings.carries_norm else c)


def next_state(
    gates: Tensor, state: State, mask: Tensor | None, weights: Weights, settings: CellSettings
) -> State:
    """The result of input_part (B, 4H) and the state of two (B, H) -> the next state."""
    h, c = reversed(state) if settings.swap else state
    product = deferred_linear(h, weights.weight_hh)
    return state_after(gates, product, c, mask, weights, settings)


def state_after(
    gates: Tensor,
    product: Tensor,
    c: Tensor,
    mask: Tensor | None,
    weights: Weights,
    settings: CellSettings,
) -> State:
    """The result of input_part and W_h h (B, 4H), the cell (B, H) -> the next state."""
    _, h, c = recur(add_product(gates, product, weights, settings), c, mask, weights, settings)
    if settings.hidden_norm:
        h = normalise(h, settings) * weights.gain_hidden + weights.bias_hidden
    return h, c


def step(
    x: Tensor,
    state: State,
    mask: Tensor | None,
    weights: Weights,
    settings: CellSettings,
    products: torch.dtype | None = None,
) -> State:
    """One time step: x (B, I), state of two (B, H) -> the next state."""
    gates = input_part(deferred_linear(x, weights.weight_ih), weights, settings)
    return next_state(gates, state, mask, weights, settings)


class Packed(NamedTuple):
    """The valid frames of a batch in the order in which one direction reads them."""

    order: Tensor  # (B,)  the utterances, longest first
    frames: Tensor  # (N,)  valid frames as rows of (B * T), by time step, then by `order`
    sizes: list[int]  # utterances that have a frame in each time step


def pack(batch: LayerInput, reverse: bool) -> Packed:
    """The order in which one direction reads the valid frames."""
    B, T, _ = batch.x.shape
    lengths = torch.tensor(batch.lengths or [T] * B, device="cpu")
    order = lengths.argsort(descending=True, stable=True)
    lengths = lengths[order]
    times = torch.arange(int(lengths[0]), device="cpu")[:, None]
    running = times < lengths  # (T, B)
    at = lengths - 1 - times if reverse else times.expand_as(running)
    frames = (order * T + at)[running]
    sizes = running.sum(dim=1).tolist()
    return Packed(*(_moved(part, batch.x.device) for part in (order, frames)), sizes)


def _moved(part: Tensor, device: torch.device) -> Tensor:
    """On the device, which is not waited for."""
    part = part.pin_memory() if device.type == "cuda" else part
    return part.to(device, non_blocking=device.type != "mps")  # which may read `part` too late


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


def run_direction(
    settings: CellSettings,
    packed: Packed,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    mask: Tensor | None,
    *flat: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = Weights(*flat)
    gates = input_part(deferred_linear(x, weights.weight_ih), weights, settings)  # (N, 4H)
    outputs, ended, start = [], [], 0
    for size in packed.sizes:
        ended.append((h[size:], c[size:]))
        now = None if mask is None else mask[:size]
        part = gates[start : start + size]
        h, c = next_state(part, (h[:size], c[:size]), now, weights, settings)
        outputs.append(h)
        start += size
    ended.append((h, c))
    h, c = (torch.cat(parts[::-1]) for parts in zip(*ended, strict=True))
    return torch.cat(outputs), h, c


def layer(
    batch: LayerInput,
    weights: list[Weights],
    settings: CellSettings,
    products: torch.dtype | None = None,
) -> LayerOutput:
    """All directions of one layer, one after the other; products as autograd and autocast do."""
    return run_packed(batch, weights, functools.partial(run_direction, settings))


def attend(inputs: AttentionInput, valid: Tensor) -> tuple[Tensor, Tensor]:
    """One attention step (asr/nn/attention.py): valid (B, T) -> weights and total, (B, K, T)."""
    keys, query, v, *_ = inputs
    if v is None:
        energy = query @ keys.transpose(1, 2) / math.sqrt(keys.size(-1))  # (B, K, T)
    else:
        energy = _energy(_energy_sum(inputs), v)
    weights = energy.masked_fill(~valid.unsqueeze(1), -torch.inf).softmax(dim=-1)
    return weights, inputs.past_total + weights


def _energy_sum(inputs: AttentionInput) -> Tensor:
    """(B, K, T, A), the largest tensor of a search.

    Added in place, since allocating memory for each sum takes longer than the sums.
    """
    query, keys = inputs.query.unsqueeze(2), inputs.keys.unsqueeze(1)
    if inputs.conv is None:
        return query + keys
    B, K, T = inputs.past_weights.shape
    weights = torch.stack([inputs.past_weights, inputs.past_total], dim=2).view(B * K, 2, T)
    features = functional.conv1d(weights, inputs.conv, padding=inputs.conv.size(2) // 2)
    location = functional.linear(features.transpose(1, 2), inputs.weight_loc).view(B, K, T, -1)
    return location.add_(keys).add_(query)


def _energy(summed: Tensor, v: Tensor) -> Tensor:
    """v . tanh(summed), (B, K, T, A) -> (B, K, T), up to a constant that softmax cancels.

    tanh(x) = 2 sigmoid(2 x) - 1; on a CPU torch's sigmoid takes a sixth of the time of tanh.
    In half precision the sigmoid would round small x to 0.
    """
    if summed.device.type == "cpu" and summed.dtype in (torch.float32, torch.float64):
        return 2 * functional.linear(summed.mul_(2).sigmoid_(), v).squeeze(-1)
    return functional.linear(summed.tanh_(), v).squeeze(-1)


def run_decoder(
    inputs: DecoderInput,
    cells: list[Weights],
    constants: DecoderConstants,
    settings: CellSettings,
) -> DecoderOutput:
    """All steps of a decoder, one after the other (asr/models/las.py), to check others against."""
    embedded, states, keys, weight_query, *matrices = inputs
    B, H = len(states), weight_query.shape[1]
    state = [(states.new_zeros(B, H), states.new_zeros(B, H)) for _ in cells]
    context, past = states.new_zeros(B, states.shape[2]), (constants.first[:, None],) * 2
    steps = []
    for u in range(len(embedded)):
        x = torch.cat([embedded[u], context], dim=1)
        for number, (w, mask) in enumerate(zip(cells, constants.masks, strict=True)):
            state[number] = step(x, state[number], mask, w, settings)
            x = state[number][0]
            x = x if constants.keep is None else x * constants.keep[number, u]
        query = functional.linear(x, weight_query)[:, None]
        v, weight_loc, conv = matrices
        past = attend(AttentionInput(keys, query, v, *past, weight_loc, conv), constants.valid)
        context = (past[0] @ states).squeeze(1)
        steps.append((x, context, past[0].squeeze(1)))
    return DecoderOutput(*map(torch.stack, zip(*steps, strict=True)))

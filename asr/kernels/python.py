"""Backend "python": a manual backward pass in PyTorch, for any device, without a compiler.

Whatever does not depend on the previous step is computed for all steps at once: the input product,
the gates' derivatives, the weights' gradients. Formulas: reference.py. Backward of a norm, with
y = g (x - mean) r and d = dy g:

    dx = r (d - mean(d) - n mean(d n)),  n = (x - mean) r,

where r = 0 in a row without variance, so that it passes no gradient.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asr.kernels.deferred import product
from asr.kernels.reference import Packed, run_packed
from asr.kernels.types import LayerInput, LayerOutput, LSTMOptions, State, Weights

SPLIT = ("ba", "raw")


class Norm(NamedTuple):
    normed: Tensor  # (..., N)  n above
    scale: Tensor  # (..., 1)  r above


def norm(x: Tensor, eps: float) -> Norm:
    """Normalises the last dimension; rows of equal elements give 0 and r = 0."""
    normed, _, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
    flat = (x == x[..., :1]).all(dim=-1, keepdim=True)
    return Norm(normed.masked_fill(flat, 0), scale.masked_fill(flat, 0))


def norm_backward(d: Tensor, norm: Norm) -> Tensor:
    """d (..., N) -> dx."""
    slope = (d * norm.normed).mean(-1, keepdim=True)
    return norm.scale * (d - d.mean(-1, keepdim=True) - norm.normed * slope)


def gate_product(a: Tensor, b: Tensor, setting: LSTMOptions) -> Tensor:
    """a @ b in the setting's precision, in a's dtype."""
    return product(a, b.to(setting.product_dtype(a.dtype)))


class _Saved(NamedTuple):
    """For the backward pass: the rows of all steps, concatenated, N in all."""

    x: Norm | None  # (N, 4H)
    h: Norm | None  # (N, 4H), in per_gate (N, 4, H)
    gates: Tensor  # (N, 4H)  the pre-activations
    c: Norm | None  # (N, H)
    shown: Tensor  # (N, H)  C of reference.py
    before: State  # the state before each step, (N, H) each


def _step(
    ax: Tensor,
    recurrent: Tensor,
    c: Tensor,
    mask: Tensor | None,
    bias: Tensor,
    w: Weights,
    setting: LSTMOptions,
) -> tuple[State, tuple[Any, ...]]:
    norm_h = norm_c = None
    if setting.norm in SPLIT:
        norm_h = norm(recurrent, setting.eps)
        gates = ax + bias + (norm_h.normed if w.gain_hh is None else norm_h.normed * w.gain_hh)
    elif setting.norm == "per_gate":
        norm_h = norm((ax + recurrent).unflatten(-1, (4, -1)), setting.eps)
        gates = norm_h.normed.flatten(-2) * w.gain_gates + bias
    else:
        gates = ax + recurrent + bias
    i, f, g, o = gates.chunk(4, dim=-1)
    candidate = g.tanh() if mask is None else g.tanh() * mask
    c = shown = f.sigmoid() * c + i.sigmoid() * candidate
    if setting.norm != "none":
        norm_c = norm(c, setting.eps)
        shown = norm_c.normed * w.gain_c + w.bias_c
    h = o.sigmoid() * shown.tanh()
    return (h, shown if setting.norm == "per_gate" else c), (gates, norm_h, norm_c, shown)


def _run(
    packed: Packed, setting: LSTMOptions, x: Tensor, state: State, mask: Tensor | None, w: Weights
) -> tuple[Tensor, State, _Saved]:
    bias = w.bias_ih + w.bias_hh
    ax, norm_x = gate_product(x, w.weight_ih.t(), setting), None
    if setting.norm in SPLIT:
        norm_x = norm(ax, setting.eps)
        ax = norm_x.normed if w.gain_ih is None else norm_x.normed * w.gain_ih
    across = w.weight_hh.t().contiguous()  # once, not in every step's product
    h, c = state
    steps, ended, start = [], [], 0
    for size in packed.sizes:
        ended.append((h[size:], c[size:]))
        before = h[:size], c[:size]
        recurrent = gate_product(before[0], across, setting)
        part, now = ax[start : start + size], None if mask is None else mask[:size]
        (h, c), kept = _step(part, recurrent, before[1], now, bias, w, setting)
        steps.append((*before, h, *kept))
        start += size
    ended.append((h, c))
    end = tuple(torch.cat(parts[::-1]) for parts in zip(*ended, strict=True))
    before_h, before_c, rows, gates, norm_h, norm_c, shown = zip(*steps, strict=True)
    saved = _Saved(norm_x, _join(norm_h), torch.cat(gates), _join(norm_c), torch.cat(shown),
                   (torch.cat(before_h), torch.cat(before_c)))  # fmt: skip
    return torch.cat(rows), end, saved


def _join(parts: tuple[Norm | None, ...]) -> Norm | None:
    if parts[0] is None:
        return None
    return Norm(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _at(rows: Norm, now: slice) -> Norm:
    return Norm(rows.normed[now], rows.scale[now])


class _Backward:
    """The steps in reverse; factors that do not depend on them are computed for all rows first."""

    def __init__(
        self, packed: Packed, setting: LSTMOptions, mask: Tensor | None, w: Weights, saved: _Saved
    ) -> None:
        self.packed, self.setting, self.w, self.saved = packed, setting, w, saved
        i, f, z, o = saved.gates.chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), z.tanh(), o.sigmoid()
        drop = 1.0 if mask is None else torch.cat([mask[:size] for size in packed.sizes])
        bounded = saved.shown.tanh()
        self.to_shown = o * (1 - bounded.square())  # times dh
        self.to_o = bounded * o * (1 - o)
        to_i, to_f = g * drop * i * (1 - i), saved.before[1] * f * (1 - f)  # times dc
        self.to_gates = torch.stack([to_i, to_f, i * drop * (1 - g.square())], dim=1)
        self.forget = f

    def run(self, drows: Tensor, dh_end: Tensor, dc_end: Tensor) -> tuple[Tensor, ...]:
        """Gradients of rows and final state -> dgates, dah (N, 4H), dh, dc (B, H), dshown."""
        N, H = drows.shape
        dgates, dshown_all = drows.new_empty(N, 4, H), drows.new_empty(N, H)
        dah_all = dgates.flatten(1) if self.saved.h is None else drows.new_empty(N, 4 * H)
        dh, dc = dh_end[:0], dc_end[:0]
        stop = N
        for size in reversed(self.packed.sizes):
            now = slice(stop - size, stop)
            dh = torch.cat([dh, dh_end[len(dh) : size]]) + drows[now]
            dc = torch.cat([dc, dc_end[len(dc) : size]])
            dshown = dh * self.to_shown[now]
            dc, dshown_all[now] = self._through_cell(dshown, dc, now)
            dgates[now, :3] = dc.unsqueeze(1) * self.to_gates[now]
            dgates[now, 3] = dh * self.to_o[now]
            dah_all[now] = dah = self._through_norm(dgates[now], now)
            dh, dc = gate_product(dah, self.w.weight_hh, self.setting), dc * self.forget[now]
            stop -= size
        return dgates.flatten(1), dah_all, dh, dc, dshown_all

    def _through_cell(self, dshown: Tensor, dc: Tensor, now: slice) -> tuple[Tensor, Tensor]:
        if self.saved.c is None:
            return dshown + dc, dshown
        if self.setting.norm == "per_gate":
            dshown = dshown + dc
        dcell = norm_backward(dshown * self.w.gain_c, _at(self.saved.c, now))
        return (dcell if self.setting.norm == "per_gate" else dcell + dc), dshown

    def _through_norm(self, dgates: Tensor, now: slice) -> Tensor:
        if self.saved.h is None:
            return dgates.flatten(1)
        gain = self.w.gain_hh if self.w.gain_gates is None else self.w.gain_gates
        d = dgates.flatten(1) if gain is None else dgates.flatten(1) * gain
        norm_h = _at(self.saved.h, now)
        return norm_backward(d.view_as(norm_h.normed), norm_h).flatten(1)


def _input_gradients(
    dgates: Tensor, w: Weights, saved: _Saved, setting: LSTMOptions, dah: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient before the input's norm, and the gradients of gains and biases."""
    bias = dgates.sum(0)
    grads = {"bias_ih": bias, "bias_hh": bias.clone()}
    if setting.norm == "per_gate":
        grads["gain_gates"] = (dgates * saved.h.normed.flatten(-2)).sum(0)
    if setting.norm not in SPLIT:
        return dah, grads
    if w.gain_ih is None:
        return norm_backward(dgates, saved.x), grads
    grads["gain_ih"] = (dgates * saved.x.normed).sum(0)
    grads["gain_hh"] = (dgates * saved.h.normed).sum(0)
    return norm_backward(dgates * w.gain_ih, saved.x), grads


class _Direction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        setting: LSTMOptions,
        packed: Packed,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        mask: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, end, saved = _run(packed, setting, x, (h, c), mask, Weights(*flat))
        ctx.packed, ctx.setting, ctx.saved = packed, setting, saved
        ctx.save_for_backward(x, mask, *flat)
        return rows, *end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, dh: Tensor, dc: Tensor) -> tuple[Any, ...]:
        x, mask, *flat = ctx.saved_tensors
        weights, saved, setting = Weights(*flat), ctx.saved, ctx.setting
        steps = _Backward(ctx.packed, setting, mask, weights, saved)
        dgates, dah, dh, dc, dshown = steps.run(drows, dh, dc)
        dax, grads = _input_gradients(dgates, weights, saved, setting, dah)
        grads["weight_ih"] = gate_product(dax.t(), x, setting)
        grads["weight_hh"] = gate_product(dah.t(), saved.before[0], setting)
        if saved.c is not None:
            grads |= {"gain_c": (dshown * saved.c.normed).sum(0), "bias_c": dshown.sum(0)}
        dx = gate_product(dax, weights.weight_ih, setting) if ctx.needs_input_grad[2] else None
        return None, None, dx, dh, dc, None, *(grads.get(name) for name in Weights._fields)


def layer(batch: LayerInput, weights: list[Weights], setting: LSTMOptions) -> LayerOutput:
    """All directions of one layer, one after the other."""
    return run_packed(batch, weights, functools.partial(_Direction.apply, setting))

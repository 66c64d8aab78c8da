"""Backend "python": a manual backward pass in PyTorch, for any device, without a compiler.

Whatever does not depend on the previous step is computed for all steps at once: the input product,
the gates' derivatives, the weights' gradients. Formulas: reference.py. Backward of a norm, with
y = g (x - mean) r and d = dy g:

    dx = r (d - mean(d) - n mean(d n)),  n = (x - mean) r,

both without the mean of x or d in RMSNorm, and r = 0 in a row without variance, so that it passes
no gradient.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from asr.config.cell import CellSettings
from asr.kernels.deferred import product
from asr.kernels.double_backward import differentiate, needs_operators
from asr.kernels.reference import Packed, norm_rows, run_direction, run_packed, widened
from asr.kernels.types import LayerInput, LayerOutput, State, Weights


class Norm(NamedTuple):
    normed: Tensor  # (..., N)  n above
    scale: Tensor  # (..., 1)  r above


def norm(x: Tensor, settings: CellSettings) -> Norm:
    """Normalises the last dimension; rows without variance (rms: of zeros) give 0 and r = 0."""
    if settings.norm_kind == "rms":
        wide = widened(x)
        flat = (x == 0).all(dim=-1, keepdim=True)
        scale = (wide.square().mean(-1, keepdim=True) + settings.eps).rsqrt().masked_fill(flat, 0)
        return Norm((wide * scale).to(x.dtype), scale.to(x.dtype))
    normed, _, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, settings.eps)
    flat = (x == x[..., :1]).all(dim=-1, keepdim=True)
    return Norm(normed.masked_fill(flat, 0), scale.masked_fill(flat, 0))


def norm_backward(d: Tensor, norm: Norm, settings: CellSettings) -> Tensor:
    """d (..., N) -> dx."""
    slope = (d * norm.normed).mean(-1, keepdim=True)
    centred = d if settings.norm_kind == "rms" else d - d.mean(-1, keepdim=True)
    return norm.scale * (centred - norm.normed * slope)


class _Saved(NamedTuple):
    """For the backward pass: the rows of all steps, concatenated, N in all."""

    x: Norm | None  # (N, 4H)
    h: Norm | None  # (N, 4H), for each gate (N, 4, H): W_h h, alone or in a sum
    gates: Tensor  # (N, 4H)  the pre-activations
    c: Norm | None  # (N, H)
    shown: Tensor  # (N, H)  the argument of the output's tanh
    hidden: Norm | None  # (N, H)
    before: State  # the state before each step, (N, H) each


def _pre_activations(
    ax: Tensor, recurrent: Tensor, bias: Tensor, w: Weights, settings: CellSettings
) -> tuple[Tensor, Norm | None]:
    """(N, 4H), and the norm that W_h h enters."""
    if settings.gates == "none":
        return ax + recurrent + bias, None
    if settings.norms_sum:
        norm_h = norm(norm_rows(ax + recurrent, settings), settings)
        return norm_h.normed.view_as(ax) * w.gain_gates + bias, norm_h
    norm_h = norm(recurrent, settings)
    scaled = norm_h.normed if w.gain_hh is None else norm_h.normed * w.gain_hh
    return ax + bias + scaled, norm_h


def _step(
    ax: Tensor,
    recurrent: Tensor,
    c: Tensor,
    mask: Tensor | None,
    bias: Tensor,
    w: Weights,
    settings: CellSettings,
) -> tuple[State, tuple[Any, ...]]:
    gates, norm_h = _pre_activations(ax, recurrent, bias, w, settings)
    i, f, g, o = gates.chunk(4, dim=-1)
    candidate = g.tanh() if mask is None else g.tanh() * mask
    c = normed = f.sigmoid() * c + i.sigmoid() * candidate
    norm_c = norm_hidden = None
    if settings.norms_cell:
        norm_c = norm(c, settings)
        normed = norm_c.normed * w.gain_c + w.bias_c
    shown = normed if settings.shows_norm else c
    h = o.sigmoid() * shown.tanh()
    if settings.hidden_norm:
        norm_hidden = norm(h, settings)
        h = norm_hidden.normed * w.gain_hidden + w.bias_hidden
    kept = gates, norm_h, norm_c, shown, norm_hidden
    return (h, normed if settings.carries_norm else c), kept


def _run(
    packed: Packed,
    settings: CellSettings,
    products: torch.dtype,
    x: Tensor,
    state: State,
    mask: Tensor | None,
    w: Weights,
) -> tuple[Tensor, State, _Saved]:
    bias = w.bias_ih + w.bias_hh
    ax, norm_x = product(x, w.weight_ih.t().to(products)), None
    if settings.gates == "split":
        norm_x = norm(ax, settings)
        ax = norm_x.normed if w.gain_ih is None else norm_x.normed * w.gain_ih
    across = w.weight_hh.t().to(products).contiguous()  # once, not in every step's product
    h, c = state
    steps, ended, start = [], [], 0
    for size in packed.sizes:
        ended.append((h[size:], c[size:]))
        before = h[:size], c[:size]
        recurrent = product(before[0], across)
        part, now = ax[start : start + size], None if mask is None else mask[:size]
        (h, c), kept = _step(part, recurrent, before[1], now, bias, w, settings)
        steps.append((*before, h, *kept))
        start += size
    ended.append((h, c))
    end = tuple(torch.cat(parts[::-1]) for parts in zip(*ended, strict=True))
    before_h, before_c, rows, gates, norm_h, norm_c, shown, hidden = zip(*steps, strict=True)
    saved = _Saved(norm_x, _join(norm_h), torch.cat(gates), _join(norm_c), torch.cat(shown),
                   _join(hidden), (torch.cat(before_h), torch.cat(before_c)))  # fmt: skip
    return torch.cat(rows), end, saved


def _join(parts: tuple[Norm | None, ...]) -> Norm | None:
    if parts[0] is None:
        return None
    return Norm(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _at(rows: Norm, now: slice) -> Norm:
    return Norm(rows.normed[now], rows.scale[now])


class NormedGradients(NamedTuple):
    """Gradients of the normed c and h of all steps, None where there is no such norm."""

    c: Tensor | None  # (N, H)
    hidden: Tensor | None  # (N, H)

    @classmethod
    def empty(cls, saved: _Saved, like: Tensor) -> "NormedGradients":
        norms = saved.c, saved.hidden
        return cls(*(None if norm is None else torch.empty_like(like) for norm in norms))

    def vectors(self, saved: _Saved) -> dict[str, Tensor]:
        """Gradients of gains and biases."""
        found = {}
        for name, gradient, norm in zip(self._fields, self, (saved.c, saved.hidden), strict=True):
            if gradient is not None:
                found[f"gain_{name}"] = (gradient * norm.normed).sum(0)
                found[f"bias_{name}"] = gradient.sum(0)
        return found


class _Backward:
    """The steps in reverse; factors that do not depend on them are computed for all rows first."""

    def __init__(
        self,
        packed: Packed,
        settings: CellSettings,
        products: torch.dtype,
        mask: Tensor | None,
        w: Weights,
        saved: _Saved,
    ) -> None:
        self.packed, self.settings, self.w, self.saved = packed, settings, w, saved
        self.weight_hh = w.weight_hh.to(products)
        i, f, z, o = saved.gates.chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), z.tanh(), o.sigmoid()
        drop = 1.0 if mask is None else torch.cat([mask[:size] for size in packed.sizes])
        bounded = saved.shown.tanh()
        self.to_shown = o * (1 - bounded.square())  # times dh
        self.to_o = bounded * o * (1 - o)
        to_i, to_f = g * drop * i * (1 - i), saved.before[1] * f * (1 - f)  # times dc
        self.to_gates = torch.stack([to_i, to_f, i * drop * (1 - g.square())], dim=1)
        self.forget = f

    def run(
        self, drows: Tensor, dh_end: Tensor, dc_end: Tensor
    ) -> tuple[Tensor, Tensor, State, NormedGradients]:
        """Gradients of rows and final state -> dgates, dah (N, 4H), those of the initial state and
        of the normed c and h.
        """
        N, H = drows.shape
        dgates = drows.new_empty(N, 4, H)
        dah_all = dgates.flatten(1) if self.saved.h is None else drows.new_empty(N, 4 * H)
        normed = NormedGradients.empty(self.saved, drows)
        dh, dc = dh_end[:0], dc_end[:0]
        stop = N
        for size in reversed(self.packed.sizes):
            now = slice(stop - size, stop)
            dh = torch.cat([dh, dh_end[len(dh) : size]]) + drows[now]
            dc = torch.cat([dc, dc_end[len(dc) : size]])
            dh = self._through_hidden(dh, now, normed)
            dc = self._through_cell(dh * self.to_shown[now], dc, now, normed)
            dgates[now, :3] = dc.unsqueeze(1) * self.to_gates[now]
            dgates[now, 3] = dh * self.to_o[now]
            dah_all[now] = dah = self._through_norm(dgates[now], now)
            dh, dc = product(dah, self.weight_hh), dc * self.forget[now]
            stop -= size
        return dgates.flatten(1), dah_all, (dh, dc), normed

    def _through_hidden(self, dh: Tensor, now: slice, normed: NormedGradients) -> Tensor:
        if self.saved.hidden is None:
            return dh
        normed.hidden[now] = dh
        return norm_backward(dh * self.w.gain_hidden, _at(self.saved.hidden, now), self.settings)

    def _through_cell(
        self, dshown: Tensor, dc: Tensor, now: slice, normed: NormedGradients
    ) -> Tensor:
        """Gradients of the argument of tanh and of the next cell state -> that of c'."""
        if self.saved.c is None:
            return dshown + dc
        through, around = (dshown, dc) if self.settings.shows_norm else (dc, dshown)
        if self.settings.cell_norm == "carried":
            through, around = dshown + dc, None
        normed.c[now] = through
        dcell = norm_backward(through * self.w.gain_c, _at(self.saved.c, now), self.settings)
        return dcell if around is None else dcell + around

    def _through_norm(self, dgates: Tensor, now: slice) -> Tensor:
        if self.saved.h is None:
            return dgates.flatten(1)
        gain = self.w.gain_recurrent
        d = dgates.flatten(1) if gain is None else dgates.flatten(1) * gain
        norm_h = _at(self.saved.h, now)
        return norm_backward(d.view_as(norm_h.normed), norm_h, self.settings).flatten(1)


def _input_gradients(
    dgates: Tensor, w: Weights, saved: _Saved, settings: CellSettings, dah: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient before the input's norm, and the gradients of gains and biases."""
    bias = dgates.sum(0)
    grads = {"bias_ih": bias, "bias_hh": bias.clone()}
    if settings.norms_sum:
        grads["gain_gates"] = (dgates * saved.h.normed.view_as(dgates)).sum(0)
    if settings.gates != "split":
        return dah, grads
    if w.gain_ih is None:
        return norm_backward(dgates, saved.x, settings), grads
    grads["gain_ih"] = (dgates * saved.x.normed).sum(0)
    grads["gain_hh"] = (dgates * saved.h.normed).sum(0)
    return norm_backward(dgates * w.gain_ih, saved.x, settings), grads


class _Direction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: CellSettings,
        products: torch.dtype,
        packed: Packed,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        mask: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, end, saved = _run(packed, settings, products, x, (h, c), mask, Weights(*flat))
        ctx.packed, ctx.settings, ctx.products = packed, settings, products
        parts, ctx.structure = tree_flatten(saved)
        # Autograd frees them, too, with the backward pass.
        ctx.save_for_backward(*parts, x, h, c, mask, *flat)
        return rows, *end

    @staticmethod
    def backward(ctx: Any, drows: Tensor, dh: Tensor, dc: Tensor) -> tuple[Any, ...]:
        tensors, count = ctx.saved_tensors, ctx.structure.num_leaves
        saved, inputs = tree_unflatten(tensors[:count], ctx.structure), tensors[count:]
        x, _, _, mask, *flat = inputs
        if needs_operators(drows, dh, dc):
            run = functools.partial(run_direction, ctx.settings, ctx.packed)
            return None, None, None, *differentiate(run, inputs, (drows, dh, dc))
        weights, settings, products = Weights(*flat), ctx.settings, ctx.products
        steps = _Backward(ctx.packed, settings, products, mask, weights, saved)
        dgates, dah, (dh, dc), normed = steps.run(drows, dh, dc)
        dax, grads = _input_gradients(dgates, weights, saved, settings, dah)
        grads["weight_ih"] = product(dax.t(), x.to(products))
        grads["weight_hh"] = product(dah.t(), saved.before[0].to(products))
        grads |= normed.vectors(saved)
        wanted = ctx.needs_input_grad[3]
        dx = product(dax, weights.weight_ih.to(products)) if wanted else None
        return None, None, None, dx, dh, dc, None, *(grads.get(name) for name in Weights._fields)


def layer(
    batch: LayerInput, weights: list[Weights], settings: CellSettings, products: torch.dtype
) -> LayerOutput:
    """All directions of one layer, one after the other. products: dtype of the matrix products."""
    return run_packed(batch, weights, functools.partial(_Direction.apply, settings, products))

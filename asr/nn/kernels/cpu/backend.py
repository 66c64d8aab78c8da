"""The backend "cpu": one call of C++ per layer, forward and backward, for both directions.

Saved for the backward pass are the matrix products before their norms, the cells and the norms'
statistics; the gates are computed again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asr.nn.kernels.cpu import library
from asr.nn.kernels.cpu.buffers import Lease
from asr.nn.kernels.cpu.library import MODES
from asr.nn.kernels.problem import Batch, Result, Setting, Weights

PER_WORKER = 4  # utterances, at least: fewer leave the matrix kernels half empty


class _Plan(NamedTuple):
    """All of a call that is not a tensor of its own."""

    setting: Setting
    lengths: list[int]
    kind: int
    threads: int
    blocks: int


def layer(batch: Batch, weights: list[Weights], setting: Setting) -> Result:
    """All directions of one layer at once. Raises build.BuildError without compiled kernels."""
    plan = _plan(batch, len(weights), setting)
    flat = [w for one in weights for w in one if w is not None]
    tensors = [batch.x, batch.h, batch.c, *flat]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return Result(*_Layer.apply(plan, weights, *tensors[:3], batch.mask, *flat))
    parts = batch._replace(x=_rows(batch.x), h=batch.h.contiguous(), c=batch.c.contiguous())
    return _forward(plan, parts, weights, None)


def _plan(batch: Batch, directions: int, setting: Setting) -> _Plan:
    B, T, _ = batch.x.shape
    threads = torch.get_num_threads()
    blocks = max(1, min(threads // directions, B // PER_WORKER))
    kind = library.kind_of_products(batch.x, setting)
    return _Plan(setting, batch.lengths or [T] * B, kind, threads, blocks)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, weights: list[Weights], x: Tensor, h: Tensor, c: Tensor,
        mask: Tensor | None, *flat: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        batch = Batch(_rows(x), plan.lengths, h.contiguous(), c.contiguous(), mask)
        frames, gates = len(weights) * sum(plan.lengths), 4 * h.shape[-1]
        counts = {"ah": frames * gates, "raw": frames * h.shape[-1], "stats": frames * 12}
        if MODES[plan.setting.norm] == 1:
            counts["ax"] = frames * gates
        lease = Lease(x.dtype, **counts)
        result = _forward(plan, batch, weights, lease)
        ctx.plan, ctx.weights, ctx.lease = plan, weights, lease
        # Saved for their versions: changing one in place before the backward pass is an error.
        ctx.save_for_backward(batch.x, batch.h, batch.c, mask, result.output, *flat)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutput: Tensor, dh: Tensor, dc: Tensor) -> tuple[Any, ...]:
        x, h, c, mask, output, *_ = ctx.saved_tensors
        batch = Batch(x, ctx.plan.lengths, h, c, mask)
        upstream = [doutput.contiguous(), dh.contiguous(), dc.contiguous()]
        return None, None, *_backward(ctx, batch, output, upstream)


def _describe(plan: _Plan, batch: Batch, weights: list[Weights], keep: list[Any]) -> library.Call:
    """The part of a call that both passes share; `keep` holds what it points to."""
    B, T, I = batch.x.shape  # noqa: E741
    H = batch.h.shape[-1]
    lengths = torch.tensor(plan.lengths)
    keep.append(lengths)
    call = library.Call(B=B, T=T, I=I, H=H, D=len(weights))
    library.describe_norm(call, plan.setting)
    call.threads, call.blocks = plan.threads, plan.blocks
    call.x_stride_b, call.x_stride_t = batch.x.stride()[:2]
    library.point(call, lengths=lengths, x=batch.x)
    for d, w in enumerate(weights):
        point_weights(call.direction[d], w, keep)
        mask = None if batch.mask is None else batch.mask[d]
        library.point(call.direction[d], h0=batch.h[d], c0=batch.c[d], mask=mask)
    return call


def point_weights(direction: library.Direction, w: Weights, keep: list[Any]) -> None:
    """A cell's weights; `keep` holds what it points to."""
    w = Weights(*(t if t is None else t.detach().contiguous() for t in w))
    ones, bias = torch.ones_like(w.bias_ih), w.bias_ih + w.bias_hh
    keep += [w, ones, bias]
    gain_h = w.gain_hh if w.gain_gates is None else w.gain_gates
    library.point(
        direction,
        weight_ih=w.weight_ih,
        weight_hh=w.weight_hh,
        bias=bias,
        gain_x=ones if w.gain_ih is None else w.gain_ih,
        gain_h=ones if gain_h is None else gain_h,
        gain_c=ones if w.gain_c is None else w.gain_c,
        bias_c=ones if w.bias_c is None else w.bias_c,
    )


def _point_saved(call: library.Call, lease: Lease, frames: int, H: int) -> None:
    """Each direction's part of the saved buffers."""
    widths = {"ax": 4 * H, "ah": 4 * H, "raw": H, "stats": 12}
    for d in range(call.D):
        for name, width in widths.items():
            if (buffer := lease[name]) is not None:
                library.point(call.direction[d], **{name: buffer[d * frames * width :]})


def _forward(plan: _Plan, batch: Batch, weights: list[Weights], lease: Lease | None) -> Result:
    B, T, _ = batch.x.shape
    D, _, H = batch.h.shape
    keep: list[Any] = []
    call = _describe(plan, batch, weights, keep)
    ragged = min(plan.lengths) < T
    output = (batch.x.new_zeros if ragged else batch.x.new_empty)(B, T, D * H)
    h, c = torch.empty_like(batch.h), torch.empty_like(batch.c)
    library.point(call, output=output)
    for d in range(D):
        library.point(call.direction[d], h=h[d], c=c[d])
    if lease is not None:
        _point_saved(call, lease, sum(plan.lengths), H)
    library.run("lstm_forward", call, plan.kind)
    return Result(output, h, c)


def _backward(
    ctx: Any, batch: Batch, output: Tensor, upstream: list[Tensor]
) -> tuple[Tensor | None, ...]:
    plan, weights, x = ctx.plan, ctx.weights, batch.x
    D, _, H = batch.h.shape
    keep: list[Any] = []
    call = _describe(plan, batch, weights, keep)
    doutput, dh, dc = upstream
    library.point(call, output=output, doutput=doutput)
    _point_saved(call, ctx.lease, sum(plan.lengths), H)
    dh0, dc0 = torch.empty_like(dh), torch.empty_like(dc)
    dx = [_like_input(x, plan) if ctx.needs_input_grad[2] else None for _ in weights]
    sums = [cell_slots(w, plan.blocks) for w in weights]
    for d in range(D):
        names = ("dweight_ih", "dweight_hh", "dvectors")
        library.point(call.direction[d], **dict(zip(names, sums[d], strict=True)))
        library.point(call.direction[d], dh=dh[d], dc=dc[d], dh0=dh0[d], dc0=dc0[d], dx=dx[d])
    library.run("lstm_backward", call, plan.kind)
    if dx[0] is not None and D == 2:
        dx[0].add_(dx.pop())
    flat = [g for w, s in zip(weights, sums, strict=True) for g in gradients(w, s, H)]
    return dx[0], dh0, dc0, None, *flat


def _like_input(x: Tensor, plan: _Plan) -> Tensor:
    """Zeros where padding is: no kernel writes there."""
    ragged = min(plan.lengths) < x.shape[1]
    return (x.new_zeros if ragged else x.new_empty)(x.shape)


def cell_slots(w: Weights, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each block of utterances sums its gradients of a cell's weights."""
    vectors = w.bias_ih.new_zeros(blocks, 14 * w.weight_hh.shape[1])
    return library.slots(w.weight_ih, blocks), library.slots(w.weight_hh, blocks), vectors


def gradients(w: Weights, sums: tuple[Tensor, ...], H: int) -> list[Tensor]:
    """What cell_slots gave -> the gradients, in the order of the weights that there are."""
    weight_ih, weight_hh, vectors = map(library.add_up, sums)
    bias, gain_x, gain_h, gain_c, bias_c = vectors.split([4 * H, 4 * H, 4 * H, H, H])
    bias_again = bias.clone()  # two parameters must not share one gradient
    every = (weight_ih, weight_hh, bias, bias_again, gain_x, gain_h, gain_h, gain_c, bias_c)
    return [g for g, own in zip(every, w, strict=True) if own is not None]

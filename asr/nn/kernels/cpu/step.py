"""One time step in C++, all of it but the two matrix products: what a decoder repeats.

The products stay torch's, so that autograd knows the weights as it does in any module.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asr.nn.kernels.cpu import library
from asr.nn.kernels.cpu.library import MODES
from asr.nn.kernels.loop import linear
from asr.nn.kernels.problem import Setting, Weights

State = tuple[Tensor, Tensor]


def step(x: Tensor, state: State, mask: Tensor | None, w: Weights, setting: Setting) -> State:
    """x (B, I), state of two (B, H) -> the next. Raises build.BuildError without the kernels."""
    h, c = reversed(state) if setting.norm == "thesis" else state
    half = setting.precision == "bf16" and x.dtype == torch.float32
    dtype = torch.bfloat16 if half else x.dtype
    ax, ah = linear(x, w.weight_ih, dtype), linear(h, w.weight_hh, dtype)
    if MODES[setting.norm] != 1:  # one sum goes through the norm, if there is one
        ax, ah = None, ax + ah
    gain_h = w.gain_hh if w.gain_gates is None else w.gain_gates
    bias = w.bias_ih + w.bias_hh
    mask = None if mask is None else mask.contiguous()
    tensors = (ax, ah, c.contiguous(), mask, bias, w.gain_ih, gain_h, w.gain_c, w.bias_c)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _Step.apply(setting, *tensors)
    return _forward(setting, *tensors)[:2]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, setting: Setting, *tensors: Tensor | None) -> State:
        h, c, raw, stats = _forward(setting, *tensors)
        ctx.setting, ctx.raw, ctx.stats = setting, raw, stats
        ctx.save_for_backward(*tensors)
        return h, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor, dc: Tensor) -> tuple[Any, ...]:
        ax, ah, c, mask, *vectors = ctx.saved_tensors
        H = c.shape[1]
        call, _keep = _describe(ctx.setting, ax, ah, c, mask, vectors)
        dah, dc0 = torch.empty_like(ah), torch.empty_like(c)
        dax = None if ax is None else torch.empty_like(ax)
        sums, upstream = c.new_zeros(14 * H), (dh.contiguous(), dc.contiguous())
        library.point(
            call.direction[0],
            raw=ctx.raw,
            stats=ctx.stats,
            dh=upstream[0],
            dc=upstream[1],
            dax=dax,
            dah=dah,
            dc0=dc0,
            dvectors=sums,
        )
        library.run("lstm_step_backward", call, library.kind_of(c))
        found = sums.split([4 * H, 4 * H, 4 * H, H, H])
        vectors = [None if v is None else g for v, g in zip(vectors, found, strict=True)]
        return None, dax, dah, dc0, None, *vectors


def _forward(
    setting: Setting, ax: Tensor | None, ah: Tensor, c: Tensor, mask: Tensor | None, *vectors: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next h and c, the cell before its norm, the norms' statistics."""
    call, _keep = _describe(setting, ax, ah, c, mask, vectors)
    h, after, raw, stats = *(torch.empty_like(c) for _ in range(3)), c.new_empty(len(c), 12)
    library.point(call.direction[0], h=h, c=after, raw=raw, stats=stats)
    library.run("lstm_step_forward", call, library.kind_of(c))
    return h, after, raw, stats


def _describe(
    setting: Setting, ax: Tensor | None, ah: Tensor, c: Tensor, mask: Tensor | None, vectors: Any
) -> tuple[library.Call, list[Tensor]]:
    """The part of a call that both passes share, and what must outlive it."""
    B, H = c.shape
    ones = c.new_ones(4 * H)
    bias, *gains = (ones if v is None else v.detach().contiguous() for v in vectors)
    call = library.Call(B=B, T=1, I=0, H=H, D=1, threads=1)
    library.describe_norm(call, setting)
    gain_x, gain_h, gain_c, bias_c = gains
    library.point(
        call.direction[0],
        ax=ax,
        ah=ah,
        c0=c,
        mask=mask,
        bias=bias,
        gain_x=gain_x,
        gain_h=gain_h,
        gain_c=gain_c,
        bias_c=bias_c,
    )
    return call, [ones, bias, *gains]

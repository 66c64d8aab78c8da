"""The recurrence of all directions given the input's part of the gates, forward and backward.

Legend: S steps, D directions, B utterances, H hidden size; tensors of a step are rows of (D, B).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asr.nn.kernels.cuda import kernels
from asr.nn.kernels.cuda.graph import replay
from asr.nn.kernels.loop import product
from asr.nn.kernels.python import norm

MODES = {"none": 0, "cell": 0, "ba": 1, "raw": 1, "per_gate": 2}


class Plan(NamedTuple):
    """What a recorded loop depends on beside its inputs' shapes."""

    norm: str
    eps: float
    half: bool  # products in bf16

    def options(self, H: int, mask: Tensor | None) -> dict[str, Any]:
        block = 1 << max(4, (H - 1).bit_length())
        return {
            "eps": self.eps,
            "MODE": MODES[self.norm],
            "NORM_C": self.norm != "none",
            "CARRY": self.norm == "per_gate",
            "DROP": mask is not None,
            "BLOCK": block,
        }


class Recurrence(torch.autograd.Function):
    """gates (S, D, B, 4H), weight (D, 4H, H), h, c (D, B, H), mask (D, B, H) or None, lengths
    (B,), gain_h, bias (D, 4H), gain_c, bias_c (D, H) -> h of all steps (S, D, B, H), final h, c.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, gates: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        key = _key(plan, "forward", gates, *inputs)
        hs, cs, ah, raw = replay(key, _Forward(plan), gates, *inputs)
        ctx.plan, ctx.saved = plan, (cs, ah, raw)
        ctx.save_for_backward(gates, hs, *inputs)
        return hs[1:], hs[-1].clone(), cs[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhs: Tensor, dh: Tensor, dc: Tensor) -> tuple[Any, ...]:
        gates, hs, weight, _, _, mask, lengths, gain_h, *rest = ctx.saved_tensors
        cs, ah, raw = ctx.saved
        given = (gates, weight, cs, ah, raw, mask, lengths, gain_h, *rest, dhs, dh, dc)
        key = _key(ctx.plan, "backward", *given)
        dz, dah, dshown, dh, dc = replay(key, _Backward(ctx.plan), *given)
        before = hs[:-1].transpose(0, 1).flatten(1, 2)  # (D, S * B, H)
        flat = dah.transpose(0, 1).flatten(1, 2).transpose(1, 2)
        dweight = _product(flat, before, ctx.plan.half)
        mode, kept = MODES[ctx.plan.norm], (ctx.plan, gates, ah, raw)
        found = _vector_gradients(*kept, dz, dshown)
        return None, (dah if mode == 2 else dz), dweight, dh, dc, None, None, *found


class _Forward:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self, gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, mask: Tensor | None,
        lengths: Tensor, *vectors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        S, D, B, _ = gates.shape
        H = h.shape[-1]
        hs, cs = gates.new_empty(S + 1, D, B, H), gates.new_empty(S + 1, D, B, H)
        hs[0], cs[0] = h, c
        ah, raw = torch.empty_like(gates), gates.new_empty(S, D, B, H)
        across = _ready(weight.transpose(1, 2), self.plan.half)
        options = self.plan.options(H, mask)
        for s in range(S):
            ah[s] = product(hs[s], across)
            kernels.forward_step[(D * B,)](
                gates[s], ah[s], hs[s], cs[s], hs if mask is None else mask, lengths, *vectors,
                hs[s + 1], cs[s + 1], raw[s], s, B, H, **options,
            )  # fmt: skip
        return hs, cs, ah, raw


class _Backward:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self, gates: Tensor, weight: Tensor, cs: Tensor, ah: Tensor, raw: Tensor,
        mask: Tensor | None, lengths: Tensor, gain_h: Tensor, bias: Tensor, gain_c: Tensor,
        bias_c: Tensor, dhs: Tensor, dh: Tensor, dc: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        S, D, B, _ = gates.shape
        H = dh.shape[-1]
        dz, dah = torch.empty_like(gates), torch.empty_like(gates)
        dshown, passing = torch.empty_like(raw), torch.empty_like(dh)
        dh, dc, weight = dh.clone(), dc.clone(), _ready(weight, self.plan.half)
        options = self.plan.options(H, mask)
        for s in reversed(range(S)):
            kernels.backward_step[(D * B,)](
                gates[s], ah[s], cs[s], raw[s], cs if mask is None else mask, lengths, gain_h,
                bias, gain_c, bias_c, dh, dhs[s], dc, dz[s], dah[s], dshown[s], passing,
                s, B, H, **options,
            )  # fmt: skip
            dh = product(dah[s], weight).add_(passing)
        return dz, dah, dshown, dh, dc


def _vector_gradients(
    plan: Plan, gates: Tensor, ah: Tensor, raw: Tensor, dz: Tensor, dshown: Tensor
) -> tuple[Tensor | None, ...]:
    """Of gain_h, bias, gain_c and bias_c, which the norms use or not."""
    mode, gain_h, bias, gain_c, bias_c = MODES[plan.norm], None, None, None, None
    if mode == 1:
        gain_h = (dz * norm(ah, plan.eps).normed).sum((0, 2))
    elif mode == 2:
        normed = norm((gates + ah).unflatten(-1, (4, -1)), plan.eps).normed.flatten(-2)
        gain_h, bias = (dz * normed).sum((0, 2)), dz.sum((0, 2))
    if plan.norm != "none":
        gain_c = (dshown * norm(raw, plan.eps).normed).sum((0, 2))
        bias_c = dshown.sum((0, 2))
    return gain_h, bias, gain_c, bias_c


def _ready(weight: Tensor, half: bool) -> Tensor:
    return (weight.bfloat16() if half else weight).contiguous()


def _product(a: Tensor, b: Tensor, half: bool) -> Tensor:
    return (a.bfloat16() @ b.bfloat16()).to(a.dtype) if half else a @ b


def _key(plan: Plan, name: str, *tensors: Tensor | None) -> tuple[Any, ...]:
    described = [t if t is None else (tuple(t.shape), t.dtype, t.device) for t in tensors]
    return plan, name, *described

"""One look of additive or location-aware attention in C++: what a speller repeats.

Energies, softmax and running sum in one call, forward and backward; asr/nn/attention.py holds the
equations and, for every other device and dtype, the same as torch's operators.
"""

import ctypes
from ctypes import c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asr.nn.kernels.cpu import library

Pair = tuple[Tensor, Tensor]


class LookCall(ctypes.Structure):
    """attention.h: LookCall."""

    _fields_ = (
        [(name, c_int64) for name in ("B", "K", "T", "A", "C", "W", "threads", "forked")]
        + library.pointers("keys wanted v place conv past_weights past_total valid weights total")
        + library.pointers("dweights dtotal dkeys dwanted dv dplace dconv")
        + library.pointers("dpast_weights dpast_total")
    )


class Given(NamedTuple):
    """What a look depends on; C filters of W taps, or None in additive attention."""

    keys: Tensor  # (B, T, A)
    wanted: Tensor  # (B, K, A)
    v: Tensor  # (1, A)
    past_weights: Tensor  # (B, K, T)
    past_total: Tensor  # (B, K, T)
    place: Tensor | None = None  # (A, C)
    conv: Tensor | None = None  # (C, 2, W)


def look(given: Given, valid: Tensor) -> Pair:
    """valid (B, T) -> this step's weights and the sum of all so far, each (B, K, T).

    All of one dtype, float32 or float64. Raises ValueError where a shape does not fit, and
    build.BuildError without the kernels.
    """
    _check(given, valid)
    given = Given(*(t if t is None else t.contiguous() for t in given))
    valid = valid.contiguous()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        return _Look.apply(valid, *given)
    return _forward(given, valid)


def _check(given: Given, valid: Tensor) -> None:
    """C++ trusts the shapes."""
    (B, T, A), K = given.keys.shape, given.wanted.shape[1]
    shapes = [(B, T, A), (B, K, A), (1, A), (B, K, T), (B, K, T)]
    if given.conv is not None:
        C, _, W = given.conv.shape
        shapes += [(A, C), (C, 2, W)]
    tensors = [t for t in given if t is not None]
    names = [*Given._fields[: len(tensors)], "valid"]
    for name, tensor, shape in zip(names, [*tensors, valid], [*shapes, (B, T)], strict=True):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, valid: Tensor, *given: Tensor | None) -> Pair:
        weights, total = _forward(Given(*given), valid)
        ctx.save_for_backward(valid, weights, *given)
        return weights, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        valid, weights, *given = ctx.saved_tensors
        return None, *_backward(Given(*given), valid, weights, dweights, dtotal)


def _forward(given: Given, valid: Tensor) -> Pair:
    weights, total = (torch.empty_like(given.past_total) for _ in range(2))
    call = _describe(given, valid, weights, rows=given.wanted.shape[:2].numel())
    library.point(call, total=total)
    library.run("look_forward", call, library.kind_of(weights))
    return weights, total


def _backward(
    given: Given, valid: Tensor, weights: Tensor, dweights: Tensor, dtotal: Tensor
) -> Given:
    """The gradients of all that is given."""
    call = _describe(given, valid, weights, rows=len(valid))
    dweights, dtotal = dweights.contiguous(), dtotal.contiguous()
    slots = given._replace(
        **{
            name: library.slots(getattr(given, name), call.threads)
            for name in ("v", "place", "conv")
        },
        past_weights=None if given.conv is None else torch.empty_like(weights),
        past_total=dtotal if given.conv is None else torch.empty_like(weights),
        keys=torch.empty_like(given.keys),
        wanted=torch.empty_like(given.wanted),
    )
    library.point(call, dweights=dweights, dtotal=dtotal)
    library.point(call, **{f"d{name}": slot for name, slot in slots._asdict().items()})
    library.run("look_backward", call, library.kind_of(weights))
    summed = {name: library.add_up(getattr(slots, name)) for name in ("v", "place", "conv")}
    return slots._replace(**summed)


def _describe(given: Given, valid: Tensor, weights: Tensor, rows: int) -> LookCall:
    """The part of a call that both passes share; `rows` can be dealt to threads."""
    (B, K, T), A = weights.shape, given.keys.shape[-1]
    C, _, W = (0, 0, 0) if given.conv is None else given.conv.shape
    threads = max(1, min(rows, torch.get_num_threads()))
    call = LookCall(B=B, K=K, T=T, A=A, C=C, W=W, threads=threads)
    library.point(call, valid=valid, weights=weights, **given._asdict())
    return call

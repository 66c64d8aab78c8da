"""The backend "cuda": per time step one cuBLAS product for both directions and one Triton kernel.

The input's part of the gates is made for all steps at once by torch and left to autograd; the
recurrence has a backward pass by hand. With precision bf16 the products are bf16, all else fp32.
Tested on the CPU under TRITON_INTERPRET=1; its speed on a GPU is not yet measured.

Steps run along S in each direction's own reading order, so that every utterance begins at step 0.
S is the longest length, rounded up to a multiple of BUCKET: few graphs serve all batches.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor

from asr.nn.kernels.problem import Batch, Result, Setting, Weights
from asr.nn.kernels.python import SPLIT, product
from asr.nn.kernels.reference import normalise

BUCKET = 32  # frames


def obstacle(like: Tensor | None = None) -> str | None:
    """Why the backend cannot run here, or not on weights like these; None where it can."""
    if reason := _missing():
        return reason
    if like is None or _interpreted() or (like.is_cuda and like.dtype == torch.float32):
        return None
    if not like.is_cuda:
        return f"the weights are on {like.device}"
    return f"the weights are {like.dtype}"


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not _interpreted() and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def layer(batch: Batch, weights: list[Weights], setting: Setting) -> Result:
    """All directions of one layer at once."""
    from asr.nn.kernels.cuda.recurrence import Plan, Recurrence  # triton need not be installed

    B, T, _ = batch.x.shape
    lengths = torch.tensor(batch.lengths or [T] * B)
    at, real = (part.to(batch.x.device) for part in _reading_order(lengths, T, len(weights)))
    rows = batch.x.flatten(0, 1)[at].masked_fill(~real.unsqueeze(-1), 0.0)  # (S, D, B, I)
    gates = torch.stack([_input_part(rows[:, d], w, setting) for d, w in enumerate(weights)], 1)
    half = setting.precision == "bf16" and gates.dtype == torch.float32
    plan = Plan(setting.norm, setting.eps, half)
    mask = None if batch.mask is None else batch.mask.contiguous()
    state = batch.h.contiguous(), batch.c.contiguous()
    fixed = (torch.stack([w.weight_hh for w in weights]), *state, mask, lengths.to(batch.x.device))
    hs, h, c = Recurrence.apply(plan, gates.contiguous(), *fixed, *_vectors(weights, setting))
    return Result(_in_time_order(hs, at, real, T), h, c)


def _reading_order(lengths: Tensor, T: int, directions: int) -> tuple[Tensor, Tensor]:
    """The frame (row of B * T) that is read in each step, and whether it is one: (S, D, B)."""
    S = -(-int(lengths.max()) // BUCKET) * BUCKET
    step = torch.arange(S)[:, None]
    real = step < lengths  # (S, B)
    times = [step.expand_as(real), lengths - 1 - step][:directions]
    first = torch.arange(len(lengths)) * T
    at = torch.stack([torch.where(real, first + time, 0) for time in times], dim=1)
    return at, real.unsqueeze(1).expand_as(at)


def _in_time_order(hs: Tensor, at: Tensor, real: Tensor, T: int) -> Tensor:
    """hs (S, D, B, H) -> (B, T, D * H), zero where no frame was read."""
    _, D, B, H = hs.shape
    parts = []
    for d in range(D):
        flat = hs.new_zeros(B * T, H)
        parts.append(flat.index_copy(0, at[:, d][real[:, d]], hs[:, d][real[:, d]]))
    return torch.cat(parts, dim=-1).view(B, T, D * H)


def _input_part(x: Tensor, w: Weights, setting: Setting) -> Tensor:
    """x (S, B, I) -> (S, B, 4H), the summand of the gates that waits for no step."""
    gates = product(x, w.weight_ih.t(), setting)
    if setting.norm == "per_gate":  # its norm and so its bias come after the sum
        return gates
    if setting.norm in SPLIT:
        gates = normalise(gates, setting.eps, setting.guard)
    if w.gain_ih is not None:
        gates = gates * w.gain_ih
    return gates + (w.bias_ih + w.bias_hh)


def _vectors(weights: list[Weights], setting: Setting) -> list[Tensor]:
    """gain_h, bias, gain_c and bias_c of all directions, ones where there is none."""
    ones = weights[0].bias_ih.new_ones(len(weights), 4 * weights[0].weight_hh.shape[1])
    columns = []
    for name in ("gain_hh", "bias_ih", "gain_c", "bias_c"):
        if name == "gain_hh" and setting.norm == "per_gate":
            name = "gain_gates"
        own = [getattr(w, name) for w in weights]
        if name == "bias_ih":
            own = [w.bias_ih + w.bias_hh for w in weights]
        columns.append(ones if own[0] is None else torch.stack(own))
    return columns

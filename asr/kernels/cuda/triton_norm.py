# ruff: noqa: ANN001, ANN201  (Triton's arguments are pointers and vectors, not Python types)
"""Triton kernels: the norm of rows with gain and bias, y = gain N(x) + bias, forward and backward.

The rows of a tensor (S, B, N), which may be a part of a larger one: row r begins at
r // B * outer + r % B * inner. NORM: without it N(x) = x. RMS: no mean is subtracted. GAIN, BIAS:
there is one, of N elements. Formulas: python.py; a row without variance gives `bias` and passes no
gradient. Arithmetic is in the dtype of y; x and its gradient may be bf16.
"""

import triton
import triton.language as tl

from asr.kernels.cuda.triton_step import norm, norm_backward


@triton.jit
def norm_rows_forward(
    x, added, gain, bias, y, B, N, x_outer, x_inner, y_outer, y_inner, eps,
    NORM: tl.constexpr, RMS: tl.constexpr, GAIN: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes one row. ADD: the rows are x + added, of the same layout."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    real = j < N
    at = row // B * x_outer + row % B * x_inner + j
    value = tl.load(x + at, real, 0.0).to(y.dtype.element_ty)
    if ADD:
        value += tl.load(added + at, real, 0.0).to(y.dtype.element_ty)
    if NORM:
        value, _1 = norm(value, real, N, eps, RMS)
    if GAIN:
        value = value * tl.load(gain + j, real, 0.0)
    if BIAS:
        value = value + tl.load(bias + j, real, 0.0)
    tl.store(y + row // B * y_outer + row % B * y_inner + j, value, real)


@triton.jit
def norm_rows_backward(
    x, added, gain, dy, dx, dgain, dbias, rows, B, N, x_outer, x_inner, y_outer, y_inner, eps,
    NORM: tl.constexpr, RMS: tl.constexpr, GAIN: tl.constexpr, ADD: tl.constexpr,
    DX: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SUMS: dgain and dbias (programs, N), the sums over the rows of each program.

    ADD: the rows are x + added, of the same layout. DX: the gradient of x, in its layout.
    """
    j = tl.arange(0, BLOCK)
    real = j < N
    kind = dy.dtype.element_ty
    gain_sum, bias_sum = tl.zeros([BLOCK], kind), tl.zeros([BLOCK], kind)
    weight = tl.load(gain + j, real, 0.0) if GAIN else tl.full([BLOCK], 1.0, kind)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        at = row // B * x_outer + row % B * x_inner + j
        value = tl.load(x + at, real, 0.0).to(kind)
        if ADD:
            value += tl.load(added + at, real, 0.0).to(kind)
        d = tl.load(dy + row // B * y_outer + row % B * y_inner + j, real, 0.0)
        normed, scale = value, tl.sum(value, 0)
        if NORM:
            normed, scale = norm(value, real, N, eps, RMS)
        gain_sum += d * normed
        bias_sum += d
        if DX:
            d = d * weight
            if NORM:
                d = norm_backward(d, normed, scale, real, N, RMS)
            tl.store(dx + at, d.to(dx.dtype.element_ty), real)
    if SUMS:
        at = tl.program_id(0) * N + j
        tl.store(dgain + at, gain_sum, real)
        tl.store(dbias + at, bias_sum, real)

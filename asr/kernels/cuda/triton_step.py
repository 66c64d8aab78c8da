# ruff: noqa: ANN001, ANN201  (Triton's arguments are pointers and vectors, not Python types)
"""Triton kernels: a LayerNorm-LSTM step without its matrix products, forward and backward.

One program computes one row: one utterance in one direction, its 4H pre-activations in registers.
Formulas: reference.py; backward of a norm: python.py. A row whose utterance has ended copies its
state and adds no gradient.

ah and the gradient that W_h returns may be bf16, as the matrix products read and write them; all
arithmetic is in the dtype of the gates.

MODE 0: z = gates + ah. 1: z = gates + gain N(ah). 2: z = gain N(gates + ah) + bias, by gate.
3: the same over all gates. RMS: no norm subtracts a mean. SHOW, CARRY: the output, the next step
reads the normed cell. HIDDEN: h is normalised.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    shrunk = tl.exp(-2 * tl.abs(x))
    size = (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def sums(a, b, c, d):
    return tl.sum(a, 0) + tl.sum(b, 0) + tl.sum(c, 0) + tl.sum(d, 0)


@triton.jit
def scale_of(squares, n, flat, eps):
    """1 / sqrt(variance + eps); 0 in a flat row."""
    return tl.where(flat, 0.0, 1 / tl.sqrt(squares / n + eps))


@triton.jit
def lowest(x, real):
    return tl.min(tl.where(real, x, float("inf")), 0)


@triton.jit
def highest(x, real):
    return tl.max(tl.where(real, x, float("-inf")), 0)


@triton.jit
def norm(x, real, n, eps, RMS: tl.constexpr):
    """N of one vector and its scale; lanes beyond n hold zeros before and after."""
    if RMS:
        squares = tl.sum(x * x, 0)
        flat = tl.max(tl.abs(x), 0) == 0  # small squares vanish
    else:
        flat = lowest(x, real) == highest(x, real)
        x = tl.where(real, x - tl.sum(x, 0) / n, 0.0)
        squares = tl.sum(x * x, 0)
    scale = scale_of(squares, n, flat, eps)
    return x * scale, scale


@triton.jit
def norm_backward(d, normed, scale, real, n, RMS: tl.constexpr):
    slope = tl.sum(d * normed, 0) / n
    if not RMS:
        d = d - tl.sum(d, 0) / n
    return tl.where(real, scale * (d - normed * slope), 0.0)


@triton.jit
def centre4(a, b, c, d, real, n):
    """Four vectors minus their common mean; are all their elements equal?"""
    low = tl.minimum(tl.minimum(lowest(a, real), lowest(b, real)),
                     tl.minimum(lowest(c, real), lowest(d, real)))  # fmt: skip
    high = tl.maximum(tl.maximum(highest(a, real), highest(b, real)),
                      tl.maximum(highest(c, real), highest(d, real)))  # fmt: skip
    mean = sums(a, b, c, d) / (4 * n)
    a, b = tl.where(real, a - mean, 0.0), tl.where(real, b - mean, 0.0)
    c, d = tl.where(real, c - mean, 0.0), tl.where(real, d - mean, 0.0)
    return a, b, c, d, low == high


@triton.jit
def norm4(a, b, c, d, real, n, eps, RMS: tl.constexpr):
    """N over four vectors together."""
    if RMS:
        squares = sums(a * a, b * b, c * c, d * d)
        size = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        flat = tl.max(size, 0) == 0
    else:
        a, b, c, d, flat = centre4(a, b, c, d, real, n)
        squares = sums(a * a, b * b, c * c, d * d)
    scale = scale_of(squares, 4 * n, flat, eps)
    return a * scale, b * scale, c * scale, d * scale, scale


@triton.jit
def norm4_backward(di, df, dg, do, a, b, c, d, scale, real, n, RMS: tl.constexpr):
    slope = sums(di * a, df * b, dg * c, do * d) / (4 * n)
    if not RMS:
        mean = sums(di, df, dg, do) / (4 * n)
        di, df, dg, do = di - mean, df - mean, dg - mean, do - mean
    return (scale * (di - a * slope), scale * (df - b * slope),
            scale * (dg - c * slope), scale * (do - d * slope))  # fmt: skip


@triton.jit
def load4(base, row, H, j, real):
    at = base + row * 4 * H + j
    return (tl.load(at, real, 0.0), tl.load(at + H, real, 0.0),
            tl.load(at + 2 * H, real, 0.0), tl.load(at + 3 * H, real, 0.0))  # fmt: skip


@triton.jit
def load_product(ah, gates, row, H, j, real):
    """W_h h in the dtype of the gates."""
    a, b, c, d = load4(ah, row, H, j, real)
    kind = gates.dtype.element_ty
    return a.to(kind), b.to(kind), c.to(kind), d.to(kind)


@triton.jit
def store4(base, row, H, j, real, a, b, c, d):
    at = base + row * 4 * H + j
    tl.store(at, a.to(base.dtype.element_ty), real)
    tl.store(at + H, b.to(base.dtype.element_ty), real)
    tl.store(at + 2 * H, c.to(base.dtype.element_ty), real)
    tl.store(at + 3 * H, d.to(base.dtype.element_ty), real)


@triton.jit
def normed_gates(gates, ah, row, H, j, real, eps, MODE: tl.constexpr, RMS: tl.constexpr):
    """The normed pre-activations but in MODE 0, and their scales, which only MODE 2 has four of."""
    a, b, c, d = load_product(ah, gates, row, H, j, real)
    if MODE != 1:
        ga, gb, gc, gd = load4(gates, row, H, j, real)
        a, b, c, d = a + ga, b + gb, c + gc, d + gd
    if MODE != 2:
        a, b, c, d, scale = norm4(a, b, c, d, real, H, eps, RMS)
        return a, b, c, d, scale, scale, scale, scale
    a, sa = norm(a, real, H, eps, RMS)
    b, sb = norm(b, real, H, eps, RMS)
    c, sc = norm(c, real, H, eps, RMS)
    d, sd = norm(d, real, H, eps, RMS)
    return a, b, c, d, sa, sb, sc, sd


@triton.jit
def activated(
    gates, ah, gain_h, bias, row, direction, H, j, real, eps, MODE: tl.constexpr, RMS: tl.constexpr
):  # fmt: skip
    """sigmoid i, sigmoid f, tanh g, sigmoid o. direction: a row of the weights."""
    if MODE == 0:
        a, b, c, d = load4(gates, row, H, j, real)
        e, f, g, h = load_product(ah, gates, row, H, j, real)
    else:
        a, b, c, d, _1, _2, _3, _4 = normed_gates(gates, ah, row, H, j, real, eps, MODE, RMS)
        e, f, g, h = load4(gain_h, direction, H, j, real)
        a, b, c, d = a * e, b * f, c * g, d * h
        if MODE == 1:
            e, f, g, h = load4(gates, row, H, j, real)
        else:
            e, f, g, h = load4(bias, direction, H, j, real)
    return sigmoid(a + e), sigmoid(b + f), tanh(c + g), sigmoid(d + h)


@triton.jit
def affine_norm(
    x, gain, bias, direction, H, j, real, eps, NORM: tl.constexpr, RMS: tl.constexpr
):  # fmt: skip
    """N(x) with gain and bias, or x; the gain, N(x) and its scale."""
    y, weight, normed, scale = x, x, x, tl.sum(x, 0)
    if NORM:
        normed, scale = norm(x, real, H, eps, RMS)
        weight = tl.load(gain + direction * H + j, real, 0.0)
        y = normed * weight + tl.load(bias + direction * H + j, real, 0.0)
    return y, weight, normed, scale


@triton.jit(do_not_specialize=["s"])
def forward_step(
    gates, ah, h, c, mask, lengths, gain_h, bias, gain_c, bias_c, gain_hidden, bias_hidden,
    h_next, h_factor, c_next, raw, raw_h, s, B, H, eps, MODE: tl.constexpr, RMS: tl.constexpr,
    NORM_C: tl.constexpr, SHOW: tl.constexpr, CARRY: tl.constexpr, HIDDEN: tl.constexpr,
    DROP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gates, ah (D*B, 4H), h, c (D*B, H) -> the next h and c, and both before their norms.

    HALF: also the next h in the dtype of h_factor, which the next product reads.
    """
    row = tl.program_id(0)
    direction = row // B
    j = tl.arange(0, BLOCK)
    real = j < H
    at = row * H + j
    c_old = tl.load(c + at, real, 0.0)
    i, f, g, o = activated(gates, ah, gain_h, bias, row, direction, H, j, real, eps, MODE, RMS)
    if DROP:
        g = g * tl.load(mask + at, real, 0.0)
    cell = tl.where(real, f * c_old + i * g, 0.0)
    normed, _1, _2, _3 = affine_norm(cell, gain_c, bias_c, direction, H, j, real, eps, NORM_C, RMS)
    hidden = tl.where(real, o * tanh(normed if SHOW else cell), 0.0)
    tl.store(raw + at, cell, real)
    if HIDDEN:
        tl.store(raw_h + at, hidden, real)
    hidden, _1, _2, _3 = affine_norm(
        hidden, gain_hidden, bias_hidden, direction, H, j, real, eps, HIDDEN, RMS
    )
    runs = s < tl.load(lengths + row % B)
    tl.store(c_next + at, tl.where(runs, normed if CARRY else cell, c_old), real)
    hidden = tl.where(runs, hidden, tl.load(h + at, real, 0.0))
    tl.store(h_next + at, hidden, real)
    if HALF:
        tl.store(h_factor + at, hidden.to(h_factor.dtype.element_ty), real)


@triton.jit
def through_norm(
    gates, ah, gain_h, row, direction, H, j, real, eps, di, df, dg, do,
    MODE: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    """Gradient of the four pre-activations -> gradient before their norm; not in MODE 0."""
    a, b, c, d, sa, sb, sc, sd = normed_gates(gates, ah, row, H, j, real, eps, MODE, RMS)
    wa, wb, wc, wd = load4(gain_h, direction, H, j, real)
    di, df, dg, do = di * wa, df * wb, dg * wc, do * wd
    if MODE == 2:
        di, df = norm_backward(di, a, sa, real, H, RMS), norm_backward(df, b, sb, real, H, RMS)
        dg, do = norm_backward(dg, c, sc, real, H, RMS), norm_backward(do, d, sd, real, H, RMS)
    else:
        di, df, dg, do = norm4_backward(di, df, dg, do, a, b, c, d, sa, real, H, RMS)
    return di, df, dg, do


@triton.jit(do_not_specialize=["s"])
def backward_step(
    gates, ah, c, raw, raw_h, mask, lengths, gain_h, bias, gain_c, bias_c, gain_hidden,
    bias_hidden, through_w, passing, dh_new, dc, dz, dah, dnormed, dhidden, s, B, H, eps,
    MODE: tl.constexpr, RMS: tl.constexpr, NORM_C: tl.constexpr, SHOW: tl.constexpr,
    CARRY: tl.constexpr, HIDDEN: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of h and the output, and dc in place -> dz, dah (D*B, 4H), and the gradients of
    the normed c and h.

    That of h is through_w, what W_h returned in the next step, plus `passing`, which is updated in
    place: the part of rows that have ended, which bypasses the product with W_h.
    """
    row = tl.program_id(0)
    direction = row // B
    j = tl.arange(0, BLOCK)
    real = j < H
    at = row * H + j
    runs = s < tl.load(lengths + row % B)
    dc_row = tl.load(dc + at, real, 0.0)
    dh_row = tl.load(through_w + at, real, 0.0).to(dc.dtype.element_ty)
    dh_row += tl.load(passing + at, real, 0.0)
    tl.store(passing + at, tl.where(runs, 0.0, dh_row), real)
    d = tl.where(runs, dh_row + tl.load(dh_new + at, real, 0.0), 0.0)
    dc_live = tl.where(runs, dc_row, 0.0)
    c_old, cell = tl.load(c + at, real, 0.0), tl.load(raw + at, real, 0.0)
    if HIDDEN:
        tl.store(dhidden + at, d, real)
        hidden = tl.load(raw_h + at, real, 0.0)
        _1, weight, normed, scale = affine_norm(
            hidden, gain_hidden, bias_hidden, direction, H, j, real, eps, HIDDEN, RMS
        )
        d = norm_backward(d * weight, normed, scale, real, H, RMS)
    i, f, g, o = activated(gates, ah, gain_h, bias, row, direction, H, j, real, eps, MODE, RMS)
    drop = 1.0
    if DROP:
        drop = tl.load(mask + at, real, 0.0)
    value, weight, normed, scale = affine_norm(
        cell, gain_c, bias_c, direction, H, j, real, eps, NORM_C, RMS
    )
    bounded = tanh(value if SHOW else cell)
    dshown = d * o * (1 - bounded * bounded)
    through, around = 0.0, 0.0  # the gradients that pass the norm of c and those that do not
    if SHOW:
        through += dshown
    else:
        around += dshown
    if CARRY:
        through += dc_live
    else:
        around += dc_live
    dcell = around
    if NORM_C:
        tl.store(dnormed + at, through, real)
        dcell += norm_backward(through * weight, normed, scale, real, H, RMS)
    di, df = dcell * g * drop * i * (1 - i), dcell * c_old * f * (1 - f)
    dg, do = dcell * i * drop * (1 - g * g), d * bounded * o * (1 - o)
    tl.store(dc + at, tl.where(runs, dcell * f, dc_row), real)
    store4(dz, row, H, j, real, di, df, dg, do)
    if MODE != 0:
        di, df, dg, do = through_norm(
            gates, ah, gain_h, row, direction, H, j, real, eps, di, df, dg, do, MODE, RMS
        )
    store4(dah, row, H, j, real, di, df, dg, do)

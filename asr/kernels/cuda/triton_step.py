# ruff: noqa: ANN001, ANN201  (Triton's arguments are pointers and vectors, not Python types)
"""Triton kernels: a LayerNorm-LSTM step without its matrix products, forward and backward.

One program computes one row: one utterance in one direction, its 4H pre-activations in registers.
Formulas: reference.py; backward of a norm: python.py. A row whose utterance has ended copies its
state and adds no gradient.

MODE 0: z = gates + ah. 1: z = gates + gain LN(ah). 2: z = gain LN(gates + ah) + bias, by gate.
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
def scale_of(squares, n, low, high, eps):
    """1 / sqrt(variance + eps); 0 in a row without variance."""
    return tl.where(low == high, 0.0, 1 / tl.sqrt(squares / n + eps))


@triton.jit
def lowest(x, real):
    return tl.min(tl.where(real, x, float("inf")), 0)


@triton.jit
def highest(x, real):
    return tl.max(tl.where(real, x, float("-inf")), 0)


@triton.jit
def norm(x, real, n, eps):
    """LN of one vector and its scale; lanes beyond n hold zeros before and after."""
    centred = tl.where(real, x - tl.sum(x, 0) / n, 0.0)
    squares = tl.sum(centred * centred, 0)
    scale = scale_of(squares, n, lowest(x, real), highest(x, real), eps)
    return centred * scale, scale


@triton.jit
def norm_backward(d, normed, scale, real, n):
    slope = tl.sum(d * normed, 0) / n
    return tl.where(real, scale * (d - tl.sum(d, 0) / n - normed * slope), 0.0)


@triton.jit
def norm4(a, b, c, d, real, n, eps):
    """LN over four vectors together."""
    mean = sums(a, b, c, d) / (4 * n)
    low = tl.minimum(tl.minimum(lowest(a, real), lowest(b, real)),
                     tl.minimum(lowest(c, real), lowest(d, real)))  # fmt: skip
    high = tl.maximum(tl.maximum(highest(a, real), highest(b, real)),
                      tl.maximum(highest(c, real), highest(d, real)))  # fmt: skip
    a, b = tl.where(real, a - mean, 0.0), tl.where(real, b - mean, 0.0)
    c, d = tl.where(real, c - mean, 0.0), tl.where(real, d - mean, 0.0)
    scale = scale_of(sums(a * a, b * b, c * c, d * d), 4 * n, low, high, eps)
    return a * scale, b * scale, c * scale, d * scale, scale


@triton.jit
def load4(base, row, H, j, real):
    at = base + row * 4 * H + j
    return (tl.load(at, real, 0.0), tl.load(at + H, real, 0.0),
            tl.load(at + 2 * H, real, 0.0), tl.load(at + 3 * H, real, 0.0))  # fmt: skip


@triton.jit
def store4(base, row, H, j, real, a, b, c, d):
    at = base + row * 4 * H + j
    tl.store(at, a, real)
    tl.store(at + H, b, real)
    tl.store(at + 2 * H, c, real)
    tl.store(at + 3 * H, d, real)


@triton.jit
def normed_gates(gates, ah, row, H, j, real, eps, MODE: tl.constexpr):
    """The normed pre-activations of MODE 1 or 2 and their scales, which are equal in MODE 1."""
    a, b, c, d = load4(ah, row, H, j, real)
    if MODE == 1:
        a, b, c, d, scale = norm4(a, b, c, d, real, H, eps)
        return a, b, c, d, scale, scale, scale, scale
    ga, gb, gc, gd = load4(gates, row, H, j, real)
    a, sa = norm(a + ga, real, H, eps)
    b, sb = norm(b + gb, real, H, eps)
    c, sc = norm(c + gc, real, H, eps)
    d, sd = norm(d + gd, real, H, eps)
    return a, b, c, d, sa, sb, sc, sd


@triton.jit
def activated(gates, ah, gain_h, bias, row, own, H, j, real, eps, MODE: tl.constexpr):
    """sigmoid i, sigmoid f, tanh g, sigmoid o. own: the direction, a row of the weights."""
    if MODE == 0:
        a, b, c, d = load4(gates, row, H, j, real)
        e, f, g, h = load4(ah, row, H, j, real)
    else:
        a, b, c, d, _1, _2, _3, _4 = normed_gates(gates, ah, row, H, j, real, eps, MODE)
        e, f, g, h = load4(gain_h, own, H, j, real)
        a, b, c, d = a * e, b * f, c * g, d * h
        if MODE == 1:
            e, f, g, h = load4(gates, row, H, j, real)
        else:
            e, f, g, h = load4(bias, own, H, j, real)
    return sigmoid(a + e), sigmoid(b + f), tanh(c + g), sigmoid(d + h)


@triton.jit
def show(cell, gain_c, bias_c, own, H, j, real, eps, NORM_C: tl.constexpr):
    """The argument of the output's tanh; the norm's gain, normed cell and scale."""
    shown, weight, normed, scale = cell, cell, cell, tl.sum(cell, 0)
    if NORM_C:
        normed, scale = norm(cell, real, H, eps)
        weight = tl.load(gain_c + own * H + j, real, 0.0)
        shown = normed * weight + tl.load(bias_c + own * H + j, real, 0.0)
    return shown, weight, normed, scale


@triton.jit
def through_cell(
    dshown, dc, weight, normed, scale, real, H, NORM_C: tl.constexpr, CARRY: tl.constexpr
):  # fmt: skip
    """Gradient of the cell before its norm."""
    dcell = dshown
    if NORM_C:
        dcell = norm_backward(dshown * weight, normed, scale, real, H)
    if not CARRY:
        dcell += dc
    return dcell


@triton.jit
def forward_step(
    gates, ah, h, c, mask, lengths, gain_h, bias, gain_c, bias_c, h_next, c_next, raw,
    s, B, H, eps, MODE: tl.constexpr, NORM_C: tl.constexpr, CARRY: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gates, ah (D*B, 4H), h, c (D*B, H) -> the next h and c, and c before its norm."""
    row = tl.program_id(0)
    own = row // B
    j = tl.arange(0, BLOCK)
    real = j < H
    at = row * H + j
    c_old = tl.load(c + at, real, 0.0)
    i, f, g, o = activated(gates, ah, gain_h, bias, row, own, H, j, real, eps, MODE)
    if DROP:
        g = g * tl.load(mask + at, real, 0.0)
    cell = tl.where(real, f * c_old + i * g, 0.0)
    shown, _1, _2, _3 = show(cell, gain_c, bias_c, own, H, j, real, eps, NORM_C)
    carried = cell
    if CARRY:
        carried = shown
    runs = s < tl.load(lengths + row % B)
    tl.store(raw + at, cell, real)
    tl.store(c_next + at, tl.where(runs, carried, c_old), real)
    tl.store(h_next + at, tl.where(runs, o * tanh(shown), tl.load(h + at, real, 0.0)), real)


@triton.jit
def through_norm(
    gates, ah, gain_h, row, own, H, j, real, eps, di, df, dg, do, MODE: tl.constexpr
):  # fmt: skip
    """Gradient of the four pre-activations -> gradient before the norm of MODE 1 or 2."""
    a, b, c, d, sa, sb, sc, sd = normed_gates(gates, ah, row, H, j, real, eps, MODE)
    wa, wb, wc, wd = load4(gain_h, own, H, j, real)
    di, df, dg, do = di * wa, df * wb, dg * wc, do * wd
    if MODE == 1:
        mean = sums(di, df, dg, do) / (4 * H)
        slope = sums(di * a, df * b, dg * c, do * d) / (4 * H)
        di, df = sa * (di - mean - a * slope), sa * (df - mean - b * slope)
        dg, do = sa * (dg - mean - c * slope), sa * (do - mean - d * slope)
    else:
        di, df = norm_backward(di, a, sa, real, H), norm_backward(df, b, sb, real, H)
        dg, do = norm_backward(dg, c, sc, real, H), norm_backward(do, d, sd, real, H)
    return di, df, dg, do


@triton.jit
def backward_step(
    gates, ah, c, raw, mask, lengths, gain_h, bias, gain_c, bias_c, dh, dh_new, dc,
    dz, dah, dshown_all, passing, s, B, H, eps, MODE: tl.constexpr, NORM_C: tl.constexpr,
    CARRY: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dh of the next step plus the output's dh_new, dc in place -> dz, dah (D*B, 4H), dshown.

    `passing` receives the dh of rows that have ended, which bypasses the product with W_h.
    """
    row = tl.program_id(0)
    own = row // B
    j = tl.arange(0, BLOCK)
    real = j < H
    at = row * H + j
    runs = s < tl.load(lengths + row % B)
    dh_row, dc_row = tl.load(dh + at, real, 0.0), tl.load(dc + at, real, 0.0)
    tl.store(passing + at, tl.where(runs, 0.0, dh_row), real)
    d = tl.where(runs, dh_row + tl.load(dh_new + at, real, 0.0), 0.0)
    dc_live = tl.where(runs, dc_row, 0.0)
    c_old, cell = tl.load(c + at, real, 0.0), tl.load(raw + at, real, 0.0)
    i, f, g, o = activated(gates, ah, gain_h, bias, row, own, H, j, real, eps, MODE)
    drop = 1.0
    if DROP:
        drop = tl.load(mask + at, real, 0.0)
    shown, weight, normed, scale = show(cell, gain_c, bias_c, own, H, j, real, eps, NORM_C)
    bounded = tanh(shown)
    dshown = d * o * (1 - bounded * bounded)
    if CARRY:
        dshown += dc_live
    tl.store(dshown_all + at, dshown, real)
    dcell = through_cell(dshown, dc_live, weight, normed, scale, real, H, NORM_C, CARRY)
    di, df = dcell * g * drop * i * (1 - i), dcell * c_old * f * (1 - f)
    dg, do = dcell * i * drop * (1 - g * g), d * bounded * o * (1 - o)
    tl.store(dc + at, tl.where(runs, dcell * f, dc_row), real)
    store4(dz, row, H, j, real, di, df, dg, do)
    if MODE != 0:
        di, df, dg, do = through_norm(
            gates, ah, gain_h, row, own, H, j, real, eps, di, df, dg, do, MODE
        )
    store4(dah, row, H, j, real, di, df, dg, do)

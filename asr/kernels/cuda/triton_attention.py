# ruff: noqa: ANN001, ANN201  (Triton's arguments are pointers and vectors, not Python types)
"""Triton kernels: one attention step over the encoder's memory, forward and backward.

Formulas: asr/nn/attention.py. Frames are divided into tiles of BLOCK_T; one program computes all A
elements of the energies' sums in its tile. KIND 0: additive, 1: dot products, 2: additive with the
location, C filters of W taps over the last weights and their sum. weight_loc: U, (A, C).

A row of queries belongs to the utterance row // K. valid: bytes, 0 in frames that are not read, so
that padding may hold NaN. Weights of a row without a frame are 0. The matrices keys, states and
query may be bf16; all arithmetic is in the dtype of the weights. Programs write their own part of
each result only, and none reads what another one writes: sums over tiles are left to sum_tiles.
"""

import triton
import triton.language as tl

from asr.kernels.cuda.triton_step import tanh


@triton.jit
def window(past, row, t, w, T, W, real, side):
    """past[t + side (w - W // 2)] of a row, (BLOCK_T, BLOCK_W); 0 outside the frames."""
    frame = t[:, None] + side * (w[None, :] - W // 2)
    inside = real[:, None] & (frame >= 0) & (frame < T) & (w < W)[None, :]
    return tl.load(past + row * T + frame, inside, 0.0)


@triton.jit
def taps(conv, c, channel, w, W):
    """The filter c of the last weights (channel 0) or their sum (1), (BLOCK_W,)."""
    return tl.load(conv + (2 * c + channel) * W + w, w < W, 0.0)


@triton.jit
def summed(
    keys, query, weight_loc, conv, past_weights, past_total, b, row, t, a, w, real, T, A, C, W,
    KIND: tl.constexpr,
):  # fmt: skip
    """W s + V h_t + U f_t, (BLOCK_T, BLOCK_A); in KIND 1 the product of query and key."""
    kind = past_weights.dtype.element_ty
    key_at = (b * T + t[:, None]) * A + a[None, :]
    key = tl.load(keys + key_at, real[:, None] & (a < A)[None, :], 0.0).to(kind)
    asked = tl.load(query + row * A + a, a < A, 0.0).to(kind)
    total = key * asked[None, :] if KIND == 1 else key + asked[None, :]
    if KIND == 2:
        recent = window(past_weights, row, t, w, T, W, real, 1)
        before = window(past_total, row, t, w, T, W, real, 1)
        for c in range(C):
            feature = filtered(recent, before, conv, c, w, W)
            total += feature[:, None] * tl.load(weight_loc + a * C + c, a < A, 0.0)[None, :]
    return total


@triton.jit
def filtered(recent, before, conv, c, w, W):
    """Feature c of the location, (BLOCK_T,)."""
    return tl.sum(recent * taps(conv, c, 0, w, W)[None, :] +
                  before * taps(conv, c, 1, w, W)[None, :], 1)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def attention_energy(
    keys, query, v, weight_loc, conv, past_weights, past_total, valid, energy, K, T, A, C, W, scale,
    KIND: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program (row, tile) -> its energies (rows, T), -inf in frames that are not read.

    keys (B, T, A), query (rows, A), past_weights, past_total (rows, T).
    """
    row = tl.program_id(0).to(tl.int64)
    b = row // K
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    a, w = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_W)
    real = tl.load(valid + b * T + t, t < T, 0) != 0
    total = summed(
        keys, query, weight_loc, conv, past_weights, past_total, b, row, t, a, w, real, T, A, C, W,
        KIND,
    )  # fmt: skip
    if KIND == 1:
        value = tl.sum(total, 1) * scale
    else:
        value = tl.sum(tanh(total) * tl.load(v + a, a < A, 0.0)[None, :], 1)
    tl.store(energy + row * T + t, tl.where(real, value, float("-inf")), t < T)


@triton.jit(do_not_specialize=["T"])
def attention_context(
    energy, states, past_total, weights, total, context, factor, K, T, E,
    CONTEXT: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Program (row, tile of E): softmax of a row of energies, and with CONTEXT its sum of states.

    The programs of tile 0 write weights and total (rows, T). HALF: the context also in the dtype of
    `factor`, which the next product reads.
    """
    row = tl.program_id(0).to(tl.int64)
    b = row // K
    kind = energy.dtype.element_ty
    r = tl.arange(0, BLOCK_R)
    highest = tl.full([BLOCK_R], float("-inf"), kind)
    for first in range(0, T, BLOCK_R):
        at = row * T + first + r
        highest = tl.maximum(highest, tl.load(energy + at, first + r < T, float("-inf")))
    peak = tl.max(highest, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # a row without a frame
    sums = tl.zeros([BLOCK_R], kind)
    for first in range(0, T, BLOCK_R):
        at = row * T + first + r
        sums += tl.exp(tl.load(energy + at, first + r < T, float("-inf")) - peak)
    scale = 1 / tl.maximum(tl.sum(sums, 0), 1.0)  # the largest addend is 1
    if CONTEXT:
        t = tl.arange(0, BLOCK_T)
        e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
        found = tl.zeros([BLOCK_E], kind)
        for first in range(0, T, BLOCK_T):
            frame = first + t
            value = tl.load(energy + row * T + frame, frame < T, float("-inf"))
            weight = tl.exp(value - peak) * scale
            real = (value != float("-inf"))[:, None] & (e < E)[None, :]
            state = tl.load(states + (b * T + frame[:, None]) * E + e[None, :], real, 0.0)
            found += tl.sum(weight[:, None] * state.to(kind), 0)
        tl.store(context + row * E + e, found, e < E)
        if HALF:
            tl.store(factor + row * E + e, found.to(factor.dtype.element_ty), e < E)
    if tl.program_id(1) == 0:
        for first in range(0, T, BLOCK_R):
            at, real = row * T + first + r, first + r < T
            weight = tl.exp(tl.load(energy + at, real, float("-inf")) - peak) * scale
            tl.store(weights + at, weight, real)
            tl.store(total + at, tl.load(past_total + at, real, 0.0) + weight, real)


@triton.jit(do_not_specialize=["T"])
def attention_backward_weights(
    states, valid, dcontext, through, dweights, dlocation, conv, dtotal, dcontext_sum, dalpha,
    B, T, E, C, W, KIND: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program (utterance, tile) -> the gradients (B, T) of its weights.

    The context's gradient is that of the output and `through`, what the next step returned; the
    programs of tile 0 write their sum. dlocation (C, B, T): gradients of the next step's features;
    dtotal (B, T): of the sum of the weights, updated in place.
    """
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    kind = dalpha.dtype.element_ty
    real = tl.load(valid + b * T + t, t < T, 0) != 0
    d = tl.load(dweights + b * T + t, real, 0.0)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        slope = tl.load(dcontext + b * E + e, e < E, 0.0)
        slope += tl.load(through + b * E + e, e < E, 0.0).to(kind)
        inside = real[:, None] & (e < E)[None, :]
        state = tl.load(states + (b * T + t[:, None]) * E + e[None, :], inside, 0.0)
        d += tl.sum(state.to(kind) * slope[None, :], 1)
        if tl.program_id(1) == 0:
            tl.store(dcontext_sum + b * E + e, slope, e < E)
    if KIND == 2:
        w = tl.arange(0, BLOCK_W)
        recent, before = tl.zeros([BLOCK_T], kind), tl.zeros([BLOCK_T], kind)
        for c in range(C):  # the frames whose filters read this one
            slopes = window(dlocation, c * B + b, t, w, T, W, real, -1)
            recent += tl.sum(slopes * taps(conv, c, 0, w, W)[None, :], 1)
            before += tl.sum(slopes * taps(conv, c, 1, w, W)[None, :], 1)
        before += tl.load(dtotal + b * T + t, real, 0.0)
        tl.store(dtotal + b * T + t, before, real)
        d += recent + before
    tl.store(dalpha + b * T + t, tl.where(real, d, 0.0), t < T)


@triton.jit(do_not_specialize=["T"])
def attention_backward(
    keys, query, v, weight_loc, conv, past_weights, past_total, valid, weights, dalpha, dkeys,
    dquery, dv, dweight_loc, dconv, dlocation, B, T, A, C, W, scale, KIND: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program (utterance, tile): the gradients of the weights -> those of what the energies read.

    Added to those of later steps: dkeys (B, T, A) and, of each tile, dv (tiles, B, A), dweight_loc
    (tiles, B, C, A) and dconv (tiles, B, C, 2, W). Of this step: dquery (tiles, B, A), and
    dlocation (C, B, T) of the features.
    """
    b = tl.program_id(0).to(tl.int64)
    kind = dalpha.dtype.element_ty
    r = tl.arange(0, BLOCK_R)
    products = tl.zeros([BLOCK_R], kind)
    for first in range(0, T, BLOCK_R):
        at = b * T + first + r
        weight = tl.load(weights + at, first + r < T, 0.0)
        products += weight * tl.load(dalpha + at, first + r < T, 0.0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    a, w = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_W)
    real = tl.load(valid + b * T + t, t < T, 0) != 0
    slope = tl.load(dalpha + b * T + t, real, 0.0) - tl.sum(products, 0)
    slope = tl.load(weights + b * T + t, real, 0.0) * slope  # of the energies
    key_at = (b * T + t[:, None]) * A + a[None, :]
    inside = real[:, None] & (a < A)[None, :]
    tile = tl.program_id(1).to(tl.int64) * B + b
    if KIND == 1:
        key = tl.load(keys + key_at, inside, 0.0).to(kind)
        asked = tl.load(query + b * A + a, a < A, 0.0).to(kind)
        slope = slope * scale
        of_query = slope[:, None] * key
        d = slope[:, None] * asked[None, :]
    else:
        total = summed(
            keys, query, weight_loc, conv, past_weights, past_total, b, b, t, a, w, real, T, A, C,
            W, KIND,
        )  # fmt: skip
        bounded = tanh(total)
        of_v = tl.load(dv + tile * A + a, a < A, 0.0) + tl.sum(slope[:, None] * bounded, 0)
        tl.store(dv + tile * A + a, of_v, a < A)
        d = slope[:, None] * tl.load(v + a, a < A, 0.0)[None, :] * (1 - bounded * bounded)
        of_query = d
    tl.store(dquery + tile * A + a, tl.sum(of_query, 0), a < A)
    tl.store(dkeys + key_at, tl.load(dkeys + key_at, inside, 0.0) + d, inside)
    if KIND == 2:
        recent = window(past_weights, b, t, w, T, W, real, 1)
        before = window(past_total, b, t, w, T, W, real, 1)
        for c in range(C):
            feature = filtered(recent, before, conv, c, w, W)
            at = (tile * C + c) * A + a
            of_loc = tl.load(dweight_loc + at, a < A, 0.0) + tl.sum(feature[:, None] * d, 0)
            tl.store(dweight_loc + at, of_loc, a < A)
            d_feature = tl.sum(d * tl.load(weight_loc + a * C + c, a < A, 0.0)[None, :], 1)
            tl.store(dlocation + (c * B + b) * T + t, d_feature, t < T)
            of_recent = dconv + (tile * C + c) * 2 * W + w
            d_taps = tl.sum(d_feature[:, None] * recent, 0)
            tl.store(of_recent, tl.load(of_recent, w < W, 0.0) + d_taps, w < W)
            d_taps = tl.sum(d_feature[:, None] * before, 0)
            tl.store(of_recent + W, tl.load(of_recent + W, w < W, 0.0) + d_taps, w < W)


@triton.jit
def sum_tiles(parts, sums, tiles, B, A, BLOCK_A: tl.constexpr):
    """parts (tiles, B, A) -> sums (B, A), in its dtype. One program computes one row."""
    b = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, BLOCK_A)
    found = tl.zeros([BLOCK_A], parts.dtype.element_ty)
    for tile in range(tiles):
        found += tl.load(parts + (tile * B + b) * A + a, a < A, 0.0)
    tl.store(sums + b * A + a, found.to(sums.dtype.element_ty), a < A)

"""Backend "cpu": an LSTM layer in one call of C++, forward and backward, and a single time step.

A layer's call covers both directions. It saves the matrix products before their norms, the cells
and the norms' statistics; the backward pass recomputes the gates. A step, which decoders repeat,
does everything in C++ but the two matrix products: those use torch, so that autograd differentiates
the weights as in any module.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.kernels import reference
from asr.kernels.cpu import library
from asr.kernels.cpu.library import STATS
from asr.kernels.deferred import deferred_linear
from asr.kernels.double_backward import differentiate, needs_operators
from asr.kernels.types import LayerInput, LayerOutput, State, Weights, check_weight

PER_WORKER = 4  # utterances, at least: fewer leave the matrix kernels half empty
# A cell's vectors in C++, and how many times H each is long.
VECTORS = {"bias": 4, "gain_x": 4, "gain_h": 4} | dict.fromkeys(
    ("gain_c", "bias_c", "gain_hidden", "bias_hidden"), 1
)
Buffers = dict[str, Tensor]  # by the names of saved_sizes


class Plan(NamedTuple):
    """The arguments of a layer's call that are not tensors."""

    settings: CellSettings
    lengths: list[int]
    kind: int
    threads: int
    blocks: int

    @classmethod
    def of(cls, batch: LayerInput, settings: CellSettings, products: torch.dtype) -> "Plan":
        """Raises compiler.BuildError without compiled kernels."""
        B, T, _ = batch.x.shape
        threads = torch.get_num_threads()
        blocks = max(1, min(threads // len(batch.h), B // PER_WORKER))
        kind = library.kind_of_products(batch.x, products)
        return cls(settings, batch.lengths or [T] * B, kind, threads, blocks)


def layer(
    batch: LayerInput, weights: list[Weights], settings: CellSettings, products: torch.dtype
) -> LayerOutput:
    """All directions of one layer at once. products: dtype of the matrix products.

    Raises compiler.BuildError without compiled kernels.
    """
    plan = Plan.of(batch, settings, products)
    flat = [w for one in weights for w in one if w is not None]
    batch = laid_out(batch)
    tensors = [batch.x, batch.h, batch.c, *flat]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return LayerOutput(*_Layer.apply(plan, weights, *tensors[:3], batch.mask, *flat))
    return layer_forward(plan, batch, weights, None)


def laid_out(batch: LayerInput) -> LayerInput:
    """The batch with the strides that the kernels read."""
    x = batch.x if batch.x.stride(-1) == 1 else batch.x.contiguous()
    return batch._replace(x=x, h=batch.h.contiguous(), c=batch.c.contiguous())


def saved_sizes(settings: CellSettings, frames: int, H: int) -> dict[str, int]:
    """Elements of each buffer that the backward pass needs, for the frames of all directions."""
    sizes = {"ah": frames * 4 * H, "raw": frames * H, "stats": frames * STATS}
    return sizes | {"ax": frames * 4 * H} if settings.gates == "split" else sizes


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        weights: list[Weights],
        x: Tensor,
        h: Tensor,
        c: Tensor,
        mask: Tensor | None,
        *flat: Tensor,
    ) -> tuple[Tensor, ...]:
        batch = LayerInput(x, plan.lengths, h, c, mask)
        frames = len(weights) * sum(plan.lengths)
        buffers = library.pooled(x.dtype, **saved_sizes(plan.settings, frames, h.shape[-1]))
        result = layer_forward(plan, batch, weights, buffers)
        ctx.plan, ctx.weights, ctx.names = plan, weights, list(buffers)
        # Saved for their versions: changing one in place before the backward pass is an error.
        # The buffers for their release by the backward pass, and for hooks of saved tensors.
        ctx.save_for_backward(*buffers.values(), result.output, x, h, c, mask, *flat)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        buffers = dict(zip(ctx.names, saved, strict=False))
        output, *inputs = saved[len(buffers) :]
        if needs_operators(*upstream):
            run = partial(_layer_by_operators, ctx.plan, ctx.weights)
            return None, None, *differentiate(run, inputs, upstream)
        x, h, c, mask, *_ = inputs
        batch = LayerInput(x, ctx.plan.lengths, h, c, mask)
        upstream = [gradient.contiguous() for gradient in upstream]
        saved, with_dx = (output, buffers), ctx.needs_input_grad[2]
        dx, dh, dc, *flat = layer_backward(ctx.plan, batch, ctx.weights, saved, upstream, with_dx)
        return None, None, dx, dh, dc, None, *flat


def _layer_by_operators(
    plan: Plan,
    weights: list[Weights],
    x: Tensor,
    h: Tensor,
    c: Tensor,
    mask: Tensor | None,
    *flat: Tensor,
) -> LayerOutput:
    """As _Layer."""
    rest = iter(flat)
    weights = [Weights(*(w if w is None else next(rest) for w in cell)) for cell in weights]
    return reference.layer(LayerInput(x, plan.lengths, h, c, mask), weights, plan.settings)


def _describe_layer(
    plan: Plan, batch: LayerInput, weights: list[Weights], alive: list[Any]
) -> library.Call:
    """The part of a call that both passes share; `alive` keeps the tensors it points to."""
    B, T, I = batch.x.shape  # noqa: E741
    lengths = torch.tensor(plan.lengths, device="cpu")
    alive.append(lengths)
    call = library.Call(B=B, T=T, I=I, H=batch.h.shape[-1], D=len(weights))
    library.describe_norm(call, plan.settings)
    call.threads, call.blocks = plan.threads, plan.blocks
    call.x_stride_b, call.x_stride_t = batch.x.stride()[:2]
    library.point(call, lengths=lengths, x=batch.x)
    for d, w in enumerate(weights):
        point_weights(call.direction[d], w, alive)
        mask = None if batch.mask is None else batch.mask[d]
        library.point(call.direction[d], h0=batch.h[d], c0=batch.c[d], mask=mask)
    return call


def point_weights(direction: library.Direction, w: Weights, alive: list[Any]) -> None:
    """Sets a cell's weights; `alive` keeps the tensors it points to."""
    w = Weights(*(t if t is None else t.detach().contiguous() for t in w))
    ones, bias = torch.ones_like(w.bias_ih), w.bias_ih + w.bias_hh
    alive += [w, ones, bias]
    vectors = (bias, *_norm_vectors(w))
    named = zip(VECTORS, (ones if v is None else v for v in vectors), strict=True)
    library.point(direction, weight_ih=w.weight_ih, weight_hh=w.weight_hh, **dict(named))


def _norm_vectors(w: Weights) -> tuple[Tensor | None, ...]:
    """A cell's vectors in the order of VECTORS, without the bias."""
    return w.gain_ih, w.gain_recurrent, w.gain_c, w.bias_c, w.gain_hidden, w.bias_hidden


def _point_saved(call: library.Call, buffers: Buffers, frames: int, H: int) -> None:
    """Each direction's part of the saved buffers."""
    widths = {"ax": 4 * H, "ah": 4 * H, "raw": H, "stats": STATS}
    for d in range(call.D):
        for name, width in widths.items():
            if (buffer := buffers.get(name)) is not None:
                library.point(call.direction[d], **{name: buffer[d * frames * width :]})


def layer_forward(
    plan: Plan, batch: LayerInput, weights: list[Weights], buffers: Buffers | None
) -> LayerOutput:
    """The batch laid_out -> the layer's output; fills `buffers`, of saved_sizes."""
    B, T, _ = batch.x.shape
    D, _, H = batch.h.shape
    alive: list[Any] = []
    call = _describe_layer(plan, batch, weights, alive)
    ragged = min(plan.lengths) < T
    output = (batch.x.new_zeros if ragged else batch.x.new_empty)(B, T, D * H)
    h, c = torch.empty_like(batch.h), torch.empty_like(batch.c)
    library.point(call, output=output)
    for d in range(D):
        library.point(call.direction[d], h=h[d], c=c[d])
    if buffers is not None:
        _point_saved(call, buffers, sum(plan.lengths), H)
    library.run("lstm_forward", call, plan.kind)
    return LayerOutput(output, h, c)


def layer_backward(
    plan: Plan,
    batch: LayerInput,
    weights: list[Weights],
    saved: tuple[Tensor, Buffers],
    upstream: list[Tensor],
    with_dx: bool,
) -> tuple[Tensor | None, ...]:
    """The output with the buffers, and the gradients of output, h and c -> those of x (None
    unless with_dx), of the initial h and c, and of the weights that are not None.
    """
    x, (output, buffers) = batch.x, saved
    D, _, H = batch.h.shape
    alive: list[Any] = []
    call = _describe_layer(plan, batch, weights, alive)
    doutput, dh, dc = upstream
    library.point(call, output=output, doutput=doutput)
    _point_saved(call, buffers, sum(plan.lengths), H)
    dh0, dc0 = torch.empty_like(dh), torch.empty_like(dc)
    # The kernels do not write the gradient of padding: zeros.
    new = x.new_zeros if min(plan.lengths) < x.shape[1] else x.new_empty
    dx = [new(x.shape) if with_dx else None for _ in weights]
    sums = [cell_slots(w, plan.blocks) for w in weights]
    for d in range(D):
        library.point(call.direction[d], **sums[d])
        library.point(call.direction[d], dh=dh[d], dc=dc[d], dh0=dh0[d], dc0=dc0[d], dx=dx[d])
    library.run("lstm_backward", call, plan.kind)
    if dx[0] is not None and D == 2:
        dx[0].add_(dx.pop())
    flat = [g for w, s in zip(weights, sums, strict=True) for g in gradients(w, s, H)]
    return dx[0], dh0, dc0, *flat


def cell_slots(w: Weights, blocks: int) -> dict[str, Tensor]:
    """Per block of utterances, the sums of the gradients of a cell's weights, as in call.h."""
    return {
        "dweight_ih": library.slots(w.weight_ih, blocks),
        "dweight_hh": library.slots(w.weight_hh, blocks),
        "dvectors": w.bias_ih.new_zeros(blocks, sum(VECTORS.values()) * w.weight_hh.shape[1]),
    }


def gradients(w: Weights, sums: dict[str, Tensor], H: int) -> list[Tensor]:
    """The summed cell_slots -> gradients, in the order of the weights that are not None."""
    weight_ih, weight_hh, vectors = map(library.add_up, sums.values())
    bias, gain_x, gain_h, *of_states = vectors.split([H * size for size in VECTORS.values()])
    bias_again = bias.clone()  # two parameters must not share one gradient
    every = (weight_ih, weight_hh, bias, bias_again, gain_x, gain_h, gain_h, *of_states)
    return [g for g, weight in zip(every, w, strict=True) if weight is not None]


def step(
    x: Tensor,
    state: State,
    mask: Tensor | None,
    w: Weights,
    settings: CellSettings,
    products: torch.dtype,
) -> State:
    """x (B, I), state of two (B, H) -> the next. Raises compiler.BuildError without the kernels."""
    h, c = reversed(state) if settings.swap else state
    ax, ah = deferred_linear(x, w.weight_ih, products), deferred_linear(h, w.weight_hh, products)
    if settings.gates != "split":  # the norm, if any, takes the sum
        ax, ah = None, ax + ah
    mask = None if mask is None else mask.contiguous()
    tensors = (ax, ah, c.contiguous(), mask, w.bias_ih + w.bias_hh, *_norm_vectors(w))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _Step.apply(settings, *tensors)
    return _step_forward(settings, *tensors)[:2]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: CellSettings, *tensors: Tensor | None) -> State:
        h, c, raw, stats = _step_forward(settings, *tensors)
        ctx.settings = settings
        ctx.save_for_backward(raw, stats, *tensors)
        return h, c

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dc: Tensor) -> tuple[Any, ...]:
        raw, stats, *tensors = ctx.saved_tensors
        ax, ah, c, _, *vectors = tensors
        if needs_operators(dh, dc):
            run = partial(_step_by_operators, ctx.settings)
            return None, *differentiate(run, tensors, (dh, dc))
        H = c.shape[1]
        call, _alive = _describe_step(ctx.settings, *tensors)
        dah, dc0 = torch.empty_like(ah), torch.empty_like(c)
        dax = None if ax is None else torch.empty_like(ax)
        sizes = [H * size for size in VECTORS.values()]
        sums, dh, dc = c.new_zeros(sum(sizes)), dh.contiguous(), dc.contiguous()
        direction = call.direction[0]
        library.point(direction, raw=raw, stats=stats, dh=dh, dc=dc)
        library.point(direction, dax=dax, dah=dah, dc0=dc0, dvectors=sums)
        library.run("lstm_step_backward", call, library.KINDS[c.dtype])
        parts = zip(vectors, sums.split(sizes), strict=True)
        dvectors = [None if v is None else g for v, g in parts]
        return None, dax, dah, dc0, None, *dvectors


def _step_by_operators(
    settings: CellSettings,
    ax: Tensor | None,
    ah: Tensor,
    c: Tensor,
    mask: Tensor | None,
    bias: Tensor,
    gain_x: Tensor | None,
    gain_h: Tensor | None,
    *of_states: Tensor | None,
) -> State:
    """As _Step."""
    gain_hh, gain_gates = (None, gain_h) if settings.norms_sum else (gain_h, None)
    vectors = bias, torch.zeros_like(bias), gain_x, gain_hh, gain_gates, *of_states
    weights = Weights(ah, ah, *vectors)  # the matrices are not read
    gates = reference.input_part(torch.zeros_like(ah) if ax is None else ax, weights, settings)
    return reference.state_after(gates, ah, c, mask, weights, settings)


def _step_forward(
    settings: CellSettings, ax: Tensor | None, ah: Tensor, c: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next h and c, the cell before its norm, the norms' statistics."""
    call, _alive = _describe_step(settings, ax, ah, c, *others)
    h, after, raw, stats = *(torch.empty_like(c) for _ in range(3)), c.new_empty(len(c), STATS)
    library.point(call.direction[0], h=h, c=after, raw=raw, stats=stats)
    library.run("lstm_step_forward", call, library.KINDS[c.dtype])
    return h, after, raw, stats


def _describe_step(
    settings: CellSettings,
    ax: Tensor | None,
    ah: Tensor,
    c: Tensor,
    mask: Tensor | None,
    *vectors: Tensor | None,
) -> tuple[library.Call, list[Tensor]]:
    """The part of a call that both passes share, and the tensors that must outlive it."""
    B, H = c.shape
    for name, product in (("ax", ax), ("ah", ah)):
        if product is not None:
            check_weight(name, product, (B, 4 * H), c)
    for (name, size), vector in zip(VECTORS.items(), vectors, strict=True):
        if vector is not None:
            check_weight(name, vector, (size * H,), c)
    ones = c.new_ones(4 * H)
    alive = [ones if v is None else v.detach().contiguous() for v in vectors]
    call = library.Call(B=B, T=1, I=0, H=H, D=1, threads=1)
    library.describe_norm(call, settings)
    library.point(call.direction[0], ax=ax, ah=ah, c0=c, mask=mask)
    library.point(call.direction[0], **dict(zip(VECTORS, alive, strict=True)))
    return call, alive

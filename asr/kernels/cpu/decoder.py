"""LAS's attention step, and all steps of its decoder along known tokens, in one call of C++ each.

Forward and backward. The equations, and the same step by step with torch's operators for other
devices, dtypes and options: asr/nn/attention.py, asr/models/las.py. Legend: asr/kernels/types.py.
"""

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.kernels.cpu import library
from asr.kernels.cpu.library import NORM_FIELDS, STATS, fields
from asr.kernels.cpu.lstm import PER_WORKER, cell_slots, gradients, point_weights
from asr.kernels.double_backward import refuse_operators
from asr.kernels.types import (
    AttentionInput,
    DecoderConstants,
    DecoderInput,
    DecoderOutput,
    Weights,
    check_decoder,
    check_shape,
)

Pair = tuple[Tensor, Tensor]
REMEDY = "use backend='reference', model.speller.backend in a recipe"


class AttentionCall(ctypes.Structure):
    """attention.h: AttentionCall."""

    _fields_ = (
        *fields(c_int64, "B K T A C W threads forked"),
        *fields(
            c_void_p, "keys query v weight_loc conv past_weights past_total valid weights total"
        ),
        *fields(
            c_void_p, "dweights dtotal dkeys dquery dv dweight_loc dconv dpast_weights dpast_total"
        ),
    )


def covers_attention(A: int, v: Tensor | None, *_: Tensor | None) -> bool:
    """Not dot products, which have no v."""
    return v is not None


def attend(inputs: AttentionInput, valid: Tensor) -> Pair:
    """valid (B, T) -> this step's weights and the sum of all so far, each (B, K, T).

    All are float32 or all float64. Raises ValueError for a wrong shape, or compiler.BuildError.
    """
    (B, T, A), K = inputs.keys.shape, inputs.query.shape[1]
    C, _, W = (1, 2, 1) if inputs.conv is None else inputs.conv.shape
    shapes = [(B, T, A), (B, K, A), (1, A), (B, K, T), (B, K, T), (A, C), (C, 2, W)]
    for name, tensor, shape in zip(AttentionInput._fields, inputs, shapes, strict=True):
        if tensor is not None:
            check_shape(name, tensor, shape)
    check_shape("valid", valid, (B, T))
    inputs = AttentionInput(*(t if t is None else t.contiguous() for t in inputs))
    valid = valid.contiguous()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _Attend.apply(valid, *inputs)
    return _attention_forward(inputs, valid)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, valid: Tensor, *inputs: Tensor | None) -> Pair:
        weights, total = _attention_forward(AttentionInput(*inputs), valid)
        ctx.save_for_backward(valid, weights, *inputs)
        return weights, total

    @staticmethod
    def backward(ctx: Any, dweights: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        refuse_operators("the speller's attention in C++", REMEDY, dweights, dtotal)
        valid, weights, *inputs = ctx.saved_tensors
        return None, *_attention_backward(AttentionInput(*inputs), valid, weights, dweights, dtotal)


def _attention_forward(inputs: AttentionInput, valid: Tensor) -> Pair:
    weights, total = (torch.empty_like(inputs.past_total) for _ in range(2))
    call = _describe_attention(inputs, valid, weights, rows=inputs.query.shape[:2].numel())
    library.point(call, total=total)
    library.run("attention_forward", call, library.KINDS[weights.dtype])
    return weights, total


def _attention_backward(
    inputs: AttentionInput, valid: Tensor, weights: Tensor, dweights: Tensor, dtotal: Tensor
) -> AttentionInput:
    """The gradients of `inputs`."""
    call = _describe_attention(inputs, valid, weights, rows=len(valid))
    dweights, dtotal = dweights.contiguous(), dtotal.contiguous()
    per_thread = ("v", "weight_loc", "conv")
    slots = inputs._replace(
        **{name: library.slots(getattr(inputs, name), call.threads) for name in per_thread},
        past_weights=None if inputs.conv is None else torch.empty_like(weights),
        past_total=dtotal if inputs.conv is None else torch.empty_like(weights),
        keys=torch.empty_like(inputs.keys),
        query=torch.empty_like(inputs.query),
    )
    library.point(call, dweights=dweights, dtotal=dtotal)
    library.point(call, **{f"d{name}": slot for name, slot in slots._asdict().items()})
    library.run("attention_backward", call, library.KINDS[weights.dtype])
    return slots._replace(**{name: library.add_up(getattr(slots, name)) for name in per_thread})


def _describe_attention(
    inputs: AttentionInput, valid: Tensor, weights: Tensor, rows: int
) -> AttentionCall:
    """The part of a call that both passes share; threads divide the `rows` among them."""
    (B, K, T), A = weights.shape, inputs.keys.shape[-1]
    C, _, W = (0, 0, 0) if inputs.conv is None else inputs.conv.shape
    threads = max(1, min(rows, torch.get_num_threads()))
    call = AttentionCall(B=B, K=K, T=T, A=A, C=C, W=W, threads=threads)
    library.point(call, valid=valid, weights=weights, **inputs._asdict())
    return call


class DecoderLayer(ctypes.Structure):
    """decoder.h: DecoderLayer."""

    _fields_ = (("cell", library.Direction), *fields(c_void_p, "keep output"))


class DecoderCall(ctypes.Structure):
    """decoder.h: DecoderCall."""

    _fields_ = (
        *fields(c_int64, f"B U T E M H A C W L {NORM_FIELDS} threads blocks forked"),
        ("eps", c_double),
        ("layers", c_void_p),
        *fields(
            c_void_p, "embedded weight_embedded weight_query states keys first v weight_loc conv"
        ),
        *fields(c_void_p, "valid query weights total context doutput dcontext dweights"),
        *fields(c_void_p, "dcontext_sum dquery dembedded dstates dkeys"),
        *fields(c_void_p, "dweight_embedded dweight_query dv dweight_loc dconv"),
    )


def run_decoder(
    inputs: DecoderInput,
    cells: list[Weights],
    constants: DecoderConstants,
    settings: CellSettings,
    products: torch.dtype,
) -> DecoderOutput:
    """All of one dtype, float32 or float64. Saves what a backward pass needs in any case.

    products: dtype of the matrix products.
    Raises ValueError where a shape or dtype does not fit, compiler.BuildError without kernels.
    """
    check_decoder(inputs, cells, constants)
    inputs = DecoderInput(*(t if t is None else t.contiguous() for t in inputs))
    valid, first = constants.valid.contiguous(), constants.first.contiguous()
    flat = [w for cell in cells for w in cell if w is not None]
    constants = constants._replace(valid=valid, first=first)
    kind = library.kind_of_products(inputs.states, products)
    return DecoderOutput(*_Decoder.apply(cells, constants, settings, kind, *inputs, *flat))


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cells: list[Weights],
        constants: DecoderConstants,
        settings: CellSettings,
        kind: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        inputs = DecoderInput(*tensors[: len(DecoderInput._fields)])
        run = _Run(inputs, cells, constants, settings, kind)
        result, buffers = _allocate(run, inputs)
        library.run("decoder_forward", run.call, run.kind)
        ctx.run, ctx.cells, ctx.names = run, cells, list(buffers)
        # Saved for their versions: changing one in place before the backward pass is an error.
        # The buffers for their release by the backward pass.
        ctx.save_for_backward(*buffers.values(), *result, constants.valid, *tensors)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_operators("the speller in C++", REMEDY, *upstream)
        saved = ctx.saved_tensors
        buffers = dict(zip(ctx.names, saved, strict=False))
        output, context, weights, _, *tensors = saved[len(buffers) :]
        inputs = DecoderInput(*tensors[: len(DecoderInput._fields)])
        # Saved-tensor hooks may have moved the saved tensors.
        ctx.run.point(inputs, DecoderOutput(output, context, weights), buffers)
        return None, None, None, None, *_decoder_backward(ctx.run, inputs, ctx.cells, upstream)


class _Run:
    """The call that both passes share, and the tensors that it points to but those of `point`."""

    def __init__(
        self,
        inputs: DecoderInput,
        cells: list[Weights],
        constants: DecoderConstants,
        settings: CellSettings,
        kind: int,
    ) -> None:
        U, B, M = inputs.embedded.shape
        (_, T, E), (A, H), L = inputs.states.shape, inputs.weight_query.shape, len(cells)
        C, _, W = (0, 0, 0) if inputs.conv is None else inputs.conv.shape
        threads = torch.get_num_threads()
        self.kind = kind
        self.call = call = DecoderCall(B=B, U=U, T=T, E=E, M=M, H=H, A=A, C=C, W=W, L=L)
        library.describe_norm(call, settings)
        self.split = settings.gates == "split"
        self.widths = {"ah": 4 * H, "raw": H, "c": H, "stats": STATS}
        self.widths |= {"ax": 4 * H} if self.split else {}
        self.widths |= {"h": H} if constants.keep is not None else {}
        call.threads, call.blocks = threads, max(1, min(threads, B // PER_WORKER))
        self.layers = (DecoderLayer * L)()
        call.layers = ctypes.addressof(self.layers)
        self.alive: list[Any] = [constants]
        library.point(call, valid=constants.valid, first=constants.first)
        weight_ih = cells[0].weight_ih.detach()
        embedded, context = (w.contiguous() for w in weight_ih.tensor_split([M], 1))
        self.alive += [embedded, context]
        library.point(call, weight_embedded=embedded)
        cells = [cells[0]._replace(weight_ih=context), *cells[1:]]
        for index, (layer, w) in enumerate(zip(self.layers, cells, strict=True)):
            point_weights(layer.cell, w, self.alive)
            library.point(layer.cell, mask=constants.masks[index])
            library.point(layer, keep=None if constants.keep is None else constants.keep[index])

    def point(
        self, inputs: DecoderInput, result: DecoderOutput, buffers: dict[str, Tensor]
    ) -> None:
        """Sets the tensors that autograd keeps between the passes; the buffers of _allocate."""
        library.point(self.call, **inputs._asdict(), context=result.context, weights=result.weights)
        library.point(self.call, query=buffers["query"], total=buffers["total"])
        self.point_rows(buffers, **self.widths)
        for index, layer in enumerate(self.layers):
            output = buffers.get(f"output {index}", result.output)
            library.point(layer, output=output)
            if layer.keep is None:
                library.point(layer.cell, h=output)

    def point_rows(self, buffers: dict[str, Tensor], **widths: int) -> None:
        """Each layer's part of buffers with rows (L, U, B) of these widths."""
        rows = self.call.U * self.call.B
        for index, layer in enumerate(self.layers):
            for name, width in widths.items():
                library.point(layer.cell, **{name: buffers[name][index * rows * width :]})


def _allocate(run: _Run, inputs: DecoderInput) -> tuple[DecoderOutput, dict[str, Tensor]]:
    """Allocates the results and the memory that the backward pass reads, also the outputs of the
    layers but the last.
    """
    call, new = run.call, inputs.states.new_empty
    H, U, B = call.H, call.U, call.B
    counts = {name: call.L * U * B * width for name, width in run.widths.items()}
    counts |= {"query": U * B * call.A, "total": U * B * call.T}
    buffers = library.pooled(inputs.states.dtype, **counts)
    buffers |= {f"output {index}": new(U, B, H) for index in range(call.L - 1)}
    result = DecoderOutput(new(U, B, H), new(U, B, call.E), new(U, B, call.T))
    run.point(inputs, result, buffers)
    return result, buffers


def _decoder_backward(
    run: _Run, inputs: DecoderInput, cells: list[Weights], upstream: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The gradients of `inputs` and of the cells' weights."""
    call, rows = run.call, run.call.U * run.call.B
    doutput, dcontext, dweights = (dy.contiguous() for dy in upstream)
    library.point(call, doutput=doutput, dcontext=dcontext, dweights=dweights)
    widths = dict.fromkeys(("dah", "dax") if run.split else ("dah",), 4 * call.H)
    counts = {name: call.L * rows * width for name, width in widths.items()}
    counts |= {"dcontext_sum": rows * call.E, "dquery": rows * call.A}
    buffers = library.pooled(inputs.states.dtype, **counts)
    run.point_rows(buffers, **widths)
    library.point(call, dcontext_sum=buffers["dcontext_sum"], dquery=buffers["dquery"])
    gradients_in = DecoderInput(
        *map(torch.empty_like, inputs[:3]), *(library.slots(w, call.blocks) for w in inputs[3:])
    )
    library.point(call, **{f"d{name}": slot for name, slot in gradients_in._asdict().items()})
    slots = [cell_slots(w, call.blocks) for w in cells]
    split = slots[0]["dweight_ih"].tensor_split([call.M], 2)
    embedded, context = (s.contiguous() for s in split)
    library.point(call, dweight_embedded=embedded)
    slots[0]["dweight_ih"] = context
    for layer, slot in zip(run.layers, slots, strict=True):
        library.point(layer.cell, **slot)
    library.run("decoder_backward", call, run.kind)
    slots[0]["dweight_ih"] = torch.cat([embedded, context], dim=2)
    of_cells = (g for w, s in zip(cells, slots, strict=True) for g in gradients(w, s, call.H))
    return [*gradients_in[:3], *map(library.add_up, gradients_in[3:]), *of_cells]

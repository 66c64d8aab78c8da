"""All steps of a speller along given tokens in one call of C++, forward and backward.

asr/models/speller.py holds the equations and, for whatever this does not cover, the same step by
step. The legend is that of spell.h: M is the size of an embedding, L the number of cells.
"""

import ctypes
from collections.abc import Iterator
from ctypes import c_double, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asr.nn.kernels.cpu import library
from asr.nn.kernels.cpu.backend import PER_WORKER, cell_slots, gradients, point_weights
from asr.nn.kernels.cpu.buffers import Lease
from asr.nn.kernels.cpu.library import MODES
from asr.nn.kernels.problem import Setting, Weights


class SpellLayer(ctypes.Structure):
    """spell.h: SpellLayer."""

    _fields_ = (("cell", library.Direction), *library.pointers("keep shown"))


class SpellCall(ctypes.Structure):
    """spell.h: SpellCall."""

    _fields_ = (
        [(name, c_int64) for name in "BUTEMHACWL"]
        + [(name, c_int64) for name in ("mode", "norm_c", "carry", "swap")]
        + [(name, c_int64) for name in ("threads", "blocks", "forked")]
        + [("eps", c_double), ("layers", c_void_p)]
        + library.pointers("embedded weight_embedded weight_query states keys first v place conv")
        + library.pointers("valid wanted weights total read dshown dread dweights dreads dwanted")
        + library.pointers("dembedded dstates dkeys")
        + library.pointers("dweight_embedded dweight_query dv dplace dconv")
    )


class Inputs(NamedTuple):
    """What the speller reads, and the weights of its attention (asr/nn/attention.py)."""

    embedded: Tensor  # (U, B, M)
    states: Tensor  # (B, T, E)
    keys: Tensor  # (B, T, A)
    weight_query: Tensor  # (A, H)
    v: Tensor  # (1, A)
    place: Tensor | None  # (A, C), or None in additive attention
    conv: Tensor | None  # (C, 2, W)


class Fixed(NamedTuple):
    """What no gradient goes to."""

    setting: Setting
    valid: Tensor  # (B, T)
    first: Tensor  # (B, T): the look before the first step
    masks: tuple[Tensor | None, ...]  # recurrent dropout's, (B, H) for each cell
    keep: Tensor | None  # (L, U, B, H): what dropout multiplies each h by


class Spelled(NamedTuple):
    """Of every step: h of the last cell after dropout, what was read, and the attention."""

    shown: Tensor  # (U, B, H)
    read: Tensor  # (U, B, E)
    weights: Tensor  # (U, B, T)


def spell(given: Inputs, cells: list[Weights], fixed: Fixed) -> Spelled:
    """All of one dtype, float32 or float64. What a backward pass needs is made in any case.

    Raises ValueError where a shape or dtype does not fit, and build.BuildError without the kernels.
    """
    _check(given, cells, fixed)
    given = Inputs(*(t if t is None else t.contiguous() for t in given))
    fixed = fixed._replace(valid=fixed.valid.contiguous(), first=fixed.first.contiguous())
    flat = [w for cell in cells for w in cell if w is not None]
    return Spelled(*_Spell.apply(cells, fixed, *given, *flat))


def _check(given: Inputs, cells: list[Weights], fixed: Fixed) -> None:
    """C++ trusts shapes and dtypes."""
    for name, tensor, shape in _expected(given, cells, fixed):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        dtype = torch.bool if name == "valid" else given.states.dtype
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}; expected {dtype}")
        if 0 in shape:
            raise ValueError(f"{name} has shape {shape}: nothing to spell, or nothing to read")


def _expected(
    given: Inputs, cells: list[Weights], fixed: Fixed
) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Name, tensor and the shape that it must have."""
    (U, B, M), (_, T, E) = given.embedded.shape, given.states.shape
    A, H = given.weight_query.shape
    C, _, W = (1, 2, 1) if given.conv is None else given.conv.shape
    shapes = [(U, B, M), (B, T, E), (B, T, A), (A, H), (1, A), (A, C), (C, 2, W)]
    yield from zip(Inputs._fields, given, shapes, strict=True)
    yield "valid", fixed.valid, (B, T)
    yield "first", fixed.first, (B, T)
    yield "keep", fixed.keep, (len(cells), U, B, H)
    for index, (w, mask) in enumerate(zip(cells, fixed.masks, strict=True)):
        yield f"weight_ih of cell {index}", w.weight_ih, (4 * H, H if index else M + E)
        yield f"weight_hh of cell {index}", w.weight_hh, (4 * H, H)
        yield f"mask of cell {index}", mask, (B, H)


class _Spell(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cells: list[Weights], fixed: Fixed, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        given = Inputs(*tensors[: len(Inputs._fields)])
        run = _Run(given, cells, fixed)
        spelled = _allot(run, given, fixed)
        library.run("spell_forward", run.call, run.kind)
        ctx.run, ctx.cells = run, cells
        # Saved for their versions: changing one in place before the backward pass is an error.
        ctx.save_for_backward(*spelled, fixed.valid, *tensors)
        return tuple(spelled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        shown, read, weights, _, *tensors = ctx.saved_tensors
        given = Inputs(*tensors[: len(Inputs._fields)])
        ctx.run.point(given, Spelled(shown, read, weights))  # hooks may have moved what was saved
        return None, None, *_backward(ctx.run, given, ctx.cells, upstream)


class _Run:
    """A call that both passes share, and what it points to but the results."""

    def __init__(self, given: Inputs, cells: list[Weights], fixed: Fixed) -> None:
        U, B, M = given.embedded.shape
        (_, T, E), (A, H), L = given.states.shape, given.weight_query.shape, len(cells)
        C, _, W = (0, 0, 0) if given.conv is None else given.conv.shape
        norm, threads = fixed.setting.norm, torch.get_num_threads()
        self.split = MODES[norm] == 1
        self.kind = library.kind_of_products(given.states, fixed.setting)
        self.call = call = SpellCall(B=B, U=U, T=T, E=E, M=M, H=H, A=A, C=C, W=W, L=L)
        library.describe_norm(call, fixed.setting)
        call.threads, call.blocks = threads, max(1, min(threads, B // PER_WORKER))
        self.layers = (SpellLayer * L)()
        call.layers = ctypes.addressof(self.layers)
        self.alive: list[Any] = [fixed]
        library.point(call, valid=fixed.valid, first=fixed.first)
        self._point_weights(cells, fixed)

    def _point_weights(self, cells: list[Weights], fixed: Fixed) -> None:
        weight_ih = cells[0].weight_ih.detach()
        embedded, reading = (w.contiguous() for w in weight_ih.tensor_split([self.call.M], 1))
        self.alive += [embedded, reading]
        library.point(self.call, weight_embedded=embedded)
        for index, (layer, w) in enumerate(zip(self.layers, cells, strict=True)):
            point_weights(
                layer.cell, w._replace(weight_ih=reading) if index == 0 else w, self.alive
            )
            library.point(layer.cell, mask=fixed.masks[index])
            library.point(layer, keep=None if fixed.keep is None else fixed.keep[index])

    def point(self, given: Inputs, spelled: Spelled) -> None:
        """What autograd keeps between the passes."""
        last = self.layers[-1]
        library.point(self.call, **given._asdict(), read=spelled.read, weights=spelled.weights)
        library.point(last, shown=spelled.shown)
        if last.keep is None:
            library.point(last.cell, h=spelled.shown)

    def point_rows(self, lease: Lease, **widths: int) -> None:
        """Each layer's part of buffers with rows (L, U, B) of these widths."""
        rows = self.call.U * self.call.B
        for index, layer in enumerate(self.layers):
            for name, width in widths.items():
                part = lease[name][index * rows * width :]
                library.point(layer.cell, **{name: part})


def _allot(run: _Run, given: Inputs, fixed: Fixed) -> Spelled:
    """Memory for the results, and for what the backward pass needs."""
    call, new = run.call, given.states.new_empty
    H, U, B = call.H, call.U, call.B
    widths = {"ah": 4 * H, "raw": H, "c": H, "stats": 12}
    widths |= {"ax": 4 * H} if run.split else {}
    widths |= {"h": H} if fixed.keep is not None else {}
    counts = {name: call.L * U * B * width for name, width in widths.items()}
    lease = Lease(given.states.dtype, **counts, wanted=U * B * call.A, total=U * B * call.T)
    run.point_rows(lease, **widths)
    shown = [new(U, B, H) for _ in run.layers]
    for layer, own in zip(run.layers, shown, strict=True):
        library.point(layer, shown=own)
        if fixed.keep is None:
            library.point(layer.cell, h=own)
    spelled = Spelled(shown.pop(), new(U, B, call.E), new(U, B, call.T))
    run.alive += [lease, shown]
    run.point(given, spelled)
    library.point(call, wanted=lease["wanted"], total=lease["total"])
    return spelled


def _backward(
    run: _Run, given: Inputs, cells: list[Weights], upstream: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The gradients of all that is given and of the cells' weights."""
    call, rows = run.call, run.call.U * run.call.B
    upstream = tuple(dy.contiguous() for dy in upstream)
    library.point(call, **dict(zip(("dshown", "dread", "dweights"), upstream, strict=True)))
    widths = dict.fromkeys(("dah", "dax") if run.split else ("dah",), 4 * call.H)
    counts = {name: call.L * rows * width for name, width in widths.items()}
    beside = {"dreads": rows * call.E, "dwanted": rows * call.A}
    lease = Lease(given.states.dtype, **counts, **beside)
    run.point_rows(lease, **widths)
    library.point(call, dreads=lease["dreads"], dwanted=lease["dwanted"])
    found = Inputs(
        *map(torch.empty_like, given[:3]), *(library.slots(w, call.blocks) for w in given[3:])
    )
    library.point(call, **{f"d{name}": slot for name, slot in found._asdict().items()})
    slots = [cell_slots(w, call.blocks) for w in cells]
    embedded, reading = (s.contiguous() for s in slots[0][0].tensor_split([call.M], 2))
    library.point(call, dweight_embedded=embedded)
    slots[0] = (reading, *slots[0][1:])
    names = ("dweight_ih", "dweight_hh", "dvectors")
    for layer, own in zip(run.layers, slots, strict=True):
        library.point(layer.cell, **dict(zip(names, own, strict=True)))
    library.run("spell_backward", call, run.kind)
    slots[0] = (torch.cat([embedded, reading], dim=2), *slots[0][1:])
    of_cells = (g for w, s in zip(cells, slots, strict=True) for g in gradients(w, s, call.H))
    return [*found[:3], *map(library.add_up, found[3:]), *of_cells]

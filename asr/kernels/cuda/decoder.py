"""LAS's decoder along known tokens, and single steps of its search, by cuBLAS and Triton.

The functions of asr/kernels/cpu/decoder.py on an NVIDIA GPU. The loop over the tokens is recorded
once as a CUDA graph and replayed, forward and backward (asr/kernels/cuda/lstm.py). A token's step
in one layer is

    forward    W_c c_{u-1}, W_h h_{u-1}, input's part of the gates, cell, dropout, W_q s_u,
               energies, softmax and context
    backward   weights, energies, sum over tiles, W_q, dropout and sum, cell, norm of the input's
               part, W_h, W_x

of which each is one launch. The part of W_x that reads embeddings is one product for all tokens
before the loop, and the gradient of each matrix is one product after it. With products in bf16 all
else is in fp32. Tested on the CPU with TRITON_INTERPRET=1, on a GPU by tests/benchmarks/gpu.py.

Tokens, utterances and frames are rounded up, so that few graphs serve all batches: padded tokens
follow the real ones, and padded utterances have no frame, so that none changes a real one.

Legend: asr/kernels/types.py; S steps, L layers.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from asr.config.cell import CellSettings
from asr.kernels import reference
from asr.kernels.cuda import lstm
from asr.kernels.deferred import deferred_linear
from asr.kernels.double_backward import refuse_operators
from asr.kernels.types import (
    AttentionInput,
    DecoderConstants,
    DecoderInput,
    DecoderOutput,
    State,
    Weights,
    check_decoder,
    check_shape,
)

TOKENS, UTTERANCES, FRAMES = 32, 8, 64  # each is rounded up to a multiple
BLOCK_T, BLOCK_E, BLOCK_R = 16, 128, 256  # frames of a tile; elements; frames of a row
MOST_A, MOST_TAPS = 1024, 256  # which a tile of frames has room for in registers
REMEDY = "use backend='reference', model.speller.backend in a recipe"


def covers_attention(
    A: int, v: Tensor | None, weight_loc: Tensor | None, conv: Tensor | None
) -> bool:
    """Is there room for the sums of a tile of frames? Matrices as in DecoderInput."""
    return A <= MOST_A and (conv is None or conv.shape[2] <= MOST_TAPS)


class Plan(NamedTuple):
    """What a recorded loop depends on beside the shapes."""

    settings: CellSettings
    dtype: torch.dtype  # of the matrix products
    layers: int


class Read(NamedTuple):
    """The tensors that both loops read, from the flat list that a recording needs."""

    inputs: DecoderInput
    constants: DecoderConstants  # valid: bytes
    cells: list[Weights]
    others: Sequence[Tensor]

    @classmethod
    def unpack(cls, layers: int, flat: Sequence[Tensor | None]) -> "Read":
        rest = iter(flat)
        inputs = DecoderInput(*(next(rest) for _ in DecoderInput._fields))
        valid, first, keep = (next(rest) for _ in range(3))
        masks = tuple(next(rest) for _ in range(layers))
        cells = [Weights(*(next(rest) for _ in Weights._fields)) for _ in range(layers)]
        return cls(inputs, DecoderConstants(valid, first, masks, keep), cells, list(rest))


def run_decoder(
    inputs: DecoderInput,
    cells: list[Weights],
    constants: DecoderConstants,
    settings: CellSettings,
    products: torch.dtype,
) -> DecoderOutput:
    """All of one dtype; where `covers_attention`. Saves what a backward pass needs in any case.

    products: dtype of the matrix products. Raises ValueError where a shape or dtype does not fit.
    """
    check_decoder(inputs, cells, constants)
    (U, B, _), T = inputs.embedded.shape, inputs.states.shape[1]
    more = [-U % TOKENS, -B % UTTERANCES, -T % FRAMES]
    inputs, constants = _padded(inputs, constants, *more)
    flat = [weight for cell in cells for weight in cell]
    plan = Plan(settings, products, len(cells))
    with torch.cuda.device_of(inputs.states):  # Triton launches on the current device
        output, context, weights = _Decoder.apply(plan, constants, *inputs, *flat)
    return DecoderOutput(output[:U, :B], context[:U, :B], weights[:U, :B, :T])


def _padded(
    inputs: DecoderInput, constants: DecoderConstants, U: int, B: int, T: int
) -> tuple[DecoderInput, DecoderConstants]:
    """With U more tokens, B more utterances and T more frames; all dense."""
    embedded, states, keys, *matrices = inputs
    embedded = pad(embedded, (0, 0, 0, B, 0, U)).contiguous()
    states, keys = (pad(x, (0, 0, 0, T, 0, B)).contiguous() for x in (states, keys))
    matrices = [w if w is None else w.contiguous() for w in matrices]
    valid, first = (pad(x, (0, T, 0, B)).contiguous() for x in constants[:2])
    masks = [m if m is None else pad(m, (0, 0, 0, B)).contiguous() for m in constants.masks]
    keep = constants.keep
    keep = keep if keep is None else pad(keep, (0, 0, 0, B, 0, U)).contiguous()
    constants = DecoderConstants(valid.view(torch.uint8), first, tuple(masks), keep)
    return DecoderInput(embedded, states, keys, *matrices), constants


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, constants: DecoderConstants, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        valid, first, masks, keep = constants
        split = len(DecoderInput._fields)
        flat = [*tensors[:split], valid, first, keep, *masks, *tensors[split:]]
        loop = functools.partial(_run_forward, plan)
        output, *saved = lstm.replay(lstm.graph_key(plan, "decoder", *flat), loop, *flat)
        ctx.plan = plan
        ctx.save_for_backward(*flat, *saved)
        _, _, weights, _, contexts, *_ = saved
        return output, contexts[1:], weights[1:]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_operators("the speller's CUDA kernels", REMEDY, *upstream)
        flat = [*ctx.saved_tensors, *(d.contiguous() for d in upstream)]
        loop = functools.partial(_run_backward, ctx.plan)
        key = lstm.graph_key(ctx.plan, "decoder backward", *flat)
        with torch.autocast(flat[0].device.type, enabled=False):
            return None, None, *lstm.replay(key, loop, *flat)


# The attention ----------------------------------------------------------------------------------


class _Attention:
    """Launches the attention's kernels over one batch."""

    def __init__(
        self,
        states: Tensor | None,
        keys: Tensor,
        matrices: tuple[Tensor | None, Tensor | None, Tensor | None],
        valid: Tensor,
        K: int = 1,
    ) -> None:
        """matrices: v, weight_loc and conv; valid: bytes; K: queries of each utterance."""
        v, weight_loc, conv = matrices
        self.states, self.keys, self.valid, self.K = states, keys, valid, K
        self.B, self.T, self.A = keys.shape
        self.kind = 1 if v is None else 0 if conv is None else 2
        self.C, self.W = (1, 1) if conv is None else conv.shape[::2]
        self.v = keys if v is None else v
        self.weight_loc = keys if weight_loc is None else weight_loc
        self.conv = keys if conv is None else conv
        self.tiles = -(-self.T // BLOCK_T)
        self.block_a = 1 << max(4, (self.A - 1).bit_length())
        self.sizes = {
            "KIND": self.kind,
            "BLOCK_T": BLOCK_T,
            "BLOCK_W": 1 << max(4, (self.W - 1).bit_length()),
        }
        self.scale = 1 / math.sqrt(self.A)

    @property
    def warps(self) -> int:
        """So that a thread has at most 32 elements of a tile of BLOCK_T frames."""
        return min(16, max(1, BLOCK_T * self.block_a // 1024))

    def energies(self, query: Tensor, weights: Tensor, total: Tensor, energy: Tensor) -> None:
        """query (B * K, A), weights and total before (B * K, T) -> energy (B * K, T)."""
        from asr.kernels.cuda import triton_attention

        triton_attention.attention_energy[(len(energy), self.tiles)](
            self.keys, query, self.v, self.weight_loc, self.conv, weights, total, self.valid,
            energy, self.K, self.T, self.A, self.C, self.W, self.scale, BLOCK_A=self.block_a,
            num_warps=self.warps, **self.sizes,
        )  # fmt: skip

    def context(
        self,
        energy: Tensor,
        before: Tensor,
        weights: Tensor,
        total: Tensor,
        context: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """energy (B * K, T), the total before -> weights and total (B * K, T), context (B * K, E),
        in the dtype of the products also `factor`.
        """
        from asr.kernels.cuda import triton_attention

        E = 1 if context is None else context.shape[1]
        triton_attention.attention_context[(len(energy), -(-E // BLOCK_E))](
            energy, energy if context is None else self.states, before, weights, total,
            energy if context is None else context, energy if factor is None else factor, self.K,
            self.T, E, CONTEXT=context is not None, HALF=factor is not None, BLOCK_R=BLOCK_R,
            BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E,
        )  # fmt: skip

    def backward_weights(
        self, dcontext: Tensor, through: Tensor, dweights: Tensor, later: Tensor, sums: "_Slopes"
    ) -> None:
        """Gradients of a step's context and weights -> sums.dalpha; later: sums.dlocation of the
        next step.
        """
        from asr.kernels.cuda import triton_attention

        triton_attention.attention_backward_weights[(self.B, self.tiles)](
            self.states, self.valid, dcontext, through, dweights, later, self.conv, sums.dtotal,
            sums.dcontext, sums.dalpha, self.B, self.T, dcontext.shape[1], self.C, self.W,
            BLOCK_E=BLOCK_E, **self.sizes,
        )  # fmt: skip

    def backward(
        self, query: Tensor, past: tuple[Tensor, Tensor], weights: Tensor, sums: "_Slopes"
    ) -> None:
        """Weights of a step, and the last ones and their total -> the other parts of sums."""
        from asr.kernels.cuda import triton_attention

        triton_attention.attention_backward[(self.B, self.tiles)](
            self.keys, query, self.v, self.weight_loc, self.conv, *past, self.valid, weights,
            sums.dalpha, sums.dkeys, sums.parts, sums.dv, sums.dweight_loc, sums.dconv,
            sums.dlocation, self.B, self.T, self.A, self.C, self.W, self.scale, BLOCK_R=BLOCK_R,
            BLOCK_A=self.block_a, num_warps=self.warps, **self.sizes,
        )  # fmt: skip
        triton_attention.sum_tiles[(self.B,)](
            sums.parts, sums.dquery, self.tiles, self.B, self.A, BLOCK_A=self.block_a
        )


class _Slopes(NamedTuple):
    """Gradients of one step, or summed over those so far."""

    dtotal: Tensor  # (B, T)
    dcontext: Tensor  # (B, E)
    dalpha: Tensor  # (B, T)
    dkeys: Tensor  # (B, T, A)
    parts: Tensor  # (tiles, B, A)
    dquery: Tensor  # (B, A)
    dv: Tensor  # (tiles, B, A)
    dweight_loc: Tensor  # (tiles, B, C, A)
    dconv: Tensor  # (tiles, B, C, 2, W)
    dlocation: Tensor  # (C, B, T)


def attend(inputs: AttentionInput, valid: Tensor) -> tuple[Tensor, Tensor] | None:
    """valid (B, T) -> this step's weights and the sum of all so far, each (B, K, T).

    For a search: None where a gradient is asked for. Raises ValueError where a shape does not fit.
    """
    keys, query, v, weights, total, weight_loc, conv = inputs
    (B, T, A), K = keys.shape, query.shape[1]
    learns = any(t is not None and t.requires_grad for t in inputs)
    if torch.is_grad_enabled() and learns:
        return None
    C, _, W = (1, 2, 1) if conv is None else conv.shape
    shapes = [(B, T, A), (B, K, A), (1, A), (B, K, T), (B, K, T), (A, C), (C, 2, W)]
    for name, tensor, shape in zip(AttentionInput._fields, inputs, shapes, strict=True):
        if tensor is not None:
            check_shape(name, tensor, shape)
    check_shape("valid", valid, (B, T))
    with torch.cuda.device_of(keys):
        dense = [w if w is None else w.contiguous() for w in (v, weight_loc, conv)]
        valid = valid.contiguous().view(torch.uint8)
        attention = _Attention(None, keys.contiguous(), tuple(dense), valid, K)
        past = [part.contiguous().view(B * K, T) for part in (weights, total)]
        energy, weights, total = (torch.empty_like(past[0]) for _ in range(3))
        attention.energies(query.contiguous(), *past, energy)
        attention.context(energy, past[1], weights, total)
    return weights.view(B, K, T), total.view(B, K, T)


# One cell ---------------------------------------------------------------------------------------


def step(
    x: Tensor,
    state: State,
    mask: Tensor | None,
    weights: Weights,
    settings: CellSettings,
    products: torch.dtype,
) -> State:
    """One time step, for a search: x (B, I), state of two (B, H) -> the next state.

    Where a gradient may be asked for, by torch's operators.
    """
    if torch.is_grad_enabled():
        half = products != weights.bias_hh.dtype
        with torch.autocast(x.device.type, products if half else None, enabled=half):
            return reference.step(x, state, mask, weights, settings)
    from asr.kernels.cuda import triton_step

    (B, H), (h, c) = state[0].shape, (part.contiguous() for part in state)
    with torch.cuda.device_of(x):
        ax = deferred_linear(x, weights.weight_ih, products)[None]
        ah = deferred_linear(h, weights.weight_hh, products)
        vectors = lstm.stacked_vectors([weights])
        gates, bias = torch.empty_like(ax), None if settings.norms_sum else vectors[1]
        gain = weights.gain_ih if weights.gain_ih is None else weights.gain_ih.contiguous()
        lstm.norm_forward(settings, settings.gates == "split", ax, None, gain, bias, gates)
        h_next, c_next, raw, raw_h = (torch.empty_like(h) for _ in range(4))
        triton_step.forward_step[(B,)](
            gates, ah, h, c, h if mask is None else mask.contiguous(), _ones(B, x.device), *vectors,
            h_next, h_next, c_next, raw, raw_h, 0, B, H, HALF=False,
            **lstm.step_options(settings, H, mask),
        )  # fmt: skip
    return h_next, c_next


@functools.lru_cache(maxsize=64)
def _ones(B: int, device: torch.device) -> Tensor:
    return torch.ones(B, dtype=torch.int64, device=device)


class _Steps(NamedTuple):
    """One layer's steps, for the backward pass. The products in their dtype."""

    ax: Tensor  # (S, B, 4H)  W_x x, in the first layer without the part of the embeddings
    gates: Tensor  # (S, B, 4H)  the input's part
    ah: Tensor  # (S, B, 4H)
    hs: Tensor  # (S + 1, B, H)
    cs: Tensor  # (S + 1, B, H)
    raw: Tensor  # (S, B, H)  c before its norm
    raw_h: Tensor  # (S, B, H)  h before its norm, where there is one


class _Cell:
    """Launches the kernels of one layer's steps."""

    def __init__(
        self,
        plan: Plan,
        w: Weights,
        mask: Tensor | None,
        added: Tensor | None,
        steps: _Steps,
    ) -> None:
        """added (S, B, 4H): the part of W_x x that is not in steps.ax; then w.weight_ih is without
        its columns.
        """
        self.settings, self.mask, self.added, self.steps = plan.settings, mask, added, steps
        self.split = plan.settings.gates == "split"
        self.weight_x, self.weight_h = (m.to(plan.dtype) for m in (w.weight_ih, w.weight_hh))
        self.vectors = lstm.stacked_vectors([w])
        self.gain_x = w.gain_ih
        self.bias_x = None if plan.settings.norms_sum else self.vectors[1][0]
        _, self.B, self.H = steps.hs.shape
        self.options = lstm.step_options(plan.settings, self.H, mask)
        self.ones = torch.ones(self.B, dtype=torch.int64, device=steps.hs.device)  # all rows run
        self.half = plan.dtype != steps.hs.dtype
        self.factor = steps.hs[0].to(plan.dtype)  # the last h, as the next product reads it

    @classmethod
    def empty_steps(cls, plan: Plan, like: Tensor, S: int, B: int, H: int) -> _Steps:
        new = like.new_empty
        ax, ah = (new(S, B, 4 * H, dtype=plan.dtype) for _ in range(2))
        hs, cs, raw = new(S + 1, B, H), new(S + 1, B, H), new(S, B, H)
        raw_h = lstm.for_hidden(plan.settings, raw)
        return _Steps(ax, new(S, B, 4 * H), ah, hs, cs, raw, raw_h)

    def forward(self, s: int, x: Tensor) -> Tensor:
        """x (B, I) -> h (B, H), both in the dtype of the products."""
        from asr.kernels.cuda import triton_step

        ax, gates, ah, hs, cs, raw, raw_h = self.steps
        torch.mm(x, self.weight_x.t(), out=ax[s])
        torch.mm(self.factor if self.half else hs[s], self.weight_h.t(), out=ah[s])
        now = slice(s, s + 1)
        added = None if self.added is None else self.added[now]
        inputs = ax[now], added, self.gain_x, self.bias_x, gates[now]
        lstm.norm_forward(self.settings, self.split, *inputs)
        triton_step.forward_step[(self.B,)](
            gates[s], ah[s], hs[s], cs[s], hs if self.mask is None else self.mask, self.ones,
            *self.vectors, hs[s + 1], self.factor, cs[s + 1], raw[s], raw_h[s], 0, self.B, self.H,
            HALF=self.half, **self.options,
        )  # fmt: skip
        return self.factor if self.half else hs[s + 1]


class _CellBackward:
    """Launches the kernels of the backward pass of one layer's steps."""

    def __init__(self, cell: _Cell, inputs: int) -> None:
        """inputs: the number that W_x reads in the loop."""
        ax, gates, ah, hs, _, raw, _ = cell.steps
        self.cell = cell
        self.dz, self.dah = torch.empty_like(gates), torch.empty_like(ah)
        self.dax = torch.empty_like(ax) if cell.split else self.dah
        self.dnormed = torch.empty_like(raw)
        self.dhidden = lstm.for_hidden(cell.settings, raw)
        self.dc, self.passing, self.dh = (torch.zeros_like(hs[0]) for _ in range(3))
        self.through_h = torch.zeros_like(hs[0], dtype=ah.dtype)
        self.dx = ah.new_zeros(cell.B, inputs)

    def run(self, s: int, dh: Tensor) -> None:
        """The gradient of h (B, H) but for what W_h returns -> that of x, in self.dx."""
        from asr.kernels.cuda import triton_step

        cell, now = self.cell, slice(s, s + 1)
        ax, gates, ah, _, cs, raw, raw_h = cell.steps
        triton_step.backward_step[(cell.B,)](
            gates[s], ah[s], cs[s], raw[s], raw_h[s], cs if cell.mask is None else cell.mask,
            cell.ones, *cell.vectors, self.through_h, self.passing, dh, self.dc, self.dz[s],
            self.dah[s], self.dnormed[s], self.dhidden[s], 0, cell.B, cell.H, **cell.options,
        )  # fmt: skip
        if cell.split:
            added = None if cell.added is None else cell.added[now]
            inputs = ax[now], added, cell.gain_x, self.dz[now], self.dax[now]
            lstm.norm_backward(cell.settings, True, *inputs, sums=False)
        torch.mm(self.dah[s], cell.weight_h, out=self.through_h)
        torch.mm(self.dax[s], cell.weight_x, out=self.dx)

    def vectors(self) -> dict[str, Tensor]:
        """The gradients of gains and biases."""
        cell = self.cell
        settings, (ax, gates, ah, _, _, raw, raw_h) = cell.settings, cell.steps
        rows = [t.unsqueeze(1) for t in (gates, ah, raw, raw_h, self.dz, self.dnormed,
                                         self.dhidden)]  # fmt: skip
        norms = settings.gates != "none", settings.norms_cell, settings.hidden_norm
        needed = tuple(norm for norm in norms for _ in range(2))
        names = ("gain_recurrent", "bias", "gain_c", "bias_c", "gain_hidden", "bias_hidden")
        sums = dict(zip(names, lstm.vector_gradients(settings, needed, *rows), strict=True))
        found = {name: part[0] for name, part in sums.items() if part is not None}
        recurrent = found.pop("gain_recurrent", None)
        found["gain_gates" if settings.norms_sum else "gain_hh"] = recurrent
        if cell.split:
            inputs = ax, cell.added, cell.gain_x, self.dz, None
            found["gain_ih"], found["bias"] = lstm.norm_backward(settings, True, *inputs)
        bias = found.pop("bias") if "bias" in found else self.dz.sum((0, 1))
        return found | {"bias_ih": bias, "bias_hh": bias.clone()}


# All tokens -------------------------------------------------------------------------------------


def _prepared(plan: Plan, read: Read, layers: list[_Steps], ex: Tensor) -> list[_Cell]:
    M = read.inputs.embedded.shape[2]
    first, *others = read.cells
    cells = [first._replace(weight_ih=first.weight_ih[:, M:]), *others]
    added = [ex, *[None] * len(others)]
    parts = zip(cells, read.constants.masks, added, layers, strict=True)
    return [_Cell(plan, *part) for part in parts]


def _attention(plan: Plan, read: Read) -> _Attention:
    _, states, keys, _, *matrices = read.inputs
    states, keys = states.to(plan.dtype), keys.to(plan.dtype)
    return _Attention(states, keys, tuple(matrices), read.constants.valid)


def _run_forward(plan: Plan, *flat: Tensor | None) -> tuple[Tensor, ...]:
    """-> the output (S, B, H); ex (S, B, 4H), the part of W_x x by the embeddings; query (S, B, A);
    weights, totals (S + 1, B, T) and contexts (S + 1, B, E), each with those before the first step;
    _Steps of each layer.
    """
    read = Read.unpack(plan.layers, flat)
    inputs, constants = read.inputs, read.constants
    (S, B, M), (_, T, E) = inputs.embedded.shape, inputs.states.shape
    A, H = inputs.weight_query.shape
    new, keep = inputs.states.new_empty, constants.keep
    ex = _product(inputs.embedded, read.cells[0].weight_ih[:, :M].t(), plan)
    layers = [_Cell.empty_steps(plan, inputs.states, S, B, H) for _ in range(plan.layers)]
    for steps in layers:
        steps.hs[0], steps.cs[0] = 0.0, 0.0
    cells, attention = _prepared(plan, read, layers, ex), _attention(plan, read)
    query = new(S, B, A, dtype=plan.dtype)
    weights, totals, contexts = new(S + 1, B, T), new(S + 1, B, T), new(S + 1, B, E)
    weights[0], totals[0], contexts[0] = constants.first, constants.first, 0.0
    half = plan.dtype != contexts.dtype
    factor = contexts[0].to(plan.dtype) if half else None
    kept, energy = new(B, H, dtype=plan.dtype), new(B, T)
    to_query = inputs.weight_query.to(plan.dtype).t()
    for s in range(S):
        x = factor if half else contexts[s]
        for number, cell in enumerate(cells):
            x = cell.forward(s, x)
            if keep is not None:
                x = torch.mul(cell.steps.hs[s + 1], keep[number, s], out=kept)
        torch.mm(x, to_query, out=query[s])
        attention.energies(query[s], weights[s], totals[s], energy)
        attention.context(energy, totals[s], weights[s + 1], totals[s + 1], contexts[s + 1], factor)
    output = _outputs(layers[-1], None if keep is None else keep[-1])
    return output, ex, query, weights, totals, contexts, *(t for steps in layers for t in steps)


def _product(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    return a.to(plan.dtype) @ b.to(plan.dtype)


def _outputs(steps: _Steps, keep: Tensor | None) -> Tensor:
    """h (S, B, H) of a layer after dropout."""
    return steps.hs[1:].clone() if keep is None else steps.hs[1:] * keep


def _run_backward(plan: Plan, *flat: Tensor | None) -> tuple[Tensor | None, ...]:
    """-> the gradients of DecoderInput and of the weights of each cell."""
    read = Read.unpack(plan.layers, flat)
    ex, query, weights, totals, contexts, *rest = read.others
    *rest, doutput, dcontext, dweights = rest
    width = len(_Steps._fields)
    layers = [_Steps(*rest[n * width : (n + 1) * width]) for n in range(plan.layers)]
    cells, attention = _prepared(plan, read, layers, ex), _attention(plan, read)
    E, H, keep = contexts.shape[2], doutput.shape[2], read.constants.keep
    passes = [_CellBackward(cell, H if number else E) for number, cell in enumerate(cells)]
    sums = _empty_slopes(attention, query, contexts)
    to_query = read.inputs.weight_query.to(plan.dtype)
    dqueried = doutput.new_empty(doutput.shape[1:], dtype=plan.dtype)
    dkept = doutput if keep is None else doutput * keep[-1]
    for s in reversed(range(len(query))):
        now = sums._replace(
            dcontext=sums.dcontext[s], dquery=sums.dquery[s], dlocation=sums.dlocation[s % 2]
        )
        later = sums.dlocation[(s + 1) % 2]
        attention.backward_weights(dcontext[s], passes[0].dx, dweights[s], later, now)
        attention.backward(query[s], (weights[s], totals[s]), weights[s + 1], now)
        torch.mm(now.dquery, to_query, out=dqueried)
        dh = passes[-1].dh
        if keep is None:
            torch.add(dkept[s], dqueried, out=dh)
        else:
            torch.addcmul(dkept[s], dqueried, keep[-1, s], out=dh)
        passes[-1].run(s, dh)
        for number in reversed(range(plan.layers - 1)):
            dh = passes[number + 1].dx
            if keep is not None:
                dh = torch.mul(dh, keep[number, s], out=passes[number].dh)
            passes[number].run(s, dh)
    of_cells = _cell_gradients(plan, read, passes, contexts)
    of_inputs = _input_gradients(plan, read, passes, sums, weights)
    return *of_inputs, *(g for gradients in of_cells for g in gradients)


def _empty_slopes(attention: _Attention, query: Tensor, contexts: Tensor) -> _Slopes:
    """With those of dcontext and dquery that have a row for each step, and dlocation of two."""
    _, B, A = query.shape
    T, C, W, tiles = attention.T, attention.C, attention.W, attention.tiles
    C = C if attention.kind == 2 else 0
    new, zeros = contexts.new_empty, contexts.new_zeros
    return _Slopes(
        zeros(B, T), torch.empty_like(contexts[1:]), new(B, T), zeros(B, T, A), new(tiles, B, A),
        torch.empty_like(query), zeros(tiles, B, A), zeros(tiles, B, C, A),
        zeros(tiles, B, C, 2, W), zeros(2, C, B, T),
    )  # fmt: skip


def _cell_gradients(
    plan: Plan, read: Read, passes: list[_CellBackward], contexts: Tensor
) -> list[Weights]:
    """The gradients of the weights of each cell, None where it has none."""
    keep, found = read.constants.keep, []
    for number, (layer, w) in enumerate(zip(passes, read.cells, strict=True)):
        if number == 0:
            x = torch.cat([read.inputs.embedded, contexts[:-1]], dim=2)
        else:
            x = _outputs(passes[number - 1].cell.steps, None if keep is None else keep[number - 1])
        gradients = layer.vectors() | {
            "weight_ih": _rows_product(layer.dax, x, plan).to(w.weight_ih.dtype),
            "weight_hh": _rows_product(layer.dah, layer.cell.steps.hs[:-1], plan).to(
                w.weight_hh.dtype
            ),
        }
        wanted = {name for name, weight in w._asdict().items() if weight is not None}
        found.append(Weights(*(gradients[n] if n in wanted else None for n in Weights._fields)))
    return found


def _rows_product(dy: Tensor, x: Tensor, plan: Plan) -> Tensor:
    """dy (S, B, N), x (S, B, K) -> the gradient (N, K) of the matrix of y = x matrix^T."""
    return dy.flatten(0, 1).to(plan.dtype).t() @ x.flatten(0, 1).to(plan.dtype)


def _input_gradients(
    plan: Plan,
    read: Read,
    passes: list[_CellBackward],
    sums: _Slopes,
    weights: Tensor,
) -> DecoderInput:
    inputs, keep = read.inputs, read.constants.keep
    M, kind = inputs.embedded.shape[2], inputs.states.dtype
    output = _outputs(passes[-1].cell.steps, None if keep is None else keep[-1])
    alphas = weights[1:].permute(1, 2, 0)  # (B, T, S)
    return DecoderInput(
        _product(passes[0].dax, read.cells[0].weight_ih[:, :M], plan).to(kind),
        _product(alphas, sums.dcontext.transpose(0, 1), plan).to(kind),
        sums.dkeys,
        _rows_product(sums.dquery, output, plan).to(kind),
        None if inputs.v is None else sums.dv.sum((0, 1))[None],
        None if inputs.conv is None else sums.dweight_loc.sum((0, 1)).t(),
        None if inputs.conv is None else sums.dconv.sum((0, 1)),
    )

"""Backend "cuda": in each time step one cuBLAS product for all directions and one Triton kernel.

The input's part of the gates is computed for all steps at once: a product and one Triton kernel for
norm, gain, bias and layout. The recurrence's loop is recorded once as a CUDA graph and replayed,
because launching a step's kernels takes longer than running them. With precision bf16 the products
are bf16, all else is fp32: the Triton kernels read and write the products' factors and results as
they are, so that both directions of a step launch two kernels in either precision. Tested on the
CPU with TRITON_INTERPRET=1, on a GPU by tests/benchmarks/gpu.py.

Legend: S steps, D directions, B utterances, H hidden size. A step's tensors have rows (D, B). The
steps of a direction follow its reading order, so that every utterance begins at step 0. S is
the longest length rounded up to a multiple of BUCKET: few graphs serve all batches.
"""

import functools
import importlib.util
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.kernels.double_backward import refuse_operators
from asr.kernels.types import MODES, LayerInput, LayerOutput, Weights

Steps = Callable[..., tuple[Tensor | None, ...]]
MOST = 128  # graphs kept; each holds the memory of its loop
MEMORY_SHARE = 0.3  # of the GPU's memory that all kept graphs may hold
BUCKET = 32  # frames
WHAT, REMEDY = "the LSTM's CUDA backend", "use backend='python'"  # for what it refuses
PROGRAMS = 264  # of a kernel that sums over all rows: two for each multiprocessor of an H100


class Recorded(NamedTuple):
    graph: "torch.cuda.CUDAGraph"
    inputs: list[Tensor | None]
    outputs: tuple[Tensor | None, ...]
    pool: int = 0  # bytes that the recording reserved, its outputs among them

    @property
    def bytes(self) -> int:
        """Memory of its inputs, its outputs and what else its loop needs."""
        inputs, outputs = (
            sum(t.untyped_storage().nbytes() for t in held if t is not None)
            for held in (self.inputs, self.outputs)
        )
        return inputs + max(outputs, self.pool)


class GraphCache:
    """Recorded loops, the last used last. The first are dropped beyond MOST or `room` bytes.

    Recording takes longer than running a loop once. If one step's loops exceed the room, each would
    be dropped before the next step. Therefore, once one has been dropped, a new loop only runs; it
    is recorded when it comes again before the first, which would be dropped for it, is used again.

    Models of one shape share a loop, so threads replay one after the other.
    """

    def __init__(self, record: Callable[[Steps, list[Tensor | None]], Recorded]) -> None:
        self.record = record
        self.recorded: OrderedDict[Hashable, Recorded] = OrderedDict()
        self.is_full = False
        self.waiting: set[Hashable] = set()  # loops that ran since the first one was used
        self.lock = threading.RLock()

    def replay(
        self, key: Hashable, loop: Steps, room: float, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """loop(*inputs); `key` identifies all shapes, dtypes, devices and options."""
        with self.lock:
            if key not in self.recorded:
                if self.is_full and key not in self.waiting:
                    self.waiting.add(key)
                    return loop(*inputs)
                self.waiting.discard(key)
                # Tensors of inference mode could not be written outside it.
                with torch.inference_mode(False), torch.no_grad():
                    buffers = [t if t is None else t.clone() for t in inputs]
                    self.recorded[key] = self.record(loop, buffers)
                self._drop_first(room)
            elif key == next(iter(self.recorded)):
                self.waiting.clear()
            self.recorded.move_to_end(key)
            recorded = self.recorded[key]
            for buffer, value in zip(recorded.inputs, inputs, strict=True):
                if buffer is not None:
                    buffer.copy_(value)
            recorded.graph.replay()
            # The next replay overwrites them.
            return tuple(out if out is None else out.clone() for out in recorded.outputs)

    def _drop_first(self, room: float) -> None:
        held = sum(recorded.bytes for recorded in self.recorded.values())
        while len(self.recorded) > 1 and (len(self.recorded) > MOST or held > room):
            held -= self.recorded.popitem(last=False)[1].bytes
            self.is_full = True

    def clear(self) -> None:
        """Free the memory of all."""
        with self.lock:
            self.recorded.clear()
            self.waiting.clear()
            self.is_full = False


def replay(key: Hashable, loop: Steps, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """loop(*inputs), on a GPU from a graph, unless the caller records one itself."""
    device = inputs[0].device
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return loop(*inputs)
    room = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    # Two streams would overwrite each other's inputs.
    key = key, torch.cuda.current_stream(device).cuda_stream
    return _graphs.replay(key, loop, room, *inputs)


def release_graphs() -> None:
    """Free the memory of all recorded loops."""
    _graphs.clear()


def _record(loop: Steps, inputs: list[Tensor | None]) -> Recorded:
    current, side = torch.cuda.current_stream(), _side_stream(torch.cuda.current_device())
    side.wait_stream(current)
    with torch.cuda.stream(side):
        loop(*inputs)  # compiles the kernels and lets cuBLAS choose: neither may be recorded
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: by default the calls of other threads, such as the one that pins batches,
        # would end the recording. Without a stream torch takes one on the first GPU that recorded.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved()
            outputs = loop(*inputs)
            pool = torch.cuda.memory_reserved() - before
    except RuntimeError as error:
        # torch does not restore the stream where the recording's end fails, which also raises
        # another error.
        torch.cuda.set_stream(current)
        raise error.__context__ or error from None
    return Recorded(graph, inputs, outputs, pool)


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings, since cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)


_graphs = GraphCache(_record)


class Loops(NamedTuple):
    """How all steps are computed. Plain functions, since a plan is part of a graph's key.

    forward(plan, learns, gates, ...), with the tensors of Recurrence -> h and c of all steps and
    the initial ones (S + 1, D, B, H), and what backward needs of `saved`.
    backward(plan, needed, gates, weight, cs, saved, mask, lengths, vectors, dhs, dh, dc) -> the
    gradients of h and c, of the gates, of W_h h in the products' dtype, and of the vectors.
    """

    forward: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]]
    bucket: int  # frames: the number of steps is rounded up to a multiple


class CudaPlan(NamedTuple):
    """The options of a layer's recurrence."""

    settings: CellSettings
    dtype: torch.dtype  # of the products
    loops: Loops


def step_options(settings: CellSettings, H: int, mask: Tensor | None) -> dict[str, Any]:
    """The keyword arguments of both Triton kernels of a step."""
    block = 1 << max(4, (H - 1).bit_length())
    return {"eps": settings.eps, "BLOCK": block} | kernel_options(settings, mask)


def for_hidden(settings: CellSettings, like: Tensor) -> Tensor:
    """A new tensor for each step's h before its norm; without that norm nothing reads it."""
    return like.new_empty(like.shape if settings.hidden_norm else (len(like), 4))


def kernel_options(settings: CellSettings, mask: Tensor | None) -> dict[str, int]:
    """The constants by which all kernels know what to compute."""
    return {
        "MODE": MODES[settings.gates],
        "RMS": settings.norm_kind == "rms",
        "NORM_C": settings.norms_cell,
        "SHOW": settings.shows_norm,
        "CARRY": settings.carries_norm,
        "HIDDEN": settings.hidden_norm,
        "DROP": mask is not None,
    }


class Recurrence(torch.autograd.Function):
    """gates (S, D, B, 4H), weight (D, 4H, H), h, c (D, B, H), mask (D, B, H) or None, lengths
    (B,), six vectors as in stacked_vectors -> h of all steps (S, D, B, H), final h, c.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: CudaPlan, gates: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        learns = any(ctx.needs_input_grad)
        hs, cs, saved = plan.loops.forward(plan, learns, gates, *inputs)
        ctx.plan, ctx.count = plan, len(saved)
        ctx.save_for_backward(gates, hs, cs, *saved, *inputs)
        return hs[1:], hs[-1].clone(), cs[-1].clone()

    @staticmethod
    def backward(ctx: Any, dhs: Tensor, dh: Tensor, dc: Tensor) -> tuple[Any, ...]:
        refuse_operators(WHAT, REMEDY, dhs, dh, dc)
        gates, hs, cs, *rest = ctx.saved_tensors
        saved, (weight, _, _, mask, lengths, *vectors) = rest[: ctx.count], rest[ctx.count :]
        upstream = (d.contiguous() for d in (dhs, dh, dc))  # the kernels read plain rows
        needed = ctx.needs_input_grad[-len(vectors) :]
        inputs = gates, weight, cs, saved, mask, lengths, vectors, *upstream
        dh, dc, dgates, dah, dvectors = ctx.plan.loops.backward(ctx.plan, needed, *inputs)
        before = hs[:-1].transpose(0, 1).flatten(1, 2)  # (D, S * B, H)
        rows = dah.transpose(0, 1).flatten(1, 2).transpose(1, 2)  # (D, 4H, S * B)
        dweight = (rows @ before.to(ctx.plan.dtype)).to(weight.dtype)
        return None, dgates, dweight, dh, dc, None, None, *dvectors


def _forward(
    plan: CudaPlan, _learns: bool, *inputs: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    loop = functools.partial(_run_forward, plan)
    hs, cs, *saved = replay(graph_key(plan, "forward", *inputs), loop, *inputs)
    return hs, cs, tuple(saved)


def _backward(
    plan: CudaPlan,
    needed: tuple[bool, ...],
    gates: Tensor,
    weight: Tensor,
    cs: Tensor,
    saved: Sequence[Tensor],
    mask: Tensor | None,
    lengths: Tensor,
    vectors: list[Tensor],
    *upstream: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]:
    inputs = (gates, weight, cs, *saved, mask, lengths, *vectors, *upstream)
    loop = functools.partial(_run_backward, plan)
    dh, dc, dz, dah, *normed = replay(graph_key(plan, "backward", *inputs), loop, *inputs)
    dvectors = vector_gradients(plan.settings, needed, gates, *saved, dz, *normed)
    return dh, dc, dah.to(dz.dtype) if plan.settings.norms_sum else dz, dah, dvectors


def _run_forward(
    plan: CudaPlan,
    gates: Tensor,
    weight: Tensor,
    h: Tensor,
    c: Tensor,
    mask: Tensor | None,
    lengths: Tensor,
    *vectors: Tensor,
) -> tuple[Tensor, ...]:
    from asr.kernels.cuda import triton_step  # needs triton, which may not be installed

    S, D, B, _ = gates.shape
    H = h.shape[-1]
    hs, cs = gates.new_empty(S + 1, D, B, H), gates.new_empty(S + 1, D, B, H)
    hs[0], cs[0] = h, c
    half = plan.dtype != gates.dtype
    factor = h.to(plan.dtype)  # of the next product: h, rounded where it must be
    ah, raw = torch.empty_like(gates, dtype=plan.dtype), gates.new_empty(S, D, B, H)
    raw_h = for_hidden(plan.settings, raw)
    across = weight.transpose(1, 2).to(plan.dtype).contiguous()
    options = step_options(plan.settings, H, mask)
    for s in range(S):
        torch.bmm(factor if half else hs[s], across, out=ah[s])
        triton_step.forward_step[(D * B,)](
            gates[s], ah[s], hs[s], cs[s], hs if mask is None else mask, lengths, *vectors,
            hs[s + 1], factor, cs[s + 1], raw[s], raw_h[s], s, B, H, HALF=half, **options,
        )  # fmt: skip
    return hs, cs, ah, raw, raw_h


def _run_backward(
    plan: CudaPlan,
    gates: Tensor,
    weight: Tensor,
    cs: Tensor,
    ah: Tensor,
    raw: Tensor,
    raw_h: Tensor,
    mask: Tensor | None,
    lengths: Tensor,
    *vectors_and_slopes: Tensor,
) -> tuple[Tensor, ...]:
    """-> dh, dc, dz, dah and the gradients of the normed c and h."""
    from asr.kernels.cuda import triton_step

    *vectors, dhs, dh, dc = vectors_and_slopes
    S, D, B, _ = gates.shape
    H = dh.shape[-1]
    dz, dah = torch.empty_like(gates), torch.empty_like(ah)
    dnormed, dhidden = torch.empty_like(raw), for_hidden(plan.settings, raw)
    passing, dc, weight = dh.clone(), dc.clone(), weight.to(plan.dtype).contiguous()
    through_w = torch.zeros_like(dh, dtype=plan.dtype)
    options = step_options(plan.settings, H, mask)
    for s in reversed(range(S)):
        triton_step.backward_step[(D * B,)](
            gates[s], ah[s], cs[s], raw[s], raw_h[s], cs if mask is None else mask, lengths,
            *vectors, through_w, passing, dhs[s], dc, dz[s], dah[s], dnormed[s], dhidden[s],
            s, B, H, **options,
        )  # fmt: skip
        torch.bmm(dah[s], weight, out=through_w)
    return passing.add_(through_w), dc, dz, dah, dnormed, dhidden


def vector_gradients(
    settings: CellSettings,
    needed: tuple[bool, ...],
    gates: Tensor,
    ah: Tensor,
    raw: Tensor,
    raw_h: Tensor,
    dz: Tensor,
    dnormed: Tensor,
    dhidden: Tensor,
) -> list[Tensor | None]:
    """Gradients of the six vectors of stacked_vectors, None where the settings have none."""
    found: list[Tensor | None] = []
    added = gates if settings.norms_sum else None
    parts = 4 if settings.gates == "per_gate" else 1
    # The bias of the gates is added to the input's part, unless the sum is normalised.
    sum_learns = needed[0] or (settings.norms_sum and needed[1])
    for wanted, *rows in (
        (sum_learns, ah, added, dz, parts),
        (any(needed[2:4]), raw, None, dnormed, 1),
        (any(needed[4:6]), raw_h, None, dhidden, 1),
    ):
        found += _affine_gradients(settings, *rows) if wanted else (None, None)
    if not settings.norms_sum:
        found[1] = None
    return found


def _affine_gradients(
    settings: CellSettings, x: Tensor, added: Tensor | None, dy: Tensor, parts: int
) -> tuple[Tensor, Tensor]:
    """dy (S, D, B, N) of y = gain N(x + added) + bias -> gradients of gain and bias, (D, N) each;
    the norm takes N elements or each of `parts`.
    """
    D, N = x.shape[1], x.shape[-1]
    size = N // parts
    sums = dy.new_empty(2, D, N)
    for d in range(D):
        for first in range(0, N, size):
            part = (slice(None), d, slice(None), slice(first, first + size))
            inputs = x[part], None if added is None else added[part], None, dy[part], None
            sums[:, d, first : first + size] = norm_backward(settings, True, *inputs)
    return sums[0], sums[1]


def graph_key(plan: Hashable, name: str, *tensors: Tensor | None) -> tuple[Any, ...]:
    kinds = (t if t is None else (tuple(t.shape), t.dtype, t.device) for t in tensors)
    return plan, name, torch.get_float32_matmul_precision(), *kinds


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot run on such weights; None where it can."""
    if (reason := missing()) or _interpreted():
        return reason
    if device.type != "cuda":
        return f"the weights are on {device}"
    return None if dtype == torch.float32 else f"the weights are {dtype}"


@functools.cache
def missing() -> str | None:
    """Why the backend cannot run on this machine; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not _interpreted() and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def layer(
    batch: LayerInput, weights: list[Weights], settings: CellSettings, products: torch.dtype
) -> LayerOutput:
    """All directions of one layer at once. products: dtype of the matrix products."""
    plan = CudaPlan(settings, products, Loops(_forward, _backward, BUCKET))
    return run_loops(batch, weights, plan)


def run_loops(batch: LayerInput, weights: list[Weights], plan: CudaPlan) -> LayerOutput:
    """All directions of one layer at once, their steps by plan.loops."""
    B, T, _ = batch.x.shape
    counts, device = batch.lengths or [T] * B, batch.x.device
    with torch.cuda.device_of(batch.x):  # Triton launches on the current device
        lengths = torch.tensor(counts).to(device, non_blocking=True)
        steps = -(-max(counts) // plan.loops.bucket) * plan.loops.bucket
        at = _reading_order(lengths, steps, T, len(weights))
        gates = _gates(batch.x, at, weights, plan)
        mask = None if batch.mask is None else batch.mask.contiguous()
        state = batch.h.contiguous(), batch.c.contiguous()
        fixed = (torch.stack([w.weight_hh for w in weights]), *state, mask, lengths)
        hs, h, c = Recurrence.apply(plan, gates, *fixed, *stacked_vectors(weights))
        return LayerOutput(_in_time_order(hs, at, T), h, c)


def _reading_order(lengths: Tensor, S: int, T: int, directions: int) -> Tensor:
    """The frame (row of B * T) that each step reads, B * T where it reads none: (D, S, B)."""
    step = torch.arange(S, device=lengths.device)[:, None]
    times = [step, lengths - 1 - step][:directions]
    B = len(lengths)
    first = torch.arange(B, device=lengths.device) * T
    return torch.stack([torch.where(step < lengths, first + time, B * T) for time in times])


def _gates(x: Tensor, at: Tensor, weights: list[Weights], plan: CudaPlan) -> Tensor:
    """x (B, T, I) -> the input's part of the gates in reading order, (S, D, B, 4H)."""
    frames = torch.nn.functional.pad(x.flatten(0, 1), (0, 0, 0, 1))  # padded steps read zeros
    products = []
    for frame, w in zip(at, weights, strict=True):
        rows = frames.index_select(0, frame.flatten()).view(*frame.shape, -1)  # (S, B, I)
        products.append(rows.to(plan.dtype) @ w.weight_ih.t().to(plan.dtype))
    gains = None if weights[0].gain_ih is None else torch.stack([w.gain_ih for w in weights])
    biases = torch.stack([w.bias_ih + w.bias_hh for w in weights])
    return InputPart.apply(plan.settings, gains, biases, *products)


class InputPart(torch.autograd.Function):
    """gains, biases (D, 4H), a product W_x x (S, B, 4H) for each direction -> (S, D, B, 4H), as
    reference.input_part. The gains may be None.
    """

    @staticmethod
    def forward(
        ctx: Any, settings: CellSettings, gains: Tensor | None, biases: Tensor, *products: Tensor
    ) -> Tensor:
        ctx.settings = settings
        ctx.save_for_backward(gains, *products)
        S, B, N = products[0].shape
        gates = biases.new_empty(S, len(products), B, N)
        for d, product in enumerate(products):
            gain = None if gains is None else gains[d]
            bias = None if settings.norms_sum else biases[d]  # else the bias follows the sum
            normed = settings.gates == "split"
            norm_forward(settings, normed, product, None, gain, bias, gates[:, d])
        return gates

    @staticmethod
    def backward(ctx: Any, dgates: Tensor) -> tuple[Any, ...]:
        refuse_operators(WHAT, REMEDY, dgates)
        settings, (gains, *products) = ctx.settings, ctx.saved_tensors
        dproducts = [torch.empty_like(product) for product in products]
        sums = dgates.new_empty(2, len(products), dgates.shape[-1])
        for d, product in enumerate(products):
            gain = None if gains is None else gains[d]
            inputs = product, None, gain, dgates[:, d], dproducts[d]
            sums[:, d] = norm_backward(settings, settings.gates == "split", *inputs)
        dgains = None if gains is None else sums[0]
        return None, dgains, None if settings.norms_sum else sums[1], *dproducts


def norm_forward(
    settings: CellSettings,
    normed: bool,
    x: Tensor,
    added: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
) -> None:
    """y = gain N(x + added) + bias, without the norm where not `normed`.

    x, added, y (S, B, N), gain, bias (N); x and added have the same strides.
    """
    from asr.kernels.cuda import triton_norm

    S, B, N = x.shape
    triton_norm.norm_rows_forward[(S * B,)](
        x, x if added is None else added, x if gain is None else gain, x if bias is None else bias,
        y, B, N, *x.stride()[:2], *y.stride()[:2], settings.eps, NORM=normed,
        RMS=settings.norm_kind == "rms", GAIN=gain is not None, BIAS=bias is not None,
        ADD=added is not None, **_row_options(N),
    )  # fmt: skip


def norm_backward(
    settings: CellSettings,
    normed: bool,
    x: Tensor,
    added: Tensor | None,
    gain: Tensor | None,
    dy: Tensor,
    dx: Tensor | None,
    sums: bool = True,
) -> Tensor | None:
    """dy of y = gain N(x + added) + bias -> gradients of gain and bias (2, N), None without `sums`;
    dx is filled.

    x, added, dy, dx (S, B, N); x, added and dx have the same strides.
    """
    from asr.kernels.cuda import triton_norm

    S, B, N = x.shape
    programs = min(S * B, PROGRAMS) if sums else S * B
    parts = dy.new_empty(2, programs, N) if sums else None
    dgain, dbias = (dy, dy) if parts is None else parts
    triton_norm.norm_rows_backward[(programs,)](
        x, x if added is None else added, x if gain is None else gain, dy,
        x if dx is None else dx, dgain, dbias, S * B, B, N, *x.stride()[:2], *dy.stride()[:2],
        settings.eps, NORM=normed, RMS=settings.norm_kind == "rms", GAIN=gain is not None,
        ADD=added is not None, DX=dx is not None, SUMS=sums, **_row_options(N),
    )  # fmt: skip
    return None if parts is None else parts.sum(1)


def _row_options(N: int) -> dict[str, int]:
    """A block holds a row; 8 elements a thread and more."""
    block = 1 << max(4, (N - 1).bit_length())
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def _in_time_order(hs: Tensor, at: Tensor, T: int) -> Tensor:
    """hs (S, D, B, H) -> (B, T, D * H), zero where no frame was read."""
    _, D, B, H = hs.shape
    parts = []
    for d in range(D):  # steps without a frame write the last row, which is dropped
        flat = hs.new_zeros(B * T + 1, H)
        parts.append(flat.index_copy(0, at[d].flatten(), hs[:, d].flatten(0, 1))[:-1])
    return torch.cat(parts, dim=-1).view(B, T, D * H)


def stacked_vectors(weights: list[Weights]) -> list[Tensor]:
    """gain_h, bias (D, 4H), gain_c, bias_c, gain_hidden and bias_hidden (D, H) of all directions.

    Where the settings have no gain_h it is ones; what else they lack is no kernel's to read.
    """
    bias = _stack([w.bias_ih + w.bias_hh for w in weights])
    gain = [w.gain_recurrent for w in weights]
    vectors = [torch.ones_like(bias) if gain[0] is None else _stack(gain), bias]
    for name in ("gain_c", "bias_c", "gain_hidden", "bias_hidden"):
        column = [getattr(w, name) for w in weights]
        vectors.append(bias.detach() if column[0] is None else _stack(column))
    return vectors


def _stack(parts: list[Tensor]) -> Tensor:
    """As torch.stack, without a copy of a single part."""
    return torch.stack(parts) if len(parts) > 1 else parts[0].contiguous().unsqueeze(0)

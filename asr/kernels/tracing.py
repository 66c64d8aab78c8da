"""The LSTM in graphs that torch records: torch.export, torch.jit.trace, torch.func, fake tensors.

Tensors of such a graph have no memory that a kernel could read, or stand for several at once. The
layer below consists of operators of torch alone, one group per frame: the number of frames is fixed
when the graph is recorded, the number of utterances and their lengths are not.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from asr.config.cell import CellSettings
from asr.kernels import reference
from asr.kernels.deferred import deferred_linear
from asr.kernels.types import LayerInput, LayerOutput, Weights

PLAIN = Tensor.__torch_dispatch__  # of classes that leave torch's operators as they are


def is_traced(*tensors: Tensor) -> bool:
    """Are operators recorded or transformed, not run? Then no kernel may see these tensors.

    True within torch.compile, torch.export, torch.jit.trace, transforms of torch.func and forward
    AD, where a TorchDispatchMode is active (make_fx, FakeTensorMode), and for tensors of the device
    meta and of classes that replace torch's operators, such as FakeTensor.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    ):
        return True
    for tensor in tensors:  # noqa: SIM110 (any() is slower, and a decoder asks in every step)
        if tensor.is_meta or type(tensor).__torch_dispatch__ is not PLAIN:
            return True
    return False


def layer(batch: LayerInput, weights: list[Weights], settings: CellSettings) -> LayerOutput:
    """All directions of one layer. Padding is computed and dropped: its values change nothing."""
    x, T, valid = batch.x, batch.x.shape[1], [None] * batch.x.shape[1]
    if batch.lengths is not None:
        lengths = batch.lengths.to(x.device).unsqueeze(1)
        within = torch.arange(T, device=x.device) < lengths  # (B, T)
        x = x.masked_fill(~within.unsqueeze(2), 0.0)
        valid = within.unsqueeze(2).unbind(1)
    outputs, states = [], []
    for d, w in enumerate(weights):
        gates = reference.input_part(deferred_linear(x, w.weight_ih), w, settings).unbind(1)
        steps = list(zip(gates, valid, strict=True))  # T of (B, 4H) and (B, 1)
        mask = None if batch.mask is None else batch.mask[d]
        start = batch.h[d], batch.c[d]
        rows, end = _run(steps[::-1] if d == 1 else steps, start, mask, w, settings)
        outputs.append(torch.stack(rows[::-1] if d == 1 else rows, dim=1))
        states.append(end)
    h, c = (torch.stack(parts) for parts in zip(*states, strict=True))
    return LayerOutput(torch.cat(outputs, dim=-1), h, c)


def _run(
    steps: list[tuple[Tensor, Tensor | None]],
    state: tuple[Tensor, Tensor],
    mask: Tensor | None,
    weights: Weights,
    settings: CellSettings,
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """-> the output (B, H) of every step, zero in padding, and the state, which padding keeps."""
    rows = []
    for gates, valid in steps:
        after = reference.next_state(gates, state, mask, weights, settings)
        if valid is None:
            state, row = after, after[0]
        else:
            h, c = (torch.where(valid, *pair) for pair in zip(after, state, strict=True))
            state, row = (h, c), after[0].masked_fill(~valid, 0.0)
        rows.append(row)
    return rows, state

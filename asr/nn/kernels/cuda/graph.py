"""Loops of many small kernels, recorded once as a CUDA graph and replayed.

Launching costs more than a step computes; a graph launches all of its kernels at once. Elsewhere
than on a GPU the loop simply runs. Not yet run on a GPU.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

Loop = Callable[..., tuple[Tensor, ...]]
MOST = 32  # graphs kept; each holds the memory of its loop


class Recorded(NamedTuple):
    graph: "torch.cuda.CUDAGraph"
    inputs: list[Tensor | None]
    outputs: tuple[Tensor, ...]


_recorded: OrderedDict[Hashable, Recorded] = OrderedDict()


def replay(key: Hashable, loop: Loop, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """loop(*inputs), whose shapes and dtypes and all else that it depends on `key` names."""
    if not inputs[0].is_cuda:
        return loop(*inputs)
    if key not in _recorded:
        _recorded[key] = _record(loop, [t if t is None else t.clone() for t in inputs])
        if len(_recorded) > MOST:
            _recorded.popitem(last=False)
    _recorded.move_to_end(key)
    recorded = _recorded[key]
    for ours, given in zip(recorded.inputs, inputs, strict=True):
        if ours is not None:
            ours.copy_(given)
    recorded.graph.replay()
    return tuple(out.clone() for out in recorded.outputs)  # the next replay overwrites them


def _record(loop: Loop, inputs: list[Tensor | None]) -> Recorded:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop(*inputs)  # compiles the kernels and lets cuBLAS choose: neither may be recorded
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = loop(*inputs)
    return Recorded(graph, inputs, outputs)

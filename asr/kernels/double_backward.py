"""Second derivatives and batched gradients of the kernels, by torch's operators.

A kernel's backward pass computes numbers. Where they are differentiated again (create_graph=True),
or where the upstream gradients stand for several at once (is_grads_batched, torch.func.vmap), the
pass computes the same function by torch's operators and differentiates those: exact, at the cost of
the reference backend.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

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


def needs_operators(*upstream: Tensor) -> bool:
    """In a backward pass: is its result differentiated again, or a batch of results?"""
    if (
        torch.is_grad_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return True
    return any(map(torch._C._functorch.is_legacy_batchedtensor, upstream))  # is_grads_batched


def differentiate(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    upstream: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradients of function(*inputs), with a graph where one is asked for; None where an input
    has no gradient.
    """
    graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(upstream[0].device.type, enabled=False):
        # Views, because one input may be computed from another, through which no gradient may pass.
        own = [t if t is None or not t.requires_grad else t.view_as(t) for t in inputs]
        learned = [t for t in own if t is not None and t.requires_grad]
        outputs = function(*own)
        found = torch.autograd.grad(
            outputs, learned, upstream, create_graph=graph, allow_unused=True
        )
    gradients = iter(found)
    return [next(gradients) if t is not None and t.requires_grad else None for t in own]


def refuse_operators(what: str, remedy: str, *upstream: Tensor) -> None:
    """Raises RuntimeError where needs_operators, for kernels that differentiate nothing else."""
    if needs_operators(*upstream):
        raise RuntimeError(
            f"{what} has no second derivatives (create_graph=True) and no batched gradients "
            f"(is_grads_batched=True): {remedy}"
        )

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
        views = [t if t is None or not t.requires_grad else t.view_as(t) for t in inputs]
        learned = [t for t in views if t is not None and t.requires_grad]
        outputs = function(*views)
        found = torch.autograd.grad(
            outputs, learned, upstream, create_graph=graph, allow_unused=True
        )
    gradients = iter(found)
    return [next(gradients) if t is not None and t.requires_grad else None for t in views]


def refuse_operators(what: str, remedy: str, *upstream: Tensor) -> None:
    """Raises RuntimeError where needs_operators, for kernels that differentiate nothing else."""
    if needs_operators(*upstream):
        raise RuntimeError(
            f"{what} has no second derivatives (create_graph=True) and no batched gradients "
            f"(is_grads_batched=True): {remedy}"
        )

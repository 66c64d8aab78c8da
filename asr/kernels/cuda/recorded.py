"""A loop over steps of torch's operators, whose step is recorded as a CUDA graph.

A step of a decoder launches 160 small kernels, forward and backward, and launching them takes four
times as long as running them. One step forward and one step backward are recorded for each shape of
the batch and replayed for every token. The backward step computes the forward step again, so that
only the states between the steps are stored. The graphs read and write buffers of their own.

Tested on a CPU, where a step is run instead of replayed; not yet run on a GPU. The first graphs of
a loop are compared with the steps themselves. Where they differ, or cannot be recorded, an error
makes the caller compute step by step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asr.errors import is_out_of_memory
from asr.kernels.cuda import lstm
from asr.kernels.deferred import autocast_dtype

Tensors = Sequence[Tensor]
# step(constants, state, given) -> the next state
Step = Callable[[Tensors, Tensors, Tensors], Tensors]

MOST = 8  # shapes of which a loop keeps graphs and buffers
BUCKET = 32  # steps: buffers have room for a multiple
BOUND = 1e-2  # largest |difference| / |value| between a replayed and a computed step


class CannotRecord(RuntimeError):
    """The message is the reason."""


class RecordedLoop:
    """The loop of one step function; `parameters` are what it reads beside its arguments."""

    def __init__(self, step: Step, parameters: Iterable[Tensor]) -> None:
        self.step, self.parameters = step, list(parameters)
        self.runners: OrderedDict[Any, _Runner] = OrderedDict()
        self.checked = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # graphs belong to one process and one module: a copy makes its own

    def run(self, constants: Tensors, state: Tensors, given: Tensors) -> tuple[Tensor, ...]:
        """The states (U, ...) after each of U steps, of which step u reads given[:][u].

        Raises CannotRecord.
        """
        counts = len(constants), len(state), len(given)
        return _Loop.apply(self, counts, *constants, *state, *given, *self.parameters)

    def runner(self, constants: Tensors, state: Tensors, given: Tensors) -> "_Runner":
        """The buffers and graphs for such tensors."""
        room = -(-len(given[0]) // BUCKET) * BUCKET
        shapes = [(tuple(t.shape), t.dtype) for t in (*constants, *state)]
        shapes += [(tuple(t.shape[1:]), t.dtype) for t in given]
        own = [(p.data_ptr(), p.requires_grad) for p in self.parameters]
        key = room, autocast_dtype(given[0].device.type), *shapes, *own
        if key not in self.runners:
            while len(self.runners) >= MOST:
                self.runners.popitem(last=False)
            try:
                made = _Runner(self, room, constants, state, given)
                if not self.checked:
                    made.check(constants, state, given)
            except Exception as error:  # of CUDA, cuBLAS and cuDNN
                if is_out_of_memory(error):
                    raise
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise CannotRecord(reason[:200]) from error
            self.checked, self.runners[key] = True, made
        self.runners.move_to_end(key)
        return self.runners[key]


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loop: RecordedLoop, counts: tuple[int, int, int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        constants, state, given = _parts(tensors, counts)
        runner = loop.runner(constants, state, given)
        runner.load(constants, given, [s.unsqueeze(0) for s in state])
        U = len(given[0])
        runner.forward(U)
        history = [own[: U + 1].clone() for own in runner.history]
        ctx.runner, ctx.counts = runner, counts
        ctx.save_for_backward(*constants, *history, *given)
        return tuple(own[1:] for own in history)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dhistory: Tensor) -> tuple[Tensor | None, ...]:
        constants, history, given = _parts(ctx.saved_tensors, ctx.counts)
        ctx.runner.load(constants, given, history)  # another batch may have used its buffers
        return None, None, *ctx.runner.backward(dhistory)


def _parts(tensors: Tensors, counts: tuple[int, int, int]) -> tuple[Tensors, Tensors, Tensors]:
    first, second = counts[0], counts[0] + counts[1]
    return tensors[:first], tensors[first:second], tensors[second : second + counts[2]]


def _autocast(like: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """As when the loop began. Without autocast's cache, whose tensors a graph must not keep."""
    kind = like.device.type
    return torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False)


class _Runner:
    """One shape's buffers, and the two recorded steps on them."""

    def __init__(
        self, loop: RecordedLoop, room: int, constants: Tensors, state: Tensors, given: Tensors
    ) -> None:
        self.step, self.parameters = loop.step, loop.parameters
        self.autocast = autocast_dtype(given[0].device.type)
        self.constants = [t.detach().clone() for t in constants]
        self.history = [t.new_zeros(room + 1, *t.shape) for t in state]
        self.given = [t.new_zeros(room, *t.shape[1:]) for t in given]
        self.number = torch.zeros(1, dtype=torch.long, device=given[0].device)  # of the step
        # Sums over the steps are fp32, whatever the dtype of a step's gradient.
        self.dconstants = [_sum_like(t) if t.is_floating_point() else None for t in constants]
        self.dparameters = [_sum_like(p) if p.requires_grad else None for p in self.parameters]
        self.dstate = [torch.zeros_like(t) for t in state]
        self.dhistory = [torch.zeros_like(t) for t in self.history]
        self.dgiven = [torch.zeros_like(t) for t in self.given]
        self.run_forward, self.run_backward = self._forward, self._backward
        if given[0].is_cuda:
            self.run_forward = lstm.record_steps(self._forward)
            self.number.fill_(1)
            self.run_backward = lstm.record_steps(self._backward)

    def load(self, constants: Tensors, given: Tensors, history: Tensors) -> None:
        """Copy into the buffers; history (u, ...): the first u states."""
        for own, new in zip(self.constants, constants, strict=True):
            own.copy_(new)
        for buffers, filled in ((self.given, given), (self.history, history)):
            for own, new in zip(buffers, filled, strict=True):
                own[: len(new)].copy_(new)

    def forward(self, steps: int) -> None:
        """Fill the history from its first state on."""
        self.number.zero_()
        for _ in range(steps):
            self.run_forward()

    def backward(self, dhistory: Tensors) -> list[Tensor | None]:
        """The gradients of constants, state, given and parameters."""
        steps = len(dhistory[0])
        sums = [t for t in (*self.dconstants, *self.dparameters) if t is not None]
        for own in (*sums, *self.dstate):
            own.zero_()
        for own, new in zip(self.dhistory, dhistory, strict=True):
            own[1 : steps + 1].copy_(new)
        self.number.fill_(steps)
        for _ in range(steps):
            self.run_backward()
        found = [*self.dconstants, *self.dstate, *(d[:steps] for d in self.dgiven)]
        return [t if t is None else t.clone() for t in (*found, *self.dparameters)]

    def _forward(self) -> None:
        state, given = self._at_number()
        with torch.no_grad(), _autocast(self.number, self.autocast):
            new = self.step(self.constants, state, given)
        self.number.add_(1)
        for own, value in zip(self.history, new, strict=True):
            own.index_copy_(0, self.number, value.to(own.dtype).unsqueeze(0))

    def _backward(self) -> None:
        upstream = [d.index_select(0, self.number)[0] for d in self.dhistory]
        self.number.sub_(1)
        state, given = ([t.requires_grad_() for t in own] for own in self._at_number())
        constants = [
            t if d is None else t.detach().requires_grad_()
            for t, d in zip(self.constants, self.dconstants, strict=True)
        ]
        with torch.enable_grad(), _autocast(self.number, self.autocast):
            new = self.step(constants, state, given)
            new = [n.to(s.dtype) for n, s in zip(new, state, strict=True)]
        total = [d + later for d, later in zip(upstream, self.dstate, strict=True)]
        learned = [(n, d) for n, d in zip(new, total, strict=True) if n.requires_grad]
        targets = [
            (leaf, sums, _add)
            for leaf, sums in zip(
                (*constants, *self.parameters), (*self.dconstants, *self.dparameters), strict=True
            )
            if sums is not None
        ]
        targets += [(leaf, d, _set) for leaf, d in zip(state, self.dstate, strict=True)]
        targets += [(leaf, d, self._set_at) for leaf, d in zip(given, self.dgiven, strict=True)]
        outputs, gradients = zip(*learned, strict=True)
        leaves = [leaf for leaf, *_ in targets]
        found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        for (_, target, write), d in zip(targets, found, strict=True):
            write(target, d)

    def _set_at(self, target: Tensor, d: Tensor | None) -> None:
        if d is not None:
            target.index_copy_(0, self.number, d.unsqueeze(0))

    def _at_number(self) -> tuple[list[Tensor], list[Tensor]]:
        """The state that the step reads, and what it is given."""
        return tuple(
            [t.index_select(0, self.number)[0] for t in buffers]
            for buffers in (self.history, self.given)
        )

    def check(self, constants: Tensors, state: Tensors, given: Tensors) -> None:
        """Raises CannotRecord unless two replayed steps are what the steps compute."""
        steps, recorded = min(2, len(given[0])), (self.run_forward, self.run_backward)
        found = []
        for run in ((self._forward, self._backward), recorded):
            self.run_forward, self.run_backward = run
            self.load(constants, given, [s.unsqueeze(0) for s in state])
            self.forward(steps)
            history = [own[: steps + 1].clone() for own in self.history]
            found.append([*history, *self.backward([torch.ones_like(h[1:]) for h in history])])
        for expected, replayed in zip(*found, strict=True):
            if expected is not None:
                error = float((replayed - expected).norm() / expected.norm().clamp_min(1e-6))
                if not error <= BOUND:  # NaN is no small error
                    raise CannotRecord(f"a replayed step differs by {error:.2g} of its size")


def _sum_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _add(target: Tensor, d: Tensor | None) -> None:
    if d is not None:
        target.add_(d)


def _set(target: Tensor, d: Tensor | None) -> None:
    if d is None:
        target.zero_()
    else:
        target.copy_(d)

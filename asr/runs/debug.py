"""train.debug: nan. Stops at the first value that is not finite and says where it arose.

Hooks look at everything that goes into and comes out of every module, forward, and at every
gradient on its way back. The first NaN or infinity ends the run: train.log gets the chain of what
was computed before it, the error line the place. A LayerNormLSTM whose backward pass is the place
is run once more step by step, so that the log shows at which frame the gradient left the range.

Every check waits for the device: this is for finding a fault, not for training.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asr.errors import UserError
from asr.nn.lstm import LayerNormLSTM
from asr.nn.lstm_trace import Frame, trace
from asr.training.position import Position

CHAIN = 12  # entries of what happened before
FRAMES = 8  # of an LSTM, before the gradient left the range
IDS = 5  # utterances named in the error's line; the log names all


class NonFinite(UserError):
    """The first value that is not finite: where, when, in what."""


@dataclass
class Passed:
    """One tensor between modules."""

    tensor: Tensor  # kept, so that its id is not given to another
    producer: str = ""
    consumers: list[str] = field(default_factory=list)


@contextmanager
def stop_at_nan(
    objective: nn.Module, position: Position, note: Callable[[str], None]
) -> Iterator[None]:
    """Within, the first value that is not finite raises NonFinite; `note` gets the chain."""
    tracer = Tracer(objective, position, note)
    hooks: list[Any] = []
    for name, module in objective.named_modules():
        place = name or "objective"
        before, after = tracer.before(place), tracer.after(place)
        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(after))
        for weight, parameter in module.named_parameters(recurse=False):
            hooks.append(parameter.register_hook(tracer.weight_gradient(place, weight)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Tracer:
    """What has happened since the objective was last called."""

    def __init__(
        self, objective: nn.Module, position: Position, note: Callable[[str], None]
    ) -> None:
        self.modules = {name or "objective": m for name, m in objective.named_modules()}
        self.position, self.note = position, note
        self.ids: tuple[str, ...] = ()
        self.chain: deque[str] = deque(maxlen=CHAIN)
        self.passed: dict[int, Passed] = {}
        self.inputs: dict[str, tuple[Any, ...]] = {}  # of LSTMs
        self.outputs: dict[str, Passed] = {}  # of LSTMs
        self.gradients: dict[str, Tensor] = {}  # of those outputs

    def before(self, place: str) -> Callable[..., None]:
        """Forward pre-hook: what goes in, and the weights."""

        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if place == "objective":
                self._begin(args[0])
            for name, weight in module.named_parameters(recurse=False):
                self._check(weight, place, f"weight {name} of {{}} is")
            for tensor in tensors((args, named)):
                self._check(tensor, place, "the input of {} is")
                self._follow(tensor).consumers.append(place)
            if isinstance(module, LayerNormLSTM):
                self.inputs[place] = args

        return hook

    def after(self, place: str) -> Callable[..., None]:
        """Forward hook: what comes out."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            largest = 0.0
            for tensor in tensors(output):
                self._check(tensor, place, "the output of {} is")
                followed = self._follow(tensor)
                followed.producer = followed.producer or place
                largest = max(largest, size(tensor))
            if isinstance(module, LayerNormLSTM):
                self.outputs[place] = self._follow(output[0])
            self.chain.append(f"forward   {place}: output up to {largest:.3g}")

        return hook

    def weight_gradient(self, place: str, weight: str) -> Callable[[Tensor], None]:
        """Hook on a weight: its gradient."""

        def hook(gradient: Tensor) -> None:
            self._check(
                gradient, place, f"the gradient of {weight} in the backward pass of {{}} is"
            )

        return hook

    def _begin(self, batch: Any) -> None:
        self.ids = tuple(getattr(batch, "ids", ()))
        for seen in (self.chain, self.passed, self.inputs, self.outputs, self.gradients):
            seen.clear()

    def _follow(self, tensor: Tensor) -> Passed:
        """Look at the tensor's gradient when it comes."""
        if id(tensor) not in self.passed:
            self.passed[id(tensor)] = passed = Passed(tensor)
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(lambda gradient: self._gradient(passed, gradient))
        return self.passed[id(tensor)]

    def _gradient(self, passed: Passed, gradient: Tensor | None) -> None:
        if gradient is None:  # of an output of C++ that nobody used
            return
        # The innermost of the modules that read it stands last.
        place = passed.consumers[-1] if passed.consumers else passed.producer
        self._check(gradient, place, "the gradient that comes out of the backward pass of {} is")
        is_output = isinstance(self.modules.get(passed.producer), LayerNormLSTM)
        if is_output and passed is self.outputs.get(passed.producer):
            self.gradients[passed.producer] = gradient.detach()
        whence = passed.producer or "an unnamed step"
        self.chain.append(f"backward  gradient of what {whence} gave: up to {size(gradient):.3g}")

    def _check(self, tensor: Tensor, place: str, what: str) -> None:
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            return
        kind = "NaN" if bool(tensor.isnan().any()) else "infinite"
        module = self.modules[place]
        step = self.position.step + 1
        fault = f"step {step}: {what.format(f'{place} ({type(module).__name__})')} {kind}"
        lines = [fault, f"utterances: {' '.join(self.ids)}", "what came before, the last below:"]
        lines += [f"  {entry}" for entry in self.chain]
        if isinstance(module, LayerNormLSTM) and "backward" in what:
            lines += self._through_time(place)
        self.note("\n".join(lines))
        more = " ..." if len(self.ids) > IDS else ""
        raise NonFinite(
            f"{fault}; utterances {' '.join(self.ids[:IDS])}{more}; "
            "train.log has the chain before it"
        )

    def _through_time(self, place: str) -> list[str]:
        """The backward pass of an LSTM once more, step by step."""
        if place not in self.inputs or place not in self.gradients:
            return []
        module, inputs = self.modules[place], self.inputs[place]
        with torch.enable_grad():
            x, *rest = inputs
            output, frames = trace(module, x.detach().requires_grad_(), *rest)
            # Without the weights: theirs are sums over all frames.
            passed = [part for frame in frames for part in (frame.h, frame.c, frame.x)]
            total = (output * self.gradients[place]).sum()
            found = torch.autograd.grad(total, passed, allow_unused=True)
        return describe_frames(frames, found)


def describe_frames(frames: list[Frame], gradients: tuple[Tensor | None, ...]) -> list[str]:
    """The frames around the first (in backward order) whose gradient is not finite, as lines.

    gradients: of h, c and x of each frame, in turn. That of x has passed the frame's own norms: at
    the first frame it alone shows that they are the place.
    """
    lines = []
    for number in reversed(range(len(frames))):
        mine = gradients[3 * number : 3 * number + 3]
        h, c, x = (0.0 if gradient is None else size(gradient) for gradient in mine)
        frame = frames[number]
        flat = ", ".join(
            f"{name} {100 * float((rows == rows[:, :1]).all(1).float().mean()):.0f} %"
            for name, rows in frame.look.entering.items()
        )
        without = f"; rows without variance: {flat}" if flat else ""
        sizes = f"gradient of h {h:.3g}, c {c:.3g}, x {x:.3g}"
        lines.append(f"  {frame.place} frame {frame.time}: {sizes}{without}")
        if not torch.isfinite(torch.tensor([h, c, x])).all():
            break
    return ["the same LSTM's backward pass, step by step:", *lines[-FRAMES:]]


def size(tensor: Tensor) -> float:
    """The largest absolute value, NaN where there is one, 0 for an empty tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def tensors(value: Any) -> Iterator[Tensor]:
    """All float tensors within tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors(getattr(value, each.name))

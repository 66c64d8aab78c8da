"""Debugging non-finite numbers: a dump of bad batches, and `train.debug: nan`.

With train.debug: nan hooks check the inputs and outputs of every module and every gradient. The
first NaN or infinity ends the run: the error names the module, train.log lists what was computed
before it. If it is the backward pass of a LayerNormLSTM, that is repeated step by step, to show at
which frame the gradient overflowed. Every check waits for the device, so training is slow.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from asr.data.batching import TaskBatch
from asr.errors import UserError, printable
from asr.io import atomic_write, atomic_writer, check_run_folder
from asr.nn.lstm import LayerNormLSTM
from asr.training.checkpoint import WEIGHTS, named_tensors, why_unwritten
from asr.training.distributed import is_first, rank
from asr.training.inspection import trace
from asr.training.state import TrainState

HISTORY = 12  # computations listed before the first bad value
SHOWN_FRAMES = 8  # of an LSTM, up to the bad gradient
MAX_IDS = 5  # utterances named in the error; the log names all


def dump_bad_batch(folder: Path, group: Sequence[TaskBatch], objective: nn.Module) -> str:
    """Write batches, weights and a report on non-finite values into a folder; -> a sentence on it.

    The folder is RUN/bad_batches/STEP. The parameters must still hold the gradients of the step.
    Each rank writes its batches, rank 0 the weights.
    """
    suffix = "" if is_first() else f"-rank{rank()}"
    group = [batch for batch in group if len(batch)]  # the others were unreadable
    try:
        check_run_folder(folder.parents[1])
        folder.mkdir(parents=True, exist_ok=True)
        if is_first():
            with atomic_writer(folder / WEIGHTS) as file:
                file.write(save(named_tensors(objective.model)))
        with atomic_writer(folder / f"batch{suffix}.pt") as file:
            torch.save([_plain(batch) for batch in group], file)
        report = printable("\n".join(_report(group, objective)) + "\n")
        atomic_write(folder / f"report{suffix}.txt", report)
    # torch raises another message for a full disk
    except (OSError, RuntimeError, UserError) as error:
        return f"The bad batches could not be saved: {why_unwritten(error, folder)}."
    return (
        f"Saved for inspection: {folder}/report{suffix}.txt names what is not finite; "
        f"batch{suffix}.pt beside it (torch.load, weights_only=True) and {WEIGHTS} are the step's."
    )


def _plain(batch: Any) -> dict[str, Any]:
    """The fields of a batch, which torch.load can read without its class."""
    return {name: value for name, value in vars(batch).items() if name != "broken"}


def _report(group: Sequence[TaskBatch], objective: nn.Module) -> Iterable[str]:
    named = list(objective.named_parameters())
    yield _line("weights", [name for name, p in named if not p.isfinite().all()])
    grads = [name for name, p in named if p.grad is not None and not p.grad.isfinite().all()]
    yield _line("gradients", grads)
    for batch in group:
        for name, value in _plain(batch).items():
            if isinstance(value, Tensor) and value.is_floating_point() and len(value):
                finite = value.isfinite().reshape(len(value), -1).all(dim=1).tolist()
                bad = [id for id, fine in zip(batch.ids, finite, strict=True) if not fine]
                yield _line(f"{name} of a batch of {len(batch)}", bad)


def _line(what: str, names: list[str]) -> str:
    return f"{what}: {'not finite: ' + ' '.join(names) if names else 'all finite'}"


class NonFinite(UserError):
    """The first non-finite value: step, module, utterances."""


@dataclass
class TrackedTensor:
    """A tensor that passes between modules."""

    tensor: Tensor  # kept alive, so that its id is not reused
    producer: str = ""
    consumers: list[str] = field(default_factory=list)


def stop_at_nan(objective: nn.Module, state: TrainState, log: Callable[[str], None]) -> None:
    """Raise NonFinite at the first non-finite value; `log` gets what was computed before."""
    tracer = Tracer(objective, state, log)
    for path, module in tracer.modules.items():
        before, after = partial(tracer.before, path), partial(tracer.after, path)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        named = module.named_parameters(recurse=False)
        for weight, parameter in ((n, p) for n, p in named if p.requires_grad):
            what = f"the gradient of {weight} in the backward pass of {{}} is"
            parameter.register_hook(partial(tracer.check, path, what))


class Tracer:
    """The computations since the objective was last called; before, after and check are hooks."""

    def __init__(self, objective: nn.Module, state: TrainState, log: Callable[[str], None]) -> None:
        self.modules = {name or "objective": m for name, m in objective.named_modules()}
        self.state, self.log = state, log
        self.ids: tuple[str, ...] = ()
        self.history: deque[str] = deque(maxlen=HISTORY)
        self.tracked: dict[int, TrackedTensor] = {}
        # Of LSTMs: positional and named arguments.
        self.inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.outputs: dict[str, TrackedTensor] = {}  # of LSTMs
        self.gradients: dict[str, Tensor] = {}  # of those outputs

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Forward pre-hook: checks inputs and weights."""
        if path == "objective":
            self.ids = args[0].ids
            for store in (self.history, self.tracked, self.inputs, self.outputs, self.gradients):
                store.clear()
        for name, weight in module.named_parameters(recurse=False):
            self.check(path, f"weight {name} of {{}} is", weight)
        for tensor in tensors((args, named)):
            self.check(path, "the input of {} is", tensor)
            self._track(tensor).consumers.append(path)
        if isinstance(module, LayerNormLSTM):
            self.inputs[path] = args, named

    def after(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: checks outputs."""
        largest = 0.0
        for tensor in tensors(output):
            self.check(path, "the output of {} is", tensor)
            tracked = self._track(tensor)
            tracked.producer = tracked.producer or path
            largest = max(largest, size(tensor))
        if isinstance(module, LayerNormLSTM):
            self.outputs[path] = self._track(output[0])
        self.history.append(f"forward   {path}: output up to {largest:.3g}")

    def _track(self, tensor: Tensor) -> TrackedTensor:
        """Check the tensor's gradient in the backward pass."""
        if id(tensor) not in self.tracked:
            self.tracked[id(tensor)] = tracked = TrackedTensor(tensor)
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(self._gradient, tracked))
        return self.tracked[id(tensor)]

    def _gradient(self, tracked: TrackedTensor, gradient: Tensor | None) -> None:
        if gradient is None:  # of an unused output of a C++ function
            return
        producer = tracked.producer
        # Of the modules that read it, the innermost is last.
        path = tracked.consumers[-1] if tracked.consumers else producer
        self.check(path, "the gradient that comes out of the backward pass of {} is", gradient)
        if tracked is self.outputs.get(producer):
            self.gradients[producer] = gradient.detach()
        self.history.append(
            f"backward  gradient of the output of {producer or 'an unnamed step'}: "
            f"up to {size(gradient):.3g}"
        )

    def check(self, path: str, what: str, tensor: Tensor) -> None:
        """Raises NonFinite for a tensor with a NaN or infinity; `what` describes it."""
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            return
        kind = "NaN" if bool(tensor.isnan().any()) else "infinite"
        module = self.modules[path]
        step = self.state.step + 1
        fault = f"step {step}: {what.format(f'{path} ({type(module).__name__})')} {kind}"
        lines = [fault, f"utterances: {' '.join(self.ids)}", "computed before it, the last below:"]
        lines += [f"  {entry}" for entry in self.history]
        if path in self.gradients and "backward" in what:
            lines += describe_frames(module, *self.inputs[path], self.gradients[path])
        self.log("\n".join(lines))
        more = " ..." if len(self.ids) > MAX_IDS else ""
        raise NonFinite(
            f"{fault}; utterances {' '.join(self.ids[:MAX_IDS])}{more}; "
            "train.log lists what was computed before it"
        )


def describe_frames(
    lstm: LayerNormLSTM, args: tuple[Any, ...], named: dict[str, Any], gradient: Tensor
) -> list[str]:
    """Repeat the backward pass of a batch-first LSTM step by step, from its arguments and the
    gradient of its output -> lines.

    These are the last frames up to the first, in backward order, with a non-finite gradient. That
    of x has passed the norms of its frame; if the fault is in those of the first frame, it alone is
    not finite.
    """
    with torch.enable_grad():
        x, *rest = args
        output, frames = trace(lstm, x.detach().requires_grad_(), *rest, **named)
        # Without the weights: theirs are sums over all frames.
        parts = [part for frame in frames for part in (frame.h, frame.c, frame.x)]
        gradients = torch.autograd.grad((output * gradient).sum(), parts, allow_unused=True)
    sizes = [0.0 if gradient is None else size(gradient) for gradient in gradients]
    lines = []
    for number, frame in reversed(list(enumerate(frames))):
        h, c, x = sizes[3 * number : 3 * number + 3]
        flat = ", ".join(
            f"{name} {100 * flat_share(rows, frame.internals.centred):.0f} %"
            for name, rows in frame.internals.entering.items()
        )
        more = f"; rows without variance: {flat}" if flat else ""
        line = f"gradient of h {h:.3g}, c {c:.3g}, x {x:.3g}{more}"
        lines.append(f"  {frame.layer} frame {frame.time}: {line}")
        if not all(map(math.isfinite, (h, c, x))):
            break
    return ["the same LSTM's backward pass, step by step:", *lines[-SHOWN_FRAMES:]]


def flat_share(rows: Tensor, centred: bool) -> float:
    """The share of rows (M, size) without variance; of a norm without centring, of zero rows."""
    level = rows[:, :1] if centred else torch.zeros_like(rows[:, :1])
    return float((rows == level).all(1).float().mean())


def size(tensor: Tensor) -> float:
    """The largest absolute value, NaN where there is one, 0 for an empty tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def tensors(value: Any) -> Iterator[Tensor]:
    """All float tensors within tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, each.name) for each in fields(value)])

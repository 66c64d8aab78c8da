"""Internals of a model in training (train.health): gates, norms and gradients.

A few validation examples are run forward and backward with hooks, which are then removed: training
itself is not slowed down. `trace` computes the internals of an LSTM anew, whatever its backend.
Figures, by their names below `valid_health/` in TensorBoard:

    variance/LAYER/GATE      of the gate's pre-activations
    saturated/LAYER/GATE     share of them whose activation is within 5 % of an end of its range
    flat/LAYER/NORM          share of rows that enter a norm with (nearly) no variance; of an LSTM's
                             h at least those of the first steps, which are zero
    gain/LAYER, gain_max/    mean and largest absolute value of a norm's gain
    gradient/LAYER           norm of the gradient of the layer's weights, of validation's loss:
                             without dropout, guided attention and intermediate CTC

B utterances, T frames, I input size, H hidden size, D directions, N rows still running.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asr.config.cell import CellSettings
from asr.kernels import reference
from asr.kernels.deferred import deferred_linear
from asr.kernels.types import LayerInput, Weights
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell, State, get_weights
from asr.nn.norm import ROW_NORMS, SQUASHING, BatchNorm, BiasNorm, RowNorm

GATES = ("input", "forget", "candidate", "output")  # in the order of their 4H pre-activations
FLAT = 1e-6  # variance (without centring: mean square) below which a row counts as flat
END = 0.05  # of an activation's range
SIGMOID_END = math.log((1 - END) / END)  # sigmoid(z) is within END of 0 or 1 for |z| above this
TANH_END = math.atanh(1 - 2 * END)  # the same share of -1 to 1
WITH_ROWS = tuple(ROW_NORMS.values())
NORMS = (*WITH_ROWS, BatchNorm, *SQUASHING.values())
LSTMS = (LayerNormLSTM, LayerNormLSTMCell)


class StepInternals(NamedTuple):
    """Internals of one time step."""

    gates: Tensor  # (N, 4H)  pre-activations, after norms and biases
    entering: dict[str, Tensor]  # norm -> its input rows (M, size)
    centred: bool  # the norms subtract the mean


class TracedStep(NamedTuple):
    """One time step of one direction of one layer."""

    layer: str  # "l0" or "l0_reverse", as in the names of the weights
    time: int  # the frame read; in reverse, that of the longest utterance
    internals: StepInternals
    x: Tensor  # (N, I)  its input; of all tensors here its gradient is computed last
    h: Tensor  # (N, H)  after the step
    c: Tensor  # (N, H)


def step_internals(
    x: Tensor, state: State, weights: Weights, settings: CellSettings
) -> StepInternals:
    """x (N, I), the state before the step -> internals of reference.step."""
    h, c = reversed(state) if settings.swap else state
    from_x = deferred_linear(x, weights.weight_ih)
    from_h = deferred_linear(h, weights.weight_hh)
    gates = reference.input_part(from_x, weights, settings)
    gates = reference.add_product(gates, from_h, weights, settings)
    after = reference.recur(gates, c, None, weights, settings)
    entering = {}
    if settings.norms_sum:
        rows = reference.norm_rows(from_x + from_h, settings)
        entering["gates"] = rows.reshape(-1, rows.shape[-1])
    elif settings.gates == "split":
        entering = {"x": from_x, "h": from_h}
    if settings.norms_cell:
        entering["c"] = after.c
    if settings.hidden_norm:
        entering["hidden"] = after.h
    return StepInternals(gates, entering, centred=settings.norm_kind == "layer")


def trace(lstm: LayerNormLSTM, *args: Any, **named: Any) -> tuple[Tensor, list[TracedStep]]:
    """lstm(*args, **named) without dropout, by the reference backend, step by step.

    -> output (B, T, D * H), frames in the order of their computation, on autograd's graph.
    """
    (x, counts, h, c), D = lstm.read(*args, **named), lstm.directions
    frames: list[TracedStep] = []
    for layer in range(lstm.num_layers):
        now, names = slice(layer * D, (layer + 1) * D), [f"l{layer}", f"l{layer}_reverse"][:D]
        weights = [get_weights(lstm, f"_{name}") for name in names]
        run = partial(_trace_direction, lstm.settings, frames, iter(names))
        x = reference.run_packed(LayerInput(x, counts, h[now], c[now], None), weights, run).output
    return x, frames


def _trace_direction(
    settings: CellSettings,
    frames: list[TracedStep],
    layers: Iterator[str],
    packed: reference.Packed,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    mask: None,
    *flat: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the steps of the next of `layers`; -> output rows, and the state as it was."""
    weights, layer, start = Weights(*flat), next(layers), (h, c)
    outputs = []
    for number, rows in enumerate(x.split(packed.sizes)):
        before = h[: len(rows)], c[: len(rows)]
        internals = step_internals(rows, before, weights, settings)
        h, c = reference.step(rows, before, None, weights, settings)
        time = len(packed.sizes) - 1 - number if layer.endswith("_reverse") else number
        frames.append(TracedStep(layer, time, internals, rows, h, c))
        outputs.append(h)
    return torch.cat(outputs), *start


def spread(rows: Tensor, centred: bool) -> Tensor:
    """rows (..., size) -> their variance, without centring their mean square (...)."""
    return rows.var(-1, correction=0) if centred else rows.square().mean(-1)


class Internals:
    """Statistics of gates and norms, gathered by hooks."""

    def __init__(self) -> None:
        # Figure -> count, sum and sum of squares of the values added.
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])

    def add(self, figure: str, values: Tensor) -> None:
        """Values of any shape."""
        values, sums = values.detach().double(), self.sums[figure]
        sums[0] += values.numel()
        sums[1] += float(values.sum())
        sums[2] += float(values.square().sum())

    def add_step(self, layer: str, step: StepInternals) -> None:
        """One LSTM step."""
        for gate, values in zip(GATES, step.gates.chunk(4, dim=-1), strict=True):
            self.add(f"variance/{layer}/{gate}", values)
            end = TANH_END if gate == "candidate" else SIGMOID_END
            self.add(f"saturated/{layer}/{gate}", values.abs() > end)
        for norm, rows in step.entering.items():
            self.add(f"flat/{layer}/{norm}", spread(rows, step.centred) < FLAT)

    def figures(self) -> dict[str, float]:
        """Name -> figure, as above."""
        figures = {}
        for name, (count, total, squares) in self.sums.items():
            mean = total / count
            variance = max(squares / count - mean**2, 0.0)
            figures[name] = variance if name.startswith("variance/") else mean
        return figures


def measure(objective: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """All figures over a few batches without padding; clears gradients, leaves the eval mode on."""
    objective.eval()
    objective.zero_grad(set_to_none=True)
    device = next(objective.parameters()).device
    count = 0.0
    with watch(objective.model) as internals, torch.enable_grad():
        for batch in batches:
            out = objective(batch.to(device))["objective"]
            out.total.backward()
            count += float(out.count)
    figures = internals.figures() | gains(objective.model)
    figures |= gradients(objective.model, max(count, 1.0))
    objective.zero_grad(set_to_none=True)
    return figures


@contextmanager
def watch(model: nn.Module) -> Iterator[Internals]:
    """Within, gathers statistics of all LSTMs and norms of the model that are called."""
    internals = Internals()
    hooks = [
        module.register_forward_pre_hook(partial(_observe, internals, name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, LSTMS + WITH_ROWS)
    ]
    try:
        yield internals
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _observe(
    internals: Internals, name: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Forward pre-hook: add what the module will compute from its arguments."""
    if isinstance(module, LayerNormLSTM):
        for frame in trace(module, *args, **named)[1]:
            internals.add_step(f"{name}.{frame.layer}", frame.internals)
    elif isinstance(module, LayerNormLSTMCell):
        internals.add_step(name, _cell_internals(module, *args, **named))
    else:
        entering = args[0] - module.bias if isinstance(module, BiasNorm) else args[0]
        rows = spread(entering, isinstance(module, nn.LayerNorm))
        internals.add(f"flat/{name}", rows < FLAT)


def _cell_internals(
    cell: LayerNormLSTMCell, x: Tensor, state: State | None = None, *_: Any, **__: Any
) -> StepInternals:
    """From the arguments of the cell; mask and weights, the same values, are not needed."""
    zeros = x.new_zeros(len(x), cell.hidden_size)
    weights = get_weights(cell)
    return step_internals(x, state or (zeros, zeros), weights, cell.settings)


def gains(model: nn.Module) -> dict[str, float]:
    """Mean and largest absolute value of every norm's gain."""
    figures = {}
    for name, module in model.named_modules():
        if isinstance(module, LSTMS):
            found = {f"{name}.{n}": p for n, p in module.named_parameters() if n.startswith("gain")}
        else:
            found = {name: gain_of(module)} if isinstance(module, (RowNorm, *NORMS)) else {}
        for path, gain in found.items():
            if gain is None:
                continue
            figures[f"gain/{path}"] = float(gain.detach().abs().mean())
            figures[f"gain_max/{path}"] = float(gain.detach().abs().max())
    return figures


def gain_of(norm: nn.Module) -> Tensor | None:
    """The gain of a RowNorm or one of NORMS, of any shape; None where it has none."""
    return norm.log_scale.exp() if isinstance(norm, BiasNorm) else norm.weight


def gradients(model: nn.Module, count: float) -> dict[str, float]:
    """The norm of each layer's gradient, divided by the number of targets."""
    squares: dict[str, float] = defaultdict(float)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            squares[layer_of(name)] += float(weight.grad.double().square().sum())
    return {f"gradient/{name}": math.sqrt(total) / count for name, total in squares.items()}


def layer_of(name: str) -> str:
    """A weight's layer: up to the number in its name, else its module.

    encoder.layers.3.feed_forward.0.weight -> encoder.layers.3;  lstm.weight_ih_l0 -> lstm
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1]) or name

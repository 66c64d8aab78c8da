"""Inside a model while it trains: gates, norms, gradients and attention, layer by layer.

A few validation examples are run once more, forward and backward, with hooks that are gone
afterwards: training itself pays nothing. An LSTM's inside is computed again by asr.nn.lstm_trace,
whatever backend it runs on. Figures, by the names they have under `health/` in TensorBoard:

    variance/LAYER/GATE      of the gate's pre-activations
    saturated/LAYER/GATE     share of them whose activation is within 5 % of an end of its range
    flat/LAYER/NORM          share of rows that enter a norm with (nearly) no variance
    gain/LAYER, gain_max/    mean and largest size of a norm's gain
    gradient/LAYER           norm of the gradient of the layer's weights
    attention/diagonality    asr.scoring.pictures; attention/coverage: asr.decoding.health
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asr.data.batch import Batch
from asr.decoding.health import coverage
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell
from asr.nn.lstm_cell import get_weights
from asr.nn.lstm_trace import GATES, Look, look, trace
from asr.nn.norm import RMSNorm, ScaleNorm
from asr.scoring.files import replace_files
from asr.scoring.pictures import diagonality
from asr.settings.train import Alarm
from asr.training.objective import shift

FLAT = 1e-6  # variance (RMS and scale norm: mean square) below which a row is called flat
END = 0.05  # of an activation's range
SIGMOID_END = math.log((1 - END) / END)  # sigmoid(z) is within END of 0 or 1 for |z| above this
TANH_END = math.atanh(1 - 2 * END)  # the same share of -1 to 1
NORMS = (nn.LayerNorm, RMSNorm, ScaleNorm)
LSTMS = (LayerNormLSTM, LayerNormLSTMCell)


class Mean:
    """A mean and a variance over all values that were added."""

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        """Values of any shape."""
        values = values.detach().double()
        self.count += values.numel()
        self.total += float(values.sum())
        self.squares += float(values.square().sum())

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        return max(self.squares / self.count - self.mean**2, 0.0)


class Inside:
    """What the hooks have seen so far."""

    def __init__(self) -> None:
        self.gates: dict[str, Mean] = defaultdict(Mean)
        self.saturated: dict[str, Mean] = defaultdict(Mean)
        self.flat: dict[str, Mean] = defaultdict(Mean)

    def add_look(self, place: str, seen: Look) -> None:
        """One LSTM step."""
        for gate, values in zip(GATES, seen.gates.chunk(4, dim=-1), strict=True):
            self.gates[f"{place}/{gate}"].add(values)
            end = TANH_END if gate == "candidate" else SIGMOID_END
            self.saturated[f"{place}/{gate}"].add(values.abs() > end)
        for norm, rows in seen.entering.items():
            self.flat[f"{place}/{norm}"].add(variance(rows) < FLAT)

    def figures(self) -> dict[str, float]:
        """By the names above."""
        found = {f"variance/{name}": mean.variance for name, mean in self.gates.items()}
        found |= {f"saturated/{name}": mean.mean for name, mean in self.saturated.items()}
        return found | {f"flat/{name}": mean.mean for name, mean in self.flat.items()}


def measure(objective: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """All figures over a few batches without padding; gradients are cleared, the mode is eval."""
    objective.eval()
    objective.zero_grad(set_to_none=True)
    device = next(objective.parameters()).device
    here = [batch.to(device) for batch in batches]
    count = 0.0
    with watch(objective.model) as inside, torch.enable_grad():
        for batch in here:
            out = objective(batch)["objective"]
            out.total.backward()
            count += float(out.count)
    looks = [one for batch in here for one in attention(objective.model, batch)]
    found = inside.figures() | gains(objective.model) | gradients(objective.model, max(count, 1.0))
    if looks:
        slopes, covered = zip(*looks, strict=True)
        found["attention/diagonality"] = sum(slopes) / len(slopes)
        found["attention/coverage"] = sum(covered) / len(covered)
    objective.zero_grad(set_to_none=True)
    return found


@contextmanager
def watch(model: nn.Module) -> Iterator[Inside]:
    """Sees all LSTMs and norms of the model that are called meanwhile."""
    inside = Inside()
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, LSTMS):
            seen = _lstm_hook(inside, name)
            hooks.append(module.register_forward_pre_hook(seen, with_kwargs=True))
        elif isinstance(module, NORMS):
            hooks.append(module.register_forward_pre_hook(_norm_hook(inside, name)))
    try:
        yield inside
    finally:
        for hook in hooks:
            hook.remove()


def _lstm_hook(inside: Inside, name: str) -> Any:
    @torch.no_grad()
    def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if isinstance(module, LayerNormLSTM):
            given = dict(zip(("x", "lengths", "state"), args, strict=False)) | named
            for frame in trace(module, **given)[1]:
                inside.add_look(f"{name}.{frame.place}", frame.look)
            return
        given = {"state": None} | dict(zip(("x", "state"), args, strict=False)) | named
        zeros = given["x"].new_zeros(len(given["x"]), module.hidden_size)
        state = given["state"] or (zeros, zeros)
        weights = get_weights(module, module.setting.norm)
        inside.add_look(name, look(given["x"], state, weights, module.setting))

    return hook


def _norm_hook(inside: Inside, name: str) -> Any:
    @torch.no_grad()
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        centred = isinstance(module, nn.LayerNorm)
        rows = variance(args[0]) if centred else args[0].square().mean(-1)
        inside.flat[name].add(rows < FLAT)

    return hook


def variance(rows: Tensor) -> Tensor:
    """rows (..., size) -> (...), divided by size as the norms do."""
    return rows.var(-1, correction=0)


def gains(model: nn.Module) -> dict[str, float]:
    """Mean and largest size of every norm's gain."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LSTMS):
            own = {n: p for n, p in module.named_parameters() if n.startswith("gain")}
        else:
            own = {"weight": module.weight} if isinstance(module, NORMS) else {}
        for which, gain in own.items():
            place = name if which == "weight" else f"{name}.{which}"
            found[f"gain/{place}"] = float(gain.detach().abs().mean())
            found[f"gain_max/{place}"] = float(gain.detach().abs().max())
    return found


def gradients(model: nn.Module, count: float) -> dict[str, float]:
    """The norm of each layer's gradient, divided by the count of targets."""
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
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1]) or name


@torch.no_grad()
def attention(model: nn.Module, batch: Any) -> list[tuple[float, float]]:
    """Diagonality and coverage of each utterance, for models that attend to speech."""
    if not isinstance(batch, Batch) or not hasattr(model, "attention"):
        return []
    memory = model.encode(batch.features, batch.lengths)
    inputs, _ = shift(batch.tokens, batch.token_lengths)
    found = []
    for weights, tokens, valid in zip(
        model.attention(memory, inputs), batch.token_lengths.tolist(), memory.valid, strict=True
    ):
        seen = weights[: tokens + 1, valid].float().cpu()
        found.append((diagonality(seen.numpy()), coverage(seen[:tokens])))
    return found


def alarm(settings: Alarm, step: int, shown: Mapping[str, float]) -> list[str]:
    """What the log should say where attention is not diagonal though it is time."""
    found = shown.get("diagonality", 1.0)
    if not settings.steps or step < settings.steps or found >= settings.diagonality:
        return []
    return [
        f"ALARM: attention is not diagonal yet ({found:.2f} < {settings.diagonality:g}). "
        "Try a higher model.ctc_weight, train.short_first=true, more reduction, a lower lr."
    ]


def write(run: Path, step: int, figures: dict[str, float]) -> None:
    """The latest figures as RUN/health.json, for reports."""
    text = json.dumps({"step": step, "figures": figures}, indent=1)
    replace_files(run, {"health.json": text + "\n"})

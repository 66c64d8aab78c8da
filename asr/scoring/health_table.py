"""What a look inside the models found, layer beside layer and setting beside setting.

Figures come by the names of asr.runs.health: KIND/LAYER/PART, e.g. variance/speller.cells.0/input.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asr.scoring.comparison import DASH, Setting
from asr.scoring.report import Table

_GATES, _NORMS = "input / forget / candidate / output", "x / h / c"
_ENTER = "x: of the input, h: of the state, c: of the cell."


@dataclass(frozen=True)
class _Kind:
    """How a kind of figures is shown: its values are multiplied by `unit` and formatted."""

    title: str
    note: str
    form: str
    unit: int = 1


_KINDS = {
    "variance": _Kind(f"variance of gates' pre-activations, {_GATES}", "", "{:.2f}"),
    "saturated": _Kind(
        f"saturated gates in %, {_GATES}",
        "Share of units whose activation is within 5 % of an end of its range.",
        "{:.1f}",
        100,
    ),
    "flat": _Kind(
        "rows without variance that enter a norm, in %",
        f"Variance below 1e-6. In an LSTM {_NORMS}; {_ENTER}",
        "{:.2f}",
        100,
    ),
    "gain": _Kind("mean size of a norm's gain", f"In an LSTM {_NORMS}; {_ENTER}", "{:.3f}"),
    "gain_max": _Kind(
        "largest size of a norm's gain", f"Over all runs. In an LSTM {_NORMS}.", "{:.2f}"
    ),
    "gradient": _Kind("norm of the gradient", "Of the layer's weights, per target.", "{:.3g}"),
    "attention": _Kind(
        "attention",
        "diagonality: 1 is a straight line; coverage: share of the speech that was looked at.",
        "{:.3f}",
    ),
}
_GAIN = re.compile(r"(.*)\.gain_(ih|hh|c)(?:_(l\d+))?(?:_reverse)?")
_ENTERS = {"ih": "x", "hh": "h", "c": "c"}  # a weight's gain -> the norm's name
_Key = tuple[str, str]  # kind, layer
_MOST = 10  # settings side by side: the first


def health_tables(settings: Sequence[Setting]) -> list[Table]:
    """A table for each kind of figures: a layer a row, a setting a column."""
    chosen = [s for s in settings if any(m.health for m in s.members)][:_MOST]
    columns = [_collected(setting) for setting in chosen]
    known = {key for column in columns for key in column}
    layers = dict.fromkeys(layer for column in columns for _, layer in column)
    steps = {m.health_step for s in chosen for m in s.members if m.health_step is not None}
    when = " to ".join(
        f"{step:,}" for step in sorted({min(steps, default=0), max(steps, default=0)})
    )
    tables = []
    for kind, shown in _KINDS.items():
        rows = [
            (layer, *(_cell(kind, column.get((kind, layer))) for column in columns))
            for layer in layers
            if (kind, layer) in known
        ]
        note = (
            f"{shown.note} As last seen, at step {when}, on a few validation examples; means over "
            "runs and directions. All steps: TensorBoard, health/."
        ).strip()
        head = ("layer", *(setting.short for setting in chosen))
        tables += [Table(f"Health: {shown.title}", head, rows, note)] if rows else []
    return tables


def _collected(setting: Setting) -> dict[_Key, dict[str, list[float]]]:
    """By kind and layer: by part (gate or norm), the values of all runs and directions."""
    found: dict[_Key, dict[str, list[float]]] = {}
    for member in setting.members:
        for name, value in member.health.items():
            kind, layer, part = _split(name)
            if kind in _KINDS:
                found.setdefault((kind, layer), {}).setdefault(part, []).append(value)
    return found


def _split(name: str) -> tuple[str, str, str]:
    """gain/listener.layers.0.gain_hh_l0_reverse -> gain, listener.layers.0.l0, h."""
    kind, _, place = name.partition("/")
    if gain := _GAIN.fullmatch(place):
        layer = ".".join(filter(None, (gain[1], gain[3])))
        return kind, layer, _ENTERS[gain[2]]
    layer, _, part = place.partition("/")
    return kind, layer.removesuffix("_reverse"), part


def _cell(kind: str, parts: dict[str, list[float]] | None) -> str:
    if not parts:
        return DASH
    shown = _KINDS[kind]
    one = np.max if kind == "gain_max" else np.mean
    return " / ".join(
        shown.form.format(shown.unit * float(one(values))) for values in parts.values()
    )

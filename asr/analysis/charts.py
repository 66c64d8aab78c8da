"""Charts of a comparison: loss curves, and every run in every figure, as PNG and SVG."""

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from asr.analysis.curves import Band
from asr.analysis.plots import shorten

# Okabe & Ito 2008, distinct for colour-blind readers too. Further lines have other strokes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STROKES = ("-", "--", ":", "-.")
_MOST_NAMES = 28
_ROUND = (1, 2, 5, 10)  # steps between ticks, times a power of ten
_LOG_FROM = 5  # highest loss / lowest loss
_RATES = ("wer", "ctc_wer", "accuracy")  # scalars that are fractions


@dataclass(frozen=True)
class Panel:
    """One pair of axes: name -> band, in the order of the legend."""

    title: str
    bands: Mapping[str, Band]
    levels: Sequence[float] = ()  # thin lines


def draw_curves(panels: Sequence[Panel]) -> tuple[bytes, str]:
    """PNG and SVG of the panels side by side: means over steps as lines, ranges over runs as bands.

    A name has the same stroke in all panels. The end of a panel's title (valid/nll) is its unit;
    panels with the same unit share their axes.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.bands))
    lines = min(len(names), _MOST_NAMES)
    figure = Figure(figsize=(5.5 * len(panels), 4 + 0.22 * lines), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    units = [panel.title.rpartition("/")[2] for panel in panels]
    same_unit = len(set(units)) == 1
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=same_unit, sharey=same_unit)[0]
    log = _log([band for panel in panels for band in panel.bands.values()]) and same_unit
    for axes, panel, unit in zip(grid, panels, units, strict=True):
        _draw(axes, panel, names)
        if log or (not same_unit and _log(list(panel.bands.values()))):
            _set_log(axes)
        elif unit in _RATES:
            axes.set_ylim(_cut(axes.get_ylim(), axes.dataLim.intervaly, 1.0))
        axes.set(xlabel="step", ylabel=unit)
        axes.tick_params(labelleft=True)
        axes.set_title(panel.title, parse_math=False, loc="left", fontsize=11)
    drawn = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    if chosen := [name for name in names if name in drawn][:_MOST_NAMES]:
        labels = [shorten(name, 150) for name in chosen]
        legend = figure.legend(
            [drawn[n] for n in chosen], labels, loc="outside lower left", frameon=False, fontsize=9
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return _files(figure)


def _draw(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    for name, band in panel.bands.items():
        index = names.index(name)
        colour = _COLOURS[index % len(_COLOURS)]
        stroke = _STROKES[index // len(_COLOURS) % len(_STROKES)]
        mark = "o" if len(band.steps) == 1 else None
        axes.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
        style = {"color": colour, "linewidth": 1.6, "marker": mark}
        axes.plot(band.steps, band.mean, stroke, label=name, **style)
    for index, level in enumerate(panel.levels):
        axes.axhline(level, color="#9aa0a6", linewidth=0.7, dashes=(4, 3), zorder=0)
        style = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "color": "#5a6066"}
        # Side by side, since levels may be close.
        axes.annotate(f"{level:.4g}", (0.01 + 0.1 * (index % 9), level), va="bottom", **style)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_ROUND, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    if not panel.bands:
        axes.text(0.5, 0.5, "no points", ha="center", transform=axes.transAxes, color="#5a6066")


def _log(bands: Sequence[Band]) -> bool:
    """Whether a linear axis would flatten the end of training."""
    low = min((band.low.min() for band in bands), default=0.0)
    high = max((band.high.max() for band in bands), default=0.0)
    return bool(0 < low * _LOG_FROM < high)


def _set_log(axes: Axes) -> None:
    """Make the y axis logarithmic, with at least three labels, at round numbers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    subs = (1, 2, 3, 5) if decades < 1.5 else (1, 2, 5) if decades < 3 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


@dataclass(frozen=True)
class Strip:
    """One figure of all runs: setting -> seed and value of each."""

    title: str
    values: Mapping[str, Sequence[tuple[int, float]]]
    percent: bool = False


def draw_seeds(strips: Sequence[Strip], names: Sequence[str]) -> tuple[bytes, str]:
    """PNG and SVG of the strips, two in a row: a dot for each run, a bar for the mean of a setting.

    A line connects the runs of one seed. A name has the same colour as in draw_curves.
    """
    lines = -(-len(strips) // 2)
    height = lines * (1.1 + 0.32 * max(len(strip.values) for strip in strips))
    figure = Figure(figsize=(11, height), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15)
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, 2, squeeze=False).ravel()
    for axes, strip in zip(grid, strips, strict=False):
        _draw_strip(axes, strip, names)
    for axes in grid[len(strips) :]:
        axes.set_axis_off()
    return _files(figure)


def _draw_strip(axes: Axes, strip: Strip, names: Sequence[str]) -> None:
    by_seed: dict[int, list[tuple[float, int]]] = {}
    for row, runs in enumerate(strip.values.values()):
        for seed, value in dict(runs).items():
            by_seed.setdefault(seed, []).append((value, row))
    for points in by_seed.values():
        axes.plot(*zip(*points, strict=True), color="#c4c9ce", linewidth=0.8, zorder=1)
    for row, (name, runs) in enumerate(strip.values.items()):
        colour = _COLOURS[names.index(name) % len(_COLOURS)]
        values = [value for _, value in runs]
        style = {"color": colour, "edgecolor": "white", "linewidth": 0.6, "zorder": 3}
        style["clip_on"] = False  # whole also at 0 and 100 %
        axes.scatter(values, [row] * len(values), s=42, **style)
        mean = float(np.mean(values))
        axes.vlines(mean, row - 0.28, row + 0.28, color=colour, linewidth=2.2, zorder=2)
    axes.set_yticks(range(len(strip.values)), list(strip.values), parse_math=False)
    axes.set_ylim(len(strip.values) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_ROUND))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.08)
    if strip.percent:
        axes.set_xlim(_cut(axes.get_xlim(), axes.dataLim.intervalx, 100.0))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(strip.title, parse_math=False, loc="left", fontsize=11)


def _cut(limits: tuple[float, float], data: Sequence[float], most: float) -> tuple[float, float]:
    """Limits of an axis of rates: cut at 0, and at `most`, which is 100 %, if no value is above."""
    low, high = limits
    return max(low, 0.0), min(high, most) if max(data) <= most else high


def _files(figure: Figure) -> tuple[bytes, str]:
    png, svg = io.BytesIO(), io.StringIO()
    # Reproducible files, with text as text rather than outlines.
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "curves", "svg.fonttype": "none"}):
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), svg.getvalue()

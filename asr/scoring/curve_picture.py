"""Curves of groups of runs in one picture: a line for the mean, a band for the range over runs."""

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from asr.scoring.curves import Band

# Okabe & Ito 2008: told apart by colour-blind readers too; then the same with other strokes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STROKES = ("-", "--", ":", "-.")
_MOST_NAMES = 28
_LOG_FROM = 5  # highest loss / lowest loss


@dataclass(frozen=True)
class Panel:
    """One pair of axes: name -> band, in the order of the legend."""

    title: str
    bands: Mapping[str, Band]
    levels: Sequence[float] = ()  # shown as thin lines


def draw_curves(panels: Sequence[Panel], x: str = "step") -> tuple[bytes, str]:
    """PNG and SVG of the panels, side by side. A name has the same stroke in all of them.

    The end of a panel's title (valid/nats) is its unit; panels of one unit share their axes.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.bands))
    lines = min(len(names), _MOST_NAMES)
    figure = Figure(figsize=(5.5 * len(panels), 4 + 0.22 * lines), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    units = [panel.title.rpartition("/")[2] for panel in panels]
    alike = len(set(units)) == 1
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=alike, sharey=alike)[0]
    log = _log([band for panel in panels for band in panel.bands.values()]) and alike
    for axes, panel, unit in zip(grid, panels, units, strict=True):
        _draw(axes, panel, names)
        if log or (not alike and _log(list(panel.bands.values()))):
            _set_log(axes)
        axes.set(xlabel=x, ylabel=unit)
        axes.tick_params(labelleft=True)
        axes.set_title(panel.title, parse_math=False, loc="left", fontsize=11)
    shown = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    chosen = [name for name in names if name in shown][:_MOST_NAMES]
    if chosen:
        labels = [n if len(n) <= 150 else f"{n[:149]}…" for n in chosen]
        legend = figure.legend(
            [shown[n] for n in chosen], labels, loc="outside lower left", frameon=False, fontsize=9
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return _files(figure)


def _draw(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    for name, band in panel.bands.items():
        place = names.index(name)
        colour = _COLOURS[place % len(_COLOURS)]
        stroke = _STROKES[place // len(_COLOURS) % len(_STROKES)]
        mark = "o" if len(band.steps) == 1 else None
        axes.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(
            band.steps, band.mean, stroke, color=colour, label=name, linewidth=1.6, marker=mark
        )
    for place, level in enumerate(panel.levels):
        axes.axhline(level, color="#9aa0a6", linewidth=0.7, dashes=(4, 3), zorder=0)
        axes.annotate(
            f"{level:g}",
            (0.01, level),
            xycoords=("axes fraction", "data"),
            va=("bottom", "top")[place % 2],  # the next level may be near
            fontsize=8,
            color="#5a6066",
        )
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # there is no step 2.5
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    if not panel.bands:
        axes.text(0.5, 0.5, "no points", ha="center", transform=axes.transAxes, color="#5a6066")


def _log(bands: Sequence[Band]) -> bool:
    """Whether all that is late in training would else be one line."""
    low = min((band.low.min() for band in bands), default=0.0)
    high = max((band.high.max() for band in bands), default=0.0)
    return bool(0 < low * _LOG_FROM < high)


def _set_log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")


def _files(figure: Figure) -> tuple[bytes, str]:
    png, svg = io.BytesIO(), io.StringIO()
    # The same curves give the same file, and its letters stay letters.
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "curves", "svg.fonttype": "none"}):
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), svg.getvalue()

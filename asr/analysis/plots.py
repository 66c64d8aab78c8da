"""Pictures for TensorBoard and reports, as pixels (height, width, 3) uint8, and loss curves.

U tokens, T frames of memory, F mel bins, K classes.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from asr.analysis.curves import Band

_MOST_TOKEN_ROWS = 32  # an attention picture with more is labelled by words
_LABEL_INCHES = 0.14  # height of a label
_LONGEST_LABEL = 20  # characters: an untrained model may write one word of hundreds


def shorten(text: str, most: int) -> str:
    """The text, or its first `most` - 1 characters and an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def attention_picture(
    weights: np.ndarray, pieces: Sequence[str], seconds: float, title: str = ""
) -> np.ndarray:
    """weights (U, T): the attention of every token over the audio, the first token on top.

    pieces: U texts of tokens, in which spaces separate words; they label the rows, where there are
    many the words do. seconds: what the T frames last.
    """
    U = len(weights)
    by_word = U > _MOST_TOKEN_ROWS
    height = min(0.9 + max(0.7, (0.06 if by_word else 0.17) * U), 8.5)

    def draw(axes: Axes) -> None:
        extent = (0.0, seconds, U - 0.5, -0.5)
        style = {"cmap": "Blues", "vmin": 0.0, "interpolation": "nearest"}
        image = axes.imshow(weights, aspect="auto", extent=extent, **style)
        _label_rows(axes, pieces, by_word, gap=_LABEL_INCHES * U / (height - 0.9))
        axes.set(xlabel="audio (seconds)")
        bar = axes.figure.colorbar(image, pad=0.015, aspect=12 * height)
        bar.set_label("attention weight")

    return _pixels(draw, title, (8, height))


def _label_rows(axes: Axes, pieces: Sequence[str], by_word: bool, gap: float) -> None:
    """Label each row by its token or, in the middle of its rows, each word.

    Labels that would be nearer than `gap` rows to the one before are omitted.
    """
    rows = [(place, place + 1, piece.strip() or "␣") for place, piece in enumerate(pieces)]
    if by_word:
        rows = _words(pieces)
        edges = [start - 0.5 for start, _, _ in rows[1:]]
        axes.hlines(edges, *axes.get_xlim(), color="#b9bec3", linewidth=0.3)
    shown: dict[float, str] = {}
    for start, end, text in rows:
        middle = (start + end - 1) / 2
        if not shown or middle - next(reversed(shown)) >= gap:
            shown[middle] = shorten(text, _LONGEST_LABEL)
    axes.set_yticks(list(shown), list(shown.values()), fontsize=9, parse_math=False)
    unit = "words" if by_word else "tokens"
    axes.set(ylabel=unit if len(shown) == len(rows) else f"{unit} (not all are labelled)")


def _words(pieces: Sequence[str]) -> list[tuple[int, int, str]]:
    """First row, row after the last, and text of each word; a space counts as the next word's."""
    starts = [0]
    for place, (piece, before) in enumerate(zip(pieces[1:], pieces, strict=False), start=1):
        after_space = piece[:1].isspace() or before[-1:].isspace()
        if after_space and "".join(pieces[starts[-1] : place]).strip():
            starts.append(place)
    ends = [*starts[1:], len(pieces)]
    return [(a, b, "".join(pieces[a:b]).strip()) for a, b in zip(starts, ends, strict=True)]


def feature_picture(features: np.ndarray, seconds: float, title: str = "") -> np.ndarray:
    """features (T, F), low frequencies below. seconds: what the T frames last."""
    F = features.shape[1]

    def draw(axes: Axes) -> None:
        extent = (0.0, seconds, -0.5, F - 0.5)
        axes.imshow(features.T, aspect="auto", origin="lower", cmap="viridis", extent=extent)
        axes.set(xlabel="audio (seconds)", ylabel="feature")

    return _pixels(draw, title, (8, 2.5))


def confusion_picture(counts: np.ndarray, title: str = "") -> np.ndarray:
    """counts (K, K), a row for each true class: the share of a row as shade, counts as numbers."""

    def draw(axes: Axes) -> None:
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0.0, vmax=1.0)  # small shares too
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if shares[row, column] > 0.4 else "black"
                axes.text(column, row, str(count), fontsize=7, ha="center", va="center", c=colour)
        places = range(len(counts))
        axes.set(xlabel="predicted class", ylabel="true class", xticks=places, yticks=places)

    return _pixels(draw, title, (5, 5))


def tiles(images: np.ndarray, columns: int) -> np.ndarray:
    """images (N, R, C) of 0 to 1 -> one picture, left to right, with a line between them."""
    count, height, width = images.shape
    lines = -(-count // columns)
    sheet = np.full((lines, height + 1, columns, width + 1), 0.5)
    for number, image in enumerate(images):
        sheet[number // columns, :height, number % columns, :width] = image
    grey = (255 * sheet.reshape(lines * (height + 1), -1)).round().astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=-1)


def _pixels(draw: Callable[[Axes], None], title: str, size: tuple[float, float]) -> np.ndarray:
    # Figure, not pyplot: no global state, no window, thread-safe.
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box; a corpus may have thousands.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title, parse_math=False)
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


# Okabe & Ito 2008: distinct for colour-blind readers too; then the same with other strokes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STROKES = ("-", "--", ":", "-.")
_MOST_NAMES = 28
_ROUND = (1, 2, 5, 10)  # steps between ticks, times a power of ten
_LOG_FROM = 5  # highest loss / lowest loss


@dataclass(frozen=True)
class Panel:
    """One pair of axes: name -> band, in the order of the legend."""

    title: str
    bands: Mapping[str, Band]
    levels: Sequence[float] = ()  # thin lines


def draw_curves(panels: Sequence[Panel]) -> tuple[bytes, str]:
    """PNG and SVG of the panels side by side, over steps: lines are means, bands ranges over runs.

    A name has the same stroke in all panels. The end of a panel's title (valid/nll) is its unit;
    panels of one unit share their axes.
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
        place = names.index(name)
        colour = _COLOURS[place % len(_COLOURS)]
        stroke = _STROKES[place // len(_COLOURS) % len(_STROKES)]
        mark = "o" if len(band.steps) == 1 else None
        axes.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
        style = {"color": colour, "linewidth": 1.6, "marker": mark}
        axes.plot(band.steps, band.mean, stroke, label=name, **style)
    for place, level in enumerate(panel.levels):
        axes.axhline(level, color="#9aa0a6", linewidth=0.7, dashes=(4, 3), zorder=0)
        style = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "color": "#5a6066"}
        # Beside each other: levels may be near.
        axes.annotate(f"{level:g}", (0.01 + 0.1 * (place % 9), level), va="bottom", **style)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_ROUND, integer=True))  # steps are whole
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
    """A logarithmic axis with three or more labels between its ends, at round numbers."""
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


def draw_seeds(strips: Sequence[Strip], names: Sequence[str]) -> tuple[bytes, str]:
    """PNG and SVG of the strips, two in a row: a dot for each run, a bar for the mean of a setting.

    A line connects the runs of one seed. Colours are those of `names` in draw_curves.
    """
    lines = -(-len(strips) // 2)
    height = lines * (1.1 + 0.32 * max(len(strip.values) for strip in strips))
    figure = Figure(figsize=(11, height), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15)
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, 2, squeeze=False).flat
    for axes, strip in zip(grid, strips, strict=False):
        _draw_strip(axes, strip, names)
    for axes in list(grid)[len(strips) :]:
        axes.set_axis_off()
    return _files(figure)


def _draw_strip(axes: Axes, strip: Strip, names: Sequence[str]) -> None:
    rows = [dict(own) for own in strip.values.values()]
    for seed in dict.fromkeys(seed for own in rows for seed in own):
        pairs = [(own[seed], row) for row, own in enumerate(rows) if seed in own]
        axes.plot(*zip(*pairs, strict=True), color="#c4c9ce", linewidth=0.8, zorder=1)
    for row, (name, own) in enumerate(strip.values.items()):
        colour = _COLOURS[names.index(name) % len(_COLOURS)]
        values = [value for _, value in own]
        style = {"color": colour, "edgecolor": "white", "linewidth": 0.6, "zorder": 3}
        axes.scatter(values, [row] * len(values), s=42, **style)
        mean = float(np.mean(values))
        axes.vlines(mean, row - 0.28, row + 0.28, color=colour, linewidth=2.2, zorder=2)
    axes.set_yticks(range(len(strip.values)), list(strip.values), parse_math=False)
    axes.set_ylim(len(strip.values) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_ROUND))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.08)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(strip.title, parse_math=False, loc="left", fontsize=11)


def _files(figure: Figure) -> tuple[bytes, str]:
    png, svg = io.BytesIO(), io.StringIO()
    # Reproducible files, with text as text rather than outlines.
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "curves", "svg.fonttype": "none"}):
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), svg.getvalue()

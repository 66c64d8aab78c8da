"""Pictures for TensorBoard and evaluation pages, as pixels (height, width, 3) uint8.

U tokens, T frames of memory, F mel bins, K classes.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.text import Text

from asr.words import is_unspaced

_MOST_TOKEN_ROWS = 32  # an attention picture with more rows is labelled by words
_LABEL_INCHES = 0.17  # height of a label
_FRAME_INCHES = 1.0  # height of title and time axis
_SMALL, _LARGE = 12, 14  # points: TensorBoard shows a picture in half its size
# For letters that matplotlib's own font lacks; of Linux, macOS and Windows, as far as installed.
_FONTS = (
    "Noto Sans CJK JP", "Noto Sans Thai", "Noto Sans Devanagari", "Noto Sans Bengali",
    "Noto Sans Tamil", "Noto Sans Khmer", "Noto Sans Myanmar", "Noto Sans Ethiopic",
    "Arial Unicode MS", "Microsoft YaHei", "Malgun Gothic", "Nirmala UI", "Leelawadee UI",
)  # fmt: skip
_LONGEST_LABEL = 20  # characters: an untrained model may write one word of hundreds


def shorten(text: str, most: int) -> str:
    """The text, or its first `most` - 1 characters and an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def attention_picture(
    weights: np.ndarray, pieces: Sequence[str], seconds: float, title: str = ""
) -> np.ndarray:
    """weights (U, T): the attention of every token over the audio, the first token on top.

    pieces: U texts of tokens, in which spaces separate words. They label the rows; if there are
    many rows, words label them. seconds: duration of the T frames.
    """
    U = len(weights)
    by_word = U > _MOST_TOKEN_ROWS
    height = min(_FRAME_INCHES + max(0.7, (0.06 if by_word else 0.19) * U), 8.5)

    def draw(axes: Axes) -> None:
        extent = (0.0, seconds, U - 0.5, -0.5)
        style = {"cmap": "Blues", "vmin": 0.0, "interpolation": "nearest"}
        image = axes.imshow(weights, aspect="auto", extent=extent, **style)
        _label_rows(axes, pieces, by_word, gap=_LABEL_INCHES * U / (height - _FRAME_INCHES))
        axes.set(xlabel="audio (seconds)")
        bar = axes.figure.colorbar(image, pad=0.015, aspect=12 * height)
        bar.set_label("attention weight", fontsize=_LARGE)
        bar.ax.tick_params(labelsize=_SMALL)

    return _pixels(draw, title, (8, height))


def _label_rows(axes: Axes, pieces: Sequence[str], by_word: bool, gap: float) -> None:
    """Label each row by its token, or each word in the middle of its rows.

    A label closer than `gap` rows to the previous one is omitted.
    """
    rows = [(row, row + 1, piece.strip() or "␣") for row, piece in enumerate(pieces)]
    if by_word:
        rows = _words(pieces)
        edges = [start - 0.5 for start, _, _ in rows[1:]]
        axes.hlines(edges, *axes.get_xlim(), color="#b9bec3", linewidth=0.3)
    shown: dict[float, str] = {}
    for start, end, text in rows:
        middle = (start + end - 1) / 2
        if not shown or middle - next(reversed(shown)) >= gap:
            shown[middle] = shorten(text, _LONGEST_LABEL)
    axes.set_yticks(list(shown), list(shown.values()), parse_math=False)
    unit = "words" if by_word else "tokens"
    axes.set(ylabel=unit if len(shown) == len(rows) else f"{unit} (not all are labelled)")


def _words(pieces: Sequence[str]) -> list[tuple[int, int, str]]:
    """First row, row after the last, and text of each word; a space is part of the next word."""
    starts = [0]
    for row, (piece, before) in enumerate(zip(pieces[1:], pieces, strict=False), start=1):
        begins = piece[:1].isspace() or before[-1:].isspace() or is_unspaced(piece[:1])
        if begins and "".join(pieces[starts[-1] : row]).strip():
            starts.append(row)
    ends = [*starts[1:], len(pieces)]
    return [(a, b, "".join(pieces[a:b]).strip()) for a, b in zip(starts, ends, strict=True)]


def feature_picture(features: np.ndarray, seconds: float, title: str = "") -> np.ndarray:
    """features (T, F), low frequencies at the bottom. seconds: duration of the T frames."""
    F = features.shape[1]

    def draw(axes: Axes) -> None:
        extent = (0.0, seconds, -0.5, F - 0.5)
        axes.imshow(features.T, aspect="auto", origin="lower", cmap="viridis", extent=extent)
        axes.set(xlabel="audio (seconds)", ylabel="feature")

    return _pixels(draw, title, (8, 2.5))


def confusion_picture(counts: np.ndarray, title: str = "") -> np.ndarray:
    """counts (K, K), a row for each true class: shades are shares of a row, numbers are counts."""

    def draw(axes: Axes) -> None:
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0.0, vmax=1.0)  # small shares too
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if shares[row, column] > 0.4 else "black"
                axes.text(column, row, str(count), fontsize=7, ha="center", va="center", c=colour)
        classes = range(len(counts))
        axes.set(xlabel="predicted class", ylabel="true class", xticks=classes, yticks=classes)

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
        # A character that the fonts lack is drawn as a box; a corpus may have thousands.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        axes = figure.subplots()
        axes.tick_params(labelsize=_SMALL)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set_size(_LARGE)
        draw(axes)
        axes.set_title(title, parse_math=False, fontsize=_LARGE)
        for text in figure.findobj(lambda part: isinstance(part, Text)):
            if not text.get_text().isascii():
                text.set_fontfamily(_fonts())
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


@cache
def _fonts() -> list[str]:
    """The default font, then those of other scripts, for the letters that those before it lack."""
    return ["sans-serif", *sorted(set(_FONTS) & set(get_font_names()), key=_FONTS.index)]

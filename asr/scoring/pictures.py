"""Pictures for TensorBoard and reports, as pixels (height, width, 3) uint8; and what they show.

U tokens, T frames of memory, F mel bins.
"""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def attention_picture(weights: np.ndarray, tokens: Sequence[str], title: str = "") -> np.ndarray:
    """weights (U, T): which frame each token was read from."""
    size = (8, 1 + min(0.16 * len(weights), 9))

    def draw(axes: Axes) -> None:
        axes.imshow(weights, aspect="auto", origin="lower", cmap="magma", vmin=0.0)
        axes.set_yticks(range(len(tokens)), tokens, fontsize=6, parse_math=False)
        axes.set(xlabel="frame of memory", ylabel="token")
        axes.set_title(title, parse_math=False)

    return _pixels(draw, size)


def feature_picture(features: np.ndarray, title: str = "") -> np.ndarray:
    """features (T, F), low frequencies below."""

    def draw(axes: Axes) -> None:
        axes.imshow(features.T, aspect="auto", origin="lower", cmap="viridis")
        axes.set(xlabel="frame", ylabel="feature")
        axes.set_title(title, parse_math=False)

    return _pixels(draw, (8, 2.5))


def confusion_picture(counts: np.ndarray, title: str = "") -> np.ndarray:
    """counts (K, K), a row for each true class: what was taken for what, by shade and number."""

    def draw(axes: Axes) -> None:
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0.0, vmax=1.0)  # few are to be seen too
        for (row, column), count in np.ndenumerate(counts):
            if count:
                dark = shares[row, column] > 0.4
                style = {"ha": "center", "va": "center", "color": "white" if dark else "black"}
                axes.text(column, row, str(count), fontsize=7, **style)
        places = range(len(counts))
        axes.set(xlabel="taken for", ylabel="true class", xticks=places, yticks=places)
        axes.set_title(title, parse_math=False)

    return _pixels(draw, (5, 5))


def tiles(images: np.ndarray, columns: int) -> np.ndarray:
    """images (N, R, C) of 0 to 1 -> one picture, left to right, with a line between them."""
    count, height, width = images.shape
    lines = -(-count // columns)
    sheet = np.full((lines, height + 1, columns, width + 1), 0.5)
    for number, image in enumerate(images):
        sheet[number // columns, :height, number % columns, :width] = image
    grey = (255 * sheet.reshape(lines * (height + 1), -1)).round().astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=-1)


def diagonality(weights: np.ndarray) -> float:
    """How far attention (U, T) walks through the utterance in step with the tokens, 0 to 1.

    Each token's mean frame, as a share of T, against the token's place, as a share of U: the
    slope of the regression line (at most 1) times the correlation. Attention that looks
    everywhere, or always at one place, gives about 0; a diagonal gives 1.
    """
    U, T = weights.shape
    if U < 3 or T < 2:
        return 1.0
    place = np.linspace(0.0, 1.0, U)
    frame = weights @ np.linspace(0.0, 1.0, T)
    if frame.std() < 1e-9:
        return 0.0
    covariance = np.mean((place - place.mean()) * (frame - frame.mean()))
    slope = covariance / place.var()
    correlation = covariance / (place.std() * frame.std())
    return float(np.clip(min(slope, 1.0) * correlation, 0.0, 1.0)) if slope > 0 else 0.0


def _pixels(draw: Callable[[Axes], None], size: tuple[float, float]) -> np.ndarray:
    # Figure, not pyplot: nothing global, no window, safe in any thread.
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # A box stands for a letter that the font lacks; a corpus has thousands of them.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        draw(figure.subplots())
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()

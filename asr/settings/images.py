"""Recipe keys of the task `images`: small models in which a cell is easy to inspect."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from asr.settings.base import Count, Rate, Settings
from asr.settings.lstm import Layer, Lstm

Window = Annotated[int, Field(ge=2, le=64)]  # a grid of one point has no distance between points


class ImageData(Settings):
    """Which images, and how they are read."""

    # With IDX files as `asr.prepare mnist` puts them; None takes scikit-learn's 8 x 8 digits.
    folder: Path | None = None
    valid: Annotated[float, Field(gt=0.0, le=0.5)] = 0.1  # share of the training images, the last
    pixels: Literal["grey", "binary"] = "grey"  # binary: drawn once, white by brightness
    batch: Count = 128  # images
    shift: Annotated[int, Field(ge=0, le=16)] = 0  # pixels that a training image may be moved by


class Cell(Lstm):
    """One LayerNorm-LSTM."""

    hidden: Count = 128


class Rows(Cell):
    """A LayerNorm-LSTM that reads an image row by row and names its class at the end."""

    kind: Literal["rows"]
    layers: Layer = 1
    dropout: Rate = 0.0  # between layers and before the output layer
    recurrent_dropout: Rate = 0.0  # on the candidate g, one mask per image


class Draw(Settings):
    """Deep Recurrent Attentive Writer (Gregor et al. 2015)."""

    kind: Literal["draw"]
    encoder: Cell = Cell()
    decoder: Cell = Cell()
    glimpses: Annotated[int, Field(ge=1, le=256)] = 64
    latent: Count = 100
    read: Window = 2  # pixels along a side of what is read
    write: Window = 5

"""Recipe keys of the task `images`: small models that show what a cell does."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asr.config.schema import (
    SPEECH_ONLY_KEYS,
    Config,
    Count,
    LayerCount,
    LSTMConfig,
    NonSpeechRecipe,
    Rate,
    RecipePath,
)

GridSize = Annotated[int, Field(ge=2, le=64)]  # a grid of one point has no distance between points


class ImageDataConfig(Config):
    """Section `data:` of the task images: the images and how they are read."""

    # IDX files of `asr.prepare mnist`; null: scikit-learn's 8 x 8 digits
    folder: RecipePath | None = None
    valid: Annotated[float, Field(gt=0.0, le=0.5)] = 0.1  # last share of the training images
    pixels: Literal["grey", "binary"] = "grey"  # binary: sampled once, P(white) = brightness
    batch: Count = 128  # images in one batch
    shift: Annotated[int, Field(ge=0, le=16)] = 0  # largest shift of a training image, pixels


class CellConfig(LSTMConfig):
    """Keys of one LayerNorm-LSTM of the task images."""

    hidden: Count = 128  # LSTM units


class RowClassifierConfig(CellConfig):
    """Section `model:` with `kind: rows`: an LSTM that reads rows and classifies after the last."""

    kind: Literal["rows"]  # selects the model
    layers: LayerCount = 1  # LSTM layers
    dropout: Rate = 0.0  # between layers and before the output layer
    recurrent_dropout: Rate = 0.0  # on the candidate g, one mask per image


class DrawConfig(Config):
    """Section `model:` with `kind: draw`: Deep Recurrent Attentive Writer (Gregor et al. 2015)."""

    kind: Literal["draw"]  # selects the model
    encoder: CellConfig = CellConfig()
    decoder: CellConfig = CellConfig()
    glimpses: Annotated[int, Field(ge=1, le=256)] = 64  # steps of reading and writing
    latent: Count = 100  # latent size per glimpse
    read: GridSize = 2  # side of the read grid, filters
    write: GridSize = 5  # side of the written grid, filters


class ImageRecipe(NonSpeechRecipe):
    """A recipe with `task: images`: classify small images, or generate them with DRAW."""

    task: Literal["images"]  # selects the task
    data: ImageDataConfig = ImageDataConfig()
    model: Annotated[RowClassifierConfig | DrawConfig, Field(discriminator="kind")]

    @property
    def unmeasured(self) -> set[str]:
        """Metrics that no validation of this recipe has."""
        of_labels = {"accuracy"} if self.model.kind == "draw" else set()
        return super().unmeasured | {"perplexity", "word_perplexity"} | of_labels

    @property
    def unused_keys(self) -> tuple[str, ...]:
        """Speech-only keys, text samples, and for DRAW, which has no labels, their smoothing."""
        labels = ("label_smoothing",) * (self.model.kind == "draw")
        return *SPEECH_ONLY_KEYS, "samples", *labels

    @model_validator(mode="after")
    def _draw_is_black_and_white(self) -> "ImageRecipe":
        if self.model.kind == "draw" and self.data.pixels != "binary":
            raise ValueError("model.kind draw models black and white: set data.pixels=binary")
        return self

"""Recipe keys under `model:` for `kind: transformer`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asr.settings.base import Count, Natural, Positive, Rate, Settings, Weight

Depth = Annotated[int, Field(ge=1, le=200)]


class PerStack(Settings):
    """One number for the encoder's layers, one for the decoder's."""

    encoder: Positive = 1.0
    decoder: Positive = 1.0


class DropPerStack(Settings):
    """One rate for the encoder's layers, one for the decoder's."""

    encoder: Rate = 0.0
    decoder: Rate = 0.0


class VShape(Settings):
    """DropHead's schedule: from `start` to 0 over `warmup` steps, then up to `end` at `total`."""

    end: Rate
    start: Rate | None = None  # None takes `end`
    warmup: Natural
    total: Count


class Transformer(Settings):
    """Speech encoder-decoder; docs/normalization.md shows where each norm sits."""

    kind: Literal["transformer"]
    d_model: Count = 256
    heads: Annotated[int, Field(ge=1, le=256)] = 4
    feed_forward: Count = 1024
    encoder_layers: Depth = 12
    decoder_layers: Depth = 6
    reduction: Literal[2, 4, 6, 8] = 4  # input frames per frame of memory
    subsampling_channels: Count = 32
    norm: Literal["layer", "rms", "scale"] = "layer"
    norm_position: Literal["pre", "post"] = "pre"  # both stacks; pre adds a final norm to each
    residual_scale: Positive | PerStack | Literal["deepnet"] = 1.0  # sublayer(x) + alpha * x
    fixnorm: bool = False  # embedding rows of length 1
    tied: bool = False  # output layer shares the embedding's weights
    activation: Literal["relu", "gelu", "swish"] = "relu"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    dropout: Rate = 0.1  # on embedding + position and on every sublayer output
    attention_dropout: Rate = 0.0
    feed_forward_dropout: Rate = 0.0
    layer_drop: Rate | DropPerStack = 0.0
    drop_head: Rate | VShape = 0.0
    ctc_weight: Weight = 0.3  # share of the CTC loss; 0 leaves the CTC head out

    @model_validator(mode="after")
    def _heads_divide(self) -> "Transformer":
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by heads {self.heads}")
        return self

"""Recipe keys under `model:` for `kind: transformer`."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, WrapValidator, field_validator

from asr.settings.base import Count, Natural, Positive, Rate, Settings, Weight

Depth = Annotated[int, Field(ge=1, le=200)]
Kernel = Annotated[int, Field(ge=1, le=255)]


def _or_say(message: str) -> WrapValidator:
    """One line for a key with several forms, where pydantic has one for each form."""

    def check(value: Any, read: Callable[[Any], Any]) -> Any:
        try:
            return read(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(check)


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

    @field_validator("total")
    @classmethod
    def _rises_after_the_warmup(cls, total: int, info: ValidationInfo) -> int:
        if info.data.get("warmup", 0) >= total:
            raise ValueError("must be above warmup")
        return total


class Windows(Settings):
    """Where the encoder's heads look first: frames of the memory ahead of each, and around."""

    offsets: list[float]
    width: Positive


ResidualScale = Annotated[
    Positive | PerStack | Literal["deepnet"],
    _or_say("should be a number above 0, {encoder: NUMBER, decoder: NUMBER} or deepnet"),
]
LayerDrop = Annotated[
    Rate | DropPerStack,
    _or_say("should be at least 0 and below 1, or {encoder: RATE, decoder: RATE} of such rates"),
]
DropHead = Annotated[
    Rate | VShape,
    _or_say(
        "should be at least 0 and below 1, or {end: RATE, start: RATE, warmup: STEPS, total: STEPS}"
        " of such rates and with total above warmup"
    ),
]


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
    residual_scale: ResidualScale = 1.0  # sublayer(x) + alpha * x
    fixnorm: bool = False  # embedding rows of length 1
    tied: bool = False  # output layer shares the embedding's weights
    activation: Literal["relu", "gelu", "swish"] = "relu"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    dropout: Rate = 0.1  # on embedding + position and on every sublayer output
    attention_dropout: Rate = 0.0
    feed_forward_dropout: Rate = 0.0
    layer_drop: LayerDrop = 0.0
    drop_head: DropHead = 0.0
    encoder_windows: Windows | None = None  # learned Gaussian windows on self-attention
    # Frames that a convolution module in each encoder layer sees, odd; null for none
    encoder_convolution: Kernel | None = None
    ctc_weight: Weight = 0.3  # share of the CTC loss; 0 leaves the CTC head out

    @field_validator("heads")
    @classmethod
    def _divides(cls, heads: int, info: ValidationInfo) -> int:
        size = info.data.get("d_model", heads)
        if size % heads:
            fitting = ", ".join(str(n) for n in range(1, 17) if size % n == 0)
            raise ValueError(f"must divide d_model = {size}: choose {fitting}")
        return heads

    @field_validator("encoder_convolution")
    @classmethod
    def _has_a_middle(cls, kernel: int | None) -> int | None:
        if kernel is not None and kernel % 2 == 0:
            raise ValueError(f"must be odd: choose {kernel - 1} or {kernel + 1}")
        return kernel

    @field_validator("encoder_windows")
    @classmethod
    def _one_each(cls, windows: Windows | None, info: ValidationInfo) -> Windows | None:
        heads = info.data.get("heads")
        if windows and heads and len(windows.offsets) != heads:
            raise ValueError(f"has {len(windows.offsets)} offsets for {heads} heads: give one each")
        return windows

"""Recipe keys of the task `language`: language models over the tokens of a speech model."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from asr.settings.base import Count, Positive, Rate, Settings
from asr.settings.data import Text
from asr.settings.lstm import Layer, Lstm
from asr.settings.transformer import Depth, VShape

Texts = Annotated[tuple[Path, ...], Field(min_length=1)]


class LanguageData(Settings):
    """Texts: .txt or .txt.gz with one sentence a line, or manifests (.tsv), their column text."""

    # spoken-numbers is made where it is missing; of the other the error names the command.
    corpus: Literal["spoken-numbers", "librispeech-lm"] | None = None
    train: Texts
    valid: Texts
    cache: Path | None = None  # folder for the line indexes of large texts; None: beside each
    max_bytes: Count = 2000  # of UTF-8 in a line; longer training lines are left out
    batch_bytes: Count = 20_000  # of padded text in one batch
    workers: Annotated[int, Field(ge=0, le=256)] = 1  # 0 loads in the training process itself


class LanguageText(Text):
    """The vocabulary: that of a run, or a new one from the training text."""

    run: Path | None = None  # a speech run's folder; its decode.lm can then name this run


class LstmLm(Lstm):
    """LayerNorm-LSTM."""

    kind: Literal["lstm"]
    layers: Layer = 2
    hidden: Count = 512
    embedding: Count = 256
    tied: bool = False  # output layer shares the embedding's weights
    dropout: Rate = 0.0  # on the embedding, between layers and before the output
    recurrent_dropout: Rate = 0.0  # on the candidate g, one mask per sentence


class TransformerLm(Settings):
    """Decoder without an encoder."""

    kind: Literal["transformer"]
    d_model: Count = 256
    heads: Annotated[int, Field(ge=1, le=256)] = 4
    feed_forward: Count = 1024
    layers: Depth = 6
    norm: Literal["layer", "rms", "scale"] = "layer"
    norm_position: Literal["pre", "post"] = "pre"  # pre adds a final norm
    residual_scale: Positive | Literal["deepnet"] = 1.0  # sublayer(x) + alpha * x
    fixnorm: bool = False  # embedding rows of length 1
    tied: bool = False  # output layer shares the embedding's weights
    activation: Literal["relu", "gelu", "swish"] = "relu"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: Count = 5000  # learned only
    dropout: Rate = 0.1  # on embedding + position and on every sublayer output
    attention_dropout: Rate = 0.0
    feed_forward_dropout: Rate = 0.0
    layer_drop: Rate = 0.0
    drop_head: Rate | VShape = 0.0

    @model_validator(mode="after")
    def _heads_divide(self) -> "TransformerLm":
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by heads {self.heads}")
        return self


LanguageModel = Annotated[LstmLm | TransformerLm, Field(discriminator="kind")]

"""Recipe keys of the task `language`: language models over the tokens of a speech model."""

from typing import Annotated, Literal

from pydantic import Field

from asr.config.schema import (
    Config,
    Count,
    Depth,
    LayerCount,
    LSTMConfig,
    NonSpeechRecipe,
    Positive,
    Rate,
    RecipePath,
    TextConfig,
    TransformerLayersConfig,
)

Texts = Annotated[tuple[RecipePath, ...], Field(min_length=1)]


class LanguageDataConfig(Config):
    """Section `data:` of a language model: its texts and how they are read."""

    # built in; spoken-numbers is made when missing, librispeech-lm by asr.prepare
    corpus: Literal["spoken-numbers", "librispeech-lm"] | None = None
    train: Texts  # .txt or .txt.gz, one sentence a line, or manifests (.tsv)
    valid: Texts  # likewise
    max_bytes: Count = 2000  # longer training lines are skipped
    batch_bytes: Count = 20_000  # padded bytes per batch
    workers: Annotated[int, Field(ge=0, le=256)] = 1  # loader processes; 0: none


class LanguageTextConfig(TextConfig):
    """Section `text:` of a language model."""

    run: RecipePath | None = None  # speech run whose vocabulary is used, for its decode.lm


class LSTMLanguageModelConfig(LSTMConfig):
    """Section `model:` of a language model with `kind: lstm`."""

    kind: Literal["lstm"]  # selects the model
    layers: LayerCount = 2  # LSTM layers
    hidden: Count = 512  # LSTM units
    embedding: Count = 256  # size of a token's vector
    tied: bool = False  # output layer and embedding share weights
    dropout: Rate = 0.0  # on embeddings, between layers and before the output
    recurrent_dropout: Rate = 0.0  # on the candidate g, one mask per sentence


class TransformerLanguageModelConfig(TransformerLayersConfig):
    """Section `model:` of a language model with `kind: transformer`: a decoder alone."""

    kind: Literal["transformer"]  # selects the model
    layers: Depth = 6  # decoder layers
    residual_scale: Positive | Literal["deepnet"] = 1.0  # alpha in sublayer(x) + alpha * x


LanguageModelConfig = Annotated[
    LSTMLanguageModelConfig | TransformerLanguageModelConfig, Field(discriminator="kind")
]


class LanguageRecipe(NonSpeechRecipe):
    """A recipe with `task: language`."""

    task: Literal["language"]  # selects the task
    data: LanguageDataConfig
    text: LanguageTextConfig = LanguageTextConfig()
    model: LanguageModelConfig

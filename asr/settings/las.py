"""Recipe keys under `model:` for `kind: las` (Listen, Attend and Spell)."""

from typing import Literal

from pydantic import model_validator

from asr.settings.base import Count, Rate, Settings, Weight
from asr.settings.lstm import Layer, Lstm


class Listener(Lstm):
    """Bidirectional LayerNorm-LSTM; the layers named in `pyramid` read pairs of frames."""

    norm_layers: Literal["all", "pyramid", "first"] = "all"  # where `norm` holds; plain elsewhere
    layers: Layer = 4
    hidden: Count = 256  # per direction
    pyramid: tuple[Layer, ...] = (2, 3)  # counted from 1; each halves the frame rate
    convolution: Literal[1, 2, 4, 6, 8] = 1  # frame-rate reduction by strided convolutions in front
    dropout: Rate = 0.0  # after each layer
    recurrent_dropout: Rate = 0.0  # on the candidate g, one mask per utterance

    @model_validator(mode="after")
    def _pyramid_layers_exist(self) -> "Listener":
        if len(set(self.pyramid)) != len(self.pyramid) or any(
            n > self.layers for n in self.pyramid
        ):
            raise ValueError(
                f"pyramid {list(self.pyramid)} must name different layers of 1 to {self.layers}"
            )
        if self.norm_layers == "pyramid" and self.norm != "none" and not self.pyramid:
            raise ValueError(
                "norm_layers pyramid needs a pyramid: without one no layer has the norm"
            )
        return self

    @property
    def reduction(self) -> int:
        """Input frames per frame of memory."""
        return self.convolution * 2 ** len(self.pyramid)


class Speller(Lstm):
    """LayerNorm-LSTM decoder with input feeding."""

    layers: Layer = 1
    hidden: Count = 256
    embedding: Count = 128
    dropout: Rate = 0.0
    recurrent_dropout: Rate = 0.0
    sampling: Rate = 0.0  # probability of reading its own last token instead of the true one
    tied: bool = False  # output layer shares the embedding's weights


class Las(Settings):
    """The whole model."""

    kind: Literal["las"]
    listener: Listener = Listener()
    attention: Literal["additive", "dot", "location"] = "location"
    attention_size: Count = 128
    speller: Speller = Speller()
    ctc_weight: Weight = 0.3  # share of the CTC loss; 0 leaves the CTC head out

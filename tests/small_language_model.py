"""Small language models of both kinds, with weights large enough for sentences to differ."""

import torch

from asr.config.language import LSTMLanguageModelConfig, TransformerLanguageModelConfig
from asr.models.language_model import LSTMLanguageModel, TransformerLanguageModel

LSTM = {"embedding": 5, "hidden": 7, "layers": 2, "backend": "reference"}
TRANSFORMER = {"d_model": 6, "heads": 2, "layers": 3, "feed_forward": 11}


def lstm(vocabulary, **settings):
    config = LSTMLanguageModelConfig(kind="lstm", **(LSTM | settings))
    return LSTMLanguageModel(vocabulary, config)


def transformer(vocabulary, **settings):
    config = TransformerLanguageModelConfig(kind="transformer", **(TRANSFORMER | settings))
    return TransformerLanguageModel(vocabulary, config)


KINDS = {
    "lstm ba": (lstm, {"norm": "ba"}),
    "lstm none tied": (lstm, {"norm": "none", "tied": True}),
    "lstm thesis": (lstm, {"norm": "thesis", "zero_variance": "guard"}),
    "lstm per_gate": (lstm, {"norm": "per_gate", "layers": 1}),
    "transformer pre": (transformer, {}),
    "transformer post": (
        transformer,
        {"norm_position": "post", "norm": "rms", "residual_scale": "deepnet"},
    ),
    "transformer tied": (transformer, {"tied": True, "fixnorm": True, "norm": "scale"}),
}


def language_model(kind, vocabulary, seed=3):
    torch.manual_seed(seed)
    make, settings = KINDS[kind]
    made = make(vocabulary, **settings)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return made.double().eval()

"""Small language models of both kinds, loud enough for their sentences to differ."""

import torch

from asr.models.language_model import LstmLanguageModel, TransformerLanguageModel

LSTM = {"embedding": 5, "hidden": 7, "layers": 2, "backend": "reference"}
TRANSFORMER = {"d_model": 6, "heads": 2, "layers": 3, "feed_forward": 11, "max_positions": 31}
KINDS = {
    "lstm ba": (LstmLanguageModel, {**LSTM, "norm": "ba"}),
    "lstm none tied": (LstmLanguageModel, {**LSTM, "norm": "none", "tied": True}),
    "lstm thesis": (LstmLanguageModel, {**LSTM, "norm": "thesis", "zero_rows": "guard"}),
    "lstm per_gate": (LstmLanguageModel, {**LSTM, "norm": "per_gate", "layers": 1}),
    "transformer pre": (TransformerLanguageModel, {**TRANSFORMER, "positions": "learned"}),
    "transformer post": (
        TransformerLanguageModel,
        {**TRANSFORMER, "norm_position": "post", "norm": "rms", "residual_scale": "deepnet"},
    ),
    "transformer tied": (
        TransformerLanguageModel,
        {**TRANSFORMER, "tied": True, "fixnorm": True, "norm": "scale"},
    ),
}


def language_model(kind, vocabulary, seed=3):
    torch.manual_seed(seed)
    make, settings = KINDS[kind]
    made = make(vocabulary, **settings)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return made.double().eval()

"""A small Transformer and a batch for it; every size is a different prime where possible."""

import torch

from asr.config.schema import TransformerConfig
from asr.models.transformer import Transformer

F, V, E = 13, 17, 10
SETTINGS = (
    {},
    {"norm_position": "post", "norm": "rms", "activation": "gelu", "positions": "learned"},
    {"norm": "scale", "fixnorm": True, "tied": True, "residual_scale": 1.3},
    {"norm_position": "post", "residual_scale": "deepnet", "reduction": 6, "activation": "swish"},
    {"encoder_windows": {"offsets": [-1.5, 2], "width": 0.7}, "encoder_convolution": 5},
)


def config(**settings):
    sizes = {"d_model": E, "heads": 2, "feed_forward": 19, "subsampling_channels": 3}
    sizes |= {"encoder_layers": 3, "decoder_layers": 2, "max_positions": 97}
    return TransformerConfig(kind="transformer", **(sizes | settings))


def model(**settings):
    """In evaluation mode, with biases and norms moved from their initial values."""
    torch.manual_seed(0)
    made = Transformer(F, V, config(**settings)).eval()
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made


def batch(size=3, frames=41, tokens=7):
    lengths = torch.tensor([frames, 29, 23][:size])
    return torch.randn(size, frames, F), lengths, torch.randint(4, V, (size, tokens))

"""A small Transformer or Conformer, and a batch; every size a different prime where possible."""

import torch

from asr.config.schema import ConformerConfig, TransformerConfig
from asr.models.build import build_speech_model

F, V, E = 13, 17, 10
SETTINGS = (
    {},
    {"norm_position": "post", "norm": "rms", "activation": "gelu"},
    {"norm": "scale", "fixnorm": True, "tied": True, "residual_scale": 1.3},
    {"norm_position": "post", "residual_scale": "deepnet", "reduction": 6, "activation": "swish"},
    {"encoder_windows": {"offsets": [-1.5, 2], "width": 0.7}, "encoder_convolution": 5},
    {"norm_position": "peri", "norm": "bias", "positions": "rope", "heads": 1, "qk_norm": True},
    {"norm_position": "reordered", "encoder_convolution": 3, "convolution_norm": "batch"},
    {"norm_position": "hybrid", "norm": "derf"},
    {"norm_position": "sub", "norm": "dyt"},
    {"depth_scaled": True, "fixnorm": True},
    {"kind": "conformer", "heads": 1, "kernel": 5, "convolution_norm": "batch"},
    {"kind": "conformer", "norm_position": "post", "positions": "sinusoidal", "kernel": 3},
    {"kind": "conformer", "norm_position": "peri", "norm": "rms", "heads": 1, "qk_norm": True},
)
CONFIGS = {"transformer": TransformerConfig, "conformer": ConformerConfig}


def config(kind="transformer", **settings):
    sizes = {"d_model": E, "heads": 2, "feed_forward": 19, "subsampling_channels": 3}
    sizes |= {"encoder_layers": 3, "decoder_layers": 2}
    return CONFIGS[kind](kind=kind, **(sizes | settings))


def model(**settings):
    """In evaluation mode, with biases and norms moved from their initial values."""
    torch.manual_seed(0)
    made = build_speech_model(config(**settings), F, V).eval()
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made


def batch(size=3, frames=41, tokens=7):
    lengths = torch.tensor([frames, 29, 23][:size])
    return torch.randn(size, frames, F), lengths, torch.randint(4, V, (size, tokens))

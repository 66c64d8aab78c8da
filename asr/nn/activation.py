"""The activations a recipe may name."""

from torch import nn

_BY_NAME = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "swish": nn.SiLU,
}


def make_activation(name: str) -> nn.Module:
    """`relu`, `gelu` or `swish` as a module; all map 0 to 0. Raises ValueError for another name."""
    if name not in _BY_NAME:
        raise ValueError(f"activation {name!r} is unknown: choose one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]()

"""What an encoder hands to every decoder, CTC head and search."""

from typing import NamedTuple

from torch import Tensor


class Memory(NamedTuple):
    """Encoded utterances: states (B, T, E) and valid (B, T) bool, True where a frame is real."""

    states: Tensor
    valid: Tensor

"""Which places of a padded batch are real. Masks are called `valid`; True means real."""

import torch
from torch import Tensor


def valid_places(lengths: Tensor, size: int) -> Tensor:
    """The mask of right-padded sequences.

    lengths (B,), size: padded length T -> valid (B, T) bool, on the device of `lengths`.
    """
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)

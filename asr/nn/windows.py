"""Gaussian windows: where each head of a self-attention looks before it has learned to.

Sperber et al. 2018 (arXiv:1803.09519) add to the scores of an acoustic model a Gaussian mask
around the frame itself, with a learned variance per head. Here each head's window also has a
learned offset, so that heads begin as the taps of a convolution:

    score(i, j) = q_i . k_j / sqrt(D) - ((j - i - offset_h) / width_h)^2 / 2

Shapes: H heads, T frames; offsets and widths are in frames of the memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

LOWEST = -30.0  # exp(-30) is as good as 0, and half precision still holds it


class Windows(nn.Module):
    """One window for each of `heads`, begun at `offsets` (H) and all of one `width` above 0.

    ValueError for another width or number. Learned are offsets and logarithms of widths.
    """

    def __init__(self, heads: int, offsets: Sequence[float], width: float) -> None:
        super().__init__()
        if len(offsets) != heads:
            raise ValueError(f"{len(offsets)} offsets of windows: {heads} heads need one each")
        if not width > 0:
            raise ValueError(f"a window's width must be above 0, not {width}")
        self.offsets = nn.Parameter(torch.tensor(offsets, dtype=torch.get_default_dtype()))
        self.log_widths = nn.Parameter(torch.full_like(self.offsets, width).log())

    def forward(self, length: int) -> Tensor:
        """What is added to the scores of `length` frames for each other: (H, T, T), -30 to 0."""
        frames = torch.arange(length, device=self.offsets.device, dtype=self.offsets.dtype)
        ahead = frames - frames.unsqueeze(1)  # (T, T), of key before query
        apart = (ahead - self.offsets[:, None, None]) / self.log_widths.exp()[:, None, None]
        return (apart.square() / -2).clamp_min(LOWEST)

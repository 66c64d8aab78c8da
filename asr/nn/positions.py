"""Position encodings: sinusoidal (Vaswani et al. 2017, section 3.5) or rotary.

Rotary encodings (RoPE, Su et al. 2021, arXiv:2104.09864, eq. 34; for speech: Zhang et al. 2025,
arXiv:2501.06051) add nothing to the input. They turn each pair of elements of queries and keys by
an angle proportional to the position, so that their products depend only on distances.
"""

import math

import torch
from torch import Tensor, nn


def make_positions(kind: str, size: int) -> nn.Module:
    """The module for the input: it adds encodings for `sinusoidal`, nothing for `rope`."""
    return NoPositions() if kind == "rope" else SinusoidalPositions(size)


class NoPositions(nn.Module):
    """Adds nothing to the input."""

    def forward(self, start: int, length: int) -> float:
        """0 for any positions."""
        return 0.0


class SinusoidalPositions(nn.Module):
    """PE(t, 2i) = sin(t / 10000^(2i/E)), PE(t, 2i+1) = cos of the same."""

    def __init__(self, size: int) -> None:
        super().__init__()
        # Not saved: a formula gives it, and it grows with the longest input.
        self.register_buffer("table", sinusoids(0, 512, size), persistent=False)

    def forward(self, start: int, length: int) -> Tensor:
        """Encodings of the positions start .. start + length - 1: (length, E)."""
        stop = start + length
        table = self.table
        if stop > len(table):
            self.table = table = sinusoids(0, 2 * stop, table.size(1)).to(table)
        return table[start:stop]  # another thread may have replaced the buffer


class RotaryPositions(nn.Module):
    """Turns queries or keys (B, H, T, D), D even: the elements i and i + D/2 are a pair.

    The angle of pair i at position t is t / 10000^(2i/D).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", rotations(0, 512, size), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """x (B, H, T, D) at the positions start .. start + T - 1 -> the same shape."""
        stop = start + x.size(2)
        table = self.table
        if stop > table.size(1):
            self.table = table = rotations(0, 2 * stop, x.size(3)).to(table)
        return rotate(x, table[:, start:stop])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x (B, H, T, D), turns (2, T, D/2) as from `rotations` -> the same shape as x."""
    cos, sin = turns.to(x.dtype).unbind()  # (T, D/2) each
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


def _angles(start: int, stop: int, size: int) -> Tensor:
    """(T, ceil(size/2)) of the T positions start .. stop - 1, in float64: float32 angles would be
    off by 1e-4 at 1,000 frames.
    """
    exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
    rates = torch.exp(-math.log(10000.0) * exponent)
    return torch.arange(start, stop, dtype=torch.float64).unsqueeze(1) * rates


def sinusoids(start: int, stop: int, size: int) -> Tensor:
    """(stop - start, size): sine and cosine of each angle in turn."""
    angles = _angles(start, stop, size)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :size].float()


def rotations(start: int, stop: int, size: int) -> Tensor:
    """(2, stop - start, size/2): cosine and sine of each angle."""
    angles = _angles(start, stop, size)
    return torch.stack((angles.cos(), angles.sin())).float()

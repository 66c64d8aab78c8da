"""Position encodings: sinusoidal (Vaswani et al. 2017, section 3.5) or learned."""

import math

import torch
from torch import Tensor, nn

from asr.errors import UserError


def make_positions(kind: str, size: int, max_length: int) -> nn.Module:
    """`sinusoidal`, of any length, or `learned`, up to max_length positions."""
    return SinusoidalPositions(size) if kind == "sinusoidal" else LearnedPositions(size, max_length)


class SinusoidalPositions(nn.Module):
    """PE(t, 2i) = sin(t / 10000^(2i/E)), PE(t, 2i+1) = cos of the same."""

    def __init__(self, size: int) -> None:
        super().__init__()
        # Not saved: it follows from the formula, and grows with the longest input.
        self.register_buffer("table", _sinusoids(512, size), persistent=False)

    def forward(self, start: int, length: int) -> Tensor:
        """Encodings of the positions start .. start + length - 1: (length, E)."""
        stop = start + length
        if stop > len(self.table):
            self.table = _sinusoids(2 * stop, self.table.size(1)).to(self.table)
        return self.table[start:stop]


class LearnedPositions(nn.Module):
    """A learned vector for each of the first `max_length` positions."""

    def __init__(self, size: int, max_length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(max_length, size) * size**-0.5)

    def forward(self, start: int, length: int) -> Tensor:
        """As SinusoidalPositions.forward; raises UserError beyond max_length."""
        stop = start + length
        if stop > len(self.table):
            raise UserError(
                f"a sequence of length {stop} is longer than the {len(self.table)} learned "
                "positions: raise model.max_positions, set model.positions=sinusoidal, or use "
                "shorter input"
            )
        return self.table[start:stop]


def _sinusoids(length: int, size: int) -> Tensor:
    """(length, size), computed in float64: float32 angles would be off by 1e-4 at 1,000 frames."""
    exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
    rates = torch.exp(-math.log(10000.0) * exponent)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * rates  # (length, ceil(E/2))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :size].float()

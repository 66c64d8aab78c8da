"""Word embeddings, with FixNorm and tied output as options.

FixNorm (Nguyen & Chiang 2018; Nguyen & Salazar 2019) uses every row w as w / |w|. Tied to the
output and behind a ScaleNorm of gain g, the logits become g cos(h, w).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class WordEmbedding(nn.Module):
    """A row per token; the input is the row times sqrt(E) (Vaswani et al. 2017, section 3.4)."""

    def __init__(self, vocabulary: int, size: int, fixnorm: bool = False) -> None:
        super().__init__()
        # Rows of length about 1: inputs of unit variance, and tied logits that start moderate.
        self.weight = nn.Parameter(torch.randn(vocabulary, size) * size**-0.5)
        self.fixnorm = fixnorm

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., E)."""
        rows = functional.embedding(tokens, self.weight)
        rows = functional.normalize(rows, dim=-1) if self.fixnorm else rows
        return rows * math.sqrt(rows.size(-1))

    def logits(self, x: Tensor) -> Tensor:
        """The tied output layer, without bias: x (..., E) -> (..., V)."""
        rows = functional.normalize(self.weight, dim=-1) if self.fixnorm else self.weight
        return functional.linear(x, rows)

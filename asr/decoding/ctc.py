"""Decoding a CTC head alone: the best path.

Graves et al. 2006. A path gives one label per frame; equal neighbours are joined and blanks
dropped.

Shapes: B utterances, T frames, V vocabulary, blank included.
"""

import torch
from torch import Tensor

from asr.tokens import BLANK


def collapse(path: list[int]) -> list[int]:
    """A path's labels -> the tokens it says: equal neighbours joined, blanks dropped."""
    neighbours = zip([BLANK, *path], path, strict=False)
    return [label for before, label in neighbours if label not in (before, BLANK)]


@torch.no_grad()
def ctc_greedy(log_probs: Tensor, valid: Tensor) -> list[list[int]]:
    """log_probs (B, T, V), valid (B, T) -> the tokens of each utterance's likeliest path."""
    paths = log_probs.argmax(dim=2).masked_fill(~valid, BLANK)
    return [collapse(path) for path in paths.tolist()]

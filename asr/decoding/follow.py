"""Which tokens may follow a hypothesis: length limits, EOS threshold, repeated n-grams.

Shapes: B utterances, K hypotheses of each, U tokens so far, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asr.decoding.search import NEVER
from asr.errors import UserError
from asr.tokens import EOS


class Follow(NamedTuple):
    """Scores of what may follow; -inf where it may not."""

    tokens: Tensor  # (B, K, V), EOS always -inf
    end: Tensor  # (B, K)
    content: Tensor  # (B, K) bool: EOS is the likeliest by itself, not only by the length limit


@dataclass(frozen=True)
class FollowRules:
    """eos_threshold: EOS only if its log-prob exceeds this factor times the best other token's
    (Hannun et al. 2019, 1.5 there); None for no such rule.
    ngram: no n-gram of this many tokens occurs twice; 0 for no such rule.
    """

    eos_threshold: float | None = None
    ngram: int = 0

    def __post_init__(self) -> None:
        if self.eos_threshold is not None and self.eos_threshold <= 0:
            raise UserError(f"eos_threshold is {self.eos_threshold}; it must be more than 0")
        if self.ngram < 0:
            raise UserError(f"ngram is {self.ngram}; it must be 0 (no guard) or more")

    def __call__(
        self, total: Tensor, log_probs: Tensor, said: Tensor, shortest: Tensor, longest: Tensor
    ) -> Follow:
        """total and the model's log_probs (B, K, V), said (B, K, U) without SOS, limits (B,).

        Where longest is reached, EOS alone may follow, whatever the other rules say.
        """
        end = total[..., EOS]
        tokens = total.index_fill(2, torch.tensor([*NEVER, EOS], device=total.device), -torch.inf)
        if self.ngram:
            tokens = tokens.masked_fill(repeated(said, self.ngram, total.shape[2]), -torch.inf)
        content = end >= tokens.amax(dim=2)
        length = said.shape[2]
        cut = (length >= longest)[:, None]  # (B, 1)
        early = (length < shortest)[:, None] | self._hesitant(log_probs)
        end = end.masked_fill(early & ~cut, -torch.inf)
        return Follow(tokens.masked_fill(cut[..., None], -torch.inf), end, content | ~cut)

    def _hesitant(self, log_probs: Tensor) -> Tensor:
        if self.eos_threshold is None:
            return log_probs.new_zeros((), dtype=torch.bool)
        end = log_probs[..., EOS]
        banned = torch.tensor([*NEVER, EOS], device=log_probs.device)
        best = log_probs.index_fill(2, banned, -torch.inf).amax(dim=2)
        return end < self.eos_threshold * best


def repeated(said: Tensor, n: int, vocabulary: int) -> Tensor:
    """said (B, K, U) -> (B, K, V) bool: the token would complete an n-gram already said."""
    mask = torch.zeros(*said.shape[:2], vocabulary, dtype=torch.long, device=said.device)
    if said.shape[2] < n:
        return mask.bool()
    ngrams = said.unfold(2, n, 1)  # (B, K, U - n + 1, n)
    ending = said[:, :, None, said.shape[2] - n + 1 :]  # (B, K, 1, n - 1)
    matches = (ngrams[..., :-1] == ending).all(dim=3)
    return mask.scatter_add_(2, ngrams[..., -1], matches.long()).bool()

"""The score by which ended hypotheses compete, whatever their length.

Wu et al. 2016 (GNMT, arXiv:1609.08144), equation 14, and a reward per token:

    s(Y) = log P(Y | X) / lp(Y) + coverage_penalty * cp(X; Y) + token_reward * |Y|
    lp(Y) = ((5 + |Y|) / 6) ^ length_penalty
    cp(X; Y) = sum over frames of log min(attention that the frame got from all steps, 1)

|Y| counts EOS, so the empty sentence has length 1 and lp 1. We differ once: a frame that got less
than FLOOR counts as FLOOR, for a weight may underflow to 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asr.errors import UserError

FLOOR = 1e-4


def coverage(attended: Tensor, valid: Tensor) -> Tensor:
    """attended (B, K, T) summed over the steps, valid (B, T) -> cp (B, K), at most 0."""
    logs = attended.clamp(FLOOR, 1.0).log()
    return logs.masked_fill(~valid[:, None], 0.0).sum(dim=2)


@dataclass(frozen=True)
class Ranking:
    """The three weights of s(Y); all 0: the plain log-probability."""

    length_penalty: float = 0.0
    token_reward: float = 0.0
    coverage_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("length_penalty", "coverage_penalty"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 or more")

    def final(self, log_prob: Tensor, length: int, covered: Tensor | float = 0.0) -> Tensor:
        """log P and cp of hypotheses of one length (EOS counted) -> s, the same shape."""
        extras = self.coverage_penalty * covered + self.token_reward * length
        return log_prob / self._lp(length) + extras

    def bound(self, log_prob: float, shortest: int, longest: int) -> float:
        """The most that a hypothesis at log_prob can reach if it ends between these lengths.

        Exact where every further token's score is at most 0, as a log-prob is: log P can only
        fall, cp only rise to 0, and the length may be the best one for each term apart.
        """
        if log_prob > 0:
            return torch.inf
        rewarded = max(self.token_reward * shortest, self.token_reward * longest)
        return log_prob / self._lp(longest) + rewarded

    def _lp(self, length: int) -> float:
        return ((5 + length) / 6) ** self.length_penalty

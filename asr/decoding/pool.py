"""The ended hypotheses of one utterance, kept apart from those still growing."""

from bisect import insort

import torch

from asr.decoding.search import Hypothesis


class Pool:
    """The n best of all that ended."""

    def __init__(self, nbest: int) -> None:
        self.nbest = nbest
        self.hypotheses: list[Hypothesis] = []  # best first
        self.ended = 0

    @property
    def entry(self) -> float:
        """The score to beat."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.nbest else -torch.inf

    def add(self, hypothesis: Hypothesis) -> None:
        """Keep it if it is among the n best."""
        insort(self.hypotheses, hypothesis, key=lambda kept: -kept.score)
        del self.hypotheses[self.nbest :]

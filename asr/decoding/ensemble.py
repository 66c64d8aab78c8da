"""Several scorers that a search follows as one: the mean of what they say.

B utterances, K hypotheses of each, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.decoding.search import Scorer
from asr.nn.memory import Memory


class Together(NamedTuple):
    """The members' states."""

    members: list[Any]

    @property
    def attention(self) -> Tensor | None:
        """The first member's weights, whose memory the search counts frames in."""
        return self.members[0].attention


class Ensemble:
    """A Scorer: the mean of its members' log-probs, the logarithm of a geometric mean.

    Every member reads a memory of its own, of the same utterances, whatever its number of frames.
    What one of them holds impossible, a sentence longer than its frames to CTC, all do.
    """

    def __init__(self, members: Sequence[tuple[Scorer, Memory]]) -> None:
        self.members = members

    def start(self, memory: Memory) -> Together:
        """Only the number of utterances in `memory` counts: it must be the members'."""
        assert all(len(own.valid) == len(memory.valid) for _, own in self.members)
        return Together([scorer.start(own) for scorer, own in self.members])

    def step(self, state: Together, tokens: Tensor) -> tuple[Tensor, Together]:
        """tokens (B, K), SOS first -> mean scores (B, K, V), Together."""
        pairs = zip(self.members, state.members, strict=True)
        stepped = [scorer.step(own, tokens) for (scorer, _), own in pairs]
        scores, states = zip(*stepped, strict=True)
        return torch.stack(scores).mean(dim=0), Together(list(states))

    def select(self, state: Together, rows: Tensor) -> Together:
        """rows (B', K') number old hypotheses b * K + k, in every member alike."""
        pairs = zip(self.members, state.members, strict=True)
        return Together([scorer.select(own, rows) for (scorer, _), own in pairs])

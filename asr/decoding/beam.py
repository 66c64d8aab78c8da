"""Beam search over all utterances and all their hypotheses in one tensor.

At each step the `beam` best continuations live on. A hypothesis that says EOS is taken out, if it
was among the `beam` best, into its utterance's pool, where it competes under the length-fair score
of score.py. An utterance ends, and leaves the batch, when no living hypothesis can still enter its
n-best: with scores that are log-probs this stop is exact, so a beam as wide as the space finds
the best of all sentences, and beam 1 without penalties is greedy search.

A beam wider than the vocabulary is no mistake: it fills as soon as there are that many sentences.

Shapes: B utterances, T memory frames, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asr.decoding.ctc_prefix import CTCPrefixScorer
from asr.decoding.ensemble import Ensemble
from asr.decoding.follow import FollowRules
from asr.decoding.living import Growth
from asr.decoding.pool import Pool
from asr.decoding.score import Ranking
from asr.decoding.search import Hypothesis, Scorer, SearchModel, heard, length_limits
from asr.errors import UserError
from asr.nn.memory import Memory


@dataclass(frozen=True)
class BeamSettings:
    """How to search. A token scores (1 - ctc_weight) * model + ctc_weight * CTC + the scorers.

    Raises UserError for a value out of range.
    """

    beam: int = 8
    nbest: int = 1
    max_ratio: float = 1.0  # at most this many tokens per memory frame
    max_constant: float = 10.0  # and so many more
    min_ratio: float = 0.0
    min_constant: float = 0.0
    length_penalty: float = 0.0  # this and the next two: score.py
    token_reward: float = 0.0
    coverage_penalty: float = 0.0
    eos_threshold: float | None = None  # this and the next: follow.py
    ngram: int = 0
    temperature: float = 1.0  # divides the model's log-probs before they are normalised again
    ctc_weight: float = 0.0
    # Ends an utterance once patience * beam hypotheses have ended, exact or not (Kasai et al.
    # 2022): token_reward and coverage_penalty seldom let the exact stop come before the limit.
    patience: float | None = None

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise UserError(f"beam is {self.beam}; it must be 1 or more")
        if not 1 <= self.nbest <= self.beam:
            raise UserError(f"nbest is {self.nbest}; it must lie between 1 and beam ({self.beam})")
        if self.temperature <= 0:
            raise UserError(f"temperature is {self.temperature}; it must be more than 0")
        if not 0 <= self.ctc_weight <= 1:
            raise UserError(f"ctc_weight is {self.ctc_weight}; it must lie between 0 and 1")
        if self.patience is not None and self.patience <= 0:
            raise UserError(f"patience is {self.patience}; it must be more than 0, or null")

    def growth(self, weighted: Sequence[tuple[float, Scorer]]) -> Growth:
        """The search itself, over scorers with their weights, the model first."""
        return Growth(
            weighted=weighted,
            beam=self.beam,
            temperature=self.temperature,
            rules=FollowRules(self.eos_threshold, self.ngram),
            ranking=Ranking(self.length_penalty, self.token_reward, self.coverage_penalty),
            quota=torch.inf if self.patience is None else self.patience * self.beam,
        )


@torch.no_grad()
def beam_search(
    model: SearchModel,
    memory: Memory,
    beam: int = 8,
    *,
    ctc: Tensor | None = None,
    others: Sequence[tuple[SearchModel, Memory, Tensor | None]] = (),
    scorers: Sequence[tuple[float, Scorer]] = (),
    **settings: Any,
) -> list[list[Hypothesis]]:
    """The nbest best hypotheses of every utterance, best first; settings: see BeamSettings.

    ctc: the CTC head's log-probs (B, T, V); others: the same utterances as heard in another way,
    at another speed or by another model, each with its model and ctc; the search follows the mean
    (ensemble.py), and frames are counted in `memory`. scorers: weights and scorers, such as
    language models. Hypothesis.parts: the model, CTC where it has a weight, then scorers in their
    order. An utterance without a frame in one of the memories gives one empty hypothesis.

    Raises UserError for a setting out of range, a ctc_weight without ctc, a scorer of another
    vocabulary, a coverage_penalty without attention, and NaN from the model.
    """
    chosen = BeamSettings(beam, **settings)
    pools = [Pool(chosen.nbest) for _ in memory.valid]
    models, whole, heads = zip((model, memory, ctc), *others, strict=True)
    active, memories = heard(*whole)
    kept = memories[0]
    weighted = [
        (1 - chosen.ctc_weight, _mean(models, memories)),
        *_ctc(heads, memories, chosen.ctc_weight, active),
        *scorers,
    ]
    growth = chosen.growth(weighted)
    if len(active):
        shortest = length_limits(kept.valid, chosen.min_ratio, chosen.min_constant)
        longest = length_limits(kept.valid, chosen.max_ratio, chosen.max_constant)
        growth.run(kept, shortest, longest, [pools[b] for b in active.tolist()])
    return [pool.hypotheses or [Hypothesis((), 0.0, True)] for pool in pools]


def _mean(scorers: Sequence[Scorer], memories: Sequence[Memory]) -> Scorer:
    """One scorer for each memory -> one for all."""
    return scorers[0] if len(scorers) == 1 else Ensemble(list(zip(scorers, memories, strict=True)))


def _ctc(
    heads: Sequence[Tensor | None], memories: Sequence[Memory], weight: float, active: Tensor
) -> list[tuple[float, Scorer]]:
    if not weight:
        return []
    if any(head is None for head in heads):
        raise UserError(f"ctc_weight is {weight}, but this model has no CTC head; set it to 0")
    return [(weight, _mean([CTCPrefixScorer(head[active]) for head in heads], memories))]

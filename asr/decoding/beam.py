"""Beam search over all utterances and all their hypotheses in one tensor.

At each step the `beam` best continuations live on. A hypothesis that says EOS is taken out, if it
was among the `beam` best, into its utterance's pool, where it competes under the length-fair score
of score.py. An utterance ends, and leaves the batch, when no living hypothesis can still enter its
n-best: with scores that are log-probs this stop is exact, so a beam as wide as the space finds
the best of all sentences, and beam 1 without penalties is greedy search.

A beam wider than the vocabulary is no mistake: it fills as soon as there are that many sentences.

Shapes: B utterances, K living hypotheses of each, T memory frames, U tokens, V vocabulary,
S scorers, the model first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.decoding.ctc_prefix import CTCPrefixScorer
from asr.decoding.follow import FollowRules
from asr.decoding.living import Growth
from asr.decoding.pool import Pool
from asr.decoding.score import Ranking
from asr.decoding.search import Hypothesis, Scorer, SearchModel, heard, length_limits
from asr.errors import UserError
from asr.nn.memory import Memory


@torch.no_grad()
def beam_search(
    model: SearchModel,
    memory: Memory,
    beam: int = 8,
    *,
    nbest: int = 1,
    max_ratio: float = 1.0,
    max_constant: float = 10.0,
    min_ratio: float = 0.0,
    min_constant: float = 0.0,
    length_penalty: float = 0.0,
    token_reward: float = 0.0,
    coverage_penalty: float = 0.0,
    eos_threshold: float | None = None,
    ngram: int = 0,
    temperature: float = 1.0,
    ctc: Tensor | None = None,
    ctc_weight: float = 0.0,
    scorers: Sequence[tuple[float, Scorer]] = (),
    patience: float | None = None,
) -> list[list[Hypothesis]]:
    """The nbest best hypotheses of every utterance, best first.

    A token scores (1 - ctc_weight) * model + ctc_weight * CTC + sum of weight * scorer; ctc is the
    CTC head's log-probs (B, T, V). Hypothesis.parts: the model, CTC where it has a weight, then
    `scorers` in order. Lengths lie between min_ * and max_ *: ratio * real frames + constant.
    patience ends an utterance once patience * beam hypotheses have ended, exact or not (Kasai et
    al. 2022): token_reward and coverage_penalty seldom let the exact stop end before the limit.

    length_penalty, token_reward, coverage_penalty: score.py. eos_threshold, ngram: follow.py.
    Raises UserError for a setting out of range, a ctc_weight without ctc, scorers of another
    vocabulary, a coverage_penalty without attention, and NaN from the model.
    """
    _check(beam, nbest, temperature, ctc_weight, ctc, patience)
    ranking = Ranking(length_penalty, token_reward, coverage_penalty)
    rules = FollowRules(eos_threshold, ngram)
    pools = [Pool(nbest) for _ in memory.valid]
    active, kept = heard(memory)
    weighted: list[tuple[float, Scorer]] = [(1 - ctc_weight, model)]
    if ctc_weight and ctc is not None:
        weighted.append((ctc_weight, CTCPrefixScorer(ctc[active])))
    weighted += scorers
    shortest = length_limits(kept.valid, min_ratio, min_constant)
    longest = length_limits(kept.valid, max_ratio, max_constant)
    quota = torch.inf if patience is None else patience * beam
    growth = Growth(weighted, beam, temperature, rules, ranking, quota)
    if len(active):
        growth.run(kept, shortest, longest, [pools[b] for b in active.tolist()])
    return [pool.hypotheses or [Hypothesis((), 0.0, True)] for pool in pools]


def _check(
    beam: int,
    nbest: int,
    temperature: float,
    ctc_weight: float,
    ctc: Tensor | None,
    patience: float | None,
) -> None:
    if beam < 1:
        raise UserError(f"beam is {beam}; it must be 1 or more")
    if not 1 <= nbest <= beam:
        raise UserError(f"nbest is {nbest}; it must lie between 1 and the beam ({beam})")
    if temperature <= 0:
        raise UserError(f"temperature is {temperature}; it must be more than 0")
    if not 0 <= ctc_weight <= 1:
        raise UserError(f"ctc_weight is {ctc_weight}; it must lie between 0 and 1")
    if ctc_weight and ctc is None:
        raise UserError(
            f"ctc_weight is {ctc_weight}, but this model has no CTC head; set ctc_weight to 0"
        )
    if patience is not None and patience <= 0:
        raise UserError(f"patience is {patience}; it must be more than 0, or null for none")

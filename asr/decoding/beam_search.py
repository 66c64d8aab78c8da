"""Beam search over all utterances and all their hypotheses in one batch.

At each step the `beam` best continuations of every utterance are kept. A hypothesis that takes EOS
and is among the `beam` best moves to the finished hypotheses of its utterance, which are ranked by

    s(Y) = log P(Y | X) / lp(Y) + token_reward * |Y|
    lp(Y) = ((5 + |Y|) / 6) ^ length_penalty

after Wu et al. 2016 (GNMT, arXiv:1609.08144), equation 14, with a reward per token in place of
their coverage penalty. |Y| counts EOS, so the empty sentence has length 1 and lp 1.

An utterance is done, and leaves the batch, when no unfinished hypothesis can enter its n-best list.
With scores that are log-probabilities this stop is exact: a beam as wide as the search space finds
the best of all sentences, and a beam of 1 without penalties is greedy search. A beam may be wider
than the vocabulary.

Shapes: B utterances still searched, K hypotheses of each, T memory frames, U tokens so far, V
vocabulary, S scorers, the model first.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.config.schema import BeamConfig
from asr.data.tokenizer import EOS, SOS
from asr.decoding.ctc import CTCPrefixScorer
from asr.decoding.fusion import Ensemble
from asr.decoding.scorer import (
    MAX_CONSTANT,
    NEVER,
    Hypothesis,
    Scorer,
    check_not_nan,
    indices,
    length_limits,
    rows_of_numbers,
    with_frames,
)
from asr.errors import UserError
from asr.nn.attention import Memory

WeightedScorer = tuple[float, Scorer]


@dataclass(frozen=True)
class Ranking:
    """The two weights of s(Y); both 0: the plain log-probability."""

    length_penalty: float
    token_reward: float

    def final(self, log_prob: Tensor, length: int) -> Tensor:
        """log P of hypotheses of one length (EOS counted) -> s, the same shape."""
        return log_prob / self._lp(length) + self.token_reward * length

    def bound(self, log_prob: float, min_length: int, max_length: int) -> float:
        """The largest s of any hypothesis of these lengths that continues one with log_prob.

        Exact where every further token's score is at most 0, as a log-probability is: log P can
        only fall. Each term takes the length that is best for it.
        """
        if log_prob > 0:
            return torch.inf
        reward = max(self.token_reward * min_length, self.token_reward * max_length)
        return log_prob / self._lp(max_length) + reward

    def _lp(self, length: int) -> float:
        return ((5 + length) / 6) ** self.length_penalty


class AllowedTokens(NamedTuple):
    """Scores of every continuation; -inf where it is forbidden."""

    tokens: Tensor  # (B, K, V), EOS always -inf
    eos: Tensor  # (B, K)
    finished: Tensor  # (B, K) bool: False where only the length limit makes EOS the best token


def allowed_tokens(
    config: BeamConfig, state: "BeamState", total: Tensor, log_probs: Tensor | None
) -> AllowedTokens:
    """total and the model's log_probs (B, K, V): the scores with and without other scorers.

    eos_threshold decides by the model's log_probs, None where its weight is 0; at max_length only
    EOS is allowed.
    """
    eos, others = total[..., EOS], _without_eos(total)
    eos_is_best = eos >= others.amax(dim=2)
    at_limit = (state.tokens.shape[2] - 1 >= state.max_length)[:, None]  # (B, 1)
    if config.eos_threshold is not None and log_probs is not None:
        best = _without_eos(log_probs).amax(dim=2)
        early = log_probs[..., EOS] < config.eos_threshold * best
        eos = eos.masked_fill(early & ~at_limit, -torch.inf)
    others = others.masked_fill(at_limit[..., None], -torch.inf)
    return AllowedTokens(others, eos, eos_is_best | ~at_limit)


def _without_eos(scores: Tensor) -> Tensor:
    """scores (..., V), -inf for EOS and for the tokens that no hypothesis contains."""
    return scores.index_fill(-1, indices([*NEVER, EOS], scores.device), -torch.inf)


class FinishedHypotheses:
    """The n best finished hypotheses of one utterance."""

    def __init__(self, nbest: int) -> None:
        self.nbest = nbest
        self.hypotheses: list[Hypothesis] = []  # best first

    @property
    def min_score(self) -> float:
        """A hypothesis enters the list with a higher score."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.nbest else -torch.inf

    def add(self, hypothesis: Hypothesis) -> None:
        """Insert by score and keep the n best."""
        insort(self.hypotheses, hypothesis, key=lambda kept: -kept.score)
        del self.hypotheses[self.nbest :]


class BeamState(NamedTuple):
    """The unfinished hypotheses; a row with the score -inf contains none."""

    scorer_states: list[Any]  # S states
    tokens: Tensor  # (B, K, 1 + U), SOS first
    scores: Tensor  # (B, K) weighted sums
    log_probs: Tensor  # (B, K, U) the model's
    parts: Tensor  # (B, K, S) unweighted sums
    max_length: Tensor  # (B,) tokens without EOS

    def unfinished(self, b: int, ranking: Ranking) -> Hypothesis:
        """The best hypothesis of utterance b, without EOS."""
        k = int(self.scores[b].argmax())
        tokens = tuple(self.tokens[b, k, 1:].tolist())
        return Hypothesis(
            tokens=tokens,
            score=float(ranking.final(self.scores[b, k], len(tokens))),
            finished=False,
            log_probs=tuple(self.log_probs[b, k].tolist()),
            parts=tuple(self.parts[b, k].tolist()),
        )


class Candidates(NamedTuple):
    """The continuations of one step: each hypothesis with EOS, and the best with another token."""

    state: BeamState  # scorer states after the step, all else before it
    token_scores: list[Tensor]  # S of (B, K, V), unweighted
    eos_scores: Tensor  # (B, K) scores of the hypotheses with EOS
    finished: Tensor  # (B, K) bool: AllowedTokens.finished
    scores: Tensor  # (B, K') the best continuations, best first
    indices: Tensor  # (B, K') of each: k * V + token
    nan: Tensor  # (B,) bool: a log-probability of the model is NaN

    def finish(
        self, places: Sequence[tuple[int, int]], scores: Sequence[float]
    ) -> list[Hypothesis]:
        """The hypotheses (b, k) with EOS, from their scores."""
        b, k = indices(places, self.eos_scores.device).unbind(1)
        state, length = self.state, self.state.tokens.shape[2] - 1
        eos = torch.stack([each[b, k, EOS] for each in self.token_scores], dim=1)  # (N, S)
        tokens, parts = state.tokens[b, k, 1:], state.parts[b, k] + eos
        columns = tokens, state.log_probs[b, k], eos[:, :1], parts, self.finished[b, k]
        return [
            Hypothesis(
                tokens=tuple(map(int, row[:length])),
                score=score,
                finished=bool(row[-1]),
                log_probs=tuple(row[length : 2 * length + 1]),
                parts=tuple(row[2 * length + 1 : -1]),
            )
            for row, score in zip(rows_of_numbers(*columns), scores, strict=True)
        ]

    def select(self, scorers: Sequence[WeightedScorer], kept: Tensor) -> BeamState:
        """The best continuations of the utterances `kept` (B',) as the next state."""
        old = self.state
        beam, vocabulary = self.token_scores[0].shape[1:]
        indices = self.indices[kept]  # (B', K')
        rows = kept[:, None] * beam + indices // vocabulary

        def take(values: Tensor) -> Tensor:
            return values.flatten(0, 1)[rows]

        def of_token(scores: Tensor) -> Tensor:
            return scores.flatten(1)[kept].gather(1, indices)[..., None]  # (B', K', 1)

        pairs = zip(scorers, old.scorer_states, strict=True)
        each = [of_token(scores) for scores in self.token_scores]
        return BeamState(
            scorer_states=[s.select(one, rows) for (_, s), one in pairs] if len(kept) else [],
            tokens=torch.cat([take(old.tokens), (indices % vocabulary)[..., None]], dim=2),
            scores=self.scores[kept],
            log_probs=torch.cat([take(old.log_probs), each[0]], dim=2),
            parts=take(old.parts) + torch.cat(each, dim=2),
            max_length=old.max_length[kept],
        )


class BeamSearch:
    """The search with its scorers and their weights, the model first."""

    def __init__(self, config: BeamConfig, scorers: Sequence[WeightedScorer]) -> None:
        self.config, self.scorers = config, scorers
        self.ranking = Ranking(config.length_penalty, config.token_reward)

    def run(self, state: BeamState, finished: list[FinishedHypotheses]) -> None:
        """Search from the first state and fill the finished hypotheses of B utterances."""
        max_lengths = state.max_length.tolist()
        while finished:
            candidates = self._step(state)
            best = self._collect_finished(candidates, finished)
            kept = [
                b
                for b, complete in enumerate(finished)
                if not self._done(candidates, b, best[b], max_lengths[b], complete)
            ]
            state = candidates.select(self.scorers, indices(kept, state.scores.device))
            finished = [finished[b] for b in kept]
            max_lengths = [max_lengths[b] for b in kept]

    def start(self, memory: Memory, max_length: Tensor) -> BeamState:
        """The empty hypothesis of every utterance; max_length (B,) in tokens without EOS."""
        B, device = len(memory.valid), memory.states.device
        return BeamState(
            scorer_states=[scorer.start(memory) for _, scorer in self.scorers],
            tokens=torch.full((B, 1, 1), SOS, device=device),
            scores=torch.zeros(B, 1, device=device),
            log_probs=torch.zeros(B, 1, 0, device=device),
            parts=torch.zeros(B, 1, len(self.scorers), device=device),
            max_length=max_length,
        )

    def _step(self, state: BeamState) -> Candidates:
        token_scores, scorer_states, nan = self._score(state)
        # A weight of 0 is skipped, since 0 * -inf is NaN.
        pairs = zip(self.scorers, token_scores, strict=True)
        weighted = sum(weight * scores for (weight, _), scores in pairs if weight)
        total = state.scores[..., None] + weighted  # (B, K, V)
        model_scores = token_scores[0] if self.scorers[0][0] else None
        allowed = allowed_tokens(self.config, state, total, model_scores)
        possible = total.shape[1] * (total.shape[2] - len(NEVER) - 1)  # neither NEVER nor EOS
        best = allowed.tokens.flatten(1).topk(min(self.config.beam, possible))
        state = state._replace(scorer_states=scorer_states)
        return Candidates(state, token_scores, allowed.eos, allowed.finished, *best, nan)

    def _score(self, state: BeamState) -> tuple[list[Tensor], list[Any], Tensor]:
        """Each scorer's scores (B, K, V) of the next token, unweighted, and its next state; and
        which utterances (B,) have a NaN of the model.
        """
        last = state.tokens[..., -1]
        pairs = zip(self.scorers, state.scorer_states, strict=True)
        results = [scorer.step(one, last) for (_, scorer), one in pairs]
        token_scores, states = map(list, zip(*results, strict=True))
        nan = token_scores[0].isnan().flatten(1).any(dim=1)
        return token_scores, states, nan

    def _collect_finished(
        self, candidates: Candidates, finished: Sequence[FinishedHypotheses]
    ) -> list[float]:
        """Add the hypotheses that end among the `beam` best to those of their utterances.

        -> the best score of those that do not end (B). All numbers that decide are read from the
        device at once, and a second time where a hypothesis has ended.
        """
        state, eos_scores = candidates.state, candidates.eos_scores
        everything = torch.cat([eos_scores, candidates.scores], dim=1)  # (B, K + K')
        last = everything.topk(min(self.config.beam, everything.shape[1])).values[:, -1:]
        ends = (eos_scores >= last) & eos_scores.isfinite()
        final = self.ranking.final(eos_scores, state.tokens.shape[2])
        K = eos_scores.shape[1]
        rows = rows_of_numbers(candidates.scores[:, :1], candidates.nan, ends, final)
        check_not_nan(any(row[1] for row in rows))
        entering = [  # b, k, score
            (b, k, row[2 + K + k])
            for b, row in enumerate(rows)
            for k in range(K)
            if row[2 + k] and row[2 + K + k] > finished[b].min_score
        ]
        if entering:
            *places, scores = zip(*entering, strict=True)
            found = candidates.finish(list(zip(*places, strict=True)), scores)
            for b, hypothesis in zip(places[0], found, strict=True):
                if hypothesis.score > finished[b].min_score:
                    finished[b].add(hypothesis)
        return [row[0] for row in rows]

    def _done(
        self,
        candidates: Candidates,
        b: int,
        best: float,
        max_length: int,
        finished: FinishedHypotheses,
    ) -> bool:
        """Whether utterance b, with its best unfinished score, needs no further step."""
        state = candidates.state
        if best == -torch.inf:
            if not finished.hypotheses:
                finished.add(state.unfinished(b, self.ranking))
            return True
        if any(weight < 0 for weight, _ in self.scorers):
            return False  # scores may still rise: there is no bound
        bound = self.ranking.bound(best, state.tokens.shape[2] + 1, max_length + 1)
        return finished.min_score >= bound


@torch.no_grad()
def beam_search(
    model: Scorer,
    memory: Memory,
    config: BeamConfig,
    *,
    nbest: int = 1,
    ctc: Tensor | None = None,
    others: Sequence[tuple[Scorer, Memory, Tensor | None]] = (),
    scorers: Sequence[WeightedScorer] = (),
    max_constant: float = MAX_CONSTANT,
) -> list[list[Hypothesis]]:
    """The `nbest` best hypotheses of every utterance, best first.

    A token scores (1 - ctc_weight) * model + ctc_weight * CTC + the weighted `scorers`, such as
    language models. ctc: the CTC head's log-probabilities (B, T, V). others: the same utterances at
    another speed or in another model, each with its model and ctc; the search uses the mean of
    their log-probabilities and counts frames in `memory`. A hypothesis has at most
    max_ratio * frames + max_constant tokens. Hypothesis.parts: the model, CTC if it has a weight,
    the scorers, which have the model's vocabulary. An utterance without a frame in one of the
    memories gives one empty hypothesis.

    Raises UserError for nbest out of range, a ctc_weight without ctc, and NaN from the model.
    """
    if not 1 <= nbest <= config.beam:
        raise UserError(f"nbest is {nbest}; it must be between 1 and beam ({config.beam})")
    models, memories, heads = zip((model, memory, ctc), *others, strict=True)
    active, memories = with_frames(*memories)
    weighted = [(1 - config.ctc_weight, _mean(models, memories))]
    if config.ctc_weight:
        if any(head is None for head in heads):
            raise UserError(
                f"ctc_weight is {config.ctc_weight}, but this model has no CTC head; set it to 0"
            )
        prefix_scorers = [CTCPrefixScorer(head[active]) for head in heads]
        weighted.append((config.ctc_weight, _mean(prefix_scorers, memories)))
    finished = [FinishedHypotheses(nbest) for _ in memory.valid]
    if len(active):
        max_length = length_limits(memories[0].valid, config.max_ratio, max_constant)
        search = BeamSearch(config, [*weighted, *scorers])
        state = search.start(memories[0], max_length)
        search.run(state, [finished[b] for b in active.tolist()])
    return [each.hypotheses or [Hypothesis((), 0.0, True)] for each in finished]


def _mean(scorers: Sequence[Scorer], memories: Sequence[Memory]) -> Scorer:
    """One scorer for each memory -> one for all."""
    return scorers[0] if len(scorers) == 1 else Ensemble(list(zip(scorers, memories, strict=True)))

"""The living hypotheses of a beam and one step of their growth.

Shapes: B utterances still in the batch, K living hypotheses of each, T memory frames, U tokens so
far, V vocabulary, S scorers, the model first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.decoding.follow import FollowRules
from asr.decoding.pool import Pool
from asr.decoding.score import Ranking, coverage
from asr.decoding.search import NEVER, Hypothesis, Scorer, checked
from asr.errors import UserError
from asr.nn.memory import Memory
from asr.tokens import EOS, SOS


class Living(NamedTuple):
    """The hypotheses that may still grow; a score of -inf marks a row that holds none."""

    states: list[Any]  # one of each scorer
    tokens: Tensor  # (B, K, 1 + U), SOS first
    scores: Tensor  # (B, K) weighted sums
    log_probs: Tensor  # (B, K, U) the model's
    parts: Tensor  # (B, K, S) unweighted sums
    attended: Tensor | None  # (B, K, T) summed attention, where coverage counts
    valid: Tensor  # (B, T)
    shortest: Tensor  # (B,)
    longest: Tensor  # (B,)


class Grown(NamedTuple):
    """One step's offers: how each hypothesis may end, and the best ways to go on."""

    living: Living  # unselected: states and attention after the step, all else from before it
    scored: list[Tensor]  # S of (B, K, V)
    ends: Tensor  # (B, K) scores with EOS
    content: Tensor  # (B, K) bool: Follow.content
    scores: Tensor  # (B, K') best continuations, best first
    choices: Tensor  # (B, K') each as old k * V + token


@dataclass(frozen=True)
class Growth:
    """How hypotheses grow, end, and compete."""

    weighted: Sequence[tuple[float, Scorer]]
    beam: int
    temperature: float
    rules: FollowRules
    ranking: Ranking
    quota: float  # ended hypotheses after which an utterance is done

    def run(self, memory: Memory, shortest: Tensor, longest: Tensor, pools: list[Pool]) -> None:
        """Fill one pool per utterance; limits (B,) in tokens without EOS."""
        living = self._seed(memory, shortest, longest)
        while pools:
            grown = self._grow(living)
            self._collect(grown, pools)
            best = grown.scores[:, 0].tolist()
            going = [b for b, pool in enumerate(pools) if not self._done(b, best[b], grown, pool)]
            living = self._select(grown, torch.tensor(going, device=grown.scores.device).long())
            pools = [pools[b] for b in going]

    def _seed(self, memory: Memory, shortest: Tensor, longest: Tensor) -> Living:
        utterances, like = len(memory.valid), memory.states
        covers = self.ranking.coverage_penalty > 0
        return Living(
            states=[scorer.start(memory) for _, scorer in self.weighted],
            tokens=torch.full((utterances, 1, 1), SOS, device=like.device),
            scores=torch.zeros(utterances, 1, device=like.device),
            log_probs=torch.zeros(utterances, 1, 0, device=like.device),
            parts=torch.zeros(utterances, 1, len(self.weighted), device=like.device),
            attended=torch.zeros_like(memory.valid[:, None], dtype=torch.float) if covers else None,
            valid=memory.valid,
            shortest=torch.minimum(shortest, longest),
            longest=longest,
        )

    def _grow(self, living: Living) -> Grown:
        scored, states = self._score(living)
        total = living.scores[..., None] + self._weigh(scored)  # (B, K, V)
        said = living.tokens[..., 1:]
        follow = self.rules(total, scored[0], said, living.shortest, living.longest)
        sayable = total.shape[2] - len(NEVER) - 1  # nor EOS
        best = follow.tokens.flatten(1).topk(min(self.beam, total.shape[1] * sayable))
        attended = living.attended
        if attended is not None:
            attended = attended + _attention(states[0])
        living = living._replace(states=states, attended=attended)
        return Grown(living, scored, follow.end, follow.content, best.values, best.indices)

    def _score(self, living: Living) -> tuple[list[Tensor], list[Any]]:
        last = living.tokens[..., -1]
        pairs = zip(self.weighted, living.states, strict=True)
        stepped = [scorer.step(state, last) for (_, scorer), state in pairs]
        scored, states = map(list, zip(*stepped, strict=True))
        scored[0] = checked(scored[0])
        if self.temperature != 1:
            scored[0] = (scored[0] / self.temperature).log_softmax(dim=2)
        for other in scored[1:]:
            if other.shape != scored[0].shape:
                raise UserError(
                    f"decoding: a scorer knows {other.shape[2]} tokens and the model "
                    f"{scored[0].shape[2]}; both must use one vocabulary"
                )
        return scored, states

    def _weigh(self, scored: list[Tensor]) -> Tensor:
        # Weight 0 is left out, for 0 * -inf is NaN.
        pairs = zip(self.weighted, scored, strict=True)
        return sum(weight * scores for (weight, _), scores in pairs if weight)

    def _collect(self, grown: Grown, pools: list[Pool]) -> None:
        """Move the hypotheses that ended among the `beam` best into their pools."""
        rivals = torch.cat([grown.ends, grown.scores], dim=1)  # (B, K + K')
        last = rivals.topk(min(self.beam, rivals.shape[1])).values[:, -1:]
        earned = (grown.ends >= last) & grown.ends.isfinite()
        ended = earned.nonzero().tolist()
        if not ended:
            return
        living = grown.living
        covered = torch.zeros_like(grown.ends)
        if living.attended is not None:
            covered = coverage(living.attended, living.valid)
        final = self.ranking.final(grown.ends, living.tokens.shape[2], covered).tolist()
        for b, k in ended:
            pools[b].ended += 1
            if final[b][k] > pools[b].entry:
                pools[b].add(_ended(grown, b, k, final[b][k], float(covered[b, k])))

    def _done(self, b: int, best: float, grown: Grown, pool: Pool) -> bool:
        """Whether no living hypothesis of utterance b can or need enter its pool."""
        if best == -torch.inf:
            if not pool.hypotheses:
                pool.add(_cut_off(grown.living, b, self.ranking))
            return True
        if pool.ended >= self.quota:
            return True
        if any(weight < 0 for weight, _ in self.weighted):
            return False  # scores may still rise: nothing is provable
        length = grown.living.tokens.shape[2]
        longest = int(grown.living.longest[b])
        return pool.entry >= self.ranking.bound(best, length + 1, longest + 1)

    def _select(self, grown: Grown, going: Tensor) -> Living:
        """Let the best continuations of the utterances `going` (B',) live on."""
        old = grown.living
        beam, vocabulary = grown.scored[0].shape[1:]
        choices = grown.choices[going]  # (B', K')
        rows = going[:, None] * beam + choices // vocabulary

        def take(kept: Tensor) -> Tensor:
            return kept.flatten(0, 1)[rows]

        def chosen(scores: Tensor) -> Tensor:
            return scores.flatten(1)[going].gather(1, choices)[..., None]  # (B', K', 1)

        pairs = zip(self.weighted, old.states, strict=True)
        states = [s.select(state, rows) for (_, s), state in pairs] if len(going) else []
        each = [chosen(scores) for scores in grown.scored]
        return Living(
            states=states,
            tokens=torch.cat([take(old.tokens), (choices % vocabulary)[..., None]], dim=2),
            scores=grown.scores[going],
            log_probs=torch.cat([take(old.log_probs), each[0]], dim=2),
            parts=take(old.parts) + torch.cat(each, dim=2),
            attended=None if old.attended is None else take(old.attended),
            valid=old.valid[going],
            shortest=old.shortest[going],
            longest=old.longest[going],
        )


def _attention(state: Any) -> Tensor:
    if state.attention is None:
        raise UserError(
            "coverage_penalty needs attention weights and this model gives none; set it to 0"
        )
    return state.attention


def _ended(grown: Grown, b: int, k: int, score: float, covered: float) -> Hypothesis:
    """Hypothesis k of utterance b, with EOS."""
    living = grown.living
    ends = torch.stack([scores[b, k, EOS] for scores in grown.scored])  # (S,)
    return Hypothesis(
        tokens=tuple(living.tokens[b, k, 1:].tolist()),
        score=score,
        finished=bool(grown.content[b, k]),
        log_probs=(*living.log_probs[b, k].tolist(), float(ends[0])),
        parts=tuple((living.parts[b, k] + ends).tolist()),
        covered=covered,
    )


def _cut_off(living: Living, b: int, ranking: Ranking) -> Hypothesis:
    """The best of utterance b as it stands: none could end, none can go on."""
    k = int(living.scores[b].argmax())
    tokens = tuple(living.tokens[b, k, 1:].tolist())
    return Hypothesis(
        tokens=tokens,
        score=float(ranking.final(living.scores[b, k], len(tokens))),
        finished=False,
        log_probs=tuple(living.log_probs[b, k].tolist()),
        parts=tuple(living.parts[b, k].tolist()),
    )

"""What a search needs of a model, what it hands back, and the simplest search: greedy.

A model of any family joins by three methods. Hypotheses stand in rows, K to an utterance, and the
memory is kept once per utterance. `select` moves rows as the beam does; a line of rows always
belongs to one utterance, so fewer lines mean that utterances have left.

Shapes: B utterances, K hypotheses of each, T memory frames, U tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from asr.errors import UserError
from asr.nn.memory import Memory
from asr.tokens import BLANK, EOS, SOS

NEVER = (BLANK, SOS)  # tokens no sentence holds


class State(Protocol):
    """A model's place in every hypothesis; a search reads only the attention."""

    @property
    def attention(self) -> Tensor | None:
        """The last step's weights (B, K, T); None before the first, or where there are none."""


class SearchModel(Protocol):
    """An encoder-decoder as a search sees it."""

    def start(self, memory: Memory) -> Any:
        """-> State before SOS with one hypothesis per utterance."""

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """state, tokens (B, K), SOS first -> log-probs (B, K, V) of the next token, State."""

    def select(self, state: Any, rows: Tensor) -> Any:
        """rows (B', K') number old hypotheses b * K + k -> State of B' utterances x K'."""


@dataclass(frozen=True)
class Hypothesis:
    """One sentence that a search proposes."""

    tokens: tuple[int, ...]  # without SOS and EOS
    score: float  # what the search ranks by
    finished: bool  # False where the length limit ended it and another token was likelier than EOS
    log_probs: tuple[float, ...] = ()  # the model's, one per token and one for EOS
    parts: tuple[float, ...] = ()  # unweighted sums: the model's log-probs, then each scorer's
    coverage: float = 0.0  # unweighted coverage penalty (score.py), where the search used it
    attention: Tensor | None = None  # (U + 1, T), EOS last, where the search was told to keep it


def length_limits(valid: Tensor, ratio: float, constant: float) -> Tensor:
    """valid (B, T) -> tokens (B,) int64: ratio * real frames + constant, rounded down."""
    return (valid.sum(dim=1) * ratio + constant).floor().clamp_min(0).long()


def heard(memory: Memory) -> tuple[Tensor, Memory]:
    """The utterances with at least one real frame: their numbers (B',) and their memory.

    The others say nothing: no attention can be formed over no frames.
    """
    kept = memory.valid.any(dim=1).nonzero().squeeze(1)
    if len(kept) == len(memory.valid):
        return kept, memory
    return kept, Memory(memory.states[kept], memory.valid[kept])


def checked(log_probs: Tensor) -> Tensor:
    """log_probs unchanged; raises UserError where the model has gone to NaN."""
    if log_probs.isnan().any():
        raise UserError("decoding: the model's log-probs are NaN; take a checkpoint from before it")
    return log_probs


@torch.no_grad()
def greedy(
    model: SearchModel,
    memory: Memory,
    *,
    max_ratio: float = 1.0,
    max_constant: float = 10.0,
    keep_attention: bool = False,
) -> list[Hypothesis]:
    """Take the likeliest token at every step, EOS included, until each utterance has ended.

    An utterance has at most max_ratio * memory frames + max_constant tokens; EOS is then forced
    and counted. score is the sum of log_probs. An utterance without a frame gives an empty
    hypothesis. Raises UserError where the model gives NaN.
    """
    results = [Hypothesis((), 0.0, True)] * len(memory.valid)
    active, memory = heard(memory)
    if len(active) == 0:
        return results
    limits = length_limits(memory.valid, max_ratio, max_constant)
    state = model.start(memory)
    trail = _Trail.empty(len(active), limits.device)
    while len(active):
        log_probs, state = model.step(state, trail.tokens[:, -1:])
        log_probs = checked(log_probs).squeeze(1).index_fill(1, _never(log_probs), -torch.inf)
        cut = limits < trail.tokens.shape[1]  # SOS stands in front
        wanted = log_probs.argmax(dim=1)
        chosen = wanted.masked_fill(cut, EOS)  # (B,)
        weights = state.attention if keep_attention else None
        trail = trail.extended(chosen, log_probs.gather(1, chosen[:, None]), weights)
        ended = chosen == EOS
        for row in ended.nonzero().squeeze(1).tolist():
            results[active[row]] = trail.hypothesis(row, finished=bool(wanted[row] == EOS))
        if ended.any():
            rows = (~ended).nonzero().squeeze(1)
            active, limits, trail = active[rows], limits[rows], trail.rows(rows)
            state = model.select(state, rows[:, None]) if len(rows) else state
    return results


def _never(like: Tensor) -> Tensor:
    return torch.tensor(NEVER, device=like.device)


@dataclass(frozen=True)
class _Trail:
    """What greedy has said so far."""

    tokens: Tensor  # (B, 1 + U), SOS first
    log_probs: Tensor  # (B, U)
    attention: Sequence[Tensor]  # U of (B, T)

    @classmethod
    def empty(cls, utterances: int, device: torch.device) -> "_Trail":
        tokens = torch.full((utterances, 1), SOS, device=device)
        return cls(tokens, torch.zeros(utterances, 0, device=device), ())

    def extended(self, chosen: Tensor, log_probs: Tensor, attention: Tensor | None) -> "_Trail":
        """chosen (B,), log_probs (B, 1), attention (B, 1, T) or None."""
        return _Trail(
            torch.cat([self.tokens, chosen[:, None]], dim=1),
            torch.cat([self.log_probs, log_probs], dim=1),
            self.attention if attention is None else [*self.attention, attention[:, 0]],
        )

    def rows(self, rows: Tensor) -> "_Trail":
        attention = [weights[rows] for weights in self.attention]
        return _Trail(self.tokens[rows], self.log_probs[rows], attention)

    def hypothesis(self, row: int, finished: bool) -> Hypothesis:
        """The sentence of a row that has just said EOS."""
        log_probs = tuple(self.log_probs[row].tolist())
        attention = torch.stack([w[row] for w in self.attention]) if self.attention else None
        total = sum(log_probs)
        tokens = tuple(self.tokens[row, 1:-1].tolist())
        return Hypothesis(tokens, total, finished, log_probs, (total,), attention=attention)

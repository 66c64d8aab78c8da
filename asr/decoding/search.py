"""What a search needs of a model, what it hands back, and the simplest search: greedy.

A model of any family joins by three methods. Hypotheses stand in rows, K to an utterance, and the
memory is kept once per utterance. `select` moves rows as the beam does; a line of rows always
belongs to one utterance, so fewer lines mean that utterances have left.

Shapes: B utterances, K hypotheses of each, T memory frames, U tokens, V vocabulary.
"""

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


class Scorer(Protocol):
    """Anything that scores the next token: an encoder-decoder, a language model, CTC.

    Scores are log-probs, at most 0: the beam's exact stop relies on that.
    """

    def start(self, memory: Memory) -> Any:
        """-> State before SOS with one hypothesis per utterance."""

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """state, tokens (B, K), SOS first -> scores (B, K, V) of the next token, State."""

    def select(self, state: Any, rows: Tensor) -> Any:
        """rows (B', K') number old hypotheses b * K + k -> State of B' utterances x K'."""


class SearchModel(Scorer, Protocol):
    """An encoder-decoder as a search sees it: a Scorer whose states are of type State."""


@dataclass(frozen=True)
class Hypothesis:
    """One sentence that a search proposes."""

    tokens: tuple[int, ...]  # without SOS and EOS
    score: float  # what the search ranks by
    finished: bool  # False where the length limit ended it and another token was likelier than EOS
    log_probs: tuple[float, ...] = ()  # the model's, one per token and one for EOS
    parts: tuple[float, ...] = ()  # unweighted sums: the model's log-probs, then each scorer's
    covered: float = 0.0  # unweighted coverage penalty (score.py), where the search used it


def length_limits(valid: Tensor, ratio: float, constant: float) -> Tensor:
    """valid (B, T) -> tokens (B,) int64: ratio * real frames + constant, rounded down."""
    return (valid.sum(dim=1) * ratio + constant).floor().clamp_min(0).long()


def heard(*memories: Memory) -> tuple[Tensor, list[Memory]]:
    """The utterances with a real frame in every memory: their numbers (B',) and their memories.

    The others say nothing: no attention can be formed over no frames.
    """
    real = torch.stack([memory.valid.any(dim=1) for memory in memories])
    kept = real.all(dim=0).nonzero().squeeze(1)
    return kept, [only(memory, kept) for memory in memories]


def only(memory: Memory, kept: Tensor) -> Memory:
    """The utterances kept (B',), in order; the memory itself, not a copy, where they are all."""
    if len(kept) == len(memory.valid):
        return memory
    return Memory(memory.states[kept], memory.valid[kept])


def checked(log_probs: Tensor) -> Tensor:
    """log_probs unchanged; raises UserError where the model has gone to NaN."""
    if log_probs.isnan().any():
        raise UserError("decoding: the model's log-probs are NaN; take a checkpoint from before it")
    return log_probs


@torch.no_grad()
def greedy(
    model: SearchModel, memory: Memory, *, max_ratio: float = 1.0, max_constant: float = 10.0
) -> list[Hypothesis]:
    """Take the likeliest token at every step, EOS included, until each utterance has ended.

    An utterance has at most max_ratio * memory frames + max_constant tokens; EOS is then forced
    and counted. score is the sum of log_probs. An utterance without a frame gives an empty
    hypothesis. Raises UserError where the model gives NaN.
    """
    results = [Hypothesis((), 0.0, True)] * len(memory.valid)
    active, (memory,) = heard(memory)
    if len(active) == 0:
        return results
    limits = length_limits(memory.valid, max_ratio, max_constant)
    never = torch.tensor(NEVER, device=limits.device)
    state = model.start(memory)
    tokens = torch.full_like(active[:, None], SOS)  # (B, 1 + U)
    each = torch.zeros(len(active), 0, device=limits.device)  # (B, U)
    while len(active):
        log_probs, state = model.step(state, tokens[:, -1:])
        log_probs = checked(log_probs).squeeze(1).index_fill(1, never, -torch.inf)  # (B, V)
        wanted = log_probs.argmax(dim=1, keepdim=True)
        chosen = wanted.masked_fill(limits[:, None] < tokens.shape[1], EOS)
        tokens = torch.cat([tokens, chosen], dim=1)
        each = torch.cat([each, log_probs.gather(1, chosen)], dim=1)
        ended = (chosen == EOS).squeeze(1)
        for row in ended.nonzero().squeeze(1).tolist():
            finished = bool(wanted[row] == EOS)
            results[active[row]] = _said(tokens[row], each[row], finished)
        if ended.any():
            rows = (~ended).nonzero().squeeze(1)
            active, limits, tokens, each = active[rows], limits[rows], tokens[rows], each[rows]
            state = model.select(state, rows[:, None]) if len(rows) else state
    return results


def _said(tokens: Tensor, each: Tensor, finished: bool) -> Hypothesis:
    """tokens (U + 2,) from SOS to EOS, each (U + 1,)."""
    log_probs = tuple(each.tolist())
    total = sum(log_probs)
    return Hypothesis(tuple(tokens[1:-1].tolist()), total, finished, log_probs, (total,))

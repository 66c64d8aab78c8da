"""What a search needs of a model, what it returns, and the simplest search: greedy.

A model of any family, or a language model, joins a search by three methods: start, step, select.
Hypotheses are kept in rows, K per utterance, and the memory once per utterance. Each row that
`select` takes belongs to one utterance, so fewer rows mean that utterances have finished.

Shapes: B utterances, K hypotheses of each, T memory frames, U tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from asr.data.tokenizer import BLANK, EOS, SOS
from asr.errors import UserError
from asr.nn.attention import Memory

NEVER = (BLANK, SOS)  # tokens that no hypothesis contains
MAX_CONSTANT = 10.0  # tokens that a search allows in addition to max_ratio * frames


class Scorer(Protocol):
    """Anything that scores the next token: an encoder-decoder, a language model, CTC.

    Scores are log-probabilities, at most 0: the exact stop of beam search relies on it. The state
    of a speech model has `attention`: the last step's weights (B, K, T), None before the first step
    and where there are none.
    """

    def start(self, memory: Memory) -> Any:
        """-> state before SOS with one hypothesis per utterance."""

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """state, tokens (B, K), SOS first -> scores (B, K, V) of the next token, next state."""

    def select(self, state: Any, rows: Tensor) -> Any:
        """rows (B', K'), numbers b * K + k of hypotheses -> state of B' utterances x K'."""


@dataclass(frozen=True)
class Hypothesis:
    """A sentence that a search proposes."""

    tokens: tuple[int, ...]  # without SOS and EOS
    score: float  # what the search ranks by
    finished: bool  # False where the length limit ended it and another token was likelier than EOS
    log_probs: tuple[float, ...] = ()  # the model's, one per token and one for EOS
    parts: tuple[float, ...] = ()  # unweighted sums: the model's log-probs, then each scorer's
    covered: float = 0.0  # unweighted coverage penalty, where beam search used it


def length_limits(valid: Tensor, ratio: float, constant: float) -> Tensor:
    """valid (B, T) -> tokens (B,) int64: ratio * real frames + constant, rounded down."""
    return (valid.sum(dim=1) * ratio + constant).floor().clamp_min(0).long()


def with_frames(*memories: Memory) -> tuple[Tensor, list[Memory]]:
    """Numbers (B',) of the utterances with a real frame in every memory, and their memories.

    The others have empty hypotheses: attention over no frames is undefined.
    """
    real = torch.stack([memory.valid.any(dim=1) for memory in memories])
    kept = real.all(dim=0).nonzero().squeeze(1)
    if len(kept) == real.shape[1]:  # no copy
        return kept, list(memories)
    return kept, [Memory(memory.states[kept], memory.valid[kept]) for memory in memories]


def check_not_nan(log_probs: Tensor) -> Tensor:
    """Return log_probs unchanged. Raises UserError for NaN."""
    if log_probs.isnan().any():
        raise UserError("decoding: the model's log-probs are NaN; use an earlier checkpoint")
    return log_probs


@torch.no_grad()
def greedy(
    model: Scorer, memory: Memory, max_ratio: float, max_constant: float = MAX_CONSTANT
) -> list[Hypothesis]:
    """Take the likeliest token at every step, EOS included, until each utterance has ended.

    An utterance has at most max_ratio * memory frames + max_constant tokens; EOS is then forced
    and counted. score is the sum of log_probs. An utterance without a frame gives an empty
    hypothesis. Raises UserError where the model gives NaN.
    """
    results = [Hypothesis((), 0.0, True)] * len(memory.valid)
    active, (memory,) = with_frames(memory)
    if len(active) == 0:
        return results
    limits = length_limits(memory.valid, max_ratio, max_constant)
    never = torch.tensor(NEVER, device=limits.device)
    state = model.start(memory)
    tokens = torch.full_like(active[:, None], SOS)  # (B, 1 + U)
    each = torch.zeros(len(active), 0, device=limits.device)  # (B, U) log-probs of tokens
    while len(active):
        log_probs, state = model.step(state, tokens[:, -1:])
        log_probs = check_not_nan(log_probs).squeeze(1).index_fill(1, never, -torch.inf)  # (B, V)
        likeliest = log_probs.argmax(dim=1, keepdim=True)
        chosen = likeliest.masked_fill(limits[:, None] < tokens.shape[1], EOS)
        tokens = torch.cat([tokens, chosen], dim=1)
        each = torch.cat([each, log_probs.gather(1, chosen)], dim=1)
        ended = (chosen == EOS).squeeze(1)
        for row in ended.nonzero().squeeze(1).tolist():
            ids, log_prob = tuple(tokens[row, 1:-1].tolist()), tuple(each[row].tolist())
            finished, total = bool(likeliest[row] == EOS), sum(log_prob)
            results[active[row]] = Hypothesis(ids, total, finished, log_prob, parts=(total,))
        if ended.any():
            rows = (~ended).nonzero().squeeze(1)
            active, limits, tokens, each = active[rows], limits[rows], tokens[rows], each[rows]
            state = model.select(state, rows[:, None]) if len(rows) else state
    return results


@torch.no_grad()
def sample(
    model: Scorer,
    count: int,
    max_tokens: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Draw `count` sentences of at most `max_tokens` tokens, the same on every device.

    Raises UserError where the model gives NaN.
    """
    if count == 0:
        return []
    valid = torch.ones(count, 1, dtype=torch.bool, device=device)
    state = model.start(Memory(torch.zeros(count, 1, 1, device=device), valid))
    never = torch.tensor(NEVER, device=device)
    tokens = [torch.full((count, 1), SOS, device=device)]
    for _ in range(max_tokens):
        log_probs, state = model.step(state, tokens[-1])
        log_probs = check_not_nan(log_probs)[:, 0].index_fill(1, never, -torch.inf)  # (count, V)
        probs = log_probs.exp().float().cpu()
        tokens.append(torch.multinomial(probs, 1, generator=generator).to(device))
    sentences = torch.cat(tokens, dim=1)[:, 1:].tolist()
    return [ids[: ids.index(EOS)] if EOS in ids else ids for ids in sentences]

"""What a search needs of a model, what it returns, and the simplest search: greedy.

A model of any family, or a language model, joins a search by three methods: start, step, select.
Hypotheses are kept in rows, K per utterance, and the memory once per utterance. Each row that
`select` takes belongs to one utterance, so fewer rows mean that utterances have finished.

Shapes: B utterances, K hypotheses of each, T memory frames, U tokens, V vocabulary.
"""

from collections.abc import Sequence
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

    Scores are log-probabilities, at most 0: the exact stop of beam search relies on it.
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


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 numbers on a device, which is not waited for."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


def rows_of_numbers(*columns: Tensor) -> list[list[float]]:
    """Columns (N,) or (N, ...) of any types side by side, as N lists: one wait for the device."""
    return torch.cat([part.reshape(len(part), -1).double() for part in columns], dim=1).tolist()


def check_not_nan(is_nan: bool) -> None:
    """Raises UserError where a log-probability of the model is NaN."""
    if is_nan:
        raise UserError("decoding: the model's log-probs are NaN; use an earlier checkpoint")


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
    never = indices(NEVER, limits.device)
    state = model.start(memory)
    tokens = torch.full_like(active[:, None], SOS)  # (B, 1 + U)
    each = torch.zeros(len(active), 0, device=limits.device)  # (B, U) log-probs of tokens
    numbers = active.tolist()  # of the utterances still searched
    while numbers:
        log_probs, state = model.step(state, tokens[:, -1:])
        nan = log_probs.isnan().flatten(1).any(dim=1)
        log_probs = log_probs.squeeze(1).index_fill(1, never, -torch.inf)  # (B, V)
        likeliest = log_probs.argmax(dim=1, keepdim=True)
        chosen = likeliest.masked_fill(limits[:, None] < tokens.shape[1], EOS)
        tokens = torch.cat([tokens, chosen], dim=1)
        each = torch.cat([each, log_probs.gather(1, chosen)], dim=1)
        ends, nans = zip(*rows_of_numbers(chosen == EOS, nan), strict=True)
        check_not_nan(any(nans))
        if not any(ends):
            continue
        ended = indices([row for row, end in enumerate(ends) if end], tokens.device)
        parts = tokens[ended, 1:-1], each[ended], likeliest[ended] == EOS
        width = tokens.shape[1] - 2
        names = (number for number, end in zip(numbers, ends, strict=True) if end)
        for number, found in zip(names, rows_of_numbers(*parts), strict=True):
            ids, log_prob = tuple(map(int, found[:width])), tuple(found[width:-1])
            total = sum(log_prob)
            results[number] = Hypothesis(ids, total, bool(found[-1]), log_prob, parts=(total,))
        left = [row for row, end in enumerate(ends) if not end]
        numbers, rows = [numbers[row] for row in left], indices(left, tokens.device)
        limits, tokens, each = limits[rows], tokens[rows], each[rows]
        state = model.select(state, rows[:, None]) if left else state
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
    never = torch.tensor(NEVER)
    tokens = [torch.full((count, 1), SOS, device=device)]
    for _ in range(max_tokens):
        log_probs, state = model.step(state, tokens[-1])
        log_probs = log_probs[:, 0].cpu()  # (count, V)
        check_not_nan(bool(log_probs.isnan().any()))
        probs = log_probs.index_fill(1, never, -torch.inf).exp().float()
        tokens.append(torch.multinomial(probs, 1, generator=generator).to(device))
    sentences = torch.cat(tokens, dim=1)[:, 1:].tolist()
    return [ids[: ids.index(EOS)] if EOS in ids else ids for ids in sentences]

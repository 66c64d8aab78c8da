"""Decoding a CTC head alone: the best path, and the best sentence by prefix beam search.

Graves et al. 2006. A path gives one label per frame; equal neighbours are joined and blanks
dropped. A sentence's probability is the sum over all paths that say it, so the likeliest sentence
need not be the likeliest path's. Prefix beam search (Hannun et al. 2014, algorithm 1) walks the
frames and keeps, of each of the best prefixes, the mass of its paths that end in blank and of those
that end in its last token.

Shapes: B utterances, T frames, V vocabulary, blank included.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor

from asr.decoding.search import Hypothesis
from asr.errors import UserError
from asr.tokens import BLANK

Prefix = tuple[int, ...]
Beam = dict[Prefix, tuple[float, float]]  # log-probs of the paths ending in blank, and in the token


def collapse(path: list[int]) -> list[int]:
    """A path's labels -> the tokens it says: equal neighbours joined, blanks dropped."""
    neighbours = zip([BLANK, *path], path, strict=False)
    return [label for before, label in neighbours if label not in (before, BLANK)]


@torch.no_grad()
def ctc_greedy(log_probs: Tensor, valid: Tensor) -> list[list[int]]:
    """log_probs (B, T, V), valid (B, T) -> the tokens of each utterance's likeliest path."""
    paths = log_probs.argmax(dim=2).masked_fill(~valid, BLANK)
    return [collapse(path) for path in paths.tolist()]


@torch.no_grad()
def ctc_beam_search(
    log_probs: Tensor, valid: Tensor, beam: int = 8, *, nbest: int = 1, tokens: int = 20
) -> list[list[Hypothesis]]:
    """log_probs (B, T, V), valid (B, T) -> each utterance's nbest sentences, best first.

    score is the log-prob of all paths found to say the sentence. In each frame only the `tokens`
    likeliest are tried, and blank. Raises UserError for a setting out of range.
    """
    if beam < 1:
        raise UserError(f"beam is {beam}; it must be 1 or more")
    if not 1 <= nbest <= beam:
        raise UserError(f"nbest is {nbest}; it must lie between 1 and the beam ({beam})")
    if tokens < 1:
        raise UserError(f"tokens is {tokens}; it must be 1 or more")
    best = log_probs.topk(min(tokens, log_probs.shape[2]), dim=2)
    results = []
    for b, length in enumerate(valid.sum(dim=1).tolist()):
        blanks, labels, scores = (
            kept[b, :length].tolist() for kept in (log_probs[..., BLANK], best.indices, best.values)
        )
        prefixes: Beam = {(): (0.0, -math.inf)}
        for blank, *frame in zip(blanks, labels, scores, strict=True):
            prefixes = _pruned(_frame(prefixes, blank, *frame), beam)
        pairs = _pruned(prefixes, nbest).items()
        results.append([Hypothesis(prefix, _add(*masses), True) for prefix, masses in pairs])
    return results


def _frame(prefixes: Beam, blank: float, labels: list[int], scores: list[float]) -> Beam:
    """Take every prefix one frame on: by a blank, its last token again, or a new token."""
    in_blank: dict[Prefix, float] = defaultdict(lambda: -math.inf)
    in_token: dict[Prefix, float] = defaultdict(lambda: -math.inf)
    for prefix, (after_blank, after_token) in prefixes.items():
        either = _add(after_blank, after_token)
        in_blank[prefix] = either + blank
        for label, score in zip(labels, scores, strict=True):
            if label == BLANK:
                continue
            longer = (*prefix, label)
            if prefix and prefix[-1] == label:  # said twice only if a blank lies between
                in_token[prefix] = _add(in_token[prefix], after_token + score)
                in_token[longer] = _add(in_token[longer], after_blank + score)
            else:
                in_token[longer] = _add(in_token[longer], either + score)
    return {prefix: (in_blank[prefix], in_token[prefix]) for prefix in {**in_blank, **in_token}}


def _pruned(prefixes: Beam, beam: int) -> Beam:
    """The likeliest prefixes, best first."""
    ranked = sorted(prefixes.items(), key=lambda pair: _add(*pair[1]), reverse=True)
    return dict(ranked[:beam])


def _add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    low, high = min(a, b), max(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))

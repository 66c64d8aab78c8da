"""When each word was said, and how sure the model is of it.

Token spans come from CTC's forced alignment where there is a CTC head and the tokens fit into the
frames (fast speech may not), else from attention: the monotonic path of frames with the most
attention (Viterbi), one frame per token. Words gather the spans of their tokens.

Shapes: T memory frames, U tokens, V vocabulary; one utterance at a time, real frames only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torchaudio.functional import forced_align

from asr.tokens import BLANK

REACH = 1.5  # frames that attention's spans go at most beyond their peaks

Span = tuple[float, float]  # frames: start, end (not included)


@dataclass(frozen=True)
class Word:
    """A word with its place in the audio."""

    text: str
    start: float  # seconds
    end: float  # seconds
    confidence: float  # 0 to 1: the geometric mean of its tokens' probabilities


def token_spans(
    tokens: Sequence[int], ctc: Tensor | None = None, attention: Tensor | None = None
) -> list[Span]:
    """Spans of U tokens by CTC log-probs (T, V) where they fit, else by attention (U, T).

    Rows of attention after the first U are left out (EOS). Without any of the two, or where CTC has
    too few frames and there is no attention, the tokens share the frames evenly.
    """
    if not tokens:
        return []
    if ctc is not None and fits(tokens, len(ctc)):
        return ctc_spans(tokens, ctc)
    if attention is not None and attention.shape[1]:
        return attention_spans(attention[: len(tokens)])
    frames = 0 if ctc is None else len(ctc)
    return [(u * frames / len(tokens), (u + 1) * frames / len(tokens)) for u in range(len(tokens))]


def fits(tokens: Sequence[int], frames: int) -> bool:
    """Whether CTC can say the tokens: each needs a frame, and a repeat a blank before it."""
    return frames >= len(tokens) + sum(a == b for a, b in pairwise(tokens))


def ctc_spans(tokens: Sequence[int], log_probs: Tensor) -> list[Span]:
    """The likeliest path that says tokens: log_probs (T, V) -> U spans of the tokens' own frames.

    The tokens must fit.
    """
    assert fits(tokens, len(log_probs)), (len(tokens), len(log_probs))
    targets = torch.tensor([tokens], dtype=torch.int32, device=log_probs.device)
    path, _ = forced_align(log_probs[None].float(), targets, blank=BLANK)
    starts, ends, before = [], [], BLANK
    for t, label in enumerate([*path[0].tolist(), BLANK]):
        if label != before:
            if before != BLANK:
                ends.append(t)
            if label != BLANK:
                starts.append(t)
        before = label
    return list(zip(starts, ends, strict=True))


def ctc_log_probs(
    tokens: Sequence[int], spans: Sequence[Span], log_probs: Tensor
) -> tuple[float, ...]:
    """Each of U tokens in the surest frame of its span (U); log_probs (T, V).

    What a CTC head alone knows of a token, where no decoder has scored it.
    """
    return tuple(
        float(log_probs[int(start) : max(int(end), int(start) + 1), token].max())
        for token, (start, end) in zip(tokens, spans, strict=True)
    )


def attention_spans(attention: Tensor) -> list[Span]:
    """attention (U, T) -> U spans that meet half-way between the tokens' peaks, or are REACH long.

    The peaks are the non-decreasing frames t_1 <= ... <= t_U with the largest product of weights.
    """
    scores = attention.cpu().double().clamp_min(1e-12).log()
    best, sources = scores[0], []
    for row in scores[1:]:
        reached, source = best.cummax(dim=0)
        best = reached + row
        sources.append(source)
    peaks = [int(best.argmax())]
    for source in reversed(sources):
        peaks.append(int(source[peaks[-1]]))
    peaks.reverse()
    between = [(a + b + 1) / 2 for a, b in pairwise(peaks)]
    edges = pairwise([peaks[0], *between, peaks[-1] + 1])
    return [
        (max(start, peak - REACH), min(end, peak + 1 + REACH))
        for peak, (start, end) in zip(peaks, edges, strict=True)
    ]


def group_words(
    pieces: Sequence[str],
    spans: Sequence[Span],
    log_probs: Sequence[float],
    frame_seconds: float,
) -> list[Word]:
    """U token texts, in which spaces part words, with spans and log-probs -> words in order.

    A token belongs to every word it has a letter of; one without letters belongs to none.
    """
    assert len(pieces) == len(spans) <= len(log_probs), (len(pieces), len(spans), len(log_probs))
    letters = [(letter, u) for u, piece in enumerate(pieces) for letter in piece]
    words: list[Word] = []
    text, members = "", []
    for letter, u in [*letters, (" ", 0)]:
        if not letter.isspace():
            text += letter
            members.append(u)
        elif text:
            words.append(_word(text, sorted(set(members)), spans, log_probs, frame_seconds))
            text, members = "", []
    return words


def _word(
    text: str,
    members: list[int],
    spans: Sequence[Span],
    log_probs: Sequence[float],
    frame_seconds: float,
) -> Word:
    mean = sum(log_probs[u] for u in members) / len(members)
    start, end = spans[members[0]][0], spans[members[-1]][1]
    return Word(text, start * frame_seconds, end * frame_seconds, min(1.0, math.exp(mean)))

"""When each word was said, and how sure the model is of it.

Token spans come from CTC's forced alignment where there is a CTC head, else from attention: the
monotonic path of frames with the most attention (Viterbi), one frame per token. Words gather the
spans of their tokens.

Nothing ties CTC on a bidirectional LSTM to the moment at which a letter is heard: trained on the
spoken numbers it says them 200 ms off, where attention is 50 ms off. So where attention is known
and the two lie apart, attention is believed.

Shapes: T memory frames, U tokens, V vocabulary; one utterance at a time, real frames only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torchaudio.functional import forced_align

from asr.tokens import BLANK

APART = 3.0  # frames between CTC's and attention's median token from which on attention is believed
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
    """Spans of U tokens by CTC log-probs (T, V), by attention (U, T), or by the better of both.

    Rows of attention after the first U are left out (EOS). Without any of the two, or where CTC has
    too few frames and there is no attention, the tokens share the frames evenly.
    """
    if not tokens:
        return []
    aligned = None if ctc is None else ctc_spans(tokens, ctc)
    if attention is not None and attention.shape[1]:
        looked = attention_spans(attention[: len(tokens)])
        return looked if aligned is None or _apart(aligned, looked) > APART else aligned
    frames = 0 if ctc is None else len(ctc)
    even = [(u * frames / len(tokens), (u + 1) * frames / len(tokens)) for u in range(len(tokens))]
    return aligned or even


def _apart(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Frames between the middles of the median token."""
    return median(abs(sum(a) - sum(b)) / 2 for a, b in zip(one, other, strict=True))


def ctc_spans(tokens: Sequence[int], log_probs: Tensor) -> list[Span] | None:
    """The likeliest path that says tokens: log_probs (T, V) -> U spans of the tokens' own frames.

    None where T frames cannot say them: every token needs one, and a blank before a repeat.
    """
    repeats = sum(a == b for a, b in pairwise(tokens))
    if len(log_probs) < len(tokens) + repeats:
        return None
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

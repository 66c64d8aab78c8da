"""Where the tokens and words of a hypothesis are in the audio, and whether it can be right.

Token spans come from CTC's forced alignment where there is a CTC head and the tokens fit into the
frames (in fast speech they may not), else from attention: the monotonic path of frames with the
most attention (Viterbi), one frame per token. A word covers the spans of its tokens.

Coverage and repetition show a hypothesis that loops or skips speech, which its score does not.

Shapes: T memory frames, U tokens, V vocabulary; one utterance at a time, real frames only.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby, pairwise
from operator import mul

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchaudio.functional import forced_align

from asr.data.tokenizer import BLANK, SOS
from asr.nn.attention import Memory
from asr.words import WORD, begins_after_space

TokenSpan = tuple[float, float]  # frames: start, end (exclusive)
REACH = 1.5  # frames: the most that a span by attention extends beyond its peak
MIN_ATTENTION = 0.5  # tokens' worth of attention in a covered window (tau of Chorowski & Jaitly)
NGRAM = 4
MIN_COVERAGE, MAX_REPETITION = 0.5, 0.75  # outside of these a hypothesis is flagged


@dataclass(frozen=True)
class TimedWord:
    """A word (asr/words.py) with its times in the audio."""

    text: str
    start: float  # seconds
    end: float
    confidence: float  # 0 to 1: the geometric mean of its tokens' probabilities
    spaced: bool = True  # a space separates it from the word before


def token_spans(
    tokens: Sequence[int], ctc: Tensor | None = None, attention: Tensor | None = None
) -> list[TokenSpan]:
    """Spans of U tokens by CTC log-probs (T, V) where they fit, else by attention (U, T).

    Rows of attention after the first U (EOS) are ignored.
    """
    if not tokens:
        return []
    if ctc is not None and has_ctc_path(tokens, len(ctc)):
        return ctc_spans(tokens, ctc)
    assert attention is not None, "tokens that CTC does not fit need attention"
    return attention_spans(attention[: len(tokens)])


def has_ctc_path(tokens: Sequence[int], frames: int) -> bool:
    """Whether the tokens fit: CTC needs a frame for each, and one for a blank before a repeat."""
    return frames >= len(tokens) + sum(a == b for a, b in pairwise(tokens))


def ctc_spans(tokens: Sequence[int], log_probs: Tensor) -> list[TokenSpan]:
    """The tokens' likeliest path: log_probs (T, V) -> U spans of frames. The tokens must fit."""
    assert has_ctc_path(tokens, len(log_probs)), (len(tokens), len(log_probs))
    targets = torch.tensor([tokens], dtype=torch.int32, device=log_probs.device)
    path, _ = forced_align(log_probs[None].float(), targets, blank=BLANK)
    spans, t = [], 0
    for label, run in groupby(path[0].tolist()):
        start, t = t, t + len(list(run))
        if label != BLANK:
            spans.append((start, t))
    return spans


def ctc_log_probs(
    tokens: Sequence[int], spans: Sequence[TokenSpan], log_probs: Tensor
) -> tuple[float, ...]:
    """log_probs (T, V) -> the highest of each token in its span (U), where no decoder scored it."""
    return tuple(
        float(log_probs[int(start) : max(int(end), int(start) + 1), token].max())
        for token, (start, end) in zip(tokens, spans, strict=True)
    )


def attention_spans(attention: Tensor) -> list[TokenSpan]:
    """attention (U, T) -> U spans that meet half-way between peaks, at most REACH beyond a peak.

    The peaks are the non-decreasing frames t_1 <= ... <= t_U with the largest product of weights.
    """
    scores = attention.cpu().double().clamp_min(1e-12).log()
    best, sources = scores[0], []
    for row in scores[1:]:
        highest, source = best.cummax(dim=0)
        best = highest + row
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
    spans: Sequence[TokenSpan],
    log_probs: Sequence[float],
    frame_seconds: float,
) -> list[TimedWord]:
    """U token texts with spans and log-probs -> words (asr/words.py) in order.

    A token belongs to every word of which it has a letter.
    """
    assert len(pieces) == len(spans) <= len(log_probs), (len(pieces), len(spans), len(log_probs))
    text = "".join(pieces)
    owners = [u for u, piece in enumerate(pieces) for _ in piece]
    words = []
    for match in WORD.finditer(text):
        tokens = sorted(set(owners[match.start() : match.end()]))
        start, end = spans[tokens[0]][0] * frame_seconds, spans[tokens[-1]][1] * frame_seconds
        mean = sum(log_probs[u] for u in tokens) / len(tokens)
        spaced = text[match.start() - 1].isspace() if words else begins_after_space(text)
        words.append(TimedWord(match[0], start, end, min(1.0, math.exp(mean)), spaced))
    return words


def join_words(words: Sequence[TimedWord]) -> str:
    """The text of words in order."""
    return "".join(" " * word.spaced + word.text for word in words).strip()


@dataclass(frozen=True)
class HypothesisHealth:
    """Measurements of one hypothesis."""

    coverage: float | None  # share of windows of the audio that were attended; low: skipped speech
    repetition: float  # share of n-grams that occurred before; high: a loop

    @property
    def flags(self) -> tuple[str, ...]:
        """Of "low coverage" (it skipped audio) and "repetition" (it is a loop) those that hold."""
        low = self.coverage is not None and self.coverage < MIN_COVERAGE
        return ("low coverage",) * low + ("repetition",) * (self.repetition > MAX_REPETITION)


def hypothesis_health(tokens: Sequence[int], attention: Tensor, window: int) -> HypothesisHealth:
    """U tokens with attention (U, T), or (U + 1, T) with a row for EOS.

    window: frames in which attention must be spent somewhere, about 1 s.
    """
    return HypothesisHealth(coverage(attention[: len(tokens)], window), repetition(tokens))


def mean_health(parts: Sequence[HypothesisHealth], lengths: Sequence[int]) -> HypothesisHealth:
    """Mean over the segments of one recording, weighted by length; all have a coverage."""
    if not parts:
        return HypothesisHealth(None, 0.0)
    columns = zip(*map(astuple, parts), strict=True)
    return HypothesisHealth(*(sum(map(mul, column, lengths)) / sum(lengths) for column in columns))


def coverage(attention: Tensor, window: int) -> float:
    """attention (U, T) -> share of windows with MIN_ATTENTION or more; 1 for no frames.

    window: frames.

    Chorowski & Jaitly 2016 count single frames; attention is peaky, so we count windows. The last
    window includes the remaining frames.
    """
    attended = attention.sum(dim=0)
    if not len(attended):
        return 1.0
    windows = max(1, len(attended) // window)
    parts = attended.tensor_split([window * k for k in range(1, windows)])
    return sum(float(part.sum()) >= MIN_ATTENTION for part in parts) / windows


def repetition(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of n-grams that occurred before (Welleck et al. 2020, seq-rep-n): 0 is none."""
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


@torch.no_grad()
def teacher_forced_attention(
    model: nn.Module, memory: Memory, tokens: Tensor, lengths: Tensor
) -> list[Tensor]:
    """Attention while the decoder reads texts, tokens (B, U) of those lengths (B,).

    -> (U + 1, T) float32 of each utterance, on the CPU.
    """
    inputs = functional.pad(tokens, (1, 0), value=SOS)
    _, weights = model.decode_and_attend(memory, inputs.to(memory.states.device))
    sizes = zip(lengths.tolist(), memory.valid.sum(dim=1).tolist(), strict=True)
    return [w[: u + 1, :t].float().cpu() for w, (u, t) in zip(weights, sizes, strict=True)]


def diagonality(weights: np.ndarray) -> float:
    """How well attention (U, T) advances through the utterance with the tokens, 0 to 1.

    Regression of each token's mean frame, as a share of T, on its position, as a share of U: the
    slope (at most 1) times the correlation. Uniform attention gives about 0, a diagonal 1.
    """
    U, T = weights.shape
    if U < 3 or T < 2:
        return 1.0
    position = np.linspace(0.0, 1.0, U)
    frame = weights @ np.linspace(0.0, 1.0, T)
    if frame.std() < 1e-9:
        return 0.0
    covariance = np.mean((position - position.mean()) * (frame - frame.mean()))
    slope = covariance / position.var()
    correlation = covariance / (position.std() * frame.std())
    return float(np.clip(min(slope, 1.0) * correlation, 0.0, 1.0)) if slope > 0 else 0.0

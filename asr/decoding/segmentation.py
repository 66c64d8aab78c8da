"""Audio longer than the training utterances: split it at pauses, merge the words of the segments.

A split is made at the quietest point of a segment's second half, if that is a pause. Without a
pause, the segments overlap, and are merged where their words in the overlap agree. Audio is read in
blocks, and no more of it is held than a segment and a block.

Shapes: S samples.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from asr.decoding.alignment import TimedWord

HOP = 0.01  # seconds between measurements of energy
PAUSE = 0.2  # seconds: length of a pause
QUIETER = 15.0  # dB of a pause below the loudest tenth of its segment
# Levels in dB of full scale. Log-mel features of an utterance hardly depend on its level, so quiet
# speech is decoded like any other, but 16 bits leave it noisy: one step has -90 dB.
QUIET = -70.0  # where the loudest part of a recording is below, its text may suffer
SILENT = -110.0  # where no part is louder, there is nothing to decode
LOWEST = -180.0  # any lower level counts as this one
BELOW_LOUDEST = 40.0  # dB: what is QUIET and so far below its segment's loudest part is a pause
# A silence is more than BELOW_LOUD dB below the loudest LOUD of its segment; KEPT of a long one
# stays on each side.
BELOW_LOUD = 35.0
LOUD, KEPT = 0.2, 0.25  # seconds
# Seconds between the middles of one word as two segments time it, at most. These differ by a few
# frames of memory; a repetition of the word is seldom so close.
MAX_DIFFERENCE = 0.4


class Segment(NamedTuple):
    """Part of a recording in samples; end is exclusive."""

    start: int
    end: int


def split_at_pauses(
    blocks: Iterable[Tensor], sample_rate: int, max_seconds: float, overlap: float
) -> Iterator[tuple[Segment, Tensor]]:
    """Consecutive blocks (S,) in [-1, 1] -> segments of at most max_seconds with their samples.

    They cover all of the audio: neighbours meet in a pause or overlap by `overlap` seconds. Audio
    of no samples has no segments. max_seconds: 1 or more. overlap: 0 to max_seconds / 4.
    """
    hop = max(1, round(HOP * sample_rate))
    size, shared = int(max_seconds * sample_rate), int(overlap * sample_rate)
    held, first, start = torch.zeros(0), 0, 0  # held: the samples from `first`, a multiple of hop
    for block in blocks:
        held = torch.cat([held, block])
        while first + len(held) - start > size:
            pause = _pause(_decibels(held[: start + size - first], hop))
            end = start + size if pause is None else first + pause * hop
            yield Segment(start, end), held[start - first : end - first].clone()
            start = end - shared if pause is None else end
            held, first = held[start // hop * hop - first :], start // hop * hop
    if first + len(held) > start:
        yield Segment(start, first + len(held)), held[start - first :].clone()


def sound_and_silence(
    samples: Tensor, sample_rate: int, max_silence: float | None
) -> list[tuple[Segment, bool]]:
    """The parts of samples (S,), in order, and which have sound; the others are silences of more
    than max_silence seconds (0.5 or more; None: there are none).
    """
    hop, whole = max(1, round(HOP * sample_rate)), Segment(0, len(samples))
    if max_silence is None or len(samples) <= max_silence * sample_rate:
        return [(whole, True)]
    decibels = _decibels(samples, hop)
    loudest = float(decibels.topk(round(LOUD / HOP)).values[-1])
    loud = (decibels > max(loudest - BELOW_LOUD, SILENT)).nonzero()[:, 0].tolist()
    kept, parts, end = round(KEPT / HOP), [], 0  # end: of the parts so far
    for last, following in pairwise([-1, *loud, len(decibels)]):
        if (following - last - 1) * HOP <= max_silence:
            continue
        first = 0 if last < 0 else (last + 1 + kept) * hop
        stop = len(samples) if following == len(decibels) else (following - kept) * hop
        parts += [(Segment(end, first), True)] if first > end else []
        parts.append((Segment(first, stop), False))
        end = stop
    return parts if end == len(samples) else [*parts, (Segment(end, len(samples)), True)]


def loudness(waveform: Tensor, sample_rate: int) -> float:
    """The level of the loudest HOP of waveform (S,) in dB of full scale; LOWEST without one."""
    decibels = _decibels(waveform, max(1, round(HOP * sample_rate)))
    return float(decibels.max()) if len(decibels) else LOWEST


def _decibels(waveform: Tensor, hop: int) -> Tensor:
    """waveform (S,) -> level (S // hop,) in dB of full scale.

    Without the mean of each hop: features remove it as well.
    """
    blocks = waveform[: len(waveform) // hop * hop].view(-1, hop)
    blocks = blocks - blocks.mean(dim=1, keepdim=True)
    deviation = torch.linalg.vector_norm(blocks, dim=1).div(hop**0.5)  # faster than std
    return 20 * deviation.clamp_min(10 ** (LOWEST / 20)).log10()


def _pause(decibels: Tensor) -> int | None:
    """Energy of a segment -> index of the middle of the deepest pause in its second half, or None.

    A pause is as loud as its loudest frame, so a stop consonant inside a word is none.
    """
    width = round(PAUSE / HOP)
    half = decibels[len(decibels) // 2 :]
    if len(half) < width:
        return None
    loudest = max_pool1d(half[None, None], width, stride=1)[0, 0]
    quietest = int(loudest.argmin())
    quiet = max(SILENT, min(QUIET, float(decibels.max()) - BELOW_LOUDEST))
    if float(loudest[quietest]) > max(float(decibels.quantile(0.9)) - QUIETER, quiet):
        return None
    return len(decibels) // 2 + quietest + width // 2


def merge_words(
    segments: Sequence[Segment], words: Sequence[Sequence[TimedWord]], sample_rate: int
) -> list[TimedWord]:
    """Each segment's words, timed from its start -> all words, timed from the start of the audio.

    In an overlap, the longest run of words that both segments contain at nearly the same times is
    kept once. Without such a run, each segment provides the nearer half.
    """
    merged: list[TimedWord] = []
    previous_end = 0.0
    for segment, timed in zip(segments, words, strict=True):
        start = segment.start / sample_rate
        shifted = [replace(w, start=w.start + start, end=w.end + start) for w in timed]
        overlaps = previous_end > start
        if overlaps:
            merged = _merge(merged, shifted, start, previous_end)
        else:
            merged.extend(shifted)
        previous_end = segment.end / sample_rate
    return merged


def _merge(
    left: list[TimedWord], right: list[TimedWord], start: float, end: float
) -> list[TimedWord]:
    """Words of two segments that overlap from start to end, in seconds."""
    first = next((i for i, word in enumerate(left) if _middle(word) >= start), len(left))
    last = next((i for i, word in enumerate(right) if _middle(word) > end), len(right))
    common = _common_run(left[first:], right[:last])
    if common:
        left, right = left[: first + common[0]], right[common[1] :]
    else:
        half = (start + end) / 2
        left = [word for word in left if _middle(word) < half]
        right = [word for word in right if _middle(word) >= half]
    begin = left[-1].start if left else 0.0  # no word of the right segment starts earlier
    return left + [replace(w, start=max(w.start, begin), end=max(w.end, begin)) for w in right]


def _common_run(left: list[TimedWord], right: list[TimedWord]) -> tuple[int, int] | None:
    """Where the longest run of equal words ends in each list, the closest in time of such runs.

    Words are equal with one text and at most MAX_DIFFERENCE in time. None without a run.
    """
    runs: dict[tuple[int, int], tuple[int, float]] = {}  # end in each -> words, -sum of differences
    for i, a in enumerate(left, start=1):
        for j, b in enumerate(right, start=1):
            difference = abs(_middle(a) - _middle(b))
            if a.text == b.text and difference <= MAX_DIFFERENCE:
                length, closeness = runs.get((i - 1, j - 1), (0, 0.0))
                runs[i, j] = length + 1, closeness - difference
    return max(runs, key=runs.__getitem__, default=None)


def _middle(word: TimedWord) -> float:
    return (word.start + word.end) / 2

"""Audio longer than a model was trained on: cut it at pauses, join what the pieces said.

A cut falls in the quietest place of a piece's second half, if that is a pause. Where nobody pauses,
the pieces overlap and both say what lies there; the words that agree show where to join.

Shapes: S samples.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from asr.decoding.times import Word
from asr.errors import UserError

HOP = 0.01  # seconds: energy is measured this often
PAUSE = 0.2  # seconds that a pause lasts
QUIETER = 15.0  # dB that a pause lies below the loud tenth of its piece
SILENT = -70.0  # dB of full scale: a pause in any case
# Seconds at most between the middles of one word as two pieces time it: they differ by a few frames
# of memory, while the same word said again, mostly behind another one, is seldom so near.
NEAR = 0.4


class Piece(NamedTuple):
    """A stretch of audio in samples; end is not included."""

    start: int
    end: int


def cut_at_pauses(
    waveform: Tensor, sample_rate: int, longest: float = 30.0, overlap: float = 2.0
) -> list[Piece]:
    """waveform (S,) in [-1, 1] -> pieces of at most `longest` seconds that leave out nothing.

    Neighbours meet in a pause or overlap by `overlap` seconds. Audio of no samples has no pieces.
    Raises UserError unless longest is 1 or more and overlap lies between 0 and longest / 4.
    """
    if longest < 1:
        raise UserError(f"longest is {longest} seconds; it must be 1 or more")
    if not 0 <= overlap <= longest / 4:
        raise UserError(f"overlap is {overlap} seconds; it must lie between 0 and longest / 4")
    hop = max(1, round(HOP * sample_rate))
    decibels = _decibels(waveform, hop)
    most, shared = int(longest * sample_rate), int(overlap * sample_rate)
    pieces, start = [], 0
    while len(waveform) - start > most:
        pause = _pause(decibels[start // hop : (start + most) // hop])
        end = start + most if pause is None else (start // hop + pause) * hop
        pieces.append(Piece(start, end))
        start = end - shared if pause is None else end
    return [*pieces, Piece(start, len(waveform))] if len(waveform) else []


def is_silent(waveform: Tensor, sample_rate: int) -> bool:
    """Whether waveform (S,) is nowhere louder than SILENT: a model would only dream there."""
    hop = max(1, round(HOP * sample_rate))
    decibels = _decibels(waveform, hop) if len(waveform) >= hop else _decibels(waveform, 1)
    return bool((decibels <= SILENT).all())


def _decibels(waveform: Tensor, hop: int) -> Tensor:
    """waveform (S,) -> energy (S // hop,) in dB of full scale."""
    blocks = waveform[: len(waveform) // hop * hop].view(-1, hop)
    return 20 * torch.linalg.vector_norm(blocks, dim=1).div(hop**0.5).clamp_min(1e-9).log10()


def _pause(decibels: Tensor) -> int | None:
    """Energy of a piece -> the middle of the deepest pause in its second half, or None.

    A pause is as loud as its loudest moment, so a stop consonant inside a word is none.
    """
    width = round(PAUSE / HOP)
    half = decibels[len(decibels) // 2 :]
    if len(half) < width:
        return None
    loudest = max_pool1d(half[None, None], width, stride=1)[0, 0]
    quietest = int(loudest.argmin())
    if float(loudest[quietest]) > max(float(decibels.quantile(0.9)) - QUIETER, SILENT):
        return None
    return len(decibels) // 2 + quietest + width // 2


def join_words(
    pieces: Sequence[Piece], words: Sequence[Sequence[Word]], sample_rate: int
) -> list[Word]:
    """Each piece's words, timed from its start -> all words, timed from the audio's start.

    In an overlap the longest run of words that both pieces say at nearly the same times is taken
    once; where they agree on none, each piece has the half that is nearer to it.
    """
    joined: list[Word] = []
    before = 0.0  # where the piece before ends
    for piece, mine in zip(pieces, words, strict=True):
        start = piece.start / sample_rate
        shifted = [replace(w, start=w.start + start, end=w.end + start) for w in mine]
        joined = _joined(joined, shifted, start, before) if before > start else joined + shifted
        before = piece.end / sample_rate
    return joined


def _joined(left: list[Word], right: list[Word], start: float, end: float) -> list[Word]:
    """Both say what lies between start and end seconds."""
    first = next((i for i, word in enumerate(left) if _middle(word) >= start), len(left))
    last = next((i for i, word in enumerate(right) if _middle(word) > end), len(right))
    agreed = _agreed(left[first:], right[:last])
    if agreed:
        return _in_order(left[: first + agreed[0]], right[agreed[1] :])
    seam = (start + end) / 2
    kept = [word for word in left if _middle(word) < seam]
    return _in_order(kept, [word for word in right if _middle(word) >= seam])


def _agreed(tail: list[Word], head: list[Word]) -> tuple[int, int] | None:
    """Where the longest run of words that both say ends in each, or None without any.

    A pair of words has one text and lies NEAR in time; of runs alike the nearest in time counts.
    """
    runs: dict[tuple[int, int], tuple[int, float]] = {}  # its end in each -> words, -seconds apart
    for i, ours in enumerate(tail, start=1):
        for j, theirs in enumerate(head, start=1):
            apart = abs(_middle(ours) - _middle(theirs))
            if ours.text == theirs.text and apart <= NEAR:
                length, nearness = runs.get((i - 1, j - 1), (0, 0.0))
                runs[i, j] = length + 1, nearness - apart
    return max(runs, key=runs.__getitem__, default=None)


def _in_order(left: list[Word], right: list[Word]) -> list[Word]:
    """All words; what the right piece times before left's last word begins together with that."""
    begun = left[-1].start if left else 0.0
    return left + [replace(w, start=max(w.start, begun), end=max(w.end, begun)) for w in right]


def _middle(word: Word) -> float:
    return (word.start + word.end) / 2

"""Is the difference between two runs on the same utterances real, or luck?

Two tests of the same question. Both look at each unit's difference in errors, so what is hard for
both systems cancels out:

paired_bootstrap  Bisani & Ney 2004: draw the units anew and see how the difference spreads.
matched_pairs     Gillick & Cox 1989 (known as MAPSSWE): a normal test on the mean difference of
                  segments whose errors are independent. We differ once: the variance is taken about
                  zero, the null hypothesis' own mean. With many segments this is the same; with few
                  it does not promise what it cannot know (two segments alike are no proof).

Utterances of one speaker go wrong together. Units of "utterances" answer for these speakers, units
of "speakers" for others like them, and need about twenty speakers or more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from operator import attrgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asr.errors import UserError
from asr.scoring.alignment import Edit, align
from asr.scoring.bootstrap import percentile_interval, resampled_sums, summed_by
from asr.scoring.files import percent
from asr.scoring.wer import Interval, Score, Units, UtteranceScore

Segments = Literal["phrases", "utterances", "speakers"]
_QUANTILE = 1.959963984540054  # of the standard normal distribution at 0.975
_GOOD_WORDS = 2  # so many words right in both runs end a phrase: a word LM's memory is two words


@dataclass(frozen=True, slots=True)
class Difference:
    """How the second run's WER differs from the first's; below 0 the second is better."""

    wer: float  # second minus first, a fraction
    interval: Interval  # 95 %
    p: float  # two-sided; 1 where no unit differs
    units: int  # how many units the test looked at


def paired_bootstrap(
    first: Score,
    second: Score,
    *,
    units: Units = "utterances",
    draws: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Paired bootstrap of two scores of the same utterances; the runs may have ordered them apart.

    p is twice the share of draws in which the difference is zero or of the other sign, each share
    counted with one draw more (Davison & Hinkley 1997, 4.11), so p is never 0.
    Raises UserError where the utterances are not the same or fewer than two units are left.
    """
    counts = _unit_counts(*_paired(first, second), units)
    if len(counts) < 2:
        raise UserError(f"a bootstrap over {units} needs two or more, there is {len(counts)}")
    words, wrong_first, wrong_second = resampled_sums(counts, draws, seed).T
    differences = (wrong_second - wrong_first) / np.maximum(words, 1)
    below, above = np.sum(differences <= 0), np.sum(differences >= 0)
    return Difference(
        wer=second.wer - first.wer,
        interval=percentile_interval(differences),
        p=min(1.0, 2 * float(min(below, above) + 1) / (draws + 1)),
        units=len(counts),
    )


def matched_pairs(first: Score, second: Score, *, segments: Segments = "phrases") -> Difference:
    """Matched-pairs test of two scores of the same utterances.

    "phrases" are stretches with errors of either run between two or more words that both have
    right; `units` counts only those. With fewer than about 50 segments p is a rough guide.
    Raises UserError where the utterances are not the same.
    """
    pairs = _paired(first, second)
    if segments == "phrases":
        wrong = np.array(_phrases(*pairs), dtype=np.int64).reshape(-1, 2)
    else:
        wrong = _unit_counts(*pairs, segments)[:, 1:]
    differences = wrong[:, 1] - wrong[:, 0]
    total, spread = int(differences.sum()), sqrt(int(np.sum(differences**2)))
    words = max(first.words, 1)
    return Difference(
        wer=total / words,
        interval=((total - _QUANTILE * spread) / words, (total + _QUANTILE * spread) / words),
        p=erfc(abs(total) / spread / sqrt(2)) if spread else 1.0,
        units=len(wrong),
    )


def _paired(
    first: Score, second: Score
) -> tuple[Sequence[UtteranceScore], Sequence[UtteranceScore]]:
    """The utterances of both by id, so that neither run's order decides what is drawn."""
    of_second = {utterance.id: utterance for utterance in second.utterances}
    odd = of_second.keys() ^ {utterance.id for utterance in first.utterances}
    if odd:
        raise UserError(
            f"utterance {min(odd)!r} is in one run only, as are {len(odd) - 1} more: "
            "evaluate both runs on the same split"
        )
    ours = sorted(first.utterances, key=attrgetter("id"))
    theirs = [of_second[utterance.id] for utterance in ours]
    for a, b in zip(ours, theirs, strict=True):
        if a.reference != b.reference:
            raise UserError(
                f"utterance {a.id!r} has another reference in each run: "
                "evaluate both runs on the same manifest"
            )
    return ours, theirs


def _unit_counts(
    first: Sequence[UtteranceScore], second: Sequence[UtteranceScore], units: Units
) -> NDArray[np.int64]:
    """Words, first's errors and second's errors of each unit: (N, 3)."""
    rows = [(a.words, a.errors, b.errors) for a, b in zip(first, second, strict=True)]
    counts = np.array(rows, dtype=np.int64)
    if units == "speakers":
        counts = summed_by([utterance.speaker for utterance in first], counts)[1]
    return counts


def _phrases(
    first: Sequence[UtteranceScore], second: Sequence[UtteranceScore]
) -> list[tuple[int, int]]:
    """Errors of both runs in each phrase with errors, utterance by utterance."""
    # Where neither run is wrong there is no phrase to find, only time to lose.
    wrong = [(a, b) for a, b in zip(first, second, strict=True) if a.errors or b.errors]
    references = [a.reference for a, _ in wrong]
    ours = align(references, [a.hypothesis for a, _ in wrong])
    theirs = align(references, [b.hypothesis for _, b in wrong])
    return [
        phrase
        for edits in zip(ours, theirs, strict=True)
        for phrase in _split(*map(_errors_by_place, edits))
    ]


def _errors_by_place(edits: Sequence[Edit]) -> list[int]:
    """Errors before, at and between the reference words: gap, word, gap, word, ..., gap."""
    places = [0]
    for edit in edits:
        if edit.mark == "I":
            places[-1] += 1
        else:
            places += [int(edit.mark != "C"), 0]
    return places


def _split(first: list[int], second: list[int]) -> list[tuple[int, int]]:
    """Cut one utterance at runs of good words: both runs' errors in each phrase that has any."""
    phrases: list[tuple[int, int]] = []
    good = _GOOD_WORDS  # so that the first error opens a phrase
    for place, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        if ours or theirs:
            if good >= _GOOD_WORDS:
                phrases.append((0, 0))
            phrases[-1] = (phrases[-1][0] + ours, phrases[-1][1] + theirs)
            good = 0
        elif place % 2:  # a word; an empty gap neither ends a run nor lengthens it
            good += 1
    return phrases


def verdict(first: Score, second: Score) -> list[str]:
    """Lines for people: how the second run's WER differs from the first's, by every test.

    Raises UserError where the utterances are not the same.
    """
    found = {"matched pairs over phrases": matched_pairs(first, second)}
    for units, count in (("utterances", len(first.utterances)), ("speakers", len(first.speakers))):
        if count > 1:
            found[f"paired bootstrap over {units}"] = paired_bootstrap(first, second, units=units)
    points = 100 * (second.wer - first.wer)
    lines = [f"{percent(second.wer)} against {percent(first.wer)}: {points:+.2f} points"]
    for name, difference in found.items():
        low, high = (100 * side for side in difference.interval)
        spread = f"95 % {low:+.2f} to {high:+.2f}"
        lines.append(f"  {name} ({difference.units}): {spread}, p = {difference.p:.2g}")
    return lines

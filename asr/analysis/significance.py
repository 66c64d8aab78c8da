"""Is the difference in WER between two runs on the same utterances real?

paired_bootstrap  Bisani & Ney 2004: resample the units and see how the difference varies.
matched_pairs     Gillick & Cox 1989 (MAPSSWE): a normal test on the mean difference of segments
                  whose errors are independent. We differ once: the variance is taken about zero,
                  the mean under the null hypothesis, which is conservative with few segments.

Errors within a speaker are correlated. A bootstrap over "utterances" is valid for these speakers,
one over "speakers" for others like them. With fewer than MIN_UNITS its p is too small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import erfc, sqrt
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from asr.analysis.statistics import (
    MIN_UNITS,
    NORMAL_QUANTILE,
    Interval,
    percentile_interval,
    resampled_sums,
    summed_by,
)
from asr.analysis.wer import Edit, Score, Units, UtteranceScore, align, percent
from asr.errors import UserError

Utterances = Sequence[UtteranceScore]
_GOOD_WORDS = 2  # words right in both runs that end a phrase: the memory of a trigram LM


@dataclass(frozen=True, slots=True)
class Difference:
    """The second run's WER minus the first's; below 0 the second is better."""

    wer: float  # a fraction
    interval: Interval  # 95 %
    p: float  # two-sided; 1 if no unit differs
    units: int  # in the test


def paired_bootstrap(
    first: Score, second: Score, *, units: Units = "utterances", draws: int = 10_000
) -> Difference:
    """Paired bootstrap of two scores of the same utterances, in any order.

    p is twice the share of draws in which the difference is zero or has the other sign. One is
    added to both counts of the share (Davison & Hinkley 1997, 4.11), so p is never 0.
    Raises UserError if the utterances differ or there are fewer than two units.
    """
    counts = _unit_counts(*_paired(first, second), units)
    if len(counts) < 2:
        raise UserError(f"a bootstrap over {units} needs at least two, there is {len(counts)}")
    words, wrong_first, wrong_second = resampled_sums(counts, draws, seed=0).T
    differences = (wrong_second - wrong_first) / np.maximum(words, 1)
    below, above = np.sum(differences <= 0), np.sum(differences >= 0)
    return Difference(
        wer=second.wer - first.wer,
        interval=percentile_interval(differences),
        p=min(1.0, 2 * float(min(below, above) + 1) / (draws + 1)),
        units=len(counts),
    )


def matched_pairs(first: Score, second: Score) -> Difference:
    """Matched-pairs test of two scores of the same utterances.

    A segment is a stretch with errors of either run; two or more words that are right in both
    runs separate segments. `units` counts them; p is only a rough guide if there are fewer than 50.
    Raises UserError if the utterances differ.
    """
    wrong = np.array(_phrases(*_paired(first, second)), dtype=np.int64).reshape(-1, 2)
    differences = wrong[:, 1] - wrong[:, 0]
    total, sd = int(differences.sum()), sqrt(int(np.sum(differences**2)))
    words = max(first.words, 1)
    return Difference(
        wer=total / words,
        interval=((total - NORMAL_QUANTILE * sd) / words, (total + NORMAL_QUANTILE * sd) / words),
        p=erfc(abs(total) / sd / sqrt(2)) if sd else 1.0,
        units=len(wrong),
    )


def _paired(first: Score, second: Score) -> tuple[Utterances, Utterances]:
    """The utterances of both runs, sorted by id, so that draws do not depend on a run's order."""
    of_second = {utterance.id: utterance for utterance in second.utterances}
    if odd := of_second.keys() ^ {utterance.id for utterance in first.utterances}:
        raise UserError(
            f"{len(odd)} utterances are only in one run, such as {min(odd)!r}: "
            "evaluate both runs on the same split"
        )
    ours = sorted(first.utterances, key=attrgetter("id"))
    theirs = [of_second[utterance.id] for utterance in ours]
    for a, b in zip(ours, theirs, strict=True):
        if a.reference != b.reference:
            raise UserError(
                f"utterance {a.id!r} has different references in the two runs: "
                "evaluate both runs on the same manifest"
            )
    return ours, theirs


def _unit_counts(first: Utterances, second: Utterances, units: Units) -> NDArray[np.int64]:
    """Words, first's errors and second's errors of each unit: (N, 3)."""
    rows = [(a.words, a.errors, b.errors) for a, b in zip(first, second, strict=True)]
    counts = np.array(rows, dtype=np.int64)
    return counts if units == "utterances" else summed_by([u.speaker for u in first], counts)[1]


def _phrases(first: Utterances, second: Utterances) -> list[tuple[int, int]]:
    """Errors of both runs in each phrase with errors, utterance by utterance."""
    # Utterances without errors in either run have no phrase; skipping them saves time.
    wrong = [(a, b) for a, b in zip(first, second, strict=True) if a.errors or b.errors]
    references = [a.reference for a, _ in wrong]
    ours = align(references, [a.hypothesis for a, _ in wrong])
    theirs = align(references, [b.hypothesis for _, b in wrong])
    phrases = (_split(*map(_errors_by_position, edits)) for edits in zip(ours, theirs, strict=True))
    return list(chain.from_iterable(phrases))


def _errors_by_position(edits: Sequence[Edit]) -> list[int]:
    """Errors before, at and between the reference words: gap, word, gap, word, ..., gap."""
    errors = [0]
    for edit in edits:
        if edit.mark == "I":
            errors[-1] += 1
        else:
            errors += [int(edit.mark != "C"), 0]
    return errors


def _split(first: list[int], second: list[int]) -> list[tuple[int, int]]:
    """Cut one utterance at correct words: both runs' errors in each phrase that has any."""
    phrases: list[tuple[int, int]] = []
    good = _GOOD_WORDS  # so that the first error opens a phrase
    for position, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        if ours or theirs:
            if good >= _GOOD_WORDS:
                phrases.append((0, 0))
            phrases[-1] = (phrases[-1][0] + ours, phrases[-1][1] + theirs)
            good = 0
        elif position % 2:  # a word; an empty gap changes nothing
            good += 1
    return phrases


def compare_two(first: Score, second: Score) -> list[str]:
    """Lines to print: how the second run's WER differs from the first's, by every test.

    Raises UserError if the utterances differ.
    """
    tests = {"matched pairs over phrases": matched_pairs(first, second)}
    counts: dict[Units, int] = {
        "utterances": len(first.utterances),
        "speakers": len(first.speakers),
    }
    for units, count in counts.items():
        if count >= MIN_UNITS:
            tests[f"paired bootstrap over {units}"] = paired_bootstrap(first, second, units=units)
    points = 100 * (second.wer - first.wer)
    lines = [f"{percent(second.wer)} against {percent(first.wer)}: {points:+.2f} points"]
    for name, difference in tests.items():
        low, high = (100 * side for side in difference.interval)
        interval = f"95 % {low:+.2f} to {high:+.2f}"
        lines.append(f"  {name} ({difference.units}): {interval}, p = {difference.p:.2g}")
    for units, count in counts.items():
        if count < MIN_UNITS:
            few = f"there are fewer than {MIN_UNITS}" if count else "the manifest names none"
            lines.append(f"  over {units}: not tested, {few}")
    return lines

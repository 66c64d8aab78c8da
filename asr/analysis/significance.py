"""Is the difference between two runs, or two settings, real?

Two runs on the same utterances are compared by each unit's difference in errors:

paired_bootstrap  Bisani & Ney 2004: resample the units and see how the difference varies.
matched_pairs     Gillick & Cox 1989 (MAPSSWE): a normal test on the mean difference of segments
                  whose errors are independent. We differ once: the variance is taken about zero,
                  the mean under the null hypothesis, which is conservative with few segments.

Errors within a speaker are correlated. A test over "utterances" holds for these speakers, one over
"speakers" for others like them, and needs MIN_SPEAKERS.

Two settings with runs of several seeds: the paired t test over seeds holds for new trainings, the
paired bootstrap over utterances only for these models. Holm's correction covers a table's pairs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import erfc, sqrt
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from asr.analysis.report import DASH, Table
from asr.analysis.runs import PERCENT, SettingRun, SettingRuns
from asr.analysis.statistics import (
    MIN_SPEAKERS,
    NORMAL_QUANTILE,
    Interval,
    PairedT,
    holm,
    paired_t,
    percentile_interval,
    resampled_sums,
    summed_by,
)
from asr.analysis.wer import Edit, Score, Units, UtteranceScore, align, between, percent, pooled
from asr.errors import UserError

Utterances = Sequence[UtteranceScore]
ALPHA = 0.05  # a smaller p is significant
_GOOD_WORDS = 2  # so many words right in both runs end a phrase: a word LM's memory is two words
_MOST_IN_PAIRS = 10  # settings: 45 pairs


@dataclass(frozen=True, slots=True)
class Difference:
    """The second run's WER minus the first's; below 0 the second is better."""

    wer: float  # a fraction
    interval: Interval  # 95 %
    p: float  # two-sided; 1 where no unit differs
    units: int  # in the test


def paired_bootstrap(
    first: Score, second: Score, *, units: Units = "utterances", draws: int = 10_000, seed: int = 0
) -> Difference:
    """Paired bootstrap of two scores of the same utterances, in any order.

    p is twice the share of draws in which the difference is zero or of the other sign, each share
    counted with one draw more (Davison & Hinkley 1997, 4.11), so p is never 0.
    Raises UserError where the utterances differ or there are fewer than two units.
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


def matched_pairs(first: Score, second: Score) -> Difference:
    """Matched-pairs test of two scores of the same utterances.

    Its segments are stretches with errors of either run between two or more words that both have
    right; `units` counts them. With fewer than about 50, p is a rough guide.
    Raises UserError where the utterances differ.
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
    """The utterances of both, sorted by id: the order of a run must not decide what is drawn."""
    of_second = {utterance.id: utterance for utterance in second.utterances}
    if odd := of_second.keys() ^ {utterance.id for utterance in first.utterances}:
        raise UserError(
            f"{len(odd)} utterances are in one run only, say {min(odd)!r}: "
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
    phrases = (_split(*map(_errors_by_place, edits)) for edits in zip(ours, theirs, strict=True))
    return list(chain.from_iterable(phrases))


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


def compare_two(first: Score, second: Score) -> list[str]:
    """Lines to print: how the second run's WER differs from the first's, by every test.

    Raises UserError where the utterances differ.
    """
    tests = {"matched pairs over phrases": matched_pairs(first, second)}
    counts: dict[Units, tuple[int, int]] = {
        "utterances": (len(first.utterances), 2),
        "speakers": (len(first.speakers), MIN_SPEAKERS),
    }
    for units, (count, needed) in counts.items():
        if count >= needed:
            tests[f"paired bootstrap over {units}"] = paired_bootstrap(first, second, units=units)
    points = 100 * (second.wer - first.wer)
    lines = [f"{percent(second.wer)} against {percent(first.wer)}: {points:+.2f} points"]
    for name, difference in tests.items():
        low, high = (100 * side for side in difference.interval)
        interval = f"95 % {low:+.2f} to {high:+.2f}"
        lines.append(f"  {name} ({difference.units}): {interval}, p = {difference.p:.2g}")
    if len(first.speakers) < MIN_SPEAKERS:
        lines.append(f"  over speakers: not tested, there are fewer than {MIN_SPEAKERS}")
    return lines


@dataclass(frozen=True)
class SettingDifference:
    """The second setting against the first in one figure; over_seeds is None with one seed."""

    first: str
    second: str
    seeds: int  # that both have
    mean: float  # second minus first
    values: tuple[float, float]  # of both: means over these seeds
    over_seeds: PairedT | None
    failed: int  # runs of both settings without a result
    over_utterances: Difference | None = None
    decoded_alike: bool = True


Pair = tuple[SettingRun, SettingRun]  # of the same seed


def figure_differences(
    settings: Sequence[SettingRuns], name: str, notes: list[str]
) -> list[SettingDifference]:
    """Every pair of settings in a figure, which some runs lack; runs of the same seed are paired.

    Pairs that cannot be tested are named in `notes`.
    """
    counted = [
        replace(s, members=tuple(m for m in s.members if name in m.figures)) for s in settings
    ]
    pairs = _setting_pairs(counted, notes)
    return [_difference(*pair, lambda member: member.figures[name]) for pair in pairs]


def wer_differences(
    settings: Sequence[SettingRuns], split: str, notes: list[str]
) -> list[SettingDifference]:
    """Every pair of settings in their WER of a split, over seeds and over utterances."""
    differences = []
    scored = [s for s in settings if any(split in member.scores for member in s.members)]
    for first, second, pairs in _setting_pairs(scored, notes):
        both = [pair for pair in pairs if all(split in member.scores for member in pair)]
        if not both:
            continue
        sides = [[member.scores[split] for member in side] for side in zip(*both, strict=True)]
        try:
            test = paired_bootstrap(*(pooled(scores, draws=1) for scores in sides))
        except UserError as error:
            names = f"{first.short} and {second.short}"
            notes.append(f"{names}: WER of {split} is not comparable: {error}.")
            continue
        over_seeds = _difference(first, second, both, lambda member: member.scores[split].wer)
        alike = all(a.decoded[split] == b.decoded[split] for a, b in both)
        differences.append(
            replace(over_seeds, mean=test.wer, over_utterances=test, decoded_alike=alike)
        )
    return differences


def difference_table(figure: str, differences: Sequence[SettingDifference]) -> Table:
    """The differences in one figure, p corrected for their number in each kind of test."""
    rates = any(d.over_utterances for d in differences)
    seeds = corrected(d.over_seeds for d in differences)
    utterances = corrected(d.over_utterances for d in differences)
    form, unit = ("{:+.2f}", 100) if figure.startswith(PERCENT) else ("{:+.4f}", 1)
    rows = []
    for d, of_seeds, of_utterances in zip(differences, seeds, utterances, strict=True):
        cells = [d.first, d.second, form.format(unit * d.mean), str(d.seeds)]
        cells += _test_cells(d.over_seeds, of_seeds, form, unit)
        cells += _test_cells(d.over_utterances, of_utterances, form, unit) if rates else []
        rows.append((*cells, _verdict(of_seeds, of_utterances)))
    head = ["first", "second", "difference" + ", points" * (unit == 100), "seeds"]
    head += ["95 % over seeds", "p (Holm)"]
    head += ["95 % over utterances", "p (Holm)"] if rates else []
    head += ["real"]
    note = (
        "Difference: second minus first. Runs of the same seed are paired. Over seeds: t test, "
        "valid for new seeds; sign test where all differences are equal. Intervals are those of "
        "each pair alone, p (Holm) is corrected for all pairs of the table; real: p (Holm) over "
        "seeds is below 0.05. One seed in common allows no conclusion about other seeds."
    )
    note += (
        " Over utterances: bootstrap of the errors summed over the seeds, valid for these trained "
        "models only: another seed can reverse such a difference."
    ) * rates
    return Table(f"Is the difference real? {figure}", head, rows, note)


def _setting_pairs(
    settings: Sequence[SettingRuns], notes: list[str]
) -> Iterable[tuple[SettingRuns, SettingRuns, list[Pair]]]:
    """Pairs of settings that have seeds in common, and their runs paired by seed."""
    counted = [setting for setting in settings if setting.members]
    chosen = list(combinations(counted, 2))
    if len(counted) > _MOST_IN_PAIRS:
        first = counted[0]
        notes.append(f"{len(counted)} groups: tested against the first, {first.short}, only.")
        chosen = [(first, other) for other in counted[1:]]
    for first, second in chosen:
        ours, theirs = ({m.seed: m for m in s.members} for s in (first, second))
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        if pairs:
            yield first, second, pairs
        else:
            names = f"{first.short} and {second.short}"
            notes.append(f"{names} have no seed in common: their difference is not tested.")


def _difference(
    first: SettingRuns,
    second: SettingRuns,
    pairs: Sequence[Pair],
    figure: Callable[[SettingRun], float],
) -> SettingDifference:
    """The difference of two settings in one figure, tested over seeds."""
    values = [[figure(member) for member in side] for side in zip(*pairs, strict=True)]
    mean = sum(b - a for a, b in zip(*values, strict=True)) / len(pairs)
    means = (sum(values[0]) / len(pairs), sum(values[1]) / len(pairs))
    test = paired_t(*values)
    failed = first.failed + second.failed
    return SettingDifference(first.short, second.short, len(pairs), mean, means, test, failed)


def corrected(tests: Iterable[PairedT | Difference | None]) -> list[float | None]:
    """Holm's p of every test, None for a missing one."""
    tests = list(tests)
    adjusted = iter(holm([test.p for test in tests if test]))
    return [next(adjusted) if test else None for test in tests]


def _test_cells(
    test: PairedT | Difference | None, corrected: float | None, form: str, unit: float
) -> list[str]:
    if test is None or corrected is None:
        return [DASH] * 2
    sides = tuple(unit * side for side in test.interval or ())
    p = "< 0.001" if corrected < 0.001 else f"{corrected:.3f}"
    return [between(sides, form) if sides else DASH, p]


def _verdict(over_seeds: float | None, over_utterances: float | None) -> str:
    if over_seeds is None:
        return "unknown: one seed"
    if over_seeds < ALPHA:
        return "yes"
    significant = over_utterances is not None and over_utterances < ALPHA
    return "of these models only" if significant else "not shown"

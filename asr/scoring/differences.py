"""What tells groups of runs apart: paired tests over seeds and over utterances, Holm-corrected.

Only seeds speak for the setting: with another one the models would be others. Utterances speak for
the models that were trained, however few there are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from asr.errors import UserError
from asr.scoring.comparison import DASH, Member, Setting, pooled
from asr.scoring.files import between
from asr.scoring.report import Table
from asr.scoring.significance import paired_bootstrap
from asr.scoring.spread import MOST_SEEDS, POWER, holm, paired_t, seeds_needed

_MOST_IN_PAIRS = 10  # groups: 45 pairs
_ALPHA = 0.05


@dataclass(frozen=True)
class Evidence:
    """A paired test of a difference: its 95 % interval, where it has one, and two-sided p."""

    interval: tuple[float, float] | None
    p: float


@dataclass(frozen=True)
class Difference:
    """The second setting against the first in one figure; over_seeds is None with one seed."""

    first: str
    second: str
    seeds: int  # that both have
    mean: float  # second minus first
    over_seeds: Evidence | None
    needed: str = DASH  # seeds that would show such a difference
    over_utterances: Evidence | None = None


Pair = tuple[Member, Member]  # of one seed


def loss_differences(settings: Sequence[Setting], notes: list[str]) -> list[Difference]:
    """Every pair of comparable settings in their best loss, runs of the same seed paired.

    What cannot be compared is said in `notes`.
    """
    same = [setting for setting in settings if setting.comparable]
    found = []
    for first, second, pairs in _pairs(same, notes):
        found.append(_by_seed(first, second, pairs, lambda member: member.best))
    return found


def figure_differences(
    settings: Sequence[Setting], name: str, notes: list[str]
) -> list[Difference]:
    """Every pair of comparable settings in one of their figures, runs of the same seed paired."""
    same = [
        replace(s, members=tuple(m for m in s.members if name in m.figures))
        for s in settings
        if s.comparable
    ]
    return [
        _by_seed(first, second, pairs, lambda member: member.figures[name])
        for first, second, pairs in _pairs(same, notes)
    ]


def wer_differences(settings: Sequence[Setting], split: str, notes: list[str]) -> list[Difference]:
    """Every pair of settings in their WER of a split, over seeds and over utterances."""
    found = []
    scored = [s for s in settings if any(split in member.scores for member in s.members)]
    for first, second, pairs in _pairs(scored, notes):
        both = [pair for pair in pairs if all(split in member.scores for member in pair)]
        if not both:
            continue
        sides = (
            pooled([m.scores[split] for m in side], draws=1) for side in zip(*both, strict=True)
        )
        try:
            test = paired_bootstrap(*sides)
        except UserError as error:
            names = f"{first.short} and {second.short}"
            notes.append(f"{names}: WER of {split} is not comparable: {error}.")
            continue
        seeds = _by_seed(first, second, both, lambda member: member.scores[split].wer)
        here = Evidence(test.interval, test.p)
        found.append(replace(seeds, mean=test.wer, over_utterances=here))
    return found


def difference_table(figure: str, found: Sequence[Difference], points: bool = False) -> Table:
    """The differences in one figure, p corrected for their number in each kind of test.

    points: the figure is a fraction, shown in percent points, as word error rates always are.
    """
    rates = any(d.over_utterances for d in found)
    seeds, utterances = (
        _corrected(d.over_seeds for d in found),
        _corrected(d.over_utterances for d in found),
    )
    form, unit = ("{:+.2f}", 100) if rates or points else ("{:+.4f}", 1)
    rows = []
    for d, of_seeds, of_utterances in zip(found, seeds, utterances, strict=True):
        cells = [d.first, d.second, form.format(unit * d.mean), str(d.seeds)]
        cells += _cells(d.over_seeds, of_seeds, form, unit)
        cells += _cells(d.over_utterances, of_utterances, form, unit) if rates else []
        rows.append((*cells, d.needed, _verdict(of_seeds, of_utterances)))
    shown = ", points" * (unit == 100)
    test = ["p", "p (Holm)"]
    head = ["first", "second", f"second minus first{shown}", "seeds", "95 % over seeds", *test]
    head += ["95 % over utterances", *test] if rates else []
    head += ["seeds needed", "real"]
    note = (
        "Runs of the same seed are paired. Over seeds: t test, for other seeds too; where all "
        "differ alike, which leaves no spread to judge by, sign test. p (Holm) holds for all pairs "
        "of the table together; real: p (Holm) over seeds is below 0.05. With one seed in common "
        "nothing is known of other seeds. Seeds needed: so many show such a difference, tested "
        f"alone, in {100 * POWER:.0f} % of repetitions, if it and its spread are truly as seen "
        "here; few seeds tell that but roughly."
    )
    more = (
        " Over utterances: bootstrap of the errors summed over the seeds, which speaks for these "
        "trained models only: another seed can turn such a difference round."
    )
    return Table(f"Is the difference real? {figure}", head, rows, note + more * rates)


def _pairs(
    settings: Sequence[Setting], notes: list[str]
) -> Iterable[tuple[Setting, Setting, list[Pair]]]:
    there = [setting for setting in settings if setting.members]
    chosen = list(combinations(there, 2))
    if len(there) > _MOST_IN_PAIRS:
        _say(
            notes, f"{len(there)} groups: each is tested against the first, {there[0].short}, only."
        )
        chosen = [(there[0], other) for other in there[1:]]
    for first, second in chosen:
        ours, theirs = ({m.seed: m for m in s.members} for s in (first, second))
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        if pairs:
            yield first, second, pairs
        else:
            names = f"{first.short} and {second.short}"
            _say(notes, f"{names} have no seed in common: their difference is not tested.")


def _say(notes: list[str], note: str) -> None:
    """Once, though losses and every split would say it."""
    if note not in notes:
        notes.append(note)


def _by_seed(
    first: Setting, second: Setting, pairs: Sequence[Pair], figure: Callable[[Member], float]
) -> Difference:
    values = [[figure(member) for member in side] for side in zip(*pairs, strict=True)]
    test = paired_t(*values)
    mean = sum(b - a for a, b in zip(*values, strict=True)) / len(pairs)
    evidence = Evidence(test.interval, test.p) if test else None
    needed = _needed(test.mean, test.sd) if test else DASH
    return Difference(first.short, second.short, len(pairs), mean, evidence, needed)


def _needed(mean: float, sd: float) -> str:
    if not sd:
        return DASH
    return str(seeds_needed(mean, sd) or f"> {MOST_SEEDS:,}")


def _corrected(tests: Iterable[Evidence | None]) -> list[float | None]:
    """p by Holm, in the places of the tests that there are."""
    tests = list(tests)
    adjusted = iter(holm([test.p for test in tests if test]))
    return [next(adjusted) if test else None for test in tests]


def _cells(test: Evidence | None, corrected: float | None, form: str, unit: float) -> list[str]:
    if test is None or corrected is None:
        return [DASH] * 3
    shown = DASH
    if test.interval:
        low, high = (unit * side for side in test.interval)
        shown = between((low, high), form)
    return [shown, _p(test.p), _p(corrected)]


def _verdict(over_seeds: float | None, over_utterances: float | None) -> str:
    if over_seeds is None:
        return "unknown: one seed"
    if over_seeds < _ALPHA:
        return "yes"
    surely = over_utterances is not None and over_utterances < _ALPHA
    return "of these models only" if surely else "not shown"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"

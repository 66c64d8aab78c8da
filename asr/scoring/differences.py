"""What tells groups of runs apart: paired tests over seeds and over utterances, Holm-corrected."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from asr.errors import UserError
from asr.scoring.comparison import Setting, between, pooled
from asr.scoring.report import Table
from asr.scoring.significance import paired_bootstrap
from asr.scoring.spread import holm, paired_t
from asr.scoring.wer import Score

_MOST_IN_PAIRS = 10  # groups: 45 pairs


@dataclass(frozen=True)
class Difference:
    """The second setting against the first in one figure."""

    first: str
    second: str
    figure: str
    wer: bool
    mean: float
    interval: tuple[float, float]
    p: float
    over: str


def differences(
    settings: Sequence[Setting], splits: Sequence[str], notes: list[str]
) -> list[Difference]:
    """Every pair of settings in every figure that both have, runs of the same seed paired.

    What cannot be compared is said in `notes`.
    """
    found = []
    for first, second in _pairs(settings, notes):
        names = f"{first.label} and {second.label}"
        ours, theirs = ({m.seed: m for m in s.members} for s in (first, second))
        seeds = sorted(ours.keys() & theirs.keys())
        pairs = [(ours[seed], theirs[seed]) for seed in seeds]
        if len(pairs) < 2:
            notes.append(
                f"{names} have fewer than two seeds in common: their losses are not tested."
            )
        elif first.comparable and second.comparable:
            found.append(_by_seed(first, second, "best loss", [(a.best, b.best) for a, b in pairs]))
        for split in splits:
            both = [(a, b) for a, b in pairs if split in a.scores and split in b.scores]
            if not both:
                continue
            scores = [(a.scores[split], b.scores[split]) for a, b in both]
            try:
                found.append(_by_utterance(first, second, split, scores))
            except UserError as error:
                notes.append(f"{names}: WER of {split} is not comparable: {error}.")
                continue
            if len(both) > 1:
                rates = [(a.wer, b.wer) for a, b in scores]
                found.append(_by_seed(first, second, f"WER {split}", rates, wer=True))
    return found


def difference_table(found: Sequence[Difference]) -> Table:
    """The differences with p corrected for their number, one family for each figure and unit."""
    corrected: dict[int, float] = {}
    families: dict[tuple[str, bool], list[int]] = {}
    for number, d in enumerate(found):
        families.setdefault((d.figure, "utterances" in d.over), []).append(number)
    for members in families.values():
        adjusted = holm([found[number].p for number in members])
        corrected |= zip(members, adjusted, strict=True)
    rows = []
    for number, d in enumerate(found):
        signed = "{:+.2%}" if d.wer else "{:+.4f}"
        mean, span = signed.format(d.mean).replace("%", " %"), between(d.interval, signed)
        verdict = "yes" if corrected[number] < 0.05 else "not shown"
        pair = (d.first, d.second, d.figure)
        rows.append((*pair, mean, span, d.over, _p(d.p), _p(corrected[number]), verdict))
    head = ("first", "second", "figure", "second minus first", "95 % interval", "paired over", "p")
    note = (
        "Over seeds: paired t test, for other seeds too. Over utterances: paired bootstrap of the "
        "errors summed over the shared seeds, for these trained models. p (Holm) holds for all "
        "pairs of one figure together; different: p (Holm) below 0.05."
    )
    return Table("Which difference is real", (*head, "p (Holm)", "different"), rows, note)


def _pairs(settings: Sequence[Setting], notes: list[str]) -> list[tuple[Setting, Setting]]:
    there = [setting for setting in settings if setting.members]
    if len(there) <= _MOST_IN_PAIRS:
        return list(combinations(there, 2))
    notes.append(f"{len(there)} groups: each is tested against the first, {there[0].label}, only.")
    return [(there[0], other) for other in there[1:]]


def _by_seed(
    first: Setting,
    second: Setting,
    figure: str,
    pairs: list[tuple[float, float]],
    wer: bool = False,
) -> Difference:
    test = paired_t(*map(list, zip(*pairs, strict=True)))
    assert test, pairs
    over = f"{test.pairs} seeds"
    labels = (first.label, second.label)
    return Difference(*labels, figure, wer, test.mean, test.interval, test.p, over)


def _by_utterance(
    first: Setting, second: Setting, split: str, scores: list[tuple[Score, Score]]
) -> Difference:
    test = paired_bootstrap(*(pooled(side, draws=1) for side in zip(*scores, strict=True)))
    over = f"{test.units} utterances"
    labels = (first.label, second.label)
    return Difference(*labels, f"WER {split}", True, test.wer, test.interval, test.p, over)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"

"""Groups of runs in figures: their losses, what it takes to pass a level, word error rates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from asr.errors import UserError
from asr.scoring.curves import finite, first_below, median_reached
from asr.scoring.events import Curve
from asr.scoring.files import between, percent
from asr.scoring.report import Table
from asr.scoring.spread import spread
from asr.scoring.wer import COUNTS, Score, summarize

DASH = "–"


@dataclass(frozen=True)
class Member:
    """One run of a group."""

    name: str
    seed: int
    loss: Curve  # on validation
    cost: Callable[[float], tuple[float, float] | None]  # step -> audio-hours, seconds
    scores: dict[str, Score] = field(default_factory=dict)  # by split
    health: dict[str, float] = field(default_factory=dict)  # as last seen, by asr.runs.health names
    health_step: int | None = None
    figures: dict[str, float] = field(default_factory=dict)  # that are not of words, by name
    decoded: dict[str, dict[str, str]] = field(default_factory=dict)  # by split: how, if known

    @property
    def best(self) -> float:
        """The lowest loss."""
        return float(finite(self.loss).values.min())

    @property
    def final(self) -> float:
        """The last loss."""
        return float(self.loss.values[-1])


@dataclass(frozen=True)
class Setting:
    """A group: the runs that can be counted, and how many could not."""

    label: str
    members: tuple[Member, ...]
    failed: int = 0
    comparable: bool = True  # its losses are of the same data and vocabulary as most others'
    letter: str = ""  # in its place where two settings stand in a row
    whole: str = ""  # with all that it may be short of

    @property
    def short(self) -> str:
        """What stands for it where there is little room."""
        return self.letter or self.label


def loss_table(settings: Sequence[Setting], curve: str) -> Table:
    """Final and best loss: mean, spread over seeds and t interval."""
    head = (
        "setting",
        "runs",
        "best loss",
        "sd",
        "95 % interval",
        "final loss",
        "sd",
        "best at step",
    )
    rows = []
    for setting in settings:
        runs = str(len(setting.members)) + (f" + {setting.failed} failed" * bool(setting.failed))
        if not setting.members or not setting.comparable:
            why = DASH if setting.comparable else "not comparable"
            rows.append((setting.label, runs, why, *[DASH] * 5))
            continue
        best = spread([member.best for member in setting.members])
        final = spread([member.final for member in setting.members])
        curves = [finite(member.loss) for member in setting.members]
        at = [float(c.steps[c.values.argmin()]) for c in curves]
        span = DASH if best.interval is None else between(best.interval, "{:.4f}")
        cells = (_loss(best.mean), _loss(best.sd), span, _loss(final.mean), _loss(final.sd))
        rows.append((setting.label, runs, *cells, f"{np.mean(at):,.0f}"))
    note = (
        f"{curve} on the validation data: the lowest and the last of each run, means over the runs "
        "(seeds) of a setting, sd their standard deviation; intervals of the mean of the best by "
        "Student's distribution, so two runs give a wide one and one run none. Best at step: mean."
    )
    return Table("Validation loss", head, rows, note)


def level_table(settings: Sequence[Setting], levels: Sequence[float]) -> Table:
    """What it takes until the loss first passes each level: medians over the runs."""
    rows = []
    for level in levels:
        for setting in settings:
            if not setting.comparable or not setting.members:
                continue
            steps = [first_below(member.loss, level) for member in setting.members]
            costs = [
                None if step is None else member.cost(step)
                for step, member in zip(steps, setting.members, strict=True)
            ]
            reached = f"{sum(s is not None for s in steps)} of {len(steps)}"
            middle = median_reached(steps)
            spent = [DASH, DASH]
            if middle is not None and all(
                c or s is None for c, s in zip(costs, steps, strict=True)
            ):
                spent = [_cost(median_reached([c and c[i] for c in costs])) for i in (0, 1)]
            shown = DASH if middle is None else f"{middle:,.0f}"
            rows.append((f"{level:g}", setting.label, reached, shown, *spent))
    note = (
        "Medians over the runs until the first validation at or below the level. A run that never "
        "gets there comes after all others; where half of them or more do not, there is no median. "
        "Levels, if not given: halfway down, what the typical run of every setting reaches, and "
        "what only that of the best setting does. Seconds of training by the clock, validation "
        "apart; other work on the machine lengthens them."
    )
    head = ("loss", "setting", "reached", "steps", "audio-hours", "seconds")
    return Table("Until the loss first passes a level", head, rows, note)


def wer_table(settings: Sequence[Setting], split: str) -> Table:
    """Word error rates of one split, pooled over the runs of each setting."""
    rows = []
    for setting in settings:
        scores = [m.scores[split] for m in setting.members if split in m.scores]
        if not scores:
            continue
        rates = spread([score.wer for score in scores])
        span, mean = _pooled_interval(scores), percent(rates.mean)
        # A rate cannot be below 0; the distribution of Student does not know that.
        seeds = (
            DASH
            if rates.interval is None
            else between((max(0, rates.interval[0]), rates.interval[1]))
        )
        sd = DASH if rates.sd is None else percent(rates.sd)
        each = ", ".join(f"{100 * score.wer:.2f}" for score in scores)
        rows.append((setting.label, str(len(scores)), mean, span, sd, seeds, each))
    head = ("setting", "runs", "WER", "over utterances", "sd of runs", "over runs", "each run, %")
    note = (
        "95 % intervals: over utterances by bootstrap (Bisani & Ney 2004), for these trained "
        "models; over runs by Student's distribution, cut at 0, for other seeds too."
    )
    return Table(f"Word error rate: {split}", head, rows, note)


def decoded_unlike(settings: Sequence[Setting], split: str) -> list[str]:
    """A note where the runs' texts of a split were not all searched for in the same way."""
    runs = [m for s in settings for m in s.members if m.decoded.get(split)]
    parts = []
    for key in dict.fromkeys(key for run in runs for key in run.decoded[split]):
        first: dict[str, str] = {}  # value -> the first run that has it
        for run in runs:
            first.setdefault(run.decoded[split].get(key, "as trained"), run.name)
        if len(first) > 1:
            parts.append(
                f"{key} " + ", ".join(f"{value} in {name}" for value, name in first.items())
            )
    if not parts:
        return []
    return [
        f"WER of {split}: not all decoded alike, so differences may be of that: {'; '.join(parts)}."
    ]


def pooled(scores: Sequence[Score], draws: int = 1000) -> Score:
    """One Score of several runs on one split: each utterance's counts summed over the runs.

    Drawing utterances then draws the same ones of every run. Raises UserError where the runs were
    scored on different utterances, or against different references.
    """
    if len(scores) == 1:
        return scores[0]
    rows = [{u.id: u for u in score.utterances} for score in scores]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise UserError("its runs were evaluated on different utterances; evaluate them again")
    if any(row[u.id].reference != u.reference for row in rows for u in scores[0].utterances):
        raise UserError("its runs were evaluated against different texts; evaluate them again")
    return summarize(
        [
            replace(u, **{c: sum(getattr(row[u.id], c) for row in rows) for c in COUNTS})
            for u in scores[0].utterances
        ],
        draws=draws,
    )


def _pooled_interval(scores: Sequence[Score]) -> str:
    try:
        interval = pooled(scores).wer_interval
    except UserError:
        return "runs differ in utterances or texts"
    return DASH if interval is None else between(interval)


def _loss(value: float | None) -> str:
    return DASH if value is None else f"{value:.4f}"


def _cost(value: float | None) -> str:
    """Nothing known (None), or no audio at all (0), is a dash."""
    return f"{value:#.3g}" if value and value < 99.95 else f"{value:,.0f}" if value else DASH

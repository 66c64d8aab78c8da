"""Groups of runs in figures: their losses, what it takes to pass a level, word error rates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from asr.errors import UserError
from asr.scoring.curves import finite, first_below, median_reached
from asr.scoring.events import Curve
from asr.scoring.files import percent
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
        f"{curve}: means over runs (seeds); intervals by Student's distribution, so two runs "
        "give a wide one and one run none."
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
            shown = "not reached" if middle is None else f"{middle:,.0f}"
            rows.append((f"{level:g}", setting.label, reached, shown, *spent))
    note = (
        "The first validation at or below the level; a run that never gets there comes after all "
        "others in the median. Seconds are of training, without validation."
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
        seeds = DASH if rates.interval is None else between(rates.interval)
        sd = DASH if rates.sd is None else percent(rates.sd)
        each = ", ".join(f"{100 * score.wer:.2f}" for score in scores)
        rows.append((setting.label, str(len(scores)), mean, span, sd, seeds, each))
    head = ("setting", "runs", "WER", "over utterances", "sd of runs", "over runs", "each run")
    note = (
        "95 % intervals: over utterances by bootstrap (Bisani & Ney 2004), for these trained "
        "models; over runs by Student's distribution, for other seeds too."
    )
    return Table(f"Word error rate: {split}", head, rows, note)


def pooled(scores: Sequence[Score], draws: int = 1000) -> Score:
    """One Score of several runs on one split: each utterance's counts summed over the runs.

    Drawing utterances then draws the same ones of every run. Raises UserError where the runs were
    scored on different utterances.
    """
    if len(scores) == 1:
        return scores[0]
    rows = [{u.id: u for u in score.utterances} for score in scores]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise UserError("its runs were evaluated on different utterances; evaluate them again")
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
        return "runs differ in utterances"
    return DASH if interval is None else between(interval)


def _loss(value: float | None) -> str:
    return DASH if value is None else f"{value:.4f}"


def _cost(value: float | None) -> str:
    """Nothing known (None), or no audio at all (0), is a dash."""
    return f"{value:,.3g}" if value and value < 100 else f"{value:,.0f}" if value else DASH


def between(interval: tuple[float, float], form: str = "{:.2%}") -> str:
    """An interval as people read it."""
    low, high = map(form.format, interval)
    return f"{low} to {high}".replace("%", " %")

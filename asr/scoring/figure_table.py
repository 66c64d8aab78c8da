"""Figures of runs that are no error rates of words: accuracy of images, a bound in nats."""

from collections.abc import Sequence

from asr.scoring.comparison import DASH, Setting
from asr.scoring.files import between
from asr.scoring.report import Table
from asr.scoring.spread import spread

PERCENT = ("accuracy",)  # fractions, shown as percent


def figure_names(settings: Sequence[Setting]) -> list[str]:
    """The figures that comparable settings have, e.g. "accuracy of test"."""
    there = [m.figures for s in settings if s.comparable for m in s.members]
    return sorted({name for figures in there for name in figures})


def figure_table(settings: Sequence[Setting], name: str) -> Table:
    """One figure: mean, spread over seeds and t interval of each comparable setting."""
    unit, form = (100, "{:.2f}") if name.startswith(PERCENT) else (1, "{:.4f}")
    rows = []
    for setting in (s for s in settings if s.comparable):
        values = [unit * m.figures[name] for m in setting.members if name in m.figures]
        if not values:
            continue
        found = spread(values)
        sd = DASH if found.sd is None else form.format(found.sd)
        span = DASH if found.interval is None else between(found.interval, form)
        each = ", ".join(map(form.format, values))
        rows.append(
            (setting.label, str(len(values)), form.format(found.mean), sd, span, each),
        )
    title = f"{name[:1].upper()}{name[1:]}" + ", %" * (unit == 100)
    head = ("setting", "runs", "mean", "sd", "95 % interval", "each run")
    note = "Means over runs (seeds); intervals by Student's distribution, for other seeds too."
    return Table(title, head, rows, note)

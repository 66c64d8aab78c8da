"""The report of asr.compare: tables, curves and sentences of a comparison, as HTML and Markdown."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asr.analysis.answers import NOTE, sentences
from asr.analysis.charts import Panel, Strip, draw_curves, draw_seeds
from asr.analysis.comparison import Comparison, compared_figures
from asr.analysis.curves import band, choose_levels, finite, first_below, median_reached
from asr.analysis.report import DASH, Picture, Points, Table, write_report
from asr.analysis.runs import BEST_LOSS, PERCENT, REPORT, TRAIN, SettingRun, SettingRuns, is_run
from asr.analysis.significance import difference_table
from asr.analysis.statistics import Interval, spread
from asr.analysis.wer import Score, between, pooled
from asr.errors import UserError
from asr.io import atomic_writer


def report(comparison: Comparison, out: Path, levels: Sequence[float] | None = None) -> None:
    """Write the report into `out` and print it. levels: losses to reach, chosen if None."""
    settings, curve = comparison.settings, comparison.curve
    comparable = [s for s in settings if s.comparable and s.members]
    if levels is None:
        levels = choose_levels([[m.loss for m in s.members] for s in comparable])
    pairs_of = comparison.differences
    answers = [line for name, pairs in pairs_of.items() for line in sentences(name, pairs)]
    tables = evaluation_tables(settings)
    tables += [difference_table(name, pairs) for name, pairs in pairs_of.items() if pairs]
    tables += [loss_table(settings, curve), level_table(comparable, levels)]
    failed = [(run.name, str(run.fault)) for run in comparison.runs if run.fault]
    if failed:
        tables.append(Table("Runs that are not counted", ("run", "why"), failed))
    out.mkdir(parents=True, exist_ok=True)
    pictures = [draw_figures(out, settings, curve), draw_losses(out, comparable, curve, levels)]
    counted = len(comparison.runs) - len(failed)
    sizes = f"{_count(counted, 'run')} in {_count(len(settings), 'group')}"
    facts = [f"{sizes} by differences of their recipes other than the seed."]
    lists = [
        Points("Which difference is real?", answers or ["No two settings are compared."], NOTE),
        Points("Settings", [f"{s.short}. {s.legend}" for s in settings if s.legend != s.short]),
        Points("Notes", comparison.notes),
    ]
    lists = [part for part in lists if part.lines]
    write_report(out, "compare", "Comparison of runs", facts, [*lists, *pictures, *tables])
    blocks = [["", part.title, *(f"- {line}" for line in part.lines)] for part in lists]
    blocks += map(_console, tables)
    print("\n".join([*facts, *(line for block in blocks for line in block)]))
    print(f"\nfiles: {out}/compare.html compare.md curves.png curves.svg seeds.png seeds.svg")


def report_folder(places: Sequence[Path]) -> Path:
    """The folder of the report where none is named: SWEEP/compare of one sweep, else compare.

    UserError for one that is elsewhere.
    """
    one_sweep = len(places) == 1 and not is_run(places[0])
    out = (places[0] if one_sweep else Path()) / REPORT
    if out.is_symlink():
        raise UserError(f"{out}: a symbolic link, through which nothing is written; name an --out")
    return out


def loss_table(settings: Sequence[SettingRuns], curve: str) -> Table:
    """Final and best loss: mean, standard deviation over seeds and t interval."""
    head = ("setting", "runs", "best loss", "sd", "95 % interval", "final loss", "sd")
    rows = []
    for setting in settings:
        runs = f"{len(setting.members)}{_failed(setting)}"
        if not setting.members or not setting.comparable:
            why = DASH if setting.comparable else "not comparable"
            rows.append((setting.label, runs, why, *[DASH] * 5))
            continue
        best = _spread_cells([member.figures[BEST_LOSS] for member in setting.members], "{:.4f}")
        final = _spread_cells([member.loss.values[-1] for member in setting.members], "{:.4f}")
        curves = [finite(member.loss) for member in setting.members]
        step = np.mean([c.steps[c.values.argmin()] for c in curves])
        rows.append((setting.label, runs, *best, *final[:2], f"{step:,.0f}"))
    note = (
        f"{curve} on the validation data: the lowest and the last of each run, means over the runs "
        "(seeds) of a setting, sd their standard deviation; intervals of the mean of the best by "
        "Student's distribution, so two runs give a wide one and one run none. Best at step: mean."
    )
    return Table("Validation loss", (*head, "best at step"), rows, note)


def _failed(setting: SettingRuns) -> str:
    return f" + {setting.failed} not counted" * bool(setting.failed)


def level_table(settings: Sequence[SettingRuns], levels: Sequence[float]) -> Table:
    """Steps, audio-hours and seconds until the loss first passes each level: medians over runs."""
    rows = [(f"{level:g}", s.label, *_level_cells(s, level)) for level in levels for s in settings]
    note = (
        "Medians over the runs until the first validation at or below the level. A run that never "
        "reaches it ranks after all others; where half of them or more do not, there is no median; "
        "failed runs are not counted. "
        "Levels, if not given: halfway down, what the typical run of every setting reaches, and "
        "what only that of the best setting reaches. Seconds of training on the clock, without "
        "validation; other work on the machine lengthens them."
    )
    head = ("loss", "setting", "reached", "steps", "audio-hours", "seconds")
    return Table("Until the loss first passes a level", head, rows, note)


def _level_cells(setting: SettingRuns, level: float) -> list[str]:
    steps = [first_below(member.loss, level) for member in setting.members]
    costs = [
        None if step is None else member.cost.at(step)
        for step, member in zip(steps, setting.members, strict=True)
    ]
    reached = f"{sum(step is not None for step in steps)} of {len(steps)}{_failed(setting)}"
    median = median_reached(steps)
    if median is None:
        return [reached, *[DASH] * 3]
    spent = [DASH, DASH]
    if all(c or s is None for c, s in zip(costs, steps, strict=True)):
        spent = [_cost(median_reached([c and c[i] for c in costs])) for i in (0, 1)]
    return [reached, f"{median:,.0f}", *spent]


def wer_table(settings: Sequence[SettingRuns], split: str) -> Table:
    """Word error rates of one split, pooled over the runs of each setting."""
    rows = []
    for setting in settings:
        scores = [m.scores[split] for m in setting.members if split in m.scores]
        if not scores:
            continue
        rates = spread([score.wer for score in scores])
        # Student's interval may extend below 0, which a rate cannot.
        over_runs = rates.interval and (max(0, rates.interval[0]), rates.interval[1])
        cells = (_number(rates.mean), _pooled_interval(scores), _number(rates.sd))
        each = ", ".join(f"{100 * score.wer:.2f}" for score in scores)
        rows.append((setting.label, str(len(scores)), *cells, _interval(over_runs), each))
    head = ("setting", "runs", "WER", "over utterances", "sd of runs", "over runs", "each run, %")
    note = (
        "95 % intervals: over utterances by bootstrap (Bisani & Ney 2004), for these trained "
        "models; over runs by Student's distribution, cut at 0, for other seeds too."
    )
    return Table(f"Word error rate: {split}", head, rows, note)


def _pooled_interval(scores: Sequence[Score]) -> str:
    try:
        return _interval(pooled(scores).wer_interval)
    except UserError:
        return "runs differ in utterances or texts"


def figure_table(settings: Sequence[SettingRuns], name: str) -> Table:
    """One figure: mean, standard deviation over seeds and t interval of each setting."""
    unit, form = (100, "{:.2f}") if name.startswith(PERCENT) else (1, "{:.4f}")
    rows = []
    for setting in settings:
        values = [unit * m.figures[name] for m in setting.members if name in m.figures]
        if not values:
            continue
        each = ", ".join(map(form.format, values))
        rows.append((setting.label, str(len(values)), *_spread_cells(values, form), each))
    title = f"{name[:1].upper()}{name[1:]}" + ", %" * (unit == 100)
    head = ("setting", "runs", "mean", "sd", "95 % interval", "each run")
    note = "Means over runs (seeds); intervals by Student's distribution, for other seeds too."
    return Table(title, head, rows, note)


def evaluation_tables(settings: Sequence[SettingRuns]) -> list[Table]:
    """The results of the evaluations."""
    splits, figures = compared_figures(settings)
    comparable = [s for s in settings if s.comparable]
    tables = [wer_table(settings, split) for split in splits]
    return tables + [figure_table(comparable, name) for name in figures]


def draw_losses(
    out: Path, settings: Sequence[SettingRuns], curve: str, levels: Sequence[float]
) -> Picture:
    """The curves overlaid: curves.png and curves.svg."""
    loss = {s.legend: mean for s in settings if (mean := band(m.loss for m in s.members))}
    train = {s.legend: mean for s in settings if (mean := band(m.train_loss for m in s.members))}
    files = draw_curves([Panel(curve, loss, levels), Panel(TRAIN, train)])
    note = (
        "Mean of the runs; the band reaches from the lowest to the highest. Dashed: the levels. "
        "nll: cross-entropy of a target (character, word piece, image), without smoothing."
    )
    return _picture(out, "Loss curves", "curves", files, note)


def draw_figures(out: Path, settings: Sequence[SettingRuns], curve: str) -> Picture:
    """Every figure of every run: seeds.png and seeds.svg."""
    # Those with curves first, so that each has the colour it has in draw_losses.
    ordered = sorted((s for s in settings if s.members), key=lambda s: not s.comparable)
    runs = [(s.short, m.seed, _figures_of(m, s, curve)) for s in ordered for m in s.members]
    strips: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, seed, figures in runs:
        for title, value in figures.items():
            strips.setdefault(title, {}).setdefault(name, []).append((seed, value))
    chosen = [Strip(title, strips[title]) for title in sorted(strips, key=_order)]
    files = draw_seeds(chosen, [s.short for s in ordered])
    note = (
        "A dot is a run, the bar the mean of a setting; a line connects the runs of one seed. "
        "The axes do not begin at 0."
    )
    return _picture(out, "Every run", "seeds", files, note)


def _figures_of(run: SettingRun, setting: SettingRuns, curve: str) -> dict[str, float]:
    """The run's figures that can be compared, by title."""
    rates = {f"WER of {split}, %": 100 * score.wer for split, score in run.scores.items()}
    if not setting.comparable:
        return rates
    others = {name: value for name, value in run.figures.items() if name != BEST_LOSS}
    return rates | others | {f"best {curve}": run.figures[BEST_LOSS]}


def _order(title: str) -> tuple[bool, str]:
    """Word error rates first."""
    return not title.startswith("WER"), title


def _picture(out: Path, title: str, name: str, files: tuple[bytes, str], note: str) -> Picture:
    """Write NAME.png and NAME.svg."""
    png, svg = files
    for suffix, content in (("png", png), ("svg", svg.encode())):
        with atomic_writer(out / f"{name}.{suffix}") as file:
            file.write(content)
    return Picture(title, f"{name}.svg", svg, note)


def _interval(interval: Interval | None, form: str = "{:.2%}") -> str:
    return DASH if interval is None else between(interval, form)


def _number(value: float | None, form: str = "{:.2%}") -> str:
    return DASH if value is None else form.format(value).replace("%", " %")


def _spread_cells(values: Sequence[float], form: str) -> list[str]:
    """Mean, standard deviation and t interval."""
    over = spread(values)
    return [form.format(over.mean), _number(over.sd, form), _interval(over.interval, form)]


def _cost(value: float | None) -> str:
    """Nothing known (None), or no audio at all (0), is a dash."""
    return f"{value:#.3g}" if value and value < 99.95 else f"{value:,.0f}" if value else DASH


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _console(table: Table) -> list[str]:
    rows = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["", table.title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]

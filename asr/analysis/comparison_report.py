"""The report of asr.compare: sentences, charts and tables of a comparison, as HTML and Markdown."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asr.analysis.charts import Panel, Strip, draw_curves, draw_seeds
from asr.analysis.comparison import (
    ALPHA,
    Comparison,
    SettingDifference,
    comparable_in,
    compared_figures,
    scale,
)
from asr.analysis.curves import band, choose_levels, finite, first_below, median_reached
from asr.analysis.report import DASH, Picture, Points, Table, write_report
from asr.analysis.runs import BEST_LOSS, REPORT, TRAIN, WER_OF, SettingRuns, is_run
from asr.analysis.significance import Difference
from asr.analysis.statistics import POWER, Interval, PairedT, detectable, spread
from asr.analysis.wer import Score, between, pooled
from asr.errors import UserError
from asr.io import atomic_writer

_SIGNIFICANT = (
    "Significant: p below 0.05 in the paired t test over seeds, corrected for the number of pairs "
    "(Holm). Can show: a true difference of this size would be significant, as the only test, in "
    f"{100 * POWER:.0f} % of repetitions."
)
_MOST_SENTENCES = 12  # per figure; a table has all pairs


def report(comparison: Comparison, out: Path, levels: Sequence[float] | None = None) -> None:
    """Write the report into `out` and print it. levels: losses to reach, chosen if None."""
    settings, curve = comparison.settings, comparison.curve
    comparable = [s for s in settings if s.comparable and s.members]
    if levels is None:
        levels = choose_levels([[m.loss for m in s.members] for s in comparable])
    differences = [(name, pairs) for name, pairs in comparison.differences.items() if pairs]
    answers = [line for name, pairs in differences for line in sentences(name, pairs)]
    answers = answers or ["No two settings are compared."]
    tables = evaluation_tables(settings)
    tables += [difference_table(name, pairs) for name, pairs in differences]
    tables += [loss_table(settings, curve), level_table(comparable, levels)]
    failed = [(run.name, str(run.fault)) for run in comparison.runs if run.fault]
    if failed:
        tables.append(Table("Runs that are not counted", ("run", "why"), failed))
    out.mkdir(parents=True, exist_ok=True)
    pictures = [draw_figures(out, settings, curve), draw_losses(out, comparable, curve, levels)]
    counted = len(comparison.runs) - len(failed)
    sizes = f"{_count(counted, 'run')} in {_count(len(settings), 'group')}"
    facts = [f"{sizes} by differences between their recipes, except the seed."]
    lists = [
        Points("Which difference is real?", answers, _SIGNIFICANT),
        Points("Settings", [f"{s.short}. {s.legend}" for s in settings if s.legend != s.short]),
        Points("Notes", comparison.notes),
    ]
    lists = [part for part in lists if part.lines]
    write_report(out, "compare", "Comparison of runs", facts, [*lists, *pictures, *tables])
    blocks = [["", part.title, *(f"- {line}" for line in part.lines)] for part in lists]
    blocks += map(_console, tables)
    print("\n".join([*facts, *(line for block in blocks for line in block)]))
    print(f"\nfiles: {out}/compare.html compare.md curves.png curves.svg seeds.png seeds.svg")


def report_folder(folders: Sequence[Path]) -> Path:
    """The default folder of the report: SWEEP/compare for one sweep, else compare.

    UserError if it is a symbolic link.
    """
    one_sweep = len(folders) == 1 and not is_run(folders[0])
    out = (folders[0] if one_sweep else Path()) / REPORT
    if out.is_symlink():
        raise UserError(f"{out}: a symbolic link; no report is written through it; add --out DIR")
    return out


def sentences(figure: str, differences: Sequence[SettingDifference]) -> list[str]:
    """A sentence for each pair of settings; if there are many, for those with the smallest p."""
    tests = sum(pair.over_seeds is not None for pair in differences)
    pairs = list(differences)
    if len(pairs) > _MOST_SENTENCES:
        pairs.sort(key=lambda pair: pair.over_seeds.p if pair.over_seeds else 2.0)
    lines = [_sentence(figure, pair, tests) for pair in pairs[:_MOST_SENTENCES]]
    if rest := len(pairs) - len(lines):
        lines.append(f"{figure}: the other {rest} pairs are in the table.")
    return lines


def _sentence(figure: str, pair: SettingDifference, tests: int) -> str:
    """tests: pairs for which p is corrected."""
    factor, digits = scale(figure)
    points = " points" * (factor == 100)

    def number(value: float) -> str:
        return f"{factor * value:.{digits}f}"

    first, second = (number(value) + " %" * bool(points) for value in pair.values)
    size, direction = number(abs(pair.mean)), "lower" if pair.mean < 0 else "higher"
    if float(size) == 0 and pair.mean:
        size = f"less than {number(0)[:-1]}1"
    size = f"{size}{points} {direction} than" if pair.mean else "equal to"
    line = f"{figure}: {pair.second} is {size} {pair.first}, {second} against {first}"
    only_models = pair.over_utterances is not None and pair.over_utterances.p < ALPHA
    if pair.over_seeds is None:
        line += ". Significant over utterances, for these two models" * only_models
        line += ". One seed in common allows no conclusion for others: train or evaluate more"
    else:
        line += f" ({_test(pair.over_seeds, tests, factor, digits)}, {pair.seeds} seeds): "
        if pair.over_seeds.p < ALPHA:
            line += "significant over seeds"
        else:
            line += "not significant over seeds"
            line += ", only over utterances, for these trained models" * only_models
            if sd := pair.over_seeds.sd:
                smallest = number(detectable(pair.seeds, sd)) + points
                line += f"; {pair.seeds} seeds that vary like these can show {smallest} or more"
    line += f". {pair.failed} runs without a result are not counted" * bool(pair.failed)
    return line + ". Not decoded alike (see Notes)" * (not pair.decoded_alike) + "."


def _test(test: PairedT, tests: int, factor: int, digits: int) -> str:
    """p = 0.300, corrected for 3 pairs; 95 % interval of this difference alone -0.1 to +0.2"""
    text = "p < 0.001" if test.p < 0.001 else f"p = {test.p:.3f}"
    text += f", corrected for {tests} pairs" * (tests > 1)
    if test.interval is None:
        return f"{text} by the sign test"
    low, high = (factor * end for end in test.interval)
    difference = "this difference alone" if tests > 1 else "the difference"
    return f"{text}; 95 % interval of {difference} {low:+.{digits}f} to {high:+.{digits}f}"


def difference_table(figure: str, differences: Sequence[SettingDifference]) -> Table:
    """The differences in one figure."""
    rates = figure.startswith(WER_OF)
    factor, digits = scale(figure)
    form = f"{{:+.{digits}f}}"
    rows = []
    for d in differences:
        row = [d.first, d.second, form.format(factor * d.mean), str(d.seeds)]
        row += _test_cells(d.over_seeds, form, factor)
        row += _test_cells(d.over_utterances, form, factor) if rates else []
        rows.append((*row, _verdict(d)))
    head = ["first", "second", "difference" + ", points" * (factor == 100), "seeds"]
    head += ["95 % over seeds", "p (Holm)"]
    head += ["95 % over utterances", "p (Holm)"] if rates else []
    head += ["real"]
    note = (
        "Difference: second minus first. Runs of the same seed are paired. Over seeds: t test, "
        "valid for new seeds; sign test where all differences are equal. Each interval is for one "
        "pair; p (Holm) is corrected for all pairs of the table; real: p (Holm) over seeds is "
        "below 0.05. One seed in common allows no conclusion about other seeds."
    )
    note += (
        " Over utterances: bootstrap of the errors summed over the seeds, valid for these trained "
        "models only: another seed can reverse such a difference."
    ) * rates
    return Table(f"Is the difference real? {figure}", head, rows, note)


def _test_cells(test: PairedT | Difference | None, form: str, factor: int) -> list[str]:
    if test is None:
        return [DASH] * 2
    interval = test.interval and between([factor * end for end in test.interval], form)
    return [interval or DASH, "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"]


def _verdict(pair: SettingDifference) -> str:
    if pair.over_seeds is None:
        return "unknown: one seed"
    if pair.over_seeds.p < ALPHA:
        return "yes"
    significant = pair.over_utterances is not None and pair.over_utterances.p < ALPHA
    return "of these models only" if significant else "not shown"


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
        f"Best (lowest) and final {curve} on the validation data, means over the runs (seeds) of a "
        "setting; sd: standard deviation over runs. 95 % interval of the mean best loss by "
        "Student's distribution: wide for two runs, none for one. Best at step: mean."
    )
    return Table("Validation loss", (*head, "best at step"), rows, note)


def _failed(setting: SettingRuns) -> str:
    return f" + {setting.failed} not counted" * bool(setting.failed)


def level_table(settings: Sequence[SettingRuns], levels: Sequence[float]) -> Table:
    """Steps, audio-hours and seconds until the loss first passes each level: medians over runs."""
    rows = [(f"{level:g}", s.label, *_level_cells(s, level)) for level in levels for s in settings]
    note = (
        "Medians over the runs until the first validation at or below the level. A run that never "
        "reaches it ranks last; if half of the runs or more do not, there is no median. Failed "
        "runs are not counted. Default levels: halfway down, the loss that the typical run of "
        "every setting reaches, and the loss that only the typical run of the best setting "
        "reaches. Seconds: wall time of training without validation; other work on the machine "
        "increases it."
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


def evaluation_tables(settings: Sequence[SettingRuns]) -> list[Table]:
    """The results of the evaluations."""
    tables = []
    for name in compared_figures(settings):
        if name != BEST_LOSS:
            table = wer_table if name.startswith(WER_OF) else figure_table
            tables.append(table(comparable_in(name, settings), name))
    return tables


def wer_table(settings: Sequence[SettingRuns], figure: str) -> Table:
    """Word error rates of one split, pooled over the runs of each setting."""
    split = figure.removeprefix(WER_OF)
    rows = []
    for setting in settings:
        scores = [m.scores[split] for m in setting.members if split in m.scores]
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


def figure_table(settings: Sequence[SettingRuns], figure: str) -> Table:
    """One figure: mean, standard deviation over seeds and t interval of each setting."""
    factor, digits = scale(figure)
    form = f"{{:.{digits}f}}"
    rows = []
    for setting in settings:
        values = [factor * m.figures[figure] for m in setting.members if figure in m.figures]
        each = ", ".join(map(form.format, values))
        rows.append((setting.label, str(len(values)), *_spread_cells(values, form), each))
    title = f"{figure[:1].upper()}{figure[1:]}" + ", %" * (factor == 100)
    head = ("setting", "runs", "mean", "sd", "95 % interval", "each run")
    note = "Means over runs (seeds); intervals by Student's distribution, for other seeds too."
    return Table(title, head, rows, note)


def draw_losses(
    out: Path, settings: Sequence[SettingRuns], curve: str, levels: Sequence[float]
) -> Picture:
    """The curves overlaid: curves.png and curves.svg."""
    loss = {s.legend: mean for s in settings if (mean := band(m.loss for m in s.members))}
    train = {s.legend: mean for s in settings if (mean := band(m.train_loss for m in s.members))}
    files = draw_curves([Panel(curve, loss, levels), Panel(TRAIN, train)])
    note = (
        "Mean over runs; band: from the lowest to the highest run. Dashed: the levels. nll: "
        "cross-entropy per target (character, word piece, image), without label smoothing."
    )
    return _picture(out, "Loss curves", "curves", files, note)


def draw_figures(out: Path, settings: Sequence[SettingRuns], curve: str) -> Picture:
    """Every figure of every run: seeds.png and seeds.svg."""
    # Settings with curves first, so that each has the same colour as in draw_losses.
    ordered = sorted((s for s in settings if s.members), key=lambda s: not s.comparable)
    strips = []
    for figure in compared_figures(ordered):
        factor, _ = scale(figure)
        values = {}
        for setting in comparable_in(figure, ordered):
            runs = [m for m in setting.members if figure in m.figures]
            values[setting.short] = [(m.seed, factor * m.figures[figure]) for m in runs]
        title = f"best {curve}" if figure == BEST_LOSS else figure + ", %" * (factor == 100)
        strips.append(Strip(title, values))
    files = draw_seeds(strips, [s.short for s in ordered])
    note = (
        "A dot is a run, the bar the mean of a setting; a line connects the runs of one seed. "
        "The axes do not start at 0."
    )
    return _picture(out, "Every run", "seeds", files, note)


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
    """A dash if unknown (None) or without audio (0)."""
    return f"{value:#.3g}" if value and value < 99.95 else f"{value:,.0f}" if value else DASH


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _console(table: Table) -> list[str]:
    rows = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["", table.title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]

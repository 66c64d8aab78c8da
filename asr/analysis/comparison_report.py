"""The report of asr.compare, as HTML and Markdown: answers, effects, charts and tables.

The first lines answer which setting is best in each figure. Every pair of settings and the methods
are folded in the page and last in the Markdown; the console omits them.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asr.analysis.charts import Panel, Strip, draw_curves, draw_seeds
from asr.analysis.comparison import (
    Comparison,
    SettingDifference,
    better_and_worse,
    comparable_in,
    compared_figures,
    figure_spread,
    scale,
)
from asr.analysis.curves import band, choose_levels, finite, first_below, median_reached
from asr.analysis.effects import ALPHA, Effect, Interaction
from asr.analysis.report import DASH, Picture, Points, Table, html, markdown
from asr.analysis.runs import BEST, REPORT, TRAIN, WER_OF, SettingRuns, best_of, is_run
from asr.analysis.significance import Difference
from asr.analysis.statistics import (
    MIN_UNITS,
    MOST_PAIRS,
    POWER,
    Interval,
    PairedT,
    Spread,
    detectable,
    pairs_needed,
    spread,
)
from asr.analysis.wer import between, pooled
from asr.errors import UserError
from asr.io import atomic_writer, write_files

METHODS = (
    "A setting is the runs whose recipes differ only in the seed; its figures are means over them.",
    "Intervals, 95 %: over runs by Student's distribution, for other seeds too; that of a rate is "
    "cut at 0, and at 100 % unless a run is above. Over utterances by bootstrap (Bisani & Ney "
    "2004), for these models and speakers only: another seed can reverse such a difference. "
    f"Differences over utterances need {MIN_UNITS} of them.",
    "Differences: second minus first, runs of one seed paired; t test over seeds, sign test where "
    "all differences are equal. Significant: p below 0.05 after Holm's correction for all tested "
    "pairs of the figure. Each interval is for one difference alone.",
    "Effect of a factor: mean difference of pairs of runs that are equal in seed and in all other "
    "factors, over the pairs of a seed, then over seeds; t test over seeds, since runs of one seed "
    "are not independent; Holm's correction for all effects on the figure.",
    "An interaction is listed if its two effects differ significantly (Holm), or if the effects of "
    "both factors change their sign with the other's value.",
    "What seeds can show: a difference that is significant among all pairs of the figure in "
    f"{100 * POWER:.0f} % of repetitions, by the power of the paired t test (Cohen 1988) at p "
    "below 0.05 / pairs. Spread: mean variance over all pairs of the differences of one seed.",
    "Levels: medians over runs until the first validation at or below; a run that never reaches it "
    "ranks last. Default levels: halfway down, the loss that the typical run of every setting "
    "reaches, and that of the best setting. Seconds: of training, without validation.",
    "Every run: a dot is a run, the bar the mean of a setting; a line connects the runs of a seed. "
    "The axes do not start at 0. Loss curves: mean over runs, band from the lowest to the highest; "
    "dashed: the levels. nll: cross-entropy per target (character, word piece, image), without "
    "label smoothing.",
)


def report(comparison: Comparison, out: Path, levels: Sequence[float] | None = None) -> None:
    """Write the report into `out` and print it. levels: losses to reach, chosen if None."""
    settings, curve = comparison.settings, comparison.curve
    comparable = [s for s in settings if s.comparable and s.members]
    if levels is None:
        levels = choose_levels([[m.loss for m in s.members] for s in comparable])
    failed = [(run.name, str(run.fault)) for run in comparison.runs if run.fault]
    figures = [figure for figure in compared_figures(settings) if not figure.startswith(BEST)]
    tables = [figure_table(comparable_in(figure, settings), figure) for figure in figures]
    tables += [loss_table(settings, curve), level_table(comparable, levels)]
    tables += [Table("Runs that are not counted", ("run", "why"), failed)] if failed else []
    pairs = [difference_table(*one) for one in comparison.differences.items() if one[1]]
    first, facts = _first_parts(comparison), answers(comparison)
    out.mkdir(parents=True, exist_ok=True)
    pictures = [draw_figures(out, settings, curve), draw_losses(out, comparable, curve, levels)]
    parts = [*first, *pictures, *tables, *pairs, Points("Methods", METHODS, folded=True)]
    report = ("Comparison of runs", facts, parts)
    write_files(out, {"compare.md": markdown(*report), "compare.html": html(*report)})
    print("\n".join(fact.replace("\n", "\n  ") for fact in facts))
    for part in (*first, *tables):
        print("", *part.text(), sep="\n")
    if pairs:
        print("\nEvery pair of settings, and the methods: in the files")
    print(f"\nfiles: {out}/compare.html compare.md curves.png curves.svg seeds.png seeds.svg")


def _first_parts(comparison: Comparison) -> list[Table | Points]:
    """Effects of factors, what letters stand for, and notes, where there are any."""
    settings = comparison.settings
    letters = [f"{s.short}. {s.legend}" for s in settings if s.label == s.short != s.legend]
    crossed = comparison.interactions.items()
    parts = [
        effect_table(comparison),
        Points("Interactions", [_interaction(name, one) for name, of in crossed for one in of]),
        Points("Settings", letters),
        Points("Notes", comparison.notes),
    ]
    return [part for part in parts if part.text()]


def report_folder(folders: Sequence[Path]) -> Path:
    """The default folder of the report: SWEEP/compare for one sweep, else compare.

    UserError if it is a symbolic link.
    """
    one_sweep = len(folders) == 1 and not is_run(folders[0])
    out = (folders[0] if one_sweep else Path()) / REPORT
    if out.is_symlink():
        raise UserError(f"{out}: a symbolic link; no report is written through it; add --out DIR")
    return out


def answers(comparison: Comparison) -> list[str]:
    """The answer in each figure that two settings have, and the number of runs."""
    compared = [name for name in comparison.differences if len(comparison.ranking(name)) > 1]
    runs = _count(sum(run.fault is None for run in comparison.runs), "run")
    groups = _count(len(comparison.settings), "group")
    number = f"{runs} in {groups} by differences between their recipes, except the seed."
    return [*(answer(comparison, figure) for figure in compared), number]


def answer(comparison: Comparison, figure: str) -> str:
    """Which setting is best in a figure; on a second line by how much, and what seeds can show."""
    ranking, pairs = comparison.ranking(figure), comparison.differences[figure]
    (best, over), (following, _), *_ = ranking
    tested = [pair for pair in pairs if pair.over_seeds]
    lines = [f"Next: {following.name}."]
    pair = next((p for p in pairs if {p.first, p.second} == {best.short, following.short}), None)
    if pair:
        lines = [f"Next: {following.name}, {_distance(figure, pair, best.short, len(pairs))}."]
        if pair.mean and better_and_worse(figure, pair)[0] == following.short:
            seeds = _count(pair.seeds, "seed")
            lines.append(
                f"On the {seeds} of both it is better: they have unequal numbers of seeds."
            )
    if not pairs:
        lines.append("No pair is tested (see Notes).")
    elif not tested:
        lines.append("One seed in common allows no conclusion for others: train or evaluate more.")
    elif not comparison.winner(figure):
        lines += _power(figure, tested, pair)
    if tested and (rest := len(pairs) - len(tested)):
        lines.append(f"Not tested: {rest} of {len(pairs)} pairs, with one seed in common.")
    alone = sum(p.over_utterances is not None and p.over_utterances.p < ALPHA for p in pairs)
    if alone and not comparison.winner(figure):
        differ = f"{alone} of {_count(len(pairs), 'pair')} differ significantly"
        lines.append(f"Over utterances, for these trained models only, {differ}.")
    if failed := sum(setting.failed for setting, _ in ranking):
        lines.append(f"Not counted (see Notes): {_count(failed, 'run')} without a result.")
    if not all(pair.decoded_alike for pair in pairs):
        lines.append("Not decoded alike (see Notes).")
    return (
        f"{figure}: {_verdict_of_all(comparison, figure)}, {_mean(figure, over)}\n{' '.join(lines)}"
    )


def _verdict_of_all(comparison: Comparison, figure: str) -> str:
    """The winner, or the best mean and what is shown of it."""
    ranking, significant = comparison.ranking(figure), comparison.significant(figure)
    best, count = ranking[0][0], len(ranking)
    if comparison.winner(figure):
        return f"{best.name} is the best of {count} settings"
    if not significant:
        tested = any(pair.over_seeds for pair in comparison.differences[figure])
        shown = "no difference is shown" if tested else "no difference can be tested over seeds"
        return f"{shown} among {count} settings; best mean: {best.name}"
    beaten = sum(better == best.short for better, _ in significant)
    others = f"{beaten or 'no'} other{'s' * (beaten > 1)}"
    pairs = [d for d in comparison.differences[figure] if best.short in (d.first, d.second)]
    if (tested := sum(pair.over_seeds is not None for pair in pairs)) < count - 1:
        others = f"{beaten} of the {tested} that it is tested against"
    return (
        f"no single best of {count} settings is shown; best mean: {best.name}, significantly "
        f"better than {others}"
    )


def _mean(figure: str, over: Spread) -> str:
    """12.30 % (95 % interval 11.10 to 13.50)"""
    factor, digits = scale(figure)
    mean, _, interval = _spread_cells(over, f"{{:.{digits}f}}", factor)
    return mean + " %" * (factor == 100) + f" (95 % interval {interval})" * (interval != DASH)


def _distance(figure: str, pair: SettingDifference, best: str, pairs: int) -> str:
    """0.80 points higher (95 % interval +0.10 to +1.50, p = 0.030 (Holm), 3 seeds)"""
    factor, digits = scale(figure)
    sign = 1 if pair.first == best else -1
    size, mean = f"{factor * abs(pair.mean):.{digits}f}", sign * pair.mean
    if float(size) == 0 and mean:
        size = f"less than 0.{'0' * (digits - 1)}1"
    direction = "lower" if mean < 0 else "higher"
    text = f"{size}{' points' * (factor == 100)} {direction}" if mean else "equal"
    if test := pair.over_seeds or pair.over_utterances:
        ends = sorted(sign * factor * end for end in test.interval or ())
        over = f"{pair.seeds} seeds" if pair.over_seeds else "over utterances, for these two models"
        interval = [f"95 % interval {ends[0]:+.{digits}f} to {ends[1]:+.{digits}f}"] if ends else []
        text += f" ({', '.join([*interval, _p(test.p) + ' (Holm)' * (pairs > 1), over])})"
    return text


def _power(
    figure: str, tested: Sequence[SettingDifference], pair: SettingDifference | None
) -> list[str]:
    """What the seeds can show, and how many would show the difference of the best two.

    The seeds are those of the best two, or the fewest of any pair where these are not tested.
    """
    factor, digits = scale(figure)
    sd = math.sqrt(np.mean([one.over_seeds.sd**2 for one in tested]))
    if not sd:
        return []

    def number(value: float) -> str:
        return f"{factor * value:.{digits}f}{' points' * (factor == 100)}"

    seeds = pair.seeds if pair in tested else min(one.seeds for one in tested)
    smallest = detectable(seeds, sd, len(tested))
    text = f"a difference of {number(smallest)} or more"
    if factor == 100 and smallest > 1:
        text = "no difference below 100 points"
    text = f"With this spread, {seeds} seeds can show {text}"
    if pair and pair.mean and abs(pair.mean) < smallest:
        needed = pairs_needed(abs(pair.mean), sd, len(tested))
        count = f"about {needed}" if needed else f"more than {MOST_PAIRS:,}"
        text += f"; to show {number(abs(pair.mean))} takes {count} seeds"
    return [f"{text}."]


def effect_table(comparison: Comparison) -> Table:
    """The effect of each factor of a grid in each figure."""
    head = ("figure", "factor", "from", "to", "difference", "95 % interval", "p (Holm)", "seeds")
    rows = [
        _effect_row(figure, effect)
        for figure, found in comparison.effects.items()
        for effect in found
    ]
    return Table("Effect of each factor, over the others", (*head, "significant"), rows)


def _effect_row(figure: str, effect: Effect) -> tuple[str, ...]:
    factor, digits = scale(figure)
    form = f"{{:+.{digits}f}}"
    cells = (form.format(factor * effect.test.mean), *_test_cells(effect.test, form, factor))
    verdict = "yes" if effect.test.p < ALPHA else "no"
    name = figure + ", points" * (factor == 100)
    return (name, effect.factor, effect.first, effect.second, *cells, f"{effect.seeds}", verdict)


def _interaction(figure: str, one: Interaction) -> str:
    factor, digits = scale(figure)
    at_each = " and ".join(
        f"{factor * effect:+.{digits}f} with {one.other}={value}"
        for effect, value in zip(one.effects, one.values, strict=True)
    )
    shown = "one seed" if one.test is None else _p(one.test.p)
    verdict = "" if one.test and one.test.p < ALPHA else ", not significant"
    return (
        f"{figure}: {one.factor}={one.second} instead of {one.first}: {at_each} ({shown}{verdict})"
    )


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


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
    return Table(f"Pairs of settings: {figure}", head, rows, folded=True)


def _test_cells(test: PairedT | Difference | None, form: str, factor: int) -> list[str]:
    if test is None:
        return [DASH] * 2
    p = "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return [_interval(test.interval, form, factor), p]


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
        best = _spread_cells(figure_spread(setting, best_of(curve)), "{:.4f}")
        final = _spread_cells(spread([m.loss.values[-1] for m in setting.members]), "{:.4f}")
        curves = [finite(member.loss) for member in setting.members]
        step = np.mean([c.steps[c.values.argmin()] for c in curves])
        rows.append((setting.label, runs, *best, *final[:2], f"{step:,.0f}"))
    return Table("Validation loss", (*head, "best at step"), rows)


def _failed(setting: SettingRuns) -> str:
    return f" + {setting.failed} not counted" * bool(setting.failed)


def level_table(settings: Sequence[SettingRuns], levels: Sequence[float]) -> Table:
    """Steps, audio-hours and seconds until the loss first passes each level: medians over runs."""
    rows = [
        (f"{level:.4g}", s.label, *_level_cells(s, level)) for level in levels for s in settings
    ]
    head = ("loss", "setting", "reached", "steps", "audio-hours", "seconds")
    return Table("Until the loss first passes a level", head, rows)


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


def figure_table(settings: Sequence[SettingRuns], figure: str) -> Table:
    """One figure; a word error rate also has an interval over the utterances of all runs."""
    factor, digits = scale(figure)
    form, words = f"{{:.{digits}f}}", figure.startswith(WER_OF)
    rows = []
    for setting in settings:
        runs = [m for m in setting.members if figure in m.figures]
        each = ", ".join(form.format(factor * m.figures[figure]) for m in runs)
        cells = _spread_cells(figure_spread(setting, figure), form, factor)
        scores = [m.scores[figure.removeprefix(WER_OF)] for m in runs] if words else []
        pool = [_interval(pooled(scores).wer_interval, form, 100)] if words else []
        rows.append((setting.label, str(len(runs)), *cells, *pool, each))
    head = ["setting", "runs", "mean", "sd", "95 % over runs"]
    head += ["95 % over utterances"] * words + ["each run"]
    return Table(f"{figure[:1].upper()}{figure[1:]}{_percent(figure)}", head, rows)


def _percent(figure: str) -> str:
    return ", %" * (scale(figure)[0] == 100)


def draw_losses(
    out: Path, settings: Sequence[SettingRuns], curve: str, levels: Sequence[float]
) -> Picture:
    """The curves overlaid: curves.png and curves.svg."""
    loss = {s.legend: mean for s in settings if (mean := band(m.loss for m in s.members))}
    train = {s.legend: mean for s in settings if (mean := band(m.train_loss for m in s.members))}
    files = draw_curves([Panel(curve, loss, levels), Panel(TRAIN, train)])
    return _picture(out, "Loss curves", "curves", files)


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
        title = f"best {curve}" if figure.startswith(BEST) else f"{figure}{_percent(figure)}"
        strips.append(Strip(title, values, percent=factor == 100))
    files = draw_seeds(strips, [s.short for s in ordered])
    return _picture(out, "Every run", "seeds", files)


def _picture(out: Path, title: str, name: str, files: tuple[bytes, str]) -> Picture:
    """Write NAME.png and NAME.svg."""
    png, svg = files
    for suffix, content in (("png", png), ("svg", svg.encode())):
        with atomic_writer(out / f"{name}.{suffix}") as file:
            file.write(content)
    return Picture(title, f"{name}.svg", svg)


def _interval(interval: Interval | None, form: str, factor: int = 1) -> str:
    return DASH if interval is None else between([factor * end for end in interval], form)


def _spread_cells(over: Spread, form: str, factor: int = 1) -> list[str]:
    """Mean, standard deviation and interval over runs."""
    sd = DASH if over.sd is None else form.format(factor * over.sd)
    return [form.format(factor * over.mean), sd, _interval(over.interval, form, factor)]


def _cost(value: float | None) -> str:
    """A dash if unknown (None) or without audio (0)."""
    return f"{value:#.3g}" if value and value < 99.95 else f"{value:,.0f}" if value else DASH


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)

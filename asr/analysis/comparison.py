"""The report of asr.compare: runs grouped by setting, their tables, curves and differences.

Runs whose recipes differ in nothing but the seed have one setting. A recipe is a flat mapping,
dotted key -> value; recipes of different kinds of model have different keys.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asr.analysis.answers import NOTE, missing_evaluations, sentences, untrained_settings
from asr.analysis.charts import Panel, Strip, draw_curves, draw_seeds
from asr.analysis.curves import band, choose_levels, finite, first_below, median_reached
from asr.analysis.report import DASH, Picture, Points, Table, write_report
from asr.analysis.runs import (
    BEST_LOSS,
    DATA,
    PERCENT,
    REPORT,
    TRAIN,
    Run,
    SettingRun,
    SettingRuns,
    expand_runs,
    read_runs,
    read_setting_run,
    short_names,
    unequal_decoding,
    value_text,
)
from asr.analysis.significance import (
    SettingDifference,
    difference_table,
    figure_differences,
    wer_differences,
)
from asr.analysis.statistics import Interval, spread
from asr.analysis.wer import Score, between, pooled
from asr.errors import UserError
from asr.io import atomic_writer
from asr.training.resume import NOT_LEARNING, is_among

RecipeKeys = Mapping[str, Any]
_SHORT, _LONG = 24, 70  # longest label: in any table; beside a letter, in one column
_MISSING, _OFF = "\0missing", "\0off"  # no YAML text can contain them


def compare(
    places: Sequence[Path],
    out: Path | None,
    curve: str,
    levels: Sequence[float] | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Compare runs, or the runs of sweep folders; write the report into `out` and print it.

    levels: losses to reach, chosen if None. ignore: keys that may differ in a group, as the seed.
    """
    folders = expand_runs(places)
    one_sweep = len(places) == 1 and folders[0] != places[0]
    out = out or _own_folder(places[0] if one_sweep else Path())
    runs = read_runs(folders, curve)
    if all(run.fault for run in runs):
        raise UserError(f"none of the {len(runs)} runs can be compared; the first, {runs[0].fault}")
    notes: list[str] = []
    settings = group_runs(runs, curve, notes, ignore)
    comparable = [s for s in settings if s.comparable and s.members]
    if levels is None:
        levels = choose_levels([[m.loss for m in s.members] for s in comparable])
    differences = tested_differences(settings, notes)
    answers = [line for name, pairs in differences.items() for line in sentences(name, pairs)]
    notes += missing_evaluations(runs, settings)
    tables = evaluation_tables(settings)
    tables += [difference_table(name, pairs) for name, pairs in differences.items() if pairs]
    tables += [loss_table(settings, curve), level_table(comparable, levels)]
    failed = [(run.name, str(run.fault)) for run in runs if run.fault]
    if failed:
        tables.append(Table("Runs that are not counted", ("run", "why"), failed))
    out.mkdir(parents=True, exist_ok=True)
    pictures = [draw_figures(out, settings, curve), draw_losses(out, comparable, curve, levels)]
    sizes = f"{_count(len(runs) - len(failed), 'run')} in {_count(len(settings), 'group')}"
    facts = [f"{sizes} by differences of their recipes other than the seed."]
    lists = [
        Points("Which difference is real?", answers or ["No two settings are compared."], NOTE),
        Points("Settings", [s.legend for s in settings if s.legend != s.short]),
        Points("Notes", list(dict.fromkeys(notes))),  # losses and every split may have the same
    ]
    lists = [part for part in lists if part.lines]
    write_report(out, "compare", "Comparison of runs", facts, [*lists, *pictures, *tables])
    blocks = [["", part.title, *(f"- {line}" for line in part.lines)] for part in lists]
    blocks += map(_console, tables)
    print("\n".join([*facts, *(line for block in blocks for line in block)]))
    print(f"\nfiles: {out}/compare.html compare.md curves.png curves.svg seeds.png seeds.svg")


def _own_folder(place: Path) -> Path:
    """The folder of the report where none was named. UserError for one that is elsewhere."""
    out = place / REPORT
    if out.is_symlink():
        raise UserError(f"{out}: a symbolic link, through which nothing is written; name an --out")
    return out


@dataclass(frozen=True)
class Group:
    """Runs with equal settings: what distinguishes them from the others, and their numbers."""

    settings: dict[str, str]  # short name -> value as text
    members: tuple[int, ...]

    @property
    def label(self) -> str:
        """norm=ba hidden=128; empty where there is only one group."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def group(runs: Sequence[RecipeKeys], ignore: Iterable[str] = ()) -> list[Group]:
    """The groups in the order of their first run; `ignore` names keys that may differ within one.

    A key that only some runs have, all with one value (a Transformer's, beside LAS), is omitted
    where the other keys already distinguish those runs from the rest.
    """
    columns = _columns(runs, set(ignore))
    shown = {
        key: values for key, values in columns.items() if len(set(values) - {_MISSING, _OFF}) > 1
    }
    for key, values in columns.items():
        if key not in shown and not _is_implied(values, list(shown.values())):
            shown[key] = values
    names = short_names(list(shown), {key for run in runs for key in run})
    groups: dict[tuple[str, ...], list[int]] = {}
    for number in range(len(runs)):
        row = tuple(values[number] for values in shown.values())
        groups.setdefault(row, []).append(number)
    return [Group(_named(names.values(), row), tuple(members)) for row, members in groups.items()]


def _columns(runs: Sequence[RecipeKeys], ignore: set[str]) -> dict[str, tuple[str, ...]]:
    """The keys that are not the same in all runs, with every run's value as text."""
    keys = list(dict.fromkeys(key for run in runs for key in run))
    # Of `train.guided_attention: null` in one run and keys below it in another, only the latter.
    parents = {key[:place] for key in keys for place, sign in enumerate(key) if sign == "."}
    keys = [key for key in keys if key not in ignore and key not in parents]
    columns = {key: tuple(_value(run, key) for run in runs) for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def _value(run: RecipeKeys, key: str) -> str:
    if key in run:
        return value_text(run[key])
    return _OFF if any(key.startswith(f"{parent}.") for parent in run) else _MISSING


def _is_implied(values: Sequence[str], columns: Sequence[Sequence[str]]) -> bool:
    """Whether runs that agree in all columns also agree in these values."""
    rows = list(zip(*columns, strict=True)) if columns else [()] * len(values)
    return len(set(zip(rows, values, strict=True))) == len(set(rows))


def _named(names: Iterable[str], row: Iterable[str]) -> dict[str, str]:
    present = {n: value for n, value in zip(names, row, strict=True) if value != _MISSING}
    return {n: "null" if value == _OFF else value for n, value in present.items()}


def group_runs(
    runs: Sequence[Run], curve: str, notes: list[str], ignore: Sequence[str]
) -> list[SettingRuns]:
    """The settings of the runs with readable recipes; those of other data are flagged.

    Runs of one setting may differ in `ignore`. UserError for a key that no run has.
    """
    readable = [run for run in runs if run.settings]
    keys = {key for run in readable for key in run.settings}
    if unknown := [key for key in ignore if key not in keys]:
        raise UserError(f"--ignore {unknown[0]}: no run has such a setting")
    ignored = {"seed", *ignore, *(key for key in keys if is_among(key, NOT_LEARNING))}
    groups = group([run.settings for run in readable], ignore=ignored)
    usual = Counter(run.settings[DATA] for run in readable if not run.fault).most_common(1)[0][0]
    settings = []
    for (label, short, legend), one in zip(_labels(groups), groups, strict=True):
        inside = [readable[place] for place in one.members]
        comparable = inside[0].settings[DATA] == usual
        if not comparable:
            notes.append(
                f"{short}: other validation data or another vocabulary than the other runs, "
                "so its losses are not comparable and are skipped."
            )
        good = [run for run in inside if not run.fault]
        if failed := len(inside) - len(good):
            notes.append(
                f"{short}: {failed} of {len(inside)} runs are not counted, which favours a setting "
                "that often fails; see below."
            )
        # The same training twice, say of two sweeps that share a setting, is not two seeds.
        own = ("seed", *ignore)
        distinct = {tuple(repr(run.settings.get(key)) for key in own): run for run in good}
        if twice := len(good) - len(distinct):
            notes.append(f"{short}: {twice} runs repeat a seed; the last run of each seed counts.")
        members = tuple(read_setting_run(run, curve, notes) for run in distinct.values())
        settings.append(SettingRuns(label, short, legend, members, failed, comparable))
        seeds = {member.seed for member in members}
        if len(seeds) < len(members):
            notes.append(f"{short}: runs that differ in {', '.join(ignore)}; pairs take the last.")
    return settings


def _labels(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """Each group's label in tables, its short label and that for a picture's legend.

    Letters stand for labels unless all are short, in all tables where they are very long.
    """
    labels = [one.label or "all runs" for one in groups]
    letters = [_letter(place) for place in range(len(labels))]
    longest = max(map(len, labels))
    if len(labels) == 1 or longest <= _SHORT:
        return [(label, label, label) for label in labels]
    legends = [f"{one}. {label}" for one, label in zip(letters, labels, strict=True)]
    if longest <= _LONG:
        return list(zip(legends, letters, legends, strict=True))
    return list(zip(letters, letters, legends, strict=True))


def _letter(place: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    before, last = divmod(place, 26)
    return (_letter(before - 1) if before else "") + chr(ord("A") + last)


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


def tested_differences(
    settings: Sequence[SettingRuns], notes: list[str]
) -> dict[str, list[SettingDifference]]:
    """The differences between settings in each figure: word error rates first, the loss last."""
    splits, figures = _figures(settings)
    for split in splits:
        notes += decoding_note(settings, split) + untrained_settings(settings, split)
    comparable = [s for s in settings if s.comparable]
    differences = {f"WER of {split}": wer_differences(settings, split, notes) for split in splits}
    named = (*figures, BEST_LOSS)
    return differences | {name: figure_differences(comparable, name, notes) for name in named}


def _figures(settings: Sequence[SettingRuns]) -> tuple[list[str], list[str]]:
    """The splits with word error rates, and the figures of other evaluations."""
    splits = sorted({name for s in settings for m in s.members for name in m.scores})
    comparable = (m for s in settings if s.comparable for m in s.members)
    return splits, sorted({name for m in comparable for name in m.figures} - {BEST_LOSS})


def evaluation_tables(settings: Sequence[SettingRuns]) -> list[Table]:
    """The results of the evaluations."""
    splits, figures = _figures(settings)
    comparable = [s for s in settings if s.comparable]
    tables = [wer_table(settings, split) for split in splits]
    return tables + [figure_table(comparable, name) for name in figures]


def decoding_note(settings: Sequence[SettingRuns], split: str) -> list[str]:
    """A note where the runs' transcripts of a split were decoded with different settings."""
    runs = [m for s in settings for m in s.members if m.decoded.get(split)]
    parts = []
    for key, values in unequal_decoding(*(run.decoded[split] for run in runs)).items():
        first: dict[str, str] = {}  # value -> the first run that has it
        for run, value in zip(runs, values, strict=True):
            first.setdefault(value, run.name)
        parts.append(f"{key} {', '.join(f'{value} in {name}' for value, name in first.items())}")
    note = f"WER of {split}: not all decoded alike, which may cause differences"
    return [f"{note}: {'; '.join(parts)}."] if parts else []


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

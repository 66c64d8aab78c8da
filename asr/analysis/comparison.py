"""Runs grouped by setting, and the differences between settings: what asr.compare tests.

Runs whose recipes differ in nothing but the seed have one setting. A recipe is a flat mapping,
dotted key -> value; recipes of different kinds of model have different keys.

Settings with runs of several seeds: the paired t test over seeds is valid for new trainings, the
paired bootstrap over utterances only for these models. Holm's correction covers all pairs of
settings in a figure.
"""

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from asr.analysis.effects import ALPHA, Cell, Effect, Interaction, effects, large_interactions
from asr.analysis.report import plain_text
from asr.analysis.runs import (
    BEST,
    DATA,
    TRAINING_DATA,
    VALID,
    WER_OF,
    RunRecord,
    SettingRun,
    SettingRuns,
    expand_runs,
    read_runs,
    read_setting_run,
    short_names,
    unequal_decoding,
    value_text,
)
from asr.analysis.significance import Difference, paired_bootstrap
from asr.analysis.statistics import MIN_UNITS, PairedT, Spread, corrected, paired_t, spread
from asr.analysis.wer import pooled, untrained
from asr.errors import UserError
from asr.training.resume import NOT_LEARNING, is_among

RecipeKeys = Mapping[str, Any]
Pair = tuple[SettingRun, SettingRun]  # of the same seed
_SHORT, _LONG = 24, 70  # longest label: in any table; beside a letter, in one column
OF_RUNS = ("mean", "sd", "low", "high")  # columns of the results
AGAINST_FIRST = ("difference", "p")
_MISSING, _OFF = "\0missing", "\0off"  # no YAML text can contain them
_MOST_IN_PAIRS = 16  # settings: 120 pairs, under a minute of bootstrap for each split


@dataclass(frozen=True)
class SettingDifference:
    """The second setting against the first in one figure; over_seeds is None with one seed.

    The p of both tests are corrected for the number of pairs in this figure (Holm).
    """

    first: str
    second: str
    seeds: int  # that both have
    mean: float  # second minus first
    values: tuple[float, float]  # of both: means over these seeds
    over_seeds: PairedT | None
    over_utterances: Difference | None = None
    decoded_alike: bool = True


@dataclass(frozen=True, repr=False)
class Comparison:
    """Settings with their runs, every pair of them tested in every figure, and effects of factors.

    settings: groups of runs that differ only in their seeds. differences: by figure (`WER of
    test`, `best loss`), second minus first; rates are fractions. effects, interactions: by figure,
    empty where the settings are no grid. notes: what limits the comparison. runs: all that were
    read, also those with a `fault`, which are not counted.
    """

    curve: str  # the loss on validation
    runs: Sequence[RunRecord]
    settings: Sequence[SettingRuns]
    differences: Mapping[str, Sequence[SettingDifference]]
    effects: Mapping[str, Sequence[Effect]]
    interactions: Mapping[str, Sequence[Interaction]]
    notes: Sequence[str]

    def __repr__(self) -> str:
        return f"Comparison({len(self.runs)} runs, {len(self.settings)} settings)"

    def ranking(self, figure: str) -> list[tuple[SettingRuns, Spread]]:
        """The settings with that figure and its spread over their runs, the best first."""
        settings = comparable_in(figure, self.settings)
        spreads = [(setting, figure_spread(setting, figure)) for setting in settings]
        return sorted(spreads, key=lambda one: _sign(figure) * one[1].mean)

    def significant(self, figure: str) -> list[tuple[str, str]]:
        """The better and the worse setting of each pair that differs significantly over seeds."""
        pairs = [d for d in self.differences[figure] if d.over_seeds and d.over_seeds.p < ALPHA]
        return [better_and_worse(figure, pair) for pair in pairs]

    def winner(self, figure: str) -> SettingRuns | None:
        """The setting that is significantly better than every other one."""
        best, *others = self.ranking(figure)
        beaten = [worse for better, worse in self.significant(figure) if better == best[0].short]
        return best[0] if others and len(beaten) == len(others) else None

    def results(self) -> list[dict[str, Any]]:
        """A mapping for each figure and setting, as for pandas.DataFrame; to_csv writes them.

        The settings that differ, number of runs and of failed ones, mean, standard deviation and
        95 % interval over runs (None for one run), whether the setting is significantly better than
        all others, and its difference from the first setting with p over seeds, as in `rows`. Rates
        are fractions.
        """
        rows, first = [], self.settings[0].short
        for figure, pairs in self.differences.items():
            winner, known = self.winner(figure), comparable_in(figure, self.settings)
            against = {pair.second: pair for pair in pairs if pair.first == first}
            for setting in self.settings:
                if setting not in known and not setting.failed:
                    continue
                row = {"figure": figure, "setting": setting.legend, **setting.factors}
                row |= {"runs": 0, "failed": setting.failed, **dict.fromkeys(OF_RUNS)}
                if setting in known:
                    over = figure_spread(setting, figure)
                    low, high = over.interval or (None, None)
                    row |= {"runs": over.count, "mean": over.mean, "sd": over.sd}
                    row |= {"low": low, "high": high}
                row |= {"best": setting is winner} | dict.fromkeys(AGAINST_FIRST)
                if pair := against.get(setting.short):
                    p = pair.over_seeds.p if pair.over_seeds else None
                    row |= {"difference": pair.mean, "p": p}
                rows.append(row)
        return rows

    def to_csv(self) -> str:
        """The results as a table with a header."""
        rows, text = self.results(), io.StringIO()
        head = ["figure", "setting", *self.factors, "runs", "failed", *OF_RUNS, "best"]
        head += AGAINST_FIRST
        writer = csv.DictWriter(text, head, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_latex(self) -> str:
        """The results as a table for the package booktabs: a row for each setting.

        Rates are in percent. Bold: significantly better than all other settings; star: different
        from the first. With the number of runs where it is not the same for all, or some failed;
        with the notes as comments.
        """
        names = self.factors or ["setting"]
        runs = {s.legend: _run_count(s) for s in self.settings}
        unequal = len(set(runs.values())) > 1 or any(s.failed for s in self.settings)
        counts = ["runs"] * unequal
        percent = {figure: ", %" * (scale(figure)[0] == 100) for figure in self.differences}
        lines = [
            "% Means over runs with 95 % intervals (Student). Bold: significantly better than all",
            "% other settings (paired t test over seeds, p < 0.05 with Holm's correction).",
            f"% Star: different from {plain_text(self.settings[0].legend)} by the same test.",
            *(f"% {plain_text(note)}" for note in self.notes),
            rf"\begin{{tabular}}{{{'l' * len(names)}{'r' * len([*counts, *percent])}}}",
            r"\toprule",
            _latex_row([*names, *counts, *(f"{figure}{unit}" for figure, unit in percent.items())]),
            r"\midrule",
        ]
        cells = {
            (row["setting"], row["figure"]): _latex_cell(row)
            for row in self.results()
            if row["runs"]
        }
        for setting in self.settings:
            values = (
                {"setting": setting.legend} | dict.fromkeys(self.factors, "--") | setting.factors
            )
            figures = [cells.get((setting.legend, figure), "--") for figure in self.differences]
            labels = [values[name] for name in names]
            lines.append(_latex_row(labels + [runs[setting.legend]] * len(counts), figures))
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def rows(self) -> list[dict[str, Any]]:
        """A mapping for each pair of settings and figure, as for pandas.DataFrame.

        The interval (95 %) and p are over seeds if both settings have two in common, otherwise over
        utterances for these two models; p is corrected for the figure's pairs (Holm). None if
        nothing was tested.
        """
        return [self._row(name, pair) for name, pairs in self.differences.items() for pair in pairs]

    def _row(self, figure: str, pair: SettingDifference) -> dict[str, Any]:
        test = pair.over_seeds or pair.over_utterances
        low, high = (test.interval if test else None) or (None, None)
        return {
            "figure": figure,
            "first": self.legends[pair.first],
            "second": self.legends[pair.second],
            "first_value": pair.values[0],
            "second_value": pair.values[1],
            "difference": pair.mean,
            "low": low,
            "high": high,
            "p": test.p if test else None,
            "tested_over": test and ("seeds" if pair.over_seeds else "utterances"),
            "seeds": pair.seeds,
        }

    @cached_property
    def factors(self) -> list[str]:
        """The names of the settings that differ between runs."""
        return [*{name: None for setting in self.settings for name in setting.factors}]

    @cached_property
    def legends(self) -> dict[str, str]:
        """The whole label of each setting by its short one."""
        return {s.short: s.legend for s in self.settings}


def _run_count(setting: SettingRuns) -> str:
    """3, or with failed runs 3 of 5."""
    count = len(setting.members)
    return f"{count} of {count + setting.failed}" if setting.failed else str(count)


def _latex_row(texts: Sequence[str], cells: Sequence[str] = ()) -> str:
    """A line of a table; cells are LaTeX already."""
    return rf"{' & '.join([*map(_latex, texts), *cells])} \\"


def _latex_cell(row: Mapping[str, Any]) -> str:
    """Mean, a star if it differs from that of the first setting, and interval."""
    factor, digits = scale(row["figure"])
    ends = [row["mean"], row["low"], row["high"]]
    mean, low, high = (n if n is None else f"{factor * n:.{digits}f}" for n in ends)
    star = "^{*}" * (row["p"] is not None and row["p"] < ALPHA)
    mean = rf"$\mathbf{{{mean}}}{star}$" if row["best"] else f"${mean}{star}$"
    return mean if low is None else f"{mean} (${low}$ to ${high}$)"


def _latex(text: str) -> str:
    """The text with LaTeX's special characters as commands."""
    escaped = re.sub(r"([&%$#_{}])", r"\\\1", plain_text(text).replace("\\", "\0"))
    commands = {"\0": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    # After \\ and \midrule LaTeX takes a bracket or an asterisk for an argument.
    guard = "{}" * escaped.startswith(("[", "*"))
    return guard + escaped.translate(str.maketrans(commands))


def _sign(figure: str) -> int:
    """1 if lower values are better, else -1."""
    return -1 if figure.startswith("accuracy") else 1


def better_and_worse(figure: str, pair: SettingDifference) -> tuple[str, str]:
    """The two settings, the one with the better mean over common seeds first."""
    first_is_better = _sign(figure) * pair.mean > 0
    return (pair.first, pair.second) if first_is_better else (pair.second, pair.first)


def figure_spread(setting: SettingRuns, figure: str) -> Spread:
    """A figure over the runs of a setting that have it.

    The interval of a rate is cut at 0, and at 100 % unless a run is above it.
    """
    values = [m.figures[figure] for m in setting.members if figure in m.figures]
    over = spread(values)
    if scale(figure)[0] == 100 and over.interval:
        low, high = over.interval
        over = replace(over, interval=(max(low, 0.0), min(high, 1.0) if max(values) <= 1 else high))
    return over


def figure_cells(settings: Sequence[SettingRuns], figure: str) -> dict[Cell, float]:
    """One figure of every run, by the run's settings and seed."""
    return {
        (tuple(s.factors.items()), m.seed): m.figures[figure]
        for s in comparable_in(figure, settings)
        for m in s.members
        if figure in m.figures
    }


def scale(figure: str) -> tuple[int, int]:
    """Factor and decimals to show a figure with: fractions are shown in percent."""
    return (100, 2) if figure.startswith((WER_OF, "accuracy")) else (1, 4)


def compare_runs(
    folders: Sequence[Path],
    curve: str = VALID,
    ignore: Sequence[str] = (),
    baseline: str | None = None,
) -> Comparison:
    """Read and test runs, or the runs of sweep folders.

    curve: the loss on validation. ignore: keys that may differ in a group, like the seed. baseline:
    a setting (`norm=none`), the only one with which others are tested. Raises UserError if no run
    can be compared, for a curve that is no loss, and for a baseline that is none of the settings.
    """
    if not folders:
        raise UserError("no runs to compare: name at least one run folder")
    if curve.startswith("speed/") or curve.endswith(("/accuracy", "/diagonality")):
        raise UserError(f"curve {curve}: no loss, whose lowest value is the best; use {VALID}, say")
    runs = read_runs(expand_runs(folders), curve)
    if all(run.fault for run in runs):
        raise UserError(f"none of the {len(runs)} runs can be compared; the first, {runs[0].fault}")
    notes: list[str] = []
    grouped = group_runs(runs, curve, notes, ignore)
    if baseline:
        grouped = baseline_first(grouped, baseline)
    settings = with_equal_references(grouped, notes)
    names = compared_figures(settings)
    for split in (name.removeprefix(WER_OF) for name in names if name.startswith(WER_OF)):
        notes += decoding_note(settings, split) + untrained_settings(settings, split)
    alone = settings[0] if baseline else None
    differences = {name: setting_differences(settings, name, alone, notes) for name in names}
    cells = {name: figure_cells(settings, name) for name in names}
    main = {name: effects(one) for name, one in cells.items()}
    crossed = {name: large_interactions(one) for name, one in cells.items()}
    notes += missing_evaluations(runs, grouped)
    return Comparison(curve, runs, settings, differences, main, crossed, list(dict.fromkeys(notes)))


@dataclass(frozen=True)
class Group:
    """Runs with equal settings: what distinguishes them from the others, and their numbers."""

    settings: dict[str, str]  # short name -> value as text
    members: tuple[int, ...]

    @property
    def label(self) -> str:
        """norm=ba hidden=128; empty if there is only one group."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def group(runs: Sequence[RecipeKeys], ignore: Iterable[str] = ()) -> list[Group]:
    """The groups in the order of their first run; `ignore` names keys that may differ within one.

    If only some runs have a key, all with one value (Transformers, beside LAS), it is omitted when
    other keys already distinguish these runs from the rest; so are the hashes of data and
    vocabulary, where other keys do.
    """
    columns = _columns(runs, set(ignore))
    shown = {
        key: values
        for key, values in columns.items()
        if len(set(values) - {_MISSING, _OFF}) > 1 and key not in (DATA, TRAINING_DATA)
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
    # If one run has `train.guided_attention: null` and another has keys below it, use only these;
    # `model.residual_scale: deepnet` is more than null.
    parents = {key[:dot] for key in keys for dot, sign in enumerate(key) if sign == "."}
    parents -= {key for run in runs for key in parents if run.get(key) is not None}
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
    runs: Sequence[RunRecord], curve: str, notes: list[str], ignore: Sequence[str]
) -> list[SettingRuns]:
    """The settings of the runs with readable recipes; settings with other data are flagged.

    Runs of one setting may differ in `ignore`. UserError for a key that no run has.
    """
    readable = [run for run in runs if run.settings]
    keys = {key for run in readable for key in run.settings}
    if unknown := [key for key in ignore if key not in keys]:
        raise UserError(f"--ignore {unknown[0]}: no run has such a setting")
    ignored = {
        "seed",
        *ignore,
        *({TRAINING_DATA} if "data.train" in ignore else ()),
        *(key for key in keys if is_among(key, NOT_LEARNING)),
    }
    groups = group([run.settings for run in readable], ignore=ignored)
    usual = Counter(run.settings[DATA] for run in readable if not run.fault).most_common(1)[0][0]
    settings = []
    for (label, short, legend), one in zip(_labels(groups), groups, strict=True):
        members = [readable[number] for number in one.members]
        comparable = members[0].settings[DATA] == usual
        if not comparable:
            notes.append(
                f"{short}: other validation data or another vocabulary than most runs, so its "
                "losses are not comparable and are skipped."
            )
        good = [run for run in members if not run.fault]
        if failed := len(members) - len(good):
            notes.append(
                f"{short}: {failed} of {len(members)} runs are not counted, which favours a "
                "setting that often fails; see below."
            )
        # One training in two sweeps is not two seeds.
        seed_keys = ("seed", *ignore)
        distinct = {tuple(repr(run.settings.get(key)) for key in seed_keys): run for run in good}
        if twice := len(good) - len(distinct):
            notes.append(f"{short}: {twice} runs repeat a seed; the last run of each seed counts.")
        counted = tuple(read_setting_run(run, curve, notes) for run in distinct.values())
        labels_of = (label, short, legend, one.settings)
        settings.append(SettingRuns(*labels_of, counted, failed, comparable))
        if len({run.seed for run in counted}) < len(counted):
            notes.append(f"{short}: runs that differ in {', '.join(ignore)}; pairs take the last.")
    return settings


def baseline_first(settings: Sequence[SettingRuns], name: str) -> list[SettingRuns]:
    """The settings, that of this label first. UserError where there is none."""
    if not (named := [s for s in settings if name in (s.short, s.legend)]):
        labels = "; ".join(plain_text(setting.legend) for setting in settings)
        raise UserError(f"--baseline {name}: no such setting; there are: {labels}")
    return [*named, *(setting for setting in settings if setting not in named)]


def with_equal_references(
    settings: Sequence[SettingRuns], notes: list[str]
) -> Sequence[SettingRuns]:
    """The settings without the WER of runs whose references are not those of most runs.

    They are named in `notes`. Of two equally frequent sets of references the first run's counts.
    """
    members = [member for setting in settings for member in setting.members]
    for split in sorted({split for member in members for split in member.scores}):
        references = {
            member.name: frozenset((u.id, u.reference) for u in member.scores[split].utterances)
            for member in members
            if split in member.scores
        }
        usual = Counter(references.values()).most_common(1)[0][0]
        other = [name for name, texts in references.items() if texts != usual]
        if not other:
            continue
        one = next(name for name, texts in references.items() if texts == usual)
        notes.append(
            f"WER of {split}: skipped for {', '.join(other)}, scored against other references "
            f"than {one}; evaluate all runs on the same manifest."
        )
        settings = [
            replace(
                s, members=tuple(_without(m, split) if m.name in other else m for m in s.members)
            )
            for s in settings
        ]
    return settings


def _without(member: SettingRun, split: str) -> SettingRun:
    """The run without its evaluation of a split."""
    scores, decoded = dict(member.scores), dict(member.decoded)
    figures = {name: x for name, x in member.figures.items() if name != f"{WER_OF}{split}"}
    del scores[split], decoded[split]
    return replace(member, scores=scores, decoded=decoded, figures=figures)


def _labels(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """Each group's label in tables, its short label and its whole label.

    If labels are long, letters replace them in rows of two settings; very long ones in all tables.
    """
    labels = [one.label or "all runs" for one in groups]
    letters = [_letter(number) for number in range(len(labels))]
    longest = max(map(len, labels))
    if len(labels) == 1 or longest <= _SHORT:
        return [(label, label, label) for label in labels]
    if longest > _LONG:
        return list(zip(letters, letters, labels, strict=True))
    tables = [f"{letter}. {label}" for letter, label in zip(letters, labels, strict=True)]
    return list(zip(tables, letters, labels, strict=True))


def _letter(number: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    before, last = divmod(number, 26)
    return (_letter(before - 1) if before else "") + chr(ord("A") + last)


def compared_figures(settings: Sequence[SettingRuns]) -> list[str]:
    """The names of the figures to compare: word error rates first, the loss last."""
    names = {name for s in settings for m in s.members for name in m.figures}
    names = {name for name in names if comparable_in(name, settings)}
    return sorted(
        names, key=lambda name: (name.startswith(BEST), not name.startswith(WER_OF), name)
    )


def comparable_in(figure: str, settings: Sequence[SettingRuns]) -> list[SettingRuns]:
    """The settings with that figure; a WER can be compared whatever the validation data are."""
    usable = [s for s in settings if s.comparable or figure.startswith(WER_OF)]
    return [s for s in usable if any(figure in m.figures for m in s.members)]


def setting_differences(
    settings: Sequence[SettingRuns], figure: str, baseline: SettingRuns | None, notes: list[str]
) -> list[SettingDifference]:
    """Every pair of settings, or those with a baseline, in one figure, tested over seeds, and a WER
    over utterances too.

    Pairs that cannot be tested are named in `notes`.
    """
    differences, known = [], comparable_in(figure, settings)
    if baseline and baseline not in known:
        notes.append(f"{figure}: {baseline.short}, the baseline, has none: nothing is tested.")
    if not baseline and len(known) > _MOST_IN_PAIRS:
        baseline = known[0]
        notes.append(f"{len(known)} groups: tested against the first, {baseline.short}, only.")
    chosen = [pair for pair in combinations(known, 2) if baseline in (None, pair[0])]
    for first, second, pairs in _with_common_seeds(chosen, figure, notes):
        values = [[member.figures[figure] for member in side] for side in zip(*pairs, strict=True)]
        means = (sum(values[0]) / len(pairs), sum(values[1]) / len(pairs))
        difference = SettingDifference(
            first.short,
            second.short,
            len(pairs),
            sum(b - a for a, b in zip(*values, strict=True)) / len(pairs),
            means,
            paired_t(*values),
        )
        if figure.startswith(WER_OF):
            difference = _tested_over_utterances(difference, pairs, figure)
        differences.append(difference)
    seeds = corrected([d.over_seeds for d in differences])
    utterances = corrected([d.over_utterances for d in differences])
    tested = zip(differences, seeds, utterances, strict=True)
    return [replace(d, over_seeds=s, over_utterances=u) for d, s, u in tested]


def _with_common_seeds(
    chosen: Iterable[tuple[SettingRuns, SettingRuns]], figure: str, notes: list[str]
) -> Iterator[tuple[SettingRuns, SettingRuns, list[Pair]]]:
    """Pairs of settings that have the figure of a common seed, and their runs paired by seed."""
    for first, second in chosen:
        ours, theirs = (
            {m.seed: m for m in s.members if figure in m.figures} for s in (first, second)
        )
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        if pairs:
            yield first, second, pairs
        else:
            names = f"{figure}: {first.short} and {second.short}"
            notes.append(f"{names} have no seed in common: their difference is not tested.")


def _tested_over_utterances(
    difference: SettingDifference, pairs: Sequence[Pair], figure: str
) -> SettingDifference:
    """The difference in WER with the bootstrap over the utterances of all pairs."""
    split = figure.removeprefix(WER_OF)
    sides = ([member.scores[split] for member in side] for side in zip(*pairs, strict=True))
    alike = all(a.decoded[split] == b.decoded[split] for a, b in pairs)
    difference = replace(difference, decoded_alike=alike)
    first, second = (pooled(scores, draws=1) for scores in sides)
    if len(first.utterances) < MIN_UNITS:
        return difference
    test = paired_bootstrap(first, second)
    return replace(difference, mean=test.wer, over_utterances=test)


def decoding_note(settings: Sequence[SettingRuns], split: str) -> list[str]:
    """A note if the runs' transcripts of a split were decoded with different settings."""
    runs = [m for s in settings for m in s.members if m.decoded.get(split)]
    parts = []
    for key, values in unequal_decoding(*(run.decoded[split] for run in runs)).items():
        first: dict[str, str] = {}  # value -> the first run that has it
        for run, value in zip(runs, values, strict=True):
            first.setdefault(value, run.name)
        parts.append(f"{key} {', '.join(f'{value} in {name}' for value, name in first.items())}")
    note = f"WER of {split}: not all decoded alike, which may cause differences"
    return [f"{note}: {'; '.join(parts)}."] if parts else []


def untrained_settings(settings: Sequence[SettingRuns], split: str) -> list[str]:
    """A note if the WER of some settings is typical of untrained models."""
    names, remark = [], ""
    for setting in settings:
        rates = [m.scores[split].wer for m in setting.members if split in m.scores]
        if rates and (text := untrained(sum(rates) / len(rates))):
            names, remark = [*names, setting.short], text
    return [f"WER of {split}: that of {', '.join(names)} is {remark}."] if names else []


def missing_evaluations(runs: Sequence[RunRecord], settings: Iterable[SettingRuns]) -> list[str]:
    """How to get the word error rates that speech runs lack."""
    scores = {m.name: set(m.scores) for setting in settings for m in setting.members}
    speech = [r for r in runs if r.name in scores and r.settings.get("task") == "speech"]
    splits = sorted({split for run in speech for split in scores[run.name]})
    missing = {split: [r for r in speech if split not in scores[r.name]] for split in splits}
    lines = [
        f"WER of {split}: {len(lacking)} of {len(speech)} runs are not evaluated"
        + (f"; {_evaluate(lacking[0], split)}" if _has(lacking[0], split) else ".")
        for split, lacking in missing.items()
        if lacking
    ]
    if speech and not splits:
        keys = [key for key in speech[0].settings if key.startswith("data.test.")]
        split = keys[0].removeprefix("data.test.") if keys else "valid"
        line = "No run has a WER. Evaluate each, then compare again: "
        lines.append(line + _evaluate(speech[0], split))
    return lines


def _has(run: RunRecord, split: str) -> bool:
    """Whether the run's recipe names the split; other evaluations are of a manifest."""
    return split in ("train", "valid") or f"data.test.{split}" in run.settings


def _evaluate(run: RunRecord, split: str) -> str:
    folder, split = (shlex.quote(plain_text(text)) for text in (str(run.folder), split))
    return f"python -m asr.evaluate {folder} --split {split}"

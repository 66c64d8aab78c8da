"""Runs grouped by setting, and the differences between settings: what asr.compare tests.

Runs whose recipes differ in nothing but the seed have one setting. A recipe is a flat mapping,
dotted key -> value; recipes of different kinds of model have different keys.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from asr.analysis.answers import missing_evaluations, untrained_settings
from asr.analysis.report import plain_text
from asr.analysis.runs import (
    BEST_LOSS,
    DATA,
    PERCENT,
    VALID,
    RunRecord,
    SettingRuns,
    expand_runs,
    read_runs,
    read_setting_run,
    short_names,
    unequal_decoding,
    value_text,
)
from asr.analysis.significance import (
    ALPHA,
    SettingDifference,
    corrected,
    figure_differences,
    wer_differences,
)
from asr.errors import UserError
from asr.training.resume import NOT_LEARNING, is_among

RecipeKeys = Mapping[str, Any]
_SHORT, _LONG = 24, 70  # longest label: in any table; beside a letter, in one column
_MISSING, _OFF = "\0missing", "\0off"  # no YAML text can contain them


@dataclass(frozen=True)
class Comparison:
    """Settings with their runs, and every pair of them tested in every figure.

    settings: groups of runs that differ in their seeds alone. differences: by figure (`WER of
    test`, `best loss`), second minus first; rates are fractions. notes: what limits the comparison.
    runs: all that were read, also those with a `fault`, which are not counted.
    """

    curve: str  # the loss on validation
    runs: Sequence[RunRecord]
    settings: Sequence[SettingRuns]
    differences: Mapping[str, Sequence[SettingDifference]]
    notes: Sequence[str]

    def rows(self) -> list[dict[str, Any]]:
        """A mapping for each pair of settings and figure, as for pandas.DataFrame.

        The interval (95 %) and p are those over seeds where both settings have two in common, else
        of these two models over utterances; p is corrected for the figure's pairs (Holm). None
        where nothing was tested.
        """
        return [row for name in self.differences for row in self._rows(name)]

    def _rows(self, figure: str) -> Iterator[dict[str, Any]]:
        pairs = self.differences[figure]
        p_seeds = corrected(pair.over_seeds for pair in pairs)
        p_utterances = corrected(pair.over_utterances for pair in pairs)
        for pair, p_seed, p_utterance in zip(pairs, p_seeds, p_utterances, strict=True):
            test, p, units = pair.over_seeds, p_seed, "seeds"
            if test is None:
                test, p, units = pair.over_utterances, p_utterance, "utterances"
            low, high = (test.interval if test else None) or (None, None)
            yield {
                "figure": figure,
                "first": self.legends[pair.first],
                "second": self.legends[pair.second],
                "first_value": pair.values[0],
                "second_value": pair.values[1],
                "difference": pair.mean,
                "low": low,
                "high": high,
                "p": p,
                "tested_over": units if test else None,
                "seeds": pair.seeds,
            }

    @cached_property
    def legends(self) -> dict[str, str]:
        """The whole label of each setting by its short one."""
        return {s.short: s.legend for s in self.settings}

    def to_latex(self) -> str:
        """The rows as a table for the package booktabs; rates in percent, p below 0.05 in bold."""
        lines = [r"\begin{tabular}{lllrrr}", r"\toprule"]
        lines += [r"figure & first & second & difference & 95\,\% interval & $p$ \\", r"\midrule"]
        lines += [rf"{' & '.join(_latex_cells(row))} \\" for row in self.rows()]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_cells(row: Mapping[str, Any]) -> list[str]:
    unit, digits = (100, 2) if row["figure"].startswith(PERCENT) else (1, 4)
    sides = [row["difference"], row["low"], row["high"]]
    difference, *interval = [s if s is None else f"${unit * s:+.{digits}f}$" for s in sides]
    names = [_latex(row[name]) for name in ("figure", "first", "second")]
    p, value = "", row["p"]
    if value is not None:
        p = f"{value:.3f}" if value >= 0.001 else "$<$0.001"
        p = rf"\textbf{{{p}}}" if value < ALPHA else p
    return [*names, difference, " to ".join(filter(None, interval)), p]


def _latex(text: str) -> str:
    """The text with LaTeX's special characters as commands."""
    escaped = re.sub(r"([&%$#_{}])", r"\\\1", plain_text(text).replace("\\", "\0"))
    commands = {"\0": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return escaped.translate(str.maketrans(commands))


def compare_runs(
    places: Sequence[Path], curve: str = VALID, ignore: Sequence[str] = ()
) -> Comparison:
    """Read and test runs, or the runs of sweep folders.

    curve: the loss on validation. ignore: keys that may differ in a group, as the seed. Raises
    UserError where no run can be compared.
    """
    runs = read_runs(expand_runs(places), curve)
    if all(run.fault for run in runs):
        raise UserError(f"none of the {len(runs)} runs can be compared; the first, {runs[0].fault}")
    notes: list[str] = []
    settings = group_runs(runs, curve, notes, ignore)
    differences = tested_differences(settings, notes)
    notes += missing_evaluations(runs, settings)
    return Comparison(curve, runs, settings, differences, list(dict.fromkeys(notes)))


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
    runs: Sequence[RunRecord], curve: str, notes: list[str], ignore: Sequence[str]
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
    """Each group's label in tables, its short label and its whole label.

    Letters stand for labels unless all are short, in all tables where they are very long.
    """
    labels = [one.label or "all runs" for one in groups]
    letters = [_letter(place) for place in range(len(labels))]
    longest = max(map(len, labels))
    if len(labels) == 1 or longest <= _SHORT:
        return [(label, label, label) for label in labels]
    if longest > _LONG:
        return list(zip(letters, letters, labels, strict=True))
    tables = [f"{one}. {label}" for one, label in zip(letters, labels, strict=True)]
    return list(zip(tables, letters, labels, strict=True))


def _letter(place: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    before, last = divmod(place, 26)
    return (_letter(before - 1) if before else "") + chr(ord("A") + last)


def tested_differences(
    settings: Sequence[SettingRuns], notes: list[str]
) -> dict[str, list[SettingDifference]]:
    """The differences between settings in each figure: word error rates first, the loss last."""
    splits, figures = compared_figures(settings)
    for split in splits:
        notes += decoding_note(settings, split) + untrained_settings(settings, split)
    comparable = [s for s in settings if s.comparable]
    differences = {f"WER of {split}": wer_differences(settings, split, notes) for split in splits}
    named = (*figures, BEST_LOSS)
    return differences | {name: figure_differences(comparable, name, notes) for name in named}


def compared_figures(settings: Sequence[SettingRuns]) -> tuple[list[str], list[str]]:
    """The splits with word error rates, and the figures of other evaluations."""
    splits = sorted({name for s in settings for m in s.members for name in m.scores})
    comparable = (m for s in settings if s.comparable for m in s.members)
    return splits, sorted({name for m in comparable for name in m.figures} - {BEST_LOSS})


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

"""Which difference is real? python -m asr.compare RUN... [--out DIR] [--levels 1.0 0.5]

RUN is a run folder or a sweep's folder. Runs are grouped by what differs in their recipes, seed and
run apart; the report is OUT/compare.md, compare.html, curves.png, curves.svg, and OUT/board for
TensorBoard.
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from asr import command
from asr.errors import UserError, writing
from asr.runs.folder import expand
from asr.runs.reading import (
    TRAIN,
    VALID,
    Run,
    cost,
    how_decoded,
    read_evaluations,
    read_health,
    read_runs,
)
from asr.runs.resume import NOT_LEARNING, is_among
from asr.scoring.board import write_board
from asr.scoring.comparison import (
    Member,
    Setting,
    decoded_unlike,
    level_table,
    loss_table,
    wer_table,
)
from asr.scoring.curve_picture import Panel, draw_curves
from asr.scoring.curves import Band, band, choose_levels, thinned
from asr.scoring.differences import (
    difference_table,
    figure_differences,
    loss_differences,
    wer_differences,
)
from asr.scoring.events import Curve
from asr.scoring.figure_table import PERCENT, figure_names, figure_table
from asr.scoring.groups import Group, group, letter
from asr.scoring.health_table import health_tables
from asr.scoring.report import Picture, Table, write_report

_SHORT, _LONG = 24, 70  # letters of a group's name: in any table; beside a letter, in one column


def main() -> int:
    """Read the runs, compare them, write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.compare", description="Compare runs, or the runs of a sweep."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run or sweep folder")
    parser.add_argument("--out", type=Path, help="folder of the report (SWEEP/compare or compare)")
    parser.add_argument("--levels", nargs="+", metavar="LOSS", help="instead of the automatic ones")
    apart = "settings that, like the seed, may differ within a group, e.g. train.init"
    parser.add_argument("--ignore", nargs="+", metavar="KEY", default=[], help=apart)
    parser.add_argument("--curve", default=VALID, help=f"the loss on validation ({VALID})")
    args = parser.parse_intermixed_args()
    wanted = None if args.levels is None else [_level(text) for text in args.levels]
    folders = expand(args.runs)
    alone = len(args.runs) == 1 and folders[0] != args.runs[0]
    out = args.out or (args.runs[0] / "compare" if alone else Path("compare"))
    runs = read_runs(folders, args.curve)
    if all(run.fault for run in runs):
        raise UserError(f"none of the {len(runs)} runs can be compared; the first, {runs[0].fault}")
    notes: list[str] = []
    settings = make_settings(runs, args.curve, notes, args.ignore)
    write(out, settings, runs, args.curve, wanted, notes)
    return 0


def make_settings(
    runs: Sequence[Run], curve: str, notes: list[str], ignore: Sequence[str]
) -> list[Setting]:
    """The groups of the runs with readable recipes, those of another world flagged.

    Runs of a group may differ in `ignore`. UserError for a key that no run has.
    """
    known = [run for run in runs if run.settings is not None]
    keys = {key for run in known for key in run.settings or {}}
    if unknown := [key for key in ignore if key not in keys]:
        raise UserError(f"--ignore {unknown[0]}: no run has such a setting")
    idle = {"seed", *ignore, *(key for key in keys if is_among(key, NOT_LEARNING))}
    groups = group([run.settings or {} for run in known], ignore=idle)
    usual = Counter(run.world for run in known if not run.fault).most_common(1)[0][0]
    settings = []
    for (label, short, whole), found in zip(_names(groups, notes), groups, strict=True):
        inside = [known[place] for place in found.members]
        good = [run for run in inside if not run.fault]
        same = inside[0].world == usual
        if not same:
            notes.append(
                f"{short or label}: other validation data or another vocabulary than most runs "
                "have, so its losses are not comparable and are left out."
            )
        members = tuple(member(run, curve, notes) for run in good)
        settings.append(Setting(label, members, len(inside) - len(good), same, short, whole))
        seeds = Counter(m.seed for m in members)
        twice = [seed for seed, count in seeds.items() if count > 1]
        if twice:
            notes.append(
                f"{short or label}: more than one run of seed {twice[0]}; pairs take the last."
            )
    return settings


def _names(groups: Sequence[Group], notes: list[str]) -> list[tuple[str, str, str]]:
    """Each group's label in tables, its letter and its whole label for a picture's legend.

    There are no letters where all labels are short.
    """
    labels = [found.label or "all runs" for found in groups]
    letters = [letter(place) for place in range(len(labels))]
    longest = max(map(len, labels))
    if len(labels) == 1 or longest <= _SHORT:
        return [(label, "", label) for label in labels]
    wholes = [f"{one}. {label}" for one, label in zip(letters, labels, strict=True)]
    if longest <= _LONG:
        return list(zip(wholes, letters, wholes, strict=True))
    notes += [f"{one}: {label}." for one, label in zip(letters, labels, strict=True)]
    return list(zip(letters, letters, wholes, strict=True))  # spelled out once in the tables


def member(run: Run, curve: str, notes: list[str]) -> Member:
    """A run as the tables take it."""
    seed = int((run.settings or {})["seed"])
    found, figures = read_evaluations(run.folder, notes)
    scores = {split: evaluation.score for split, evaluation in found.items()}
    decoded = {split: how_decoded(evaluation.about) for split, evaluation in found.items()}
    step, health = read_health(run.folder)
    loss = run.curves[curve]
    return Member(run.name, seed, loss, cost(run).at, scores, health, step, figures, decoded)


def write(
    out: Path,
    settings: Sequence[Setting],
    runs: Sequence[Run],
    curve: str,
    levels: Sequence[float] | None,
    notes: list[str],
) -> None:
    """All files of the report; the tables on the console too."""
    same = [s for s in settings if s.comparable and s.members]
    if levels is None:
        levels = choose_levels([[m.loss for m in s.members] for s in same])
    tables = [loss_table(settings, curve), level_table(settings, levels)]
    tables += judged(settings, notes)
    failed = [(run.name, str(run.fault)) for run in runs if run.fault]
    if failed:
        tables.append(Table("Runs that are not counted", ("run", "why"), failed))
    out.mkdir(parents=True, exist_ok=True)
    picture = draw(out, settings, runs, curve, levels)
    counted = len(runs) - len(failed)
    sizes = f"{_count(counted, 'run')} in {_count(len(settings), 'group')}"
    facts = [f"{sizes} by what differs in their recipes, seeds apart.", *notes]
    inside = health_tables(settings)
    parts = [tables[0], picture, *tables[1:], *inside]
    write_report(out, "compare", "Comparison of runs", facts, parts)
    print("\n".join([*facts, *(line for table in tables for line in _console(table))]))
    print(f"\nfiles: {out}/compare.html compare.md curves.png curves.svg")
    if inside:
        print("gates, norms, gradients and attention of each layer: see Health in the files")
    print(f"TensorBoard, page Custom Scalars: tensorboard --logdir {out / 'board'}")


def judged(settings: Sequence[Setting], notes: list[str]) -> list[Table]:
    """What the evaluations gave, and which difference is real."""
    splits = sorted({name for s in settings for m in s.members for name in m.scores})
    notes += [note for split in splits for note in decoded_unlike(settings, split)]
    figures = figure_names(settings)
    tables = [wer_table(settings, split) for split in splits]
    tables += [figure_table(settings, name) for name in figures]
    found = {"best loss": loss_differences(settings, notes)}
    found |= {f"WER of {split}": wer_differences(settings, split, notes) for split in splits}
    found |= {name: figure_differences(settings, name, notes) for name in figures}
    return tables + [
        difference_table(figure, pairs, points=figure.startswith(PERCENT))
        for figure, pairs in found.items()
        if pairs
    ]


def draw(
    out: Path,
    settings: Sequence[Setting],
    runs: Sequence[Run],
    curve: str,
    levels: Sequence[float],
) -> Picture:
    """The curves overlaid, as PNG, SVG and a board for TensorBoard."""
    by_name = {run.name: run.curves for run in runs}
    bands: dict[str, dict[str, Band]] = {}
    shown: dict[str, dict[str, Curve]] = {}
    for setting in (s for s in settings if s.comparable):
        for name in (curve, TRAIN):
            curves = [by_name[m.name][name] for m in setting.members]
            if mean := band(curves):
                bands.setdefault(setting.label, {})[name] = mean
            for m, one in zip(setting.members, curves, strict=True):
                shown.setdefault(m.name, {})[name] = thinned(one)
    wholes = {setting.label: setting.whole for setting in settings}
    panels = [
        Panel(name, {wholes[k]: b[name] for k, b in bands.items() if name in b}, marks)
        for name, marks in ((curve, levels), (TRAIN, ()))
    ]
    png, svg = draw_curves(panels)
    with writing(out):
        (out / "curves.png").write_bytes(png)
        (out / "curves.svg").write_text(svg, encoding="utf-8")
    write_board(out / "board", bands, shown)
    note = (
        "Mean of the runs; the band reaches from the lowest to the highest. Dashed: the levels. "
        "nats: cross-entropy of a target (character, word piece, image), without smoothing."
    )
    return Picture("Loss curves", "curves.svg", svg, note)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _console(table: Table) -> list[str]:
    rows = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return ["", table.title, *lines]


def _level(text: str) -> float:
    try:
        level = float(text)
    except ValueError:
        level = math.nan
    if not math.isfinite(level):
        raise UserError(f"--levels {text}: must be numbers, e.g. --levels 1.0 0.5")
    return level


if __name__ == "__main__":
    command.run(main)

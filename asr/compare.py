"""Which difference is real? python -m asr.compare RUN... [--out DIR] [--csv FILE] [--latex FILE]

RUN is a run folder or a sweep's folder. Runs are grouped by the differences between their recipes,
except seed and run. The report is OUT/compare.md and compare.html with the pictures curves.png and
.svg, seeds.png and .svg.
"""

from pathlib import Path

from asr.arguments import CommandParser, above_zero
from asr.errors import UserError, run_command
from asr.io import atomic_write


def main() -> int:
    """Read the runs, compare them, write the report."""
    parser = CommandParser(
        prog="python -m asr.compare", description="Compare runs, or the runs of a sweep."
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run or sweep folder")
    add("--out", type=Path, help="folder of the report (SWEEP/compare or compare)")
    levels = "of steps to a loss (automatic)"
    add("--levels", nargs="+", type=above_zero, metavar="LOSS", help=levels)
    ignore = "settings that may differ within a group, like the seed: train.init"
    add("--ignore", nargs="+", metavar="KEY", default=[], help=ignore)
    baseline = "test only differences from this setting, chosen before: listener.norm=none"
    add("--baseline", metavar="SETTING", help=baseline)
    add("--curve", default="valid/nll", help="the loss on validation (%(default)s)")
    add("--csv", type=Path, metavar="FILE", help="also write the results as a table")
    add("--latex", type=Path, metavar="FILE", help="also write them as a table for booktabs")
    args = parser.parse()
    tables = [(file, kind) for kind in ("csv", "latex") if (file := getattr(args, kind))]
    for file, kind in tables:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UserError(f"--{kind} {file}: not a regular file; name another")
    from asr.analysis.comparison import compare_runs
    from asr.analysis.comparison_report import report, report_folder

    out = args.out or report_folder(args.runs)
    comparison = compare_runs(args.runs, args.curve, args.ignore, args.baseline)
    for file, kind in tables:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, comparison.to_csv() if kind == "csv" else comparison.to_latex())
    report(comparison, out, args.levels)
    return 0


if __name__ == "__main__":
    run_command(main)

"""Plot WER over hours of training speech: one curve for each model, from its evaluations.

    .venv/bin/python tests/benchmarks/hours_of_speech.py --out FOLDER MODEL:HOURS:EVALUATION ...

EVALUATION is a folder of asr.evaluate with a score.json. Bars are its 95 % intervals. Writes
FOLDER/hours.png.
"""

import argparse
from pathlib import Path

import matplotlib
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from asr.analysis.score_files import read_evaluation

COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")


def main() -> None:
    """Read the evaluations, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", nargs="+", metavar="MODEL:HOURS:EVALUATION")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    curves: dict[str, dict[float, tuple[float, float, float]]] = {}
    for point in options.points:
        model, hours, folder = point.split(":", 2)
        score = read_evaluation(Path(folder)).score
        low, high = score.wer_interval
        curves.setdefault(model, {})[float(hours)] = (score.wer, score.wer - low, high - score.wer)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(curves, options.out / "hours.png")


def draw(curves: dict[str, dict[float, tuple[float, float, float]]], path: Path) -> None:
    """curves: model -> hours -> WER and how far its interval reaches below and above, fractions."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    shown = sorted({hours for points in curves.values() for hours in points})
    for number, (model, points) in enumerate(curves.items()):
        hours = sorted(points)
        wer, below, above = zip(*(points[each] for each in hours), strict=True)
        # Side by side, so that bars at the same hours do not cover each other.
        at = [each * 1.012 ** (number - (len(curves) - 1) / 2) for each in hours]
        percent = [[100 * value for value in row] for row in (wer, below, above)]
        style = {"color": COLORS[number], "marker": "o", "markersize": 4, "capsize": 2}
        axes.errorbar(at, percent[0], yerr=percent[1:], label=model, **style)
    axes.set(xscale="log", yscale="log", xlabel="hours of training speech", ylabel="WER, %")
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{each:g}" for each in shown]))
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = [20, 25, 30, 40, 50, 60, 80]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter([str(tick) for tick in ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


if __name__ == "__main__":
    main()

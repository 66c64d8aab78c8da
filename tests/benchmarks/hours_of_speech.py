"""Plot WER over hours of training speech, from the table of docs/real_speech.md.

    .venv/bin/python tests/benchmarks/hours_of_speech.py

One curve for each column of figures `WER [low, high]`; bars are these intervals. Writes
docs/pictures/hours.png.
"""

import re
from pathlib import Path

import matplotlib
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

DOCS = Path(__file__).parents[2] / "docs"
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")
FIGURE = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")  # not a difference, which has a sign

Curves = dict[str, dict[float, tuple[float, float, float]]]  # model -> hours -> WER, below, above


def read_table(page: str) -> Curves:
    """WER of the table in the section `Hours of speech` and its intervals' reach, in per cent."""
    section = page.partition("\n## Hours of speech\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    (_, *models), _, *rows = [[*map(str.strip, line.strip("|").split("|"))] for line in lines]
    curves: Curves = {}
    for hours, *cells in rows:
        for model, cell in zip(models, cells, strict=True):
            if figure := FIGURE.fullmatch(cell):
                wer, low, high = map(float, figure.groups())
                curves.setdefault(model, {})[float(hours)] = wer, wer - low, high - wer
    return curves


def draw(curves: Curves, path: Path) -> None:
    """Write the picture, both axes logarithmic."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    shown = sorted({hours for points in curves.values() for hours in points})
    for number, (model, points) in enumerate(curves.items()):
        hours = sorted(points)
        wer, below, above = zip(*(points[each] for each in hours), strict=True)
        # Side by side, so that bars at the same hours do not cover each other.
        at = [each * 1.012 ** (number - (len(curves) - 1) / 2) for each in hours]
        style = {"color": COLORS[number], "marker": "o", "markersize": 4, "capsize": 2}
        axes.errorbar(at, wer, yerr=[below, above], label=model, **style)
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
    draw(
        read_table((DOCS / "real_speech.md").read_text(encoding="utf-8")),
        DOCS / "pictures" / "hours.png",
    )

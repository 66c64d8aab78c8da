"""Experiment: how long a change of one frame affects the outputs of an untrained LSTM.

    .venv/bin/python tests/benchmarks/perturbation_decay.py [--out FOLDER] [--runs RUN...]

One direction of one layer reads 200 frames of standard normal numbers, as many as there are mel
bins and mean-variance normalised like them. Then it reads them again with one frame changed by a
millionth, and the difference of the two outputs is measured from that frame on. A
shrinking difference means a short memory; a growing one means chaotic dynamics.

Prints the difference some frames later, relative to the first one (geometric mean over utterances
and seeds), and plots FOLDER/echo.png. For trained LAS runs it prints the same for the listener's
first layer, forward direction, and the mean gain of its recurrent product. Takes half a minute.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.inference.recognition import Recognizer
from asr.kernels.dispatch import Kernels
from asr.nn.lstm import LayerNormLSTM

FRAMES, DISTURBED, UTTERANCES, INPUT, HIDDEN = 210, 50, 8, 40, 128
LATER = (1, 5, 10, 20, 50, 100, 150)
SETTINGS = {
    **{norm: CellSettings(norm) for norm in ("none", "cell", "per_gate")},
    "ba": CellSettings("ba", recurrent_gain=1.0),
    "ba, gain 0.3": CellSettings("ba", recurrent_gain=0.3),
    "ba, gain 0.1": CellSettings("ba", recurrent_gain=0.1),
    "joined": CellSettings("joined"),
    "ba, rms": CellSettings("ba", norm_kind="rms", recurrent_gain=1.0),
    "joined, rms": CellSettings("joined", norm_kind="rms"),
    "ba, cell_norm none": CellSettings("ba", cell_norm="none", recurrent_gain=1.0),
    "ba, cell_norm carried": CellSettings("ba", cell_norm="carried", recurrent_gain=1.0),
    "ba, cell_norm state": CellSettings("ba", cell_norm="state", recurrent_gain=1.0),
    "joined, hidden_norm": CellSettings("joined", hidden_norm=True),
    "ba, gain 0.1, hidden_norm": CellSettings("ba", recurrent_gain=0.1, hidden_norm=True),
    "per_gate, rms": CellSettings("per_gate", norm_kind="rms"),
    "raw": CellSettings("raw"),
    "thesis": CellSettings("thesis"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: a new temporary folder")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", nargs="+", type=Path, default=[], help="trained LAS runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':28}" + "".join(f"{later:>10}" for later in LATER) + "  frames later")
    curves = {}
    for name, settings in SETTINGS.items():
        actual = torch.stack([fresh(settings, seed) for seed in range(options.seeds)])
        curves[name] = actual.log().mean(0).exp()
        print(f"{name:28}{shares(curves[name])}", flush=True)
    for run in options.runs:
        lstm = Recognizer.load(run).model.listener.layers[0]
        gain = (
            f", recurrent gain {lstm.gain_hh_l0.mean():.3f}" if lstm.settings.norm == "ba" else ""
        )
        print(f"{shares(decay(lstm)):>98}  {run}{gain}", flush=True)
    folder = options.out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    draw(curves, folder / "echo.png")


def fresh(settings: CellSettings, seed: int) -> Tensor:
    """The decay in an untrained layer."""
    torch.manual_seed(seed)
    return decay(LayerNormLSTM(INPUT, HIDDEN, batch_first=True, norm=settings))


@torch.no_grad()
def decay(lstm: LayerNormLSTM) -> Tensor:
    """(FRAMES - DISTURBED,) difference of the outputs from the disturbed frame on, 1 at first."""
    lstm.double().kernels = Kernels("reference", lstm.settings)
    x = torch.randn(UTTERANCES, FRAMES, lstm.input_size, dtype=torch.double)
    other = x.clone()
    other[:, DISTURBED] += 1e-6 * torch.randn(UTTERANCES, lstm.input_size)
    distance = (lstm(other)[0] - lstm(x)[0])[..., : lstm.hidden_size].norm(dim=-1)[:, DISTURBED:]
    return (distance / distance[:, :1]).log().mean(0).exp()


def shares(curve: Tensor) -> str:
    return "".join(f"{curve[later].item():10.2g}" for later in LATER)


def draw(curves: dict[str, Tensor], path: Path) -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    by_end = sorted(curves, key=lambda name: curves[name][-1].item(), reverse=True)
    for place, name in enumerate(by_end):
        # Neighbours in the legend, which often overlap, differ in colour and in dashes.
        axes.semilogy(curves[name], "-" if place % 2 else "--", color=f"C{place % 10}", label=name)
    axes.axhline(1, color="grey", linewidth=0.5)
    axes.set(ylim=(1e-6, 1e4), xlabel="frames after the perturbed one", ylabel="difference")
    axes.set_title(
        "perturbation of one frame before any training, relative to the first difference"
    )
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


if __name__ == "__main__":
    main()

"""Experiment: without warm-up, pre-norm trains where post-norm at the same rate does not.

    .venv/bin/python tests/benchmarks/prenorm_warmup.py [--out FOLDER]

The toy task is to spell random words backwards: every letter lasts eight noisy frames, the decoder
outputs the letters from last to first, so that it has to learn where to attend. The same small
Transformer (6 + 6 layers, d = 48) starts from the same seed and sees the same batches with
norm_position pre and post, with Adam at one rate from the first step or after a linear warm-up.
Xiong et al. 2020 (arXiv:2002.04745) explain the outcome: post-norm's first gradients near the
output are large.

Writes the curves as FOLDER/prenorm_warmup.png and prints, for every run, the mean cross-entropy of
its last 50 steps. Guessing letters evenly costs ln 20 = 3.00 nats. Takes about four minutes.
"""

import argparse
import math
import tempfile
from pathlib import Path

import matplotlib
import torch
from torch import Tensor
from torch.nn import functional

from asr.config.schema import TransformerConfig
from asr.data.tokenizer import SOS, SPECIAL
from asr.models.transformer import Transformer

LETTERS, LENGTH, BATCH, FRAMES_EACH, FEATURES = 20, 6, 16, 8, 24
FIRST = len(SPECIAL)  # number of the first letter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: a new temporary folder")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=400, help="steps, where there is one")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves = {}
    for position, warmup in (("pre", 0), ("post", 0), ("post", options.warmup)):
        name = f"{position}-norm, " + (f"{warmup} steps of warm-up" if warmup else "no warm-up")
        curves[name] = [
            train(position, warmup, options.rate, options.steps, seed)
            for seed in range(options.seeds)
        ]
        ends = ", ".join(f"{sum(curve[-50:]) / 50:.3f}" for curve in curves[name])
        print(f"{name:30} rate {options.rate}: {ends} nats over the last 50 steps", flush=True)
    folder = options.out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    draw(curves, folder / "prenorm_warmup.png")


def train(position: str, warmup: int, rate: float, steps: int, seed: int) -> list[float]:
    """The loss of every step, nats per letter."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        kind="transformer",
        d_model=48,
        heads=4,
        feed_forward=192,
        encoder_layers=6,
        decoder_layers=6,
        subsampling_channels=8,
        dropout=0.0,
        norm_position=position,
        ctc_weight=0,
    )
    model = Transformer(FEATURES, FIRST + LETTERS, config)
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.98), eps=1e-9)
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(warmup, 1))
    )
    codes = torch.randn(LETTERS, FEATURES)
    losses = []
    for _ in range(steps):
        features, lengths, targets = words(codes)
        tokens = functional.pad(targets[:, :-1], (1, 0), value=SOS)
        logits = model.decode(model.encode(features, lengths), tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ramp.step()
        losses.append(loss.item())
    return losses


def words(codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A batch: features (B, T, F), lengths (B,), targets (B, U), the letters backwards."""
    letters = torch.randint(LETTERS, (BATCH, LENGTH))
    features = codes[letters].repeat_interleave(FRAMES_EACH, 1)
    features = features + 0.3 * torch.randn_like(features)
    return features, torch.full((BATCH,), features.size(1)), letters.flip(1) + FIRST


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for colour, (name, runs) in enumerate(curves.items()):
        for seed, curve in enumerate(runs):
            smooth = torch.tensor(curve).unfold(0, 10, 1).mean(-1)
            label = name if seed == 0 else None
            axes.plot(smooth, color=f"C{colour}", label=label, linewidth=1)
    axes.axhline(math.log(LETTERS), color="grey", linestyle=":", label="guessing")
    axes.set(xlabel="step", ylabel="nats per letter", title="The same rate from the first step")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(path)


if __name__ == "__main__":
    main()

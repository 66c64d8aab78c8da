"""Experiment: variation over time that layer normalisation leaves of unnormalised features.

    .venv/bin/python tests/benchmarks/feature_offset.py [--manifest MANIFEST.tsv]

The input product of an untrained LSTM, W_x x, over real utterances, before and after LN. LN uses
the mean and variance over the units of one frame. An offset common to all frames, such as the
level of log-mel energies, becomes one fixed pattern over the units, and LN divides by that
pattern's size: the differences between frames, which carry the speech, become small.

Prints for every kind of features the standard deviation over time of a unit before and after LN.
"""

import argparse
from pathlib import Path

import torch

from asr.config.cell import CellSettings
from asr.config.schema import FeaturesConfig
from asr.data.corpus import Corpus, read_manifest
from asr.features.front_end import FrontEnd
from asr.kernels.reference import normalise
from asr.models import build

GATES, EVERY = 4 * 128, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifest", type=Path, default=Path("data/spoken_numbers/test.tsv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = read_manifest(options.manifest)
    print(f"{'features':22}mean of x   W_x x over time   LN(W_x x) over time")
    for kind, ceps in (("logmel", {}), ("mfcc", {"ceps": 13, "deltas": 2})):
        for mvn in ("none", "utterance"):
            front_end = build.build_front_end(
                FeaturesConfig(kind=kind, mel_bins=40, mvn=mvn, **ceps)
            )
            mean, before, after = spreads(front_end, corpus[::EVERY])
            print(f"{kind + ', mvn ' + mvn:22}{mean:9.2f}   {before:15.2f}   {after:19.2f}")


def spreads(front_end: FrontEnd, corpus: Corpus) -> list[float]:
    """Mean of the features, and a unit's standard deviation over time before and after LN."""
    torch.manual_seed(0)
    results = []
    for utterance in corpus:
        x = front_end.features(front_end.load(utterance.audio))  # (T, F)
        product = x @ torch.nn.init.xavier_uniform_(torch.empty(GATES, x.shape[1])).T
        normed = normalise(product, CellSettings())
        results.append([x.mean(), product.std(0).mean(), normed.std(0).mean()])
    return torch.tensor(results).mean(0).tolist()


if __name__ == "__main__":
    main()

"""Experiment: what layer normalisation leaves of features that are not normalised.

    .venv/bin/python tests/benchmarks/offset.py [--manifest MANIFEST.tsv]

The input product of an untrained LSTM, W_x x, over real utterances, before and after LN. LN takes
the mean and variance over the units of one frame. An offset that all frames share, such as the
level of log-mel energies, becomes one fixed pattern over the units, and LN scales the whole by that
pattern's size: what changes from frame to frame, which is what is said, grows small.

Prints, for every kind of features, the standard deviation over time of a unit before and after LN.
"""

import argparse
from pathlib import Path

import torch

from asr import build
from asr.data.corpus import Corpus, read_manifest
from asr.nn.kernels.reference import normalise
from asr.settings import Features
from features.front_end import FrontEnd

GATES, EVERY, EPS = 4 * 128, 40, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifest", type=Path, default=Path("data/spoken_numbers/test.tsv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = read_manifest(options.manifest)
    print(f"{'features':22}mean of x   W_x x over time   LN(W_x x) over time")
    for kind, ceps in (("logmel", {}), ("mfcc", {"ceps": 13, "deltas": 2})):
        for mvn in ("none", "utterance"):
            front_end = build.front_end(Features(kind=kind, mel_bins=40, mvn=mvn, **ceps))
            mean, before, after = spreads(front_end, corpus[::EVERY])
            print(f"{kind + ', mvn ' + mvn:22}{mean:9.2f}   {before:15.2f}   {after:19.2f}")


def spreads(front_end: FrontEnd, corpus: Corpus) -> list[float]:
    """Mean of the features, and a unit's deviation over time before and after LN."""
    torch.manual_seed(0)
    found = []
    for utterance in corpus:
        x = front_end.features(front_end.load(utterance.audio))  # (T, F)
        product = x @ torch.nn.init.xavier_uniform_(torch.empty(GATES, x.shape[1])).T
        normed = normalise(product, EPS, guard=True)
        found.append([x.mean(), product.std(0).mean(), normed.std(0).mean()])
    return torch.tensor(found).mean(0).tolist()


if __name__ == "__main__":
    main()

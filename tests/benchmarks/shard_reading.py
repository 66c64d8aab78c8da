"""Time of reading audio from tars against single files, both in the page cache, in ms.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/shard_reading.py MANIFEST.tsv

The same utterances in the same random order, interleaved; the median of the rounds.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from asr.data.corpus import Corpus, read_manifest
from asr.data.shards import pack
from asr.features.audio import read_audio

ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--utterances", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        packed = pack(args.manifest, folder, args.megabytes)
        corpora = {"files": read_manifest(args.manifest), "tars": read_manifest(packed)}
        order = list(range(len(corpora["files"])))
        rows = random.Random(1).sample(order, min(args.utterances, len(order)))
        seconds = {
            name: statistics.median(times)
            for name, times in zip(corpora, zip(*in_turns(corpora, rows), strict=True), strict=True)
        }
    for name, passed in seconds.items():
        print(f"{name}  {1e3 * passed / len(rows):.3f} ms an utterance, read and decoded")
    print(f"tars / files  {seconds['tars'] / seconds['files']:.3f}")


def in_turns(corpora: dict[str, Corpus], rows: list[int]) -> list[list[float]]:
    """Seconds of every round, one value per corpus."""
    return [[once(corpus, rows) for corpus in corpora.values()] for _ in range(ROUNDS)]


def once(corpus: Corpus, rows: list[int]) -> float:
    """Seconds to read and decode these utterances."""
    begin = time.perf_counter()
    for row in rows:
        read_audio(corpus[row].audio, 16_000)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

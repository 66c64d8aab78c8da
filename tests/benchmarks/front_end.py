"""Speed of the front end: seconds of audio per second, on one thread.

    python tests/benchmarks/front_end.py [--seconds 12] [--utterances 20]

Each figure is the best of five passes over synthetic utterances: noise with the rhythm of
syllables, at 16 kHz. Speech decodes at about the same speed.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import soundfile
import torch
from torch import Tensor

from asr.features.audio import read_audio
from asr.features.augment import SpecAugment, add_noise, change_speed
from asr.features.fbank import Fbank, Mfcc, SlaneyMel
from asr.features.normalize import MeanVarianceNorm

RATE = 16_000
PASSES = 5
FILES = {"FLAC": {"format": "FLAC"}, "Opus": {"format": "OGG", "subtype": "OPUS"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="length of an utterance")
    parser.add_argument("--utterances", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    waveforms = [utterance(options.seconds, seed) for seed in range(options.utterances)]
    total = options.seconds * options.utterances
    for name, work in in_memory().items():
        report(name, total, work, waveforms)
    log_mel, read = Fbank(), partial(read_audio, sample_rate=RATE)
    with tempfile.TemporaryDirectory() as folder:
        for kind in FILES:
            paths = written(waveforms, kind, Path(folder))
            report(f"read {kind}", total, read, paths)
            report(f"read {kind} + log-mel", total, lambda path: log_mel(read(path)), paths)


def in_memory() -> dict[str, Callable[[Tensor], Tensor]]:
    """The functions timed on waveforms, by name."""
    log_mel, norm, mask = Fbank(), MeanVarianceNorm("utterance"), SpecAugment(2, 27, 2, 100, 1.0)
    generator = torch.Generator().manual_seed(0)
    return {
        "log-mel": log_mel,
        "MFCC": Mfcc(),
        "MFCC, 2 deltas": Mfcc(deltas=2),
        "Slaney-mel": SlaneyMel(),
        "log-mel + normalise + SpecAugment": lambda x: mask(norm(log_mel(x)), generator),
        "speed 0.9": lambda x: change_speed(x, 0.9),
        "speed 1.1": lambda x: change_speed(x, 1.1),
        "noise": lambda x: add_noise(x, 10.0, generator),
    }


def utterance(seconds: float, seed: int) -> Tensor:
    """Four bursts of noise per second, (S,)."""
    noise = torch.randn(round(seconds * RATE), generator=torch.Generator().manual_seed(seed))
    return 0.1 * noise * torch.sin(torch.arange(len(noise)) * (4 * torch.pi / RATE)).square()


def written(waveforms: Sequence[Tensor], kind: str, folder: Path) -> list[Path]:
    paths = [folder / f"{number}.{kind}" for number in range(len(waveforms))]
    for path, waveform in zip(paths, waveforms, strict=True):
        soundfile.write(path, waveform.numpy(), RATE, **FILES[kind])
    return paths


def report(name: str, seconds: float, work: Callable, items: Sequence) -> None:
    best = float("inf")
    for _ in range(PASSES):
        started = time.perf_counter()
        for item in items:
            work(item)
        best = min(best, time.perf_counter() - started)
    print(f"{name:36}{seconds / best:10,.0f} x real time")


if __name__ == "__main__":
    main()

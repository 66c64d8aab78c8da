"""Words that a model gives for audio without speech: python tests/benchmarks/non_speech.py RUN...

20 kinds, each of 5 and 20 s: noise, hum, tones, chords, clicks. Keys of the recipe may follow the
runs, such as decode.no_speech_log_prob=null, which keeps all. Prints the words of each kind and
their sum.
"""

import sys
from collections.abc import Iterator

import numpy as np

RATE = 16_000


def coloured(random: np.random.Generator, count: int, slope: float) -> np.ndarray:
    """Noise whose power falls with frequency ** slope, with a peak of 1: 0 white, 1 pink."""
    spectrum = np.fft.rfft(random.standard_normal(count))
    spectrum[1:] /= np.arange(1, len(spectrum)) ** (slope / 2)
    spectrum[0] = 0
    noise = np.fft.irfft(spectrum, count)
    return noise / np.abs(noise).max()


def pulses(t: np.ndarray, rate: float, decay: float) -> np.ndarray:
    """Decaying bursts of 1 kHz, `rate` in a second, of time constant `decay` in seconds."""
    since = np.mod(t, 1 / rate)
    return np.exp(-since / decay) * np.sin(2 * np.pi * 1000 * since)


def chords(t: np.ndarray) -> np.ndarray:
    """A triad of four harmonics each for every half second, struck and decaying."""
    roots = 220 * 2 ** (np.array([0, 5, 7, 3, 8, 10]) / 12)
    root = roots[(t / 0.5).astype(int) % len(roots)]
    notes = sum(
        np.sin(2 * np.pi * root * 2 ** (interval / 12) * harmonic * t) / harmonic
        for interval in (0, 4, 7)
        for harmonic in (1, 2, 3, 4)
    )
    return notes * np.exp(-np.mod(t, 0.5) / 0.3)


def kinds(seconds: float) -> Iterator[tuple[str, np.ndarray]]:
    """Names and samples (S,) in -1 to 1."""
    random = np.random.default_rng(1)
    t = np.arange(round(seconds * RATE)) / RATE
    sine = lambda hertz: np.sin(2 * np.pi * hertz * t)  # noqa: E731
    hum = sum(sine(50 * k) / k for k in (1, 2, 3, 4, 6))
    white, pink, brown = (coloured(random, len(t), slope) for slope in (0, 1, 2))
    for name, noise in (("white", white), ("pink", pink), ("brown", brown)):
        for level in (0.5, 0.01):
            yield f"{name} noise of {level}", noise * level
    yield "white noise of 16-bit steps", random.integers(-1, 2, len(t)) / 32768
    yield "noise, amplitude 4 Hz", white * 0.3 * (1 + sine(4)) / 2
    yield "noise in bursts", pink * 0.3 * (np.mod(t, 0.7) < 0.25)
    yield "constant 0.1", np.full(len(t), 0.1)
    yield "constant 0.001 and steps", 0.001 + random.integers(-1, 2, len(t)) / 32768
    yield "hum of 50 Hz", hum * 0.1
    yield "hum and noise", hum * 0.02 + white * 0.002
    yield "tone of 440 Hz", sine(440) * 0.3
    yield "dial tone", (sine(350) + sine(440)) * 0.2
    yield "busy tone", sine(425) * 0.3 * (np.mod(t, 1) < 0.5)
    yield "chirps", 0.3 * np.sin(2 * np.pi * (300 + 1500 * np.mod(t, 1)) * np.mod(t, 1))
    yield "chords", chords(t) * 0.1
    yield "clicks", (np.mod(np.arange(len(t)), RATE // 2) < 8) * 0.8
    yield "pulses", pulses(t, 3, 0.05) * 0.5


def main() -> None:
    from asr.inference.recognition import Recognizer

    runs = [argument for argument in sys.argv[1:] if "=" not in argument]
    overrides = [argument for argument in sys.argv[1:] if "=" in argument]
    for run in runs:
        recognizer = Recognizer.load(run, overrides)
        total = 0
        for seconds in (5.0, 20.0):
            for name, samples in kinds(seconds):
                words = recognizer(samples.astype(np.float32), RATE).text.split()
                total += len(words)
                print(f"{run} {seconds:g} s {name}: {len(words)} {' '.join(words[:8])}", flush=True)
        print(f"{run}: {total} words in 40 recordings without speech", flush=True)


if __name__ == "__main__":
    main()

"""Samples in memory -> mono waveform at the sample rate of the recogniser.

Shapes: S samples, C channels.
"""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torchaudio.transforms import Resample

# A header is free to claim any rate, and resampling from 1 Hz would turn 1 MB into 30 GB.
SAMPLE_RATES = (1_000, 1_000_000)
# Lossy decoders overshoot full scale a little; beyond this the file is not scaled to [-1, 1].
MAX_PEAK = 8.0
# Taps of the largest bank of resampling filters; the usual rates need at most 282,240.
MAX_FILTER_TAPS = 2**20


class AudioError(Exception):
    """One line: the file, and what is wrong with it."""


class NoSamples(AudioError):
    """Audio of good form that holds no sample: nothing to learn from, but easily transcribed."""


def from_samples(
    samples: np.ndarray | Tensor, rate: float, sample_rate: int = 16_000, name: str = "the waveform"
) -> Tensor:
    """Samples in memory, (S,) or (S, C) at `rate` -> (S',) float32 in [-1, 1] at `sample_rate`.

    Values over full scale are clipped to it, after resampling, which overshoots at sharp edges.
    Raises AudioError, beginning with `name`, for samples that are empty, not finite, of another
    shape, fewer than channels, or not scaled to [-1, 1]; and for a rate that is not whole.
    """
    rate = whole_rate(rate, name)
    array = samples.numpy(force=True) if isinstance(samples, Tensor) else samples
    waveform = torch.from_numpy(np.array(array, dtype=np.float32))
    _check_shape(tuple(waveform.shape), name)
    check_values(waveform, name)
    mono = waveform if waveform.ndim == 1 else waveform.mean(dim=1)
    return resample(mono, rate, sample_rate).clamp(-1.0, 1.0)


def resample(waveform: Tensor, rate: int, sample_rate: int) -> Tensor:
    """(S,) at `rate` -> (ceil(S * sample_rate / rate),) at `sample_rate`, band-limited (Hann sinc).

    Rates with no useful common divisor (44,101 to 16,000 Hz) would need gigabytes of filters; they
    are met by the nearest ratio that does not, at most 0.05 % away, which no listener notices.
    """
    ratio = Fraction(rate, sample_rate)
    ratio = ratio.limit_denominator(max(1, math.isqrt(int(MAX_FILTER_TAPS / ratio))))
    if ratio == 1:
        return waveform
    return _resampler(ratio.numerator, ratio.denominator)(waveform)


@lru_cache(maxsize=16)  # one entry holds at most 4 MB of filters
def _resampler(old: int, new: int) -> Resample:
    return Resample(old, new)


def _check_shape(shape: tuple[int, ...], name: str) -> None:
    if len(shape) not in (1, 2):
        raise AudioError(f"{name}: expected shape (samples,) or (samples, channels), got {shape}")
    if not math.prod(shape):
        raise NoSamples(f"{name}: no audio, 0 samples")
    # The mean of a whole utterance over time would be heard as silence, and nobody told.
    if shape[1:] > shape[:1]:
        told = f"shape {shape} would be {shape[0]} samples of {shape[1]} channels"
        raise AudioError(f"{name}: {told}; pass (samples, channels), so .T of this one")


def check_values(waveform: Tensor, name: str) -> None:
    """AudioError, beginning with `name`, for samples that are not finite or not in [-1, 1]."""
    peak = float(waveform.abs().max())
    if not math.isfinite(peak):
        raise AudioError(f"{name}: holds samples that are NaN or infinite")
    if peak > MAX_PEAK:
        raise AudioError(f"{name}: samples reach {peak:.4g}; scale floating-point audio to [-1, 1]")


def whole_rate(rate: float, name: str) -> int:
    """The sample rate in Hz. AudioError, beginning with `name`, for one that no recording has."""
    lowest, highest = SAMPLE_RATES
    if not lowest <= rate <= highest:
        raise AudioError(f"{name}: sample rate {rate} Hz is outside {lowest} to {highest} Hz")
    if rate != int(rate):
        raise AudioError(f"{name}: sample rate {rate} Hz is not a whole number; round it")
    return int(rate)

"""Resampling of a waveform, whole or in blocks.

Shapes: S samples.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor
from torchaudio.transforms import Resample

MAX_FILTER_TAPS = 2**20  # in a bank of resampling filters; the usual rates need at most 282,240


def resample(waveform: Tensor, rate: int, sample_rate: int) -> Tensor:
    """(S,) at `rate` -> (ceil(S * sample_rate / rate),) at `sample_rate`, band-limited (Hann sinc).

    Rates without a useful common divisor (44,101 to 16,000 Hz) would need gigabytes of filters;
    they are replaced by the nearest ratio that does not, at most 0.05 % away, which is inaudible.
    """
    (whole,) = resample_blocks([waveform], rate, sample_rate)
    return whole


def resample_blocks(blocks: Iterable[Tensor], rate: int, sample_rate: int) -> Iterator[Tensor]:
    """`resample` of a waveform in blocks (S,), as if they were one.

    Holds one block more than the caller; a waveform of one block gives one.
    """
    ratio = Fraction(rate, sample_rate)
    ratio = ratio.limit_denominator(max(1, math.isqrt(int(MAX_FILTER_TAPS / ratio))))
    if ratio == 1:
        yield from blocks
        return
    old, new = ratio.numerator, ratio.denominator
    resampler = _resampler(old, new)
    margin = -(-resampler.width // old) * old  # the filter's reach, in whole periods of `old`
    buffer, done = torch.zeros(0), 0  # done: samples of the buffer that are only context
    for number, block in enumerate(blocks):
        end = (len(buffer) - margin) // old * old  # up to here the next block has no influence
        if end > done:
            yield resampler(buffer)[done // old * new : end // old * new]
            buffer, done = buffer[max(0, end - margin) :], min(end, margin)
        buffer = torch.cat([buffer, block]) if number else block
    yield resampler(buffer)[done // old * new :]


@lru_cache(maxsize=16)  # one entry holds at most 4 MB of filters
def _resampler(old: int, new: int) -> Resample:
    return Resample(old, new)

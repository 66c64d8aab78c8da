"""Random changes of training utterances: SpecAugment, speed perturbation, noise.

All randomness comes from the generator that is passed in. SpecAugment draws the same number of
values whatever the length of the utterance.

Shapes: S samples, T frames, F features per frame.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from asr.features.resample import resample

SPEEDS = (0.25, 4.0)  # beyond these, speech is unintelligible


@dataclass(frozen=True)
class SpecAugment:
    """Masks on the log-mel spectrogram (Park et al. 2019, arXiv:1904.08779).

    Each mask has a uniform width, 0 to `freq_width` features or 0 to `time_width` frames, and a
    uniform position. No time mask is longer than `time_fraction` of the utterance (Park et al.
    2020, arXiv:1912.05533: 0.05 with many masks). A random frame moves by up to `time_warp` frames,
    0 for no warping. We differ once: the time warp is linear on both sides of that frame, where the
    paper draws a spline.

    Masked values become the mean of the features, which is 0 after normalisation.
    Raises ValueError for a setting out of range.
    """

    freq_masks: int = 2
    freq_width: int = 27
    time_masks: int = 2
    time_width: int = 100
    time_fraction: float = 0.2
    time_warp: int = 0

    def __post_init__(self) -> None:
        for name in ("freq_masks", "freq_width", "time_masks", "time_width", "time_warp"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} must not be negative")
        if not 0.0 <= self.time_fraction <= 1.0:
            raise ValueError(f"time_fraction {self.time_fraction} must lie in 0 to 1")

    def __call__(self, features: Tensor, generator: torch.Generator) -> Tensor:
        """(T, F) -> (T, F), a copy."""
        frames, size = features.shape
        warp = torch.rand(2, generator=generator)
        time = torch.rand(self.time_masks, 2, generator=generator)
        freq = torch.rand(self.freq_masks, 2, generator=generator)
        if not features.numel():
            return features.clone()
        longest = min(self.time_width, int(self.time_fraction * frames))
        masked = _masks(time, longest, frames)[:, None]  # (T, 1)
        masked = masked | _masks(freq, min(self.freq_width, size), size)  # (T, F)
        warped = self._warp(features, *warp.tolist())
        return warped.masked_fill(masked, float(features.mean()))

    def _warp(self, features: Tensor, position: float, move: float) -> Tensor:
        """Move one frame by up to `time_warp` and stretch both sides to fit: (T, F) -> (T, F)."""
        reach, frames = self.time_warp, len(features)
        if reach == 0 or frames <= 2 * reach + 1:
            return features
        # From reach + 1 to frames - reach - 1.
        pivot = reach + 1 + int(position * (frames - 2 * reach - 1))
        target = pivot - reach + int(move * (2 * reach + 1))
        left = _stretch(features[:pivot], target)
        return torch.cat([left, _stretch(features[pivot:], frames - target)])


def _masks(draws: Tensor, longest: int, length: int) -> Tensor:
    """draws (masks, 2) in [0, 1): width and position of each -> (length,) bool, True in a mask."""
    widths = (draws[:, 0] * (longest + 1)).long()
    starts = (draws[:, 1] * (length - widths + 1)).long()
    index = torch.arange(length)
    covered = (index >= starts[:, None]) & (index < (starts + widths)[:, None])  # (masks, length)
    return covered.any(dim=0)


def _stretch(features: Tensor, frames: int) -> Tensor:
    """(T, F) -> (frames, F) by linear interpolation."""
    return interpolate(features.T[None], size=frames, mode="linear", align_corners=False)[0].T


def change_speed(waveform: Tensor, factor: float) -> Tensor:
    """(S,) `factor` times as fast: ceil(S / factor) samples, every pitch times `factor`.

    Speed perturbation of Ko et al. 2015 ("Audio augmentation for speech recognition"), by
    resampling, hence independent of the sample rate. `factor` is rounded to hundredths, which
    needs few filters. Raises ValueError outside 0.25 to 4.
    """
    if not SPEEDS[0] <= factor <= SPEEDS[1]:
        raise ValueError(f"speed {factor} must lie in {SPEEDS[0]} to {SPEEDS[1]}")
    ratio = Fraction(round(factor * 100), 100)
    return resample(waveform, ratio.numerator, ratio.denominator)


def add_noise(waveform: Tensor, snr_db: float, generator: torch.Generator) -> Tensor:
    """(S,) plus white Gaussian noise, `snr_db` decibels below the waveform's mean power."""
    noise = torch.randn(waveform.shape, generator=generator)
    if not waveform.numel():
        return waveform
    power = waveform.square().mean() * 10.0 ** (-snr_db / 10.0)
    return waveform + noise * power.sqrt()

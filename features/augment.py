"""Random changes of training utterances: SpecAugment, speed, noise, room responses.

All randomness comes from the generator that is passed in. SpecAugment draws the same number of
values whatever the length of the utterance.

Shapes: S samples, T frames, F features per frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from asr.features import AudioError
from asr.features.audio import stream_audio
from asr.features.resample import resample

LONGEST = 300  # seconds that are used of a file of noise or of a response
KEPT = 1 << 25  # samples of such files that a process keeps, 128 MB
QUIETEST = 1e-10  # mean power of noise: a pause in it is not amplified to the drawn ratio


@dataclass(frozen=True)
class SpecAugment:
    """Masks on the log-mel spectrogram (Park et al. 2019, arXiv:1904.08779).

    Each mask has a uniform width, 0 to `freq_width` features or 0 to `time_width` frames, and a
    uniform position. No time mask is longer than `time_fraction` of the utterance (Park et al.
    2020, arXiv:1912.05533: 0.05 with many masks). A random frame moves by up to `time_warp` frames,
    0 for no warping. We differ once: the time warp is linear on both sides of that frame, where the
    paper draws a spline.

    Masked values become the mean of the features, which is 0 after normalisation.
    """

    freq_masks: int = 2
    freq_width: int = 27
    time_masks: int = 2
    time_width: int = 100
    time_fraction: float = 0.2
    time_warp: int = 0

    def __call__(
        self, features: Tensor, generator: torch.Generator | None, groups: int = 1
    ) -> Tensor:
        """(T, F) -> (T, F), a copy. groups: equal parts of F, which the same masks cover."""
        return self.mask(self.warp(features, generator), generator, groups)

    def warp(self, features: Tensor, generator: torch.Generator | None) -> Tensor:
        """Move one frame by up to `time_warp` and stretch both sides to fit: (T, F) -> (T, F)."""
        position, move = torch.rand(2, generator=generator).tolist()
        reach, frames = self.time_warp, len(features)
        if reach == 0 or frames <= 2 * reach + 1:
            return features
        # From reach + 1 to frames - reach - 1.
        pivot = reach + 1 + int(position * (frames - 2 * reach - 1))
        target = pivot - reach + int(move * (2 * reach + 1))
        left = _stretch(features[:pivot], target)
        return torch.cat([left, _stretch(features[pivot:], frames - target)])

    def mask(self, features: Tensor, generator: torch.Generator | None, groups: int = 1) -> Tensor:
        """The masks alone: (T, F) -> (T, F), a copy."""
        frames, size = len(features), features.size(1) // groups
        time = torch.rand(self.time_masks, 2, generator=generator)
        freq = torch.rand(self.freq_masks, 2, generator=generator)
        if not features.numel():
            return features.clone()
        longest = min(self.time_width, int(self.time_fraction * frames))
        masked = _masks(time, longest, frames)[:, None]  # (T, 1)
        masked_features = _masks(freq, min(self.freq_width, size), size).repeat(groups)
        masked = (masked | masked_features).to(features.device)  # (T, F)
        return features.masked_fill(masked, float(features.detach().mean()))


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
    needs few filters.
    """
    ratio = Fraction(round(factor * 100), 100)
    return resample(waveform, ratio.numerator, ratio.denominator)


@dataclass(frozen=True)
class AudioFiles:
    """Files of noise or room responses, of which one is drawn with `probability`.

    Those read last stay in memory, up to KEPT samples.
    """

    paths: Sequence[Path]
    sample_rate: int
    probability: float
    _kept: dict[Path, Tensor] = field(default_factory=dict)

    def draw(self, generator: torch.Generator) -> Tensor | None:
        """The waveform (N,) of a file, or None. Raises AudioError, also for a silent file."""
        chance, choice = torch.rand(2, generator=generator).tolist()
        if chance >= self.probability:
            return None
        path = self.paths[int(choice * len(self.paths))]
        waveform = self._kept.pop(path, None)
        self._kept[path] = self._read(path) if waveform is None else waveform
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT:
            del self._kept[next(iter(self._kept))]
        return self._kept[path]

    def _read(self, path: Path) -> Tensor:
        blocks, left = [], LONGEST * self.sample_rate
        for block in stream_audio(path, self.sample_rate):
            blocks.append(block[:left])
            left -= len(blocks[-1])
            if not left:
                break
        waveform = torch.cat(blocks)
        if not waveform.any():
            raise AudioError(f"{path}: silent, all samples are 0")
        return waveform


def add_noise(
    waveform: Tensor, snr_db: float, generator: torch.Generator, files: AudioFiles | None = None
) -> Tensor:
    """(S,) plus noise, `snr_db` decibels below the waveform's mean power.

    White Gaussian noise; or the noise of a file from a random sample on, repeated where it ends.
    """
    if files is None:
        noise = torch.randn(waveform.shape, generator=generator)
    else:
        position, sound = float(torch.rand((), generator=generator)), files.draw(generator)
        if sound is None:
            return waveform
        noise = _cut(sound, len(waveform), position)
        noise = noise / noise.square().mean().clamp_min(QUIETEST).sqrt()
    if not waveform.numel():
        return waveform
    power = waveform.square().mean() * 10.0 ** (-snr_db / 10.0)
    return waveform + noise * power.sqrt()


def _cut(sound: Tensor, samples: int, position: float) -> Tensor:
    """(N,) -> (samples,) from a position in [0, 1) on; a short one is repeated."""
    if len(sound) >= samples:
        start = int(position * (len(sound) - samples + 1))
        return sound[start : start + samples]
    turned = sound.roll(-int(position * len(sound)))
    return turned.repeat(-(-samples // len(sound)))[:samples]


def reverberate(waveform: Tensor, response: Tensor) -> Tensor:
    """(S,) convolved with a room's impulse response (R,) -> (S,) of the same mean power.

    The response's peak, the direct path, causes no delay.
    """
    from scipy.fft import irfft, next_fast_len, rfft  # of one thread, and twice as fast as torch's

    if not waveform.any():
        return waveform
    peak, size = int(response.abs().argmax()), next_fast_len(len(waveform) + len(response) - 1)
    wet = irfft(rfft(waveform.numpy(), size) * rfft(response.numpy(), size), size)
    wet = torch.from_numpy(wet[peak : peak + len(waveform)].copy())
    return wet * (waveform.square().mean() / wet.square().mean()).sqrt()

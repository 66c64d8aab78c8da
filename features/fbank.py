"""Spectral features of an utterance: Kaldi's log-mel and MFCC, and Slaney's mel.

`Fbank` and `Mfcc` wrap `torchaudio.compliance.kaldi`, which computes the same as Kaldi's
compute-fbank-feats and compute-mfcc-feats: frames that fit entirely into the samples (snip_edges),
pre-emphasis 0.97, Povey window, samples scaled to 16 bits. `SlaneyMel` computes librosa's
`melspectrogram` (Slaney 1998, Auditory Toolbox).

We differ once: dither is added to the samples, from a separate generator, where Kaldi draws
again for every frame; so the same utterance has the same features everywhere.

Shapes: B utterances, S samples, T frames, F features per frame (`size`).
"""

import math

import torch
import torchaudio
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torchaudio.compliance import kaldi

FRAME_LENGTH, FRAME_SHIFT = 25.0, 10.0  # milliseconds
LOW_FREQ = 20.0  # Hz, of Kaldi's lowest mel filter
KALDI_SCALE = 32768.0  # Kaldi reads samples as 16-bit integers
# Frames computed at once: an hour of audio needs no more memory than six seconds, and 600 frames
# fit a core's cache. Frames do not depend on each other.
BLOCK_FRAMES = 600
POWER_FLOOR = 1e-10  # of Slaney-mel energy before the logarithm: -100 dB


class FeatureExtractor:
    """Base of all kinds: samples are cut into overlapping frames."""

    size: int
    groups = 1  # of features within a frame that SpecAugment masks alike
    max_samples: int | None = None  # of the longest waveform

    def __init__(self, sample_rate: int, dither: float) -> None:
        self.sample_rate, self.dither = sample_rate, dither
        self.window = int(sample_rate * FRAME_LENGTH * 0.001)  # samples, rounded as Kaldi does
        self.shift = int(sample_rate * FRAME_SHIFT * 0.001)

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame to the next."""
        return self.shift / self.sample_rate

    def num_frames(self, samples: int) -> int:
        """T for S samples; 0 if they do not fill one window."""
        return 0 if samples < self.window else 1 + (samples - self.window) // self.shift

    def __call__(
        self,
        waveform: Tensor,
        lengths: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """waveform (S,) in [-1, 1] -> features (T, F) float32; T = `num_frames(S)`.

        A padded batch (B, S) with the number of samples of each, `lengths` (B,), gives features
        (B, T, F), padded with 0, and their numbers of frames (B,): each as it is alone. Without
        `lengths` all have S samples.

        Dither, if any, is drawn from `generator`; without one (at evaluation) it is the same noise
        for every utterance. Raises ValueError for other shapes or lengths.
        """
        if waveform.ndim == 1 and lengths is None:
            return self._extract(waveform, generator)
        if waveform.ndim != 2:
            raise ValueError(
                f"expected (samples,), or (batch, samples) with lengths, got shape "
                f"{tuple(waveform.shape)}"
            )
        batch, samples = waveform.shape
        counts = [samples] * batch if lengths is None else lengths.tolist()
        if len(counts) != batch or not all(0 <= count <= samples for count in counts):
            raise ValueError(f"lengths {counts} must be {batch} numbers of 0 to {samples} samples")
        parts = [w[:n] for w, n in zip(waveform, counts, strict=True)]
        features = [self._extract(part, generator) for part in parts]
        return pad_sequence(features, batch_first=True), torch.tensor([len(f) for f in features])

    def _extract(self, waveform: Tensor, generator: torch.Generator | None) -> Tensor:
        frames, waveform = self.num_frames(len(waveform)), waveform.float()
        if not frames:
            return torch.zeros(0, self.size)
        if self.dither:
            generator = generator or torch.Generator().manual_seed(0)
            noise = torch.randn(waveform.shape, generator=generator)
            waveform = waveform + noise * (self.dither / KALDI_SCALE)
        features = []
        for first in range(0, frames, BLOCK_FRAMES):  # overlapping pieces hold every frame once
            last = min(first + BLOCK_FRAMES, frames) - 1
            piece = waveform[first * self.shift : last * self.shift + self.window]
            features.append(self._features(piece))
        return torch.cat(features)

    def _features(self, piece: Tensor) -> Tensor:
        raise NotImplementedError


class Fbank(FeatureExtractor):
    """Kaldi's log-mel filterbank energies: (S,) -> (T, num_mel_bins).

    `dither` in units of a 16-bit sample. Raises ValueError for a filterbank with a bin that no FFT
    frequency falls into (Kaldi refuses those, torchaudio returns a constant).
    """

    def __init__(
        self, sample_rate: int = 16_000, num_mel_bins: int = 80, dither: float = 0.0
    ) -> None:
        super().__init__(sample_rate, dither)
        self.size = num_mel_bins
        if num_mel_bins < 4:
            raise ValueError(f"num_mel_bins {num_mel_bins}: Kaldi's filterbank needs 4 or more")
        fft = 2 ** (self.window - 1).bit_length()
        self.filters, _ = kaldi.get_mel_banks(
            num_mel_bins, fft, sample_rate, LOW_FREQ, 0.0, 100.0, -500.0, 1.0
        )
        _check_filters(self.filters, sample_rate)
        self._options = {"sample_frequency": sample_rate, "num_mel_bins": num_mel_bins}
        self._options |= {"frame_length": FRAME_LENGTH, "frame_shift": FRAME_SHIFT}
        self._options |= {"low_freq": LOW_FREQ}

    def _features(self, piece: Tensor) -> Tensor:
        return kaldi.fbank(piece[None] * KALDI_SCALE, **self._options)


class Mfcc(Fbank):
    """Kaldi's mel-frequency cepstra with C0, liftered by 22: (S,) -> (T, num_ceps * (1 + deltas)).

    `deltas` 1 appends the first and 2 also the second time derivative, as Kaldi's add-deltas does
    (regression over 2 frames to each side). Raises ValueError as `Fbank` does.
    """

    def __init__(
        self,
        sample_rate: int = 16_000,
        num_ceps: int = 13,
        deltas: int = 0,
        num_mel_bins: int = 23,
        dither: float = 0.0,
    ) -> None:
        super().__init__(sample_rate, num_mel_bins, dither)
        if not 1 <= num_ceps <= num_mel_bins:
            raise ValueError(f"num_ceps {num_ceps} must lie in 1 to num_mel_bins ({num_mel_bins})")
        if deltas not in (0, 1, 2):
            raise ValueError(f"deltas {deltas} must be 0, 1 or 2")
        self.num_ceps, self.deltas = num_ceps, deltas
        self.size = num_ceps * (1 + deltas)

    def _extract(self, waveform: Tensor, generator: torch.Generator | None) -> Tensor:
        features = super()._extract(waveform, generator)  # deltas need neighbouring frames
        return add_deltas(features, self.deltas) if self.deltas and len(features) else features

    def _features(self, piece: Tensor) -> Tensor:
        return kaldi.mfcc(piece[None] * KALDI_SCALE, num_ceps=self.num_ceps, **self._options)


def add_deltas(features: Tensor, order: int) -> Tensor:
    """(T, F) -> (T, F * (1 + order)): the features, then their derivatives, T at least 1.

    Kaldi (feat/feature-functions.cc) repeats the first and last frame before it differentiates
    once or twice, not the first and last derivative: `reach` times, enough for both.
    """
    reach = 2 * order
    parts = [pad(features.T[None], (reach, reach), mode="replicate")[0]]  # (F, T + 2 * reach)
    for _ in range(order):
        parts.append(torchaudio.functional.compute_deltas(parts[-1], win_length=5))
    return torch.cat(parts)[:, reach : reach + len(features)].T.contiguous()


class SlaneyMel(FeatureExtractor):
    """The natural logarithm of librosa's mel power spectrogram: (S,) -> (T, num_mel_bins).

    Agrees with log(max(1e-10, melspectrogram(n_fft=window, hop_length=shift, center=False,
    htk=False, norm="slaney"))): Hann window, no pre-emphasis, samples in [-1, 1], frames counted
    as `Fbank` counts them. `dither` in units of a 16-bit sample. Raises ValueError as `Fbank` does.
    """

    def __init__(
        self, sample_rate: int = 16_000, num_mel_bins: int = 80, dither: float = 0.0
    ) -> None:
        super().__init__(sample_rate, dither)
        self.size = num_mel_bins
        frequencies = torch.fft.rfftfreq(self.window, 1 / sample_rate, dtype=torch.float64)
        self.filters = slaney_filters(frequencies, num_mel_bins, sample_rate / 2).float()
        _check_filters(self.filters, sample_rate)
        self.hann = torch.hann_window(self.window)

    def _features(self, piece: Tensor) -> Tensor:
        frames = piece.unfold(0, self.window, self.shift) * self.hann  # (T', window)
        power = torch.fft.rfft(frames).abs().square()  # (T', window // 2 + 1)
        return (power @ self.filters.T).clamp_min(POWER_FLOOR).log()


def slaney_filters(frequencies: Tensor, bins: int, top: float) -> Tensor:
    """Triangles of area 1 Hz, equally spaced in Slaney's mel from 0 to `top` Hz, 1000 or more:
    frequencies (N,) -> (bins, N).

    That scale is linear to 1 kHz, 15 mel, and logarithmic above: 27 mel to a factor of 6.4.
    """
    step = math.log(6.4) / 27
    end = 15 + math.log(top / 1000) / step
    mel = torch.linspace(0.0, end, bins + 2, dtype=torch.float64)[:, None]
    hertz = torch.where(mel > 15, 1000 * ((mel - 15) * step).exp(), mel / 0.015)  # (bins + 2, 1)
    left, centre, right = hertz[:-2], hertz[1:-1], hertz[2:]
    rising = (frequencies - left) / (centre - left)
    falling = (right - frequencies) / (right - centre)
    return torch.minimum(rising, falling).clamp_min(0) * 2 / (right - left)


def _check_filters(filters: Tensor, sample_rate: int) -> None:
    """Raises ValueError for a filter of zeros, hence a constant feature; filters (F, N)."""
    empty = int((filters.amax(dim=1) == 0).sum())
    if empty:
        raise ValueError(
            f"{empty} of {len(filters)} mel bins at {sample_rate} Hz are narrower than the FFT's"
            " resolution; take fewer, or Slaney's filters (kind: slaney)"
        )

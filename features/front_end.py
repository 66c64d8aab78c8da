"""The whole way from an audio file to the features of one utterance, alike for every model.

Nothing here depends on a batch: an utterance gives the same features alone or among others, and
at evaluation the same ones every time.

Shapes: S samples, T frames, F features per frame.
"""

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from features.audio import read_audio
from features.augment import SpecAugment, add_noise, change_speed
from features.fbank import Frames
from features.normalize import MeanVarianceNorm


class FrontEnd:
    """Reads, extracts, normalises and, in training, augments.

    `noise` is the range of signal-to-noise ratios in dB that training draws from. `max_seconds`
    refuses endless files: 1 MB of FLAC can hold a day of silence. None stands for no limit.
    Raises ValueError for an extractor of another sample rate, or a range that is not one.
    """

    def __init__(
        self,
        extract: Frames,
        norm: MeanVarianceNorm,
        sample_rate: int = 16_000,
        spec_augment: SpecAugment | None = None,
        noise: tuple[float, float] | None = None,
        max_seconds: float | None = 3600.0,
    ) -> None:
        if extract.sample_rate != sample_rate:
            raise ValueError(f"features at {extract.sample_rate} Hz of audio at {sample_rate} Hz")
        if noise is not None and not noise[0] <= noise[1]:
            raise ValueError(f"noise {noise} must be (lowest, highest) in dB")
        self.extract, self.norm, self.sample_rate = extract, norm, sample_rate
        self.spec_augment, self.noise, self.max_seconds = spec_augment, noise, max_seconds

    @property
    def size(self) -> int:
        """F."""
        return self.extract.size

    def num_frames(self, seconds: float, speed: float = 1.0) -> int:
        """About how many frames T an utterance of this length gives; exact to one frame."""
        return self.extract.num_frames(round(seconds * self.sample_rate / speed))

    def load(self, path: str | os.PathLike[str]) -> Tensor:
        """The waveform (S,) of a file; AudioError where there is none to be had."""
        return read_audio(path, self.sample_rate, self.max_seconds)

    def to_measure(
        self, waveform: Tensor, speaker: str | None = None, speeds: Iterable[float] = (1.0,)
    ) -> list[tuple[Tensor, str | None]]:
        """(S,) -> what to add to the normalisation's statistics: features (T, F) and whose."""
        return [
            (self.extract(change_speed(waveform, speed)), voice(speaker, speed)) for speed in speeds
        ]

    def features(self, waveform: Tensor, speaker: str | None = None, speed: float = 1.0) -> Tensor:
        """(S,) -> (T, F) as evaluation needs it: nothing is drawn at random.

        Raises StatisticsError where the normalisation lacks its statistics.
        """
        return self.norm(self.extract(change_speed(waveform, speed)), voice(speaker, speed))

    def at_speeds(
        self, waveform: Tensor, speaker: str | None, others: Sequence[float]
    ) -> tuple[Tensor, ...]:
        """(S,) -> `features` (T, F) at speed 1 and at each of `others`.

        A speed at which so little audio leaves no frame has those of speed 1.
        """
        plain = self.features(waveform, speaker)
        if not len(plain):
            return (plain,) * (1 + len(others))
        heard = (self.features(waveform, speaker, speed) for speed in others)
        return (plain, *(features if len(features) else plain for features in heard))

    def augmented(
        self,
        waveform: Tensor,
        speaker: str | None,
        speed: float,
        generator: torch.Generator,
        views: int = 1,
    ) -> tuple[Tensor, ...]:
        """(S,) -> (T, F) as training sees it: speed, noise, features, normalisation, masks.

        Of several `views` only the masks differ.
        """
        waveform = change_speed(waveform, speed)
        if self.noise is not None:
            lowest, highest = self.noise
            draw = float(torch.rand((), generator=generator))
            waveform = add_noise(waveform, lowest + draw * (highest - lowest), generator)
        features = self.norm(self.extract(waveform, generator), voice(speaker, speed))
        if self.spec_augment is None:
            return (features,) * views
        return tuple(self.spec_augment(features, generator) for _ in range(views))


def voice(speaker: str | None, speed: float) -> str | None:
    """Whose statistics a speaker has at a speed: another pitch is another voice's, as in Kaldi.

    No manifest's speaker has a tab in its name.
    """
    return speaker if speaker is None or speed == 1.0 else f"{speaker}\t{speed:g}"

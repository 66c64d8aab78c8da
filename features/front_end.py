"""From an audio file to the features of one utterance, the same for every model.

Nothing here depends on a batch: an utterance has the same features alone or among others, and at
evaluation every time.

Shapes: S samples, T frames, F features per frame.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from asr.features.audio import read_audio, stream_audio
from asr.features.augment import AudioFiles, SpecAugment, add_noise, change_speed, reverberate
from asr.features.fbank import FeatureExtractor
from asr.features.files import Source
from asr.features.normalize import MeanVarianceNorm


class FrontEnd:
    """Reads, extracts, normalises and, in training, augments.

    noise: the range of signal-to-noise ratios in dB that training draws from; ValueError for an
    empty one. max_seconds: longer files raise AudioError (1 MB of FLAC can hold a day of silence).
    """

    def __init__(
        self,
        extract: FeatureExtractor,
        norm: MeanVarianceNorm,
        spec_augment: SpecAugment | None = None,
        noise: tuple[float, float] | None = None,
        max_seconds: float | None = None,
    ) -> None:
        if noise is not None and not noise[0] <= noise[1]:
            raise ValueError(f"noise {noise} must be (lowest, highest) in dB")
        self.extract, self.norm, self.sample_rate = extract, norm, extract.sample_rate
        self.spec_augment, self.noise, self.max_seconds = spec_augment, noise, max_seconds
        self.noise_files: AudioFiles | None = None  # None: white noise
        self.room_responses: AudioFiles | None = None
        self.encoder_norm: MeanVarianceNorm | None = None  # of an encoder within the model

    @property
    def corpus_norm(self) -> MeanVarianceNorm:
        """The normalisation that may have statistics of the corpus."""
        return self.encoder_norm or self.norm

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame to the next."""
        return self.extract.frame_seconds

    @property
    def longest(self) -> float:
        """Seconds of the longest waveform that the features' encoder takes; infinite: any."""
        return (self.extract.max_samples or math.inf) / self.sample_rate

    @property
    def size(self) -> int:
        """F, features per frame."""
        return self.extract.size

    def num_frames(self, seconds: float, speed: float = 1.0) -> int:
        """The number of frames T of an utterance of this duration, exact to one frame."""
        return self.extract.num_frames(round(seconds * self.sample_rate / speed))

    def load(self, path: str | os.PathLike[str]) -> Tensor:
        """The waveform (S,) of a file. Raises AudioError."""
        return read_audio(path, self.sample_rate, self.max_seconds)

    def stream(self, source: Source) -> Iterator[Tensor]:
        """The waveform of a file of any length, in blocks (S,). Raises AudioError.

        Here, but not in `load`, ffmpeg decodes what libsndfile cannot read.
        """
        from asr.features.containers import container_of, stream_container  # not for training

        if demuxer := container_of(source):
            return stream_container(source, demuxer, self.sample_rate)
        return stream_audio(source, self.sample_rate)

    @property
    def changes_audio(self) -> bool:
        """Whether training changes the waveform at random, besides its speed."""
        return self.noise is not None or bool(self.room_responses)

    def features_for_statistics(
        self, waveform: Tensor, speaker: str | None, speeds: Iterable[float]
    ) -> list[tuple[Tensor, str | None]]:
        """(S,) -> features (T, F) and their speaker, for the normalisation's statistics."""
        return [(self.raw(waveform, speed), group_of(speaker, speed)) for speed in speeds]

    def raw(self, waveform: Tensor, speed: float = 1.0) -> Tensor:
        """(S,) -> features (T, F) before normalisation, without randomness."""
        return self.extract(change_speed(waveform, speed))

    def normalised(self, raw: Tensor, speaker: str | None, speed: float = 1.0) -> Tensor:
        """`raw` features (T, F) -> normalised ones. StatisticsError as in `self.norm`."""
        return self.norm(raw, group_of(speaker, speed))

    def features(self, waveform: Tensor, speaker: str | None = None, speed: float = 1.0) -> Tensor:
        """(S,) -> (T, F) for evaluation, without randomness. StatisticsError as in `self.norm`."""
        return self.normalised(self.raw(waveform, speed), speaker, speed)

    def at_speeds(
        self,
        waveform: Tensor,
        speaker: str | None,
        others: Sequence[float],
        stored: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """(S,) -> `features` (T, F) at speed 1 and at each of `others`.

        stored: `raw` ones of these speeds, None where they are to be computed. A speed at which the
        audio is shorter than a frame has the features of speed 1.
        """

        def at(speed: float, raw: Tensor | None) -> Tensor:
            raw = self.raw(waveform, speed) if raw is None else raw
            return self.normalised(raw, speaker, speed)

        first, *rest = stored or [None] * (1 + len(others))
        plain = at(1.0, first)
        if not len(plain):
            return [plain] * (1 + len(others))
        return [plain, *(found if len(found) else plain for found in map(at, others, rest))]

    def augmented(
        self,
        waveform: Tensor,
        speaker: str | None,
        speed: float,
        generator: torch.Generator,
        views: int = 1,
    ) -> tuple[Tensor, ...]:
        """(S,) -> (T, F) for training: speed, room, noise, features, normalisation, masks.

        Several `views` differ in their masks. Raises AudioError for a file of noise or a response.
        """
        waveform = change_speed(waveform, speed)
        if self.room_responses:
            response = self.room_responses.draw(generator)
            waveform = waveform if response is None else reverberate(waveform, response)
        if self.noise is not None:
            lowest, highest = self.noise
            draw = float(torch.rand((), generator=generator))
            snr = lowest + draw * (highest - lowest)
            waveform = add_noise(waveform, snr, generator, self.noise_files)
        raw = self.extract(waveform, generator=generator)
        return self.masked(self.normalised(raw, speaker, speed), generator, views)

    def masked(
        self, features: Tensor, generator: torch.Generator, views: int = 1
    ) -> tuple[Tensor, ...]:
        """Normalised features (T, F) -> `views` times with masks, where training has some.

        All views have one time warp, since their frames are compared one by one (Yao et al. 2024,
        arXiv:2410.05101).
        """
        if self.spec_augment is None:
            return (features,) * views
        augment, groups = self.spec_augment, self.extract.groups
        warped = augment.warp(features, generator)
        return tuple(augment.mask(warped, generator, groups) for _ in range(views))


def group_of(speaker: str | None, speed: float) -> str | None:
    """The group of a speaker's statistics: as in Kaldi, another speed is another speaker.

    No manifest's speaker has a tab in its name.
    """
    return speaker if speaker is None or speed == 1.0 else f"{speaker}\t{speed:g}"

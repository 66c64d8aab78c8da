"""Recipe keys under `data:`, `features:` and `text:`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from asr.settings.base import Natural, Positive, Settings, Speed, Weight


class Data(Settings):
    """Where the manifests lie and how they are read."""

    # spoken-numbers is made where it is missing; of the others the error names the command.
    corpus: Literal["spoken-numbers", "librispeech", "mini-librispeech"] | None = None
    train: Path | None = None
    valid: Path | None = None
    test: dict[str, Path] = Field(default_factory=dict)  # split name -> manifest
    outside: bool = False  # True: manifests may name audio that is not below their own folder
    workers: Annotated[int, Field(ge=0, le=256)] = 2  # 0 loads in the training process itself
    min_seconds: Annotated[float, Field(ge=0.0)] = 0.1  # shorter training utterances are left out
    max_seconds: Positive = 35.0  # longer training utterances are left out
    broken: Weight = 0.01  # largest share of unreadable training utterances before the run stops


class SpecAugment(Settings):
    """Masks on the log-mel picture (Park et al. 2019, without time warping)."""

    freq_masks: Annotated[int, Field(ge=0, le=100)] = 2
    freq_width: Natural = 27  # mel bins
    time_masks: Annotated[int, Field(ge=0, le=100)] = 2
    time_width: Natural = 100  # frames of 10 ms
    time_fraction: Weight = 0.2  # a time mask never covers more of its utterance than this


TRAINING_ONLY = {"spec_augment", "speed", "noise"}  # of the features


class Features(Settings):
    """The acoustic front end, the same for every model."""

    kind: Literal["logmel", "mfcc", "slaney"] = "logmel"
    sample_rate: Annotated[int, Field(ge=4000, le=48000)] = 16000
    mel_bins: Annotated[int, Field(ge=4, le=512)] = 80
    ceps: Annotated[int, Field(ge=1, le=512)] = 13  # mfcc only
    deltas: Annotated[int, Field(ge=0, le=2)] = 0  # mfcc only: 1 adds deltas, 2 delta-deltas too
    dither: Annotated[float, Field(ge=0.0)] = 0.0
    mvn: Literal["none", "utterance", "speaker", "global"] = "utterance"
    mvn_variance: bool = True  # False subtracts the mean only
    spec_augment: SpecAugment | None = None
    # One is drawn per utterance and epoch.
    speed: Annotated[tuple[Speed, ...], Field(min_length=1)] = (1.0,)
    noise: tuple[float, float] | None = None  # white noise in training: lowest and highest SNR, dB


class Text(Settings):
    """How transcripts become tokens."""

    kind: Literal["characters", "bpe", "unigram"] = "characters"
    size: Annotated[int, Field(ge=8, le=1_000_000)] = 500  # subwords wanted; not for characters

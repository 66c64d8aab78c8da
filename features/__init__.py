"""The acoustic front end: audio file -> waveform -> features -> normalised -> augmented.

It imports nothing of the recogniser. It raises AudioError for a file that
cannot be used, StatisticsError for statistics that are missing or wrong, and ValueError for
settings that make no sense.

    from asr.features import Fbank, MeanVarianceNorm, read_audio

    features = MeanVarianceNorm("utterance")(Fbank()(read_audio("a.wav", 16000)))     # (T, 80)

The source is the folder features/ of the repository. Its names are imported when they are used, so
that catching the errors costs nothing.
"""

from importlib import import_module
from typing import Any

# Name -> the module that defines it.
_MODULES = {
    "Fbank": "fbank",
    "FrontEnd": "front_end",
    "MeanVarianceNorm": "normalize",
    "Mfcc": "fbank",
    "SlaneyMel": "fbank",
    "SpecAugment": "augment",
    "read_audio": "audio",
}
__all__ = [
    "AudioError", "Fbank", "FrontEnd", "MeanVarianceNorm", "Mfcc", "NoSamples", "SlaneyMel",
    "SpecAugment", "StatisticsError", "read_audio",
]  # fmt: skip


class AudioError(Exception):
    """One line: the file, and what is wrong with it."""


class NoSamples(AudioError):
    """Valid audio without a sample: nothing to learn from, and its transcript is empty."""


class StatisticsError(Exception):
    """One line: statistics that are missing, unreadable, or of other features."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The acoustic front end: audio file -> waveform -> features -> normalised -> augmented.

A package of its own that imports nothing of the recogniser. It raises AudioError for a file that
cannot be used, StatisticsError for statistics that are missing or wrong, and ValueError for
settings that make no sense. This file imports nothing, so that catching the errors costs nothing.
"""


class AudioError(Exception):
    """One line: the file, and what is wrong with it."""


class NoSamples(AudioError):
    """Valid audio without a sample: nothing to learn from, and its transcript is empty."""


class StatisticsError(Exception):
    """One line: statistics that are missing, unreadable, or of other features."""

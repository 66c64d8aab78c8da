"""The acoustic front end: audio file -> waveform -> features -> normalised -> augmented.

A package of its own that knows nothing of the recogniser. It raises `audio.AudioError` for a
file that cannot be used, `normalize.StatisticsError` for statistics that are missing or wrong,
and `ValueError` for settings that make no sense.
"""

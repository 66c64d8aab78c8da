"""Cut a part, or a channel, out of an audio file as asr.prepare makes utterances.

Up to 24 bits a sample are kept; floating-point audio is clipped to full scale.

Shapes: S samples, C channels.
"""

import io
import math

import numpy as np
import soundfile
import torch

from asr.features import AudioError
from asr.features.files import Source
from asr.features.libsndfile import sound_error
from asr.features.sound import BLOCK_VALUES, Sound, check_values, open_audio

MAX_PART = 3600.0  # seconds of a part, which is cut in memory
OVERSHOOT = 0.5  # seconds that a part may end after its recording, as in Kaldi's extract-segments
FINE = {"PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ALAC_20", "ALAC_24", "ALAC_32"}  # over 16 bits


def audio_channels(path: Source) -> int:
    """The number of channels by the file's header. Raises AudioError as `audio_seconds` does."""
    with open_audio(path) as sound:
        return sound.channels


def cut_audio(
    path: Source, start: float, seconds: float | None, channel: int | None
) -> tuple[bytes, float]:
    """A part of a file as FLAC of the same rate, and its duration in seconds.

    seconds: None cuts to the end. channel: counted from 0; None keeps all of them. Samples of up to
    24 bits stay as they are. Raises AudioError as `read_audio` does, and for a part that is not in
    the file or longer than MAX_PART.
    """
    with open_audio(path) as sound:
        name = sound.name
        if channel is not None and channel >= sound.channels:
            raise AudioError(f"{name}: no channel {channel}, counted from 0: has {sound.channels}")
        if channel is None and sound.channels > 8:
            count = f"{sound.channels} channels, of which FLAC holds 8"
            raise AudioError(f"{name}: {count}; choose one")
        rate, kind = sound.rate, "PCM_24" if sound.subtype in FINE else "PCM_16"
        samples = _read_part(sound, start, seconds)
    if channel is not None:
        samples = samples[:, channel]
    file = io.BytesIO()
    try:
        soundfile.write(file, samples, rate, format="FLAC", subtype=kind)
    except soundfile.SoundFileError as error:
        raise AudioError(f"{name}: cannot be written as FLAC ({sound_error(error)})") from None
    return file.getvalue(), len(samples) / rate


def _samples_of(seconds: float, rate: int) -> int:
    """The nearest number of samples, halves up as in Lhotse, in spite of binary fractions."""
    return math.floor(round(seconds * rate, 8) + 0.5)


def _read_part(sound: Sound, start: float, seconds: float | None) -> np.ndarray:
    """(S, C) of a part: int16, int32 for 24 bits, float32 for floating-point audio."""
    name, rate, where = sound.name, sound.rate, f"the part from {start:.3f} s"
    sound.search()
    begin, total = _samples_of(start, rate), sound.exact_samples()
    count = _samples_of(MAX_PART + 1 if seconds is None else seconds, rate)
    if seconds is not None and seconds > MAX_PART:
        raise AudioError(f"{name}: {where} is longer than {MAX_PART:g} seconds")
    if begin >= total or count <= 0:
        raise AudioError(f"{name}: {where} is not in the file of {total / rate:.3f} s")
    kind = "int16" if sound.subtype not in FINE else "int32"
    kind = "float32" if sound.subtype in ("FLOAT", "DOUBLE") else kind
    parts, rest = [], count
    for block in sound.blocks(kind, min(BLOCK_VALUES, count * sound.channels), begin):
        parts.append(block[:rest].copy())
        rest -= len(parts[-1])
        if not rest:
            break
    if seconds is None and not rest:
        raise AudioError(f"{name}: {where} is longer than {MAX_PART:g} seconds")
    if not parts or (seconds is not None and rest > OVERSHOOT * rate):
        ends = f"{(begin + count - rest) / rate:.3f} s"
        raise AudioError(f"{name}: {where} lasts {seconds or 0:.3f} s, but the file ends at {ends}")
    samples = np.concatenate(parts)
    if kind == "float32":
        check_values(torch.from_numpy(samples), name)
    return samples

"""Audio files of any common kind, also inside tars -> mono waveform at the recogniser's rate.

A file of any length can be read in bounded memory, a block at a time: 4 MB of FLAC can hold two
days of silence.

Shapes: S samples, C channels.
"""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.features import AudioError, NoSamples
from asr.features.files import Source
from asr.features.resample import resample, resample_blocks
from asr.features.sound import (
    BLOCK_VALUES,
    Sound,
    check_values,
    open_audio,
    whole_rate,
)


def from_samples(
    samples: np.ndarray | Tensor, rate: float, sample_rate: int, name: str = "the waveform"
) -> Tensor:
    """Samples in memory, (S,), (S, C) or (C, S) at `rate` -> (S',) float32 at `sample_rate`.

    Floats are in [-1, 1]; integers are divided by their type's full scale. Of two axes the longer
    one is time. Channels are averaged; values over full scale are clipped after resampling, which
    overshoots at sharp edges. Raises AudioError, beginning with `name`, for samples that are empty,
    not finite, of another shape or type, or not scaled to [-1, 1]; and for a rate that is not
    whole.
    """
    rate = whole_rate(rate, name)
    waveform = _as_floats(samples, name)
    shape = tuple(waveform.shape)
    if len(shape) not in (1, 2):
        raise AudioError(f"{name}: expected shape (samples,) or (samples, channels), got {shape}")
    if not math.prod(shape):
        raise NoSamples(f"{name}: no audio, 0 samples")
    check_values(waveform, name)
    if waveform.ndim == 2:
        waveform = waveform.mean(dim=0 if shape[0] < shape[1] else 1)
    return resample(waveform, rate, sample_rate).clamp(-1.0, 1.0)


def array_and_rate(audio: Any) -> tuple[np.ndarray, float]:
    """Samples and rate in Hz of {"array": samples, "sampling_rate": Hz}, which Hugging Face's
    decoders of audio have, too. Raises KeyError, IndexError, TypeError or ValueError for others.
    """
    return np.asarray(audio["array"]), float(audio["sampling_rate"])


def _as_floats(samples: np.ndarray | Tensor, name: str) -> Tensor:
    """Samples as float32, integers in [-1, 1]."""
    if isinstance(samples, Tensor):
        samples = samples.float() if samples.is_floating_point() else samples
        samples = samples.numpy(force=True)
    if samples.dtype.kind == "f":
        return torch.from_numpy(np.array(samples, dtype=np.float32))
    if samples.dtype.kind not in "iu" or samples.dtype.itemsize > 4:
        # int64 is what lists and most operators give, whatever scale the samples have.
        raise AudioError(f"{name}: {samples.dtype} samples; give int16, or floats in [-1, 1]")
    half = 2.0 ** (8 * samples.dtype.itemsize - 1)
    centre = half if samples.dtype.kind == "u" else 0.0
    return torch.from_numpy(((samples - centre) / half).astype(np.float32))


def read_audio(
    path: str | os.PathLike[str], sample_rate: int, max_seconds: float | None = None
) -> Tensor:
    """The samples of a file, mono and at `sample_rate`: (S,) float32 in [-1, 1].

    Channels are averaged. Raises AudioError for a file that is missing, not audio, empty, broken,
    holds NaN or infinite samples, or lasts longer than `max_seconds`, of which at most one block
    more is decoded, whatever the header claims.
    """
    blocks = list(stream_audio(path, sample_rate, max_seconds))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def stream_audio(
    path: Source, sample_rate: int, max_seconds: float | None = None
) -> Iterator[Tensor]:
    """`read_audio` in blocks (S,), each decoded when it is asked for."""
    with open_audio(path) as sound:
        blocks = map(torch.from_numpy, _mono_blocks(sound, max_seconds, sample_rate))
        for block in resample_blocks(blocks, sound.rate, sample_rate):
            yield block.clamp(-1.0, 1.0)


def decoded_seconds(
    path: Source,
    max_seconds: float | None = None,
    inspect: Callable[[np.ndarray], None] | None = None,
) -> float:
    """Duration of what can be decoded, a block at a time in memory.

    inspect: called with every block (S, C), which the next one overwrites.
    Raises AudioError as `read_audio` does, and for a truncated file, which holds less than its
    header claims, or ends within a page of Ogg.
    """
    with open_audio(path) as sound:
        blocks = _mono_blocks(sound, max_seconds, inspect=inspect, refuse_truncated=True)
        return sum(map(len, blocks)) / sound.rate


def audio_seconds(path: Source) -> float:
    """Duration by the headers in the file; decoded and counted only if it has none.

    Raises AudioError as `read_audio` does, for what shows without decoding. A second FLAC behind
    the first in one file is not looked for, which would read all of it.
    """
    with open_audio(path) as sound:
        samples = sound.exact_samples()
        if samples <= 0:
            raise NoSamples(f"{sound.name}: no audio, 0 samples")
        return samples / sound.rate


def _mono_blocks(
    sound: Sound,
    max_seconds: float | None = None,
    sample_rate: int | None = None,
    inspect: Callable[[np.ndarray], None] | None = None,
    refuse_truncated: bool = False,
) -> Iterator[np.ndarray]:
    """The file, averaged over channels and checked, (S,) at a time; also at `sample_rate`, a block
    has at most BLOCK_VALUES. AudioError without samples, or soon after `max_seconds`.
    """
    limit = math.inf if max_seconds is None else max_seconds * sound.rate
    values = BLOCK_VALUES * min(1.0, sound.rate / (sample_rate or sound.rate))
    count = 0
    for block in sound.blocks("float32", values):
        count += len(block)
        if count > limit:
            raise AudioError(f"{sound.name}: longer than the limit of {max_seconds:g} seconds")
        with np.errstate(invalid="ignore", over="ignore"):  # such values are refused next
            mono = block.mean(axis=1) if sound.channels > 1 else block[:, 0].copy()
        check_values(torch.from_numpy(mono), sound.name)
        if inspect:
            inspect(block)
        yield mono
    if not count:
        raise NoSamples(f"{sound.name}: no audio, 0 samples")
    sound.check_end(count, refuse_truncated)

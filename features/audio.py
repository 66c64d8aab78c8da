"""Audio files of any common kind -> mono waveform at the sample rate of the recogniser.

soundfile (libsndfile) decodes WAV, FLAC, OGG Vorbis, Opus, MP3, AIFF and more by content, not by
name. A file is never believed: what its header claims is checked against what can be decoded, so
a WAV that announces 4 GB over 1 kB of data costs 1 kB.

Shapes: S samples, C channels.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from features.hush import hushed
from features.packed import PackedError, member_of, read_member
from features.samples import AudioError, NoSamples, check_values, from_samples, whole_rate

# Values decoded at once, over all channels: 16 MB, and a whole utterance in nearly every case.
BLOCK_VALUES = 2**22
# What libsndfile reports where the header does not know (FLAC written to a pipe).
UNKNOWN_FRAMES = 2**63 - 1
# What it notes of WAV, RF64, W64, AIFF and AU with fewer bytes than their header says, before it
# believes the file. One written to a pipe knows no length either, and says something from here on.
FEWER_BYTES = re.compile(r"(?:data|SSND|Data Size|[Rr]iff(?: size)?) +: (\d+) \(should be (\d+)\)")
PIPED_BYTES = 2**31 - 2**25
TOLERANCE = 0.1  # seconds between header and content: lossy coders pad
# How WAV, FLAC, OGG and AIFF begin; what begins otherwise may be MP3, whose decoder is a talker.
QUIET = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"FORM")


def read_audio(
    path: str | os.PathLike[str], sample_rate: int = 16_000, max_seconds: float | None = None
) -> Tensor:
    """The samples of a file, mono and at `sample_rate`: (S,) float32 in [-1, 1].

    Channels are averaged. Raises AudioError for a file that is missing, not audio, empty, broken,
    holds NaN or infinite samples, or lasts longer than `max_seconds`; no more than `max_seconds`
    and one block of it is decoded, whatever the header says.
    """
    name = _printable(path)
    with _open(path) as sound:
        blocks, rate = list(_limited(sound, name, max_seconds)), sound.samplerate
    samples = np.concatenate(blocks) if blocks else np.empty(0, np.float32)
    return from_samples(samples, rate, sample_rate, name)


def decoded_seconds(path: str | os.PathLike[str], max_seconds: float | None = None) -> float:
    """Duration by what can be decoded, a block at a time in memory.

    Raises AudioError as `read_audio` does, and for a file that holds less than its header says:
    it breaks off. Of MP3 and OGG, whose headers seldom say, no more than a broken frame shows.
    """
    name, count = _printable(path), 0
    with _open(path) as sound:
        for block in _limited(sound, name, max_seconds):
            check_values(torch.from_numpy(block), name)
            count += len(block)
        if not count:
            raise NoSamples(f"{name}: no audio, 0 samples")
        said, found = _said_frames(sound) / sound.samplerate, count / sound.samplerate
        if said > found + TOLERANCE:
            raise AudioError(
                f"{name}: breaks off: its header says {said:.3f} seconds and {found:.3f} are there"
            )
        return found


def _said_frames(sound: soundfile.SoundFile) -> float:
    """By the header; 0 where it does not know. MP3 seldom has one, and libsndfile then guesses."""
    if sound.format == "MP3":
        return 0
    for said, there in FEWER_BYTES.findall(sound.extra_info):
        if int(said) < PIPED_BYTES:
            return sound.frames * int(said) / max(1, int(there))
    return 0 if sound.frames == UNKNOWN_FRAMES else sound.frames


def audio_seconds(path: str | os.PathLike[str]) -> float:
    """Duration by the file's header; decoded and counted only where the header does not know.

    Raises AudioError as `read_audio` does, for what shows without decoding.
    """
    with _open(path) as sound:
        frames = sound.frames
        if frames == UNKNOWN_FRAMES:
            frames = sum(len(block) for block in _blocks(sound, _printable(path)))
        if frames <= 0:
            raise NoSamples(f"{_printable(path)}: no audio, 0 samples")
        return frames / sound.samplerate


def _open(path: str | os.PathLike[str]) -> soundfile.SoundFile:
    name = _printable(path)
    try:
        source, begin = _source(path, name)
        with _silence(begin not in QUIET):
            sound = soundfile.SoundFile(source)
    except (soundfile.SoundFileError, TypeError, ValueError, OSError) as error:
        raise AudioError(f"{name}: not readable as audio ({_reason(error)})") from error
    try:
        whole_rate(sound.samplerate, name)
    except AudioError:
        sound.close()
        raise
    return sound


def _source(path: str | os.PathLike[str], name: str) -> tuple[bytes | BytesIO, bytes]:
    """What soundfile opens, a path or what was read of a tar; and its first four bytes."""
    member = member_of(path)
    if member is not None:
        try:
            content = read_member(member)
        except PackedError as error:
            raise AudioError(f"{name}: {error}") from None
        if not content:
            raise AudioError(f"{name}: the file is empty (0 bytes)")
        return BytesIO(content), content[:4]
    if not Path(path).exists():
        raise AudioError(f"{name}: no such file")
    if not Path(path).is_file():  # a pipe or a device could be read for ever
        raise AudioError(f"{name}: not a regular file")
    if not Path(path).stat().st_size:
        raise AudioError(f"{name}: the file is empty (0 bytes)")
    with Path(path).open("rb") as file:
        return os.fsencode(path), file.read(4)  # a name need not be text


def _limited(
    sound: soundfile.SoundFile, name: str, max_seconds: float | None
) -> Iterator[np.ndarray]:
    """The blocks of a file, which AudioError ends soon after `max_seconds`."""
    limit = math.inf if max_seconds is None else max_seconds * sound.samplerate
    count = 0
    for block in _blocks(sound, name):
        count += len(block)
        if count > limit:
            raise AudioError(f"{name}: longer than the limit of {max_seconds:g} seconds")
        yield block


def _blocks(sound: soundfile.SoundFile, name: str) -> Iterator[np.ndarray]:
    """The rest of the file, averaged over channels, (S,) float32 at a time."""
    length = max(1, min(sound.frames, BLOCK_VALUES // sound.channels))
    block = np.empty((length, sound.channels), np.float32)
    read = length
    while read == length:
        read = _read_block(sound, block, name)
        if read:
            yield block[:read].mean(axis=1)


def _read_block(sound: soundfile.SoundFile, block: np.ndarray, name: str) -> int:
    """Fills `block` (S, C) from its start; returns the number of samples read, less at the end."""
    block.fill(np.nan)
    try:
        with _silence(sound.format == "MP3"):
            return len(sound.read(out=block))
    except (soundfile.SoundFileError, ValueError) as error:
        # soundfile seeks after it has read, which fails at the end of a file of unknown length:
        # the samples are there, but not their number. Such files are FLAC, hence never NaN.
        if sound.frames == UNKNOWN_FRAMES and "fseek" in str(error):
            return int((~np.isnan(block[:, 0])).sum())
        text = "broken, or shorter than its header claims"
        raise AudioError(f"{name}: {text} ({_reason(error)})") from error


def _silence(needed: bool) -> AbstractContextManager[None]:
    return hushed() if needed else nullcontext()


def _printable(path: str | os.PathLike[str]) -> str:
    """A file name may hold line breaks and bytes that are not text; a message is one clean line."""
    text = os.fspath(path)
    return text if text.isprintable() else ascii(text)


def _reason(error: Exception) -> str:
    """libsndfile's own words, without the path that it repeats."""
    text = getattr(error, "error_string", None) or str(error)
    return " ".join(text.split()).rstrip(".")

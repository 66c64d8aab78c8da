"""Audio files of any common kind, also inside tars -> mono waveform at the recogniser's rate.

soundfile (libsndfile) decodes WAV, FLAC, OGG Vorbis, Opus, MP3, AIFF and more by content, not by
name. No header is trusted: its claims are checked against what can be decoded, so a WAV that
announces 4 GB over 1 kB of data costs 1 kB. A file of any length can be read in bounded memory, a
block at a time: 4 MB of FLAC can hold two days of silence.

Audio inside a plain tar is named by its place, FOLDER/x.tar/NAME@OFFSET+BYTES: where the content
begins and how long it is (asr.prepare shards writes both). Utterances are read in any order.

Shapes: S samples, C channels.
"""

import errno
import io
import math
import os
import re
import stat
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor
from torchaudio.transforms import Resample

from features import AudioError, NoSamples

BLOCK = 512  # bytes: what precedes a member in a tar is a header of this size
_PLACE = re.compile(r"(.+\.tar)/(.+)@(\d{1,18})\+(\d{1,18})", re.DOTALL)


class PackedError(Exception):
    """One line: what is wrong with the tar at that place."""


class TarMember(NamedTuple):
    """The place of one file's content in a tar."""

    tar: str
    name: str
    offset: int
    size: int


def member_of(path: str | os.PathLike[str]) -> TarMember | None:
    """The place that a path of the form above names; None for any other path."""
    match = _PLACE.fullmatch(os.fspath(path)) if "@" in os.fspath(path) else None
    return TarMember(match[1], match[2], int(match[3]), int(match[4])) if match else None


def read_member(member: TarMember) -> bytes:
    """The content. Raises PackedError if the tar has no such file there or cannot be read."""
    with open_member(member) as window:
        return window.file.read(member.size)


@contextmanager
def open_member(member: TarMember) -> Iterator["Window"]:
    """The content, open for reading. Raises PackedError as read_member does."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(member.tar))
            size = os.fstat(file.fileno()).st_size
            if member.offset < BLOCK or member.offset + member.size > size:
                raise PackedError(f"the tar ends before it, at {size} bytes")
            file.seek(member.offset - BLOCK)
            header = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
        except OSError as error:
            raise PackedError(f"the tar cannot be read: {error.strerror}") from None
        except tarfile.HeaderError:
            raise PackedError("the tar is damaged: no file begins there") from None
        same = PurePosixPath(header.name) == PurePosixPath(member.name)  # a path has lost its ./
        if not header.isreg() or header.size != member.size or not same:
            other = f"another file there, {header.name!r}"
            raise PackedError(f"the tar has {other}; was it packed anew?")
        yield Window(file, member.offset, member.size)


class Window:
    """`size` bytes of an open file from `offset`, as soundfile reads a file.

    error: what ended the reading early, which soundfile would print with a traceback.
    """

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self.file, self.offset, self.size, self.position = file, offset, size, 0
        self.error: OSError | None = None

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position from the start, from the present one, or from the end; -> it."""
        position += (0, self.position, self.size)[whence]
        self.position = max(0, min(position, self.size))
        return self.position

    def tell(self) -> int:
        """The position, in bytes from the start of the window."""
        return self.position

    def readinto(self, buffer: bytearray) -> int:
        """Fill the buffer as far as the window goes; -> the number of bytes."""
        try:
            self.file.seek(self.offset + self.position)
            count = self.file.readinto(memoryview(buffer)[: self.size - self.position])
        except OSError as error:
            self.error = error
            return 0
        self.position += count
        return count


def name_of(path: str | os.PathLike[str]) -> str:
    """The path on one line: quoted, with escapes, if it has a line break or no printable text."""
    text = os.fspath(path)
    return text if text.isprintable() else ascii(text)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A regular file, open for reading. OSError for a FIFO or a device, which might never end."""

    def opener(path: str, flags: int) -> int:
        handle = os.open(path, flags | os.O_NONBLOCK)  # else a FIFO waits for its other end
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file")
        return handle

    return open(path, "rb", opener=opener)


STDERR = 2
_stderr_lock = threading.Lock()
_discarding = 0  # threads in suppress_stderr
_saved_stderr: int | None = None  # a copy of its descriptor while there are any


@contextmanager
def suppress_stderr(needed: bool) -> Iterator[None]:
    """Discard what is written to stderr meanwhile, by other threads too, so keep it short.

    libmpg123, by which libsndfile decodes MP3, prints a line for every damaged frame and cannot be
    silenced through libsndfile. Of several threads the first redirects stderr, and the last
    restores it.
    """
    global _discarding, _saved_stderr
    if not needed:
        yield
        return
    with _stderr_lock:
        if not _discarding:
            _saved_stderr = _redirect_stderr()
        _discarding += 1
    try:
        yield
    finally:
        with _stderr_lock:
            _discarding -= 1
            if not _discarding and _saved_stderr is not None:
                os.dup2(_saved_stderr, STDERR)
                os.close(_saved_stderr)


def _redirect_stderr() -> int | None:
    """Let stderr write to the null device -> a copy of it, None in a process without stderr."""
    try:
        saved = os.dup(STDERR)
    except OSError:
        return None
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, STDERR)
    os.close(null)
    return saved


SAMPLE_RATES = (1_000, 1_000_000)  # a header may claim 1 Hz, which would turn 1 MB into 30 GB
MAX_PEAK = 8.0  # lossy decoders overshoot a little; above it samples are not scaled to [-1, 1]
MAX_FILTER_TAPS = 2**20  # in a bank of resampling filters; the usual rates need at most 282,240


def from_samples(
    samples: np.ndarray | Tensor, rate: float, sample_rate: int, name: str = "the waveform"
) -> Tensor:
    """Samples in memory, (S,) or (S, C) at `rate` -> (S',) float32 in [-1, 1] at `sample_rate`.

    Channels are averaged; values over full scale are clipped after resampling, which overshoots at
    sharp edges. Raises AudioError, beginning with `name`, for samples that are empty, not finite,
    of another shape, fewer than channels, or not scaled to [-1, 1]; and for a rate that is not
    whole.
    """
    rate = whole_rate(rate, name)
    array = samples.numpy(force=True) if isinstance(samples, Tensor) else samples
    waveform = torch.from_numpy(np.array(array, dtype=np.float32))
    shape = tuple(waveform.shape)
    if len(shape) not in (1, 2):
        raise AudioError(f"{name}: expected shape (samples,) or (samples, channels), got {shape}")
    if not math.prod(shape):
        raise NoSamples(f"{name}: no audio, 0 samples")
    if shape[1:] > shape[:1]:  # a transposed array, whose mean over time would be silence
        meaning = f"shape {shape} would be {shape[0]} samples of {shape[1]} channels"
        raise AudioError(f"{name}: {meaning}; pass (samples, channels), so .T of this one")
    check_values(waveform, name)
    mono = waveform if waveform.ndim == 1 else waveform.mean(dim=1)
    return resample(mono, rate, sample_rate).clamp(-1.0, 1.0)


def resample(waveform: Tensor, rate: int, sample_rate: int) -> Tensor:
    """(S,) at `rate` -> (ceil(S * sample_rate / rate),) at `sample_rate`, band-limited (Hann sinc).

    Rates without a useful common divisor (44,101 to 16,000 Hz) would need gigabytes of filters;
    they are replaced by the nearest ratio that does not, at most 0.05 % away, which is inaudible.
    """
    (whole,) = resample_blocks([waveform], rate, sample_rate)
    return whole


def resample_blocks(blocks: Iterable[Tensor], rate: int, sample_rate: int) -> Iterator[Tensor]:
    """`resample` of a waveform in blocks (S,), as if they were one.

    Holds one block more than the caller; a waveform of one block gives one.
    """
    ratio = Fraction(rate, sample_rate)
    ratio = ratio.limit_denominator(max(1, math.isqrt(int(MAX_FILTER_TAPS / ratio))))
    if ratio == 1:
        yield from blocks
        return
    old, new = ratio.numerator, ratio.denominator
    resampler = _resampler(old, new)
    margin = -(-resampler.width // old) * old  # the filter's reach, in whole periods of `old`
    buffer, done = torch.zeros(0), 0  # done: samples of the buffer that are only context
    for number, block in enumerate(blocks):
        end = (len(buffer) - margin) // old * old  # up to here the next block has no influence
        if end > done:
            yield resampler(buffer)[done // old * new : end // old * new]
            buffer, done = buffer[max(0, end - margin) :], min(end, margin)
        buffer = torch.cat([buffer, block]) if number else block
    yield resampler(buffer)[done // old * new :]


@lru_cache(maxsize=16)  # one entry holds at most 4 MB of filters
def _resampler(old: int, new: int) -> Resample:
    return Resample(old, new)


def check_values(waveform: Tensor, name: str) -> None:
    """AudioError, beginning with `name`, for samples that are not finite or not in [-1, 1]."""
    if not waveform.is_floating_point():
        top = torch.iinfo(waveform.dtype).max + 1
        raise AudioError(f"{name}: {waveform.dtype} samples; divide them by {top}")
    peak = float(waveform.abs().max())
    if not math.isfinite(peak):
        raise AudioError(f"{name}: holds samples that are NaN or infinite")
    if peak > MAX_PEAK:
        raise AudioError(f"{name}: samples reach {peak:.4g}; scale floating-point audio to [-1, 1]")


def whole_rate(rate: float, name: str) -> int:
    """The sample rate in Hz. AudioError, beginning with `name`, for one that no recording has."""
    lowest, highest = SAMPLE_RATES
    if not lowest <= rate <= highest:
        raise AudioError(f"{name}: sample rate {rate} Hz is outside {lowest} to {highest} Hz")
    if rate != int(rate):
        raise AudioError(f"{name}: sample rate {rate} Hz is not a whole number; round it")
    return int(rate)


BLOCK_VALUES = 2**22  # decoded at once, over all channels: 16 MB, which most utterances fit
UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's length if the header has none (FLAC written to a pipe)
# libsndfile's note on WAV, RF64, W64, AIFF and AU with fewer bytes than their header claims, which
# it then trusts no more. A file written to a pipe claims PIPED_BYTES or more.
FEWER_BYTES = re.compile(r"(?:data|SSND|Data Size|[Rr]iff(?: size)?) +: (\d+) \(should be (\d+)\)")
PIPED_BYTES = 2**31 - 2**25
TOLERANCE = 0.1  # seconds between header and content: lossy coders pad
# An open file has a name here, beside which no file ._NAME can be: libsndfile would open it as the
# file's resource fork, which a FIFO would block. For an open file without a name it opens ./._
HAS_FILE_NAMES = Path("/dev/fd").is_dir()
SDS = b"\xf0\x7e"  # first bytes of a MIDI sample dump, whose decoder writes to stdout
# First bytes of WAV, FLAC, OGG and AIFF; other files may be MP3, whose decoder writes to stderr.
QUIET = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"FORM")
# First bytes of files whose decoders find every place by arithmetic. Those of the others, OGG and
# MP3, search all of the file for the next page or frame, at a gigabyte per second.
INDEXED = (b"RIFF", b"RF64", b"riff", b"fLaC", b"FORM")
MAX_SEARCHED = 4 << 30  # bytes of such a file: three days at 128 kbit/s
Source = str | os.PathLike[str] | bytes  # a file, a place in a tar, or a file's content
IN_MEMORY = "the audio"  # the name of a content in messages


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
    path: str | os.PathLike[str], sample_rate: int, max_seconds: float | None = None
) -> Iterator[Tensor]:
    """`read_audio` in blocks (S,), each decoded when it is asked for."""
    with open_audio(path) as (sound, name):
        blocks = map(torch.from_numpy, _blocks(sound, name, max_seconds, sample_rate))
        for block in resample_blocks(blocks, sound.samplerate, sample_rate):
            yield block.clamp(-1.0, 1.0)


def decoded_seconds(
    path: Source,
    max_seconds: float | None = None,
    inspect: Callable[[np.ndarray], None] | None = None,
) -> float:
    """Duration of what can be decoded, a block at a time in memory.

    inspect: called with every block (S, C), which the next one overwrites.
    Raises AudioError as `read_audio` does, and for a truncated file, which holds less than its
    header claims. MP3 and OGG headers seldom have a length; there only a broken frame shows it.
    """
    count = 0
    with open_audio(path) as (sound, name):
        for block in _blocks(sound, name, max_seconds, inspect=inspect):
            count += len(block)
        claimed, decoded = _claimed_frames(sound) / sound.samplerate, count / sound.samplerate
        if claimed > decoded + TOLERANCE:
            lengths = f"its header says {claimed:.3f} seconds and {decoded:.3f} are there"
            raise AudioError(f"{name}: breaks off: {lengths}")
        return decoded


def _claimed_frames(sound: soundfile.SoundFile) -> float:
    """The header's length; 0 if it has none. For MP3 libsndfile guesses."""
    if sound.format == "MP3":
        return 0
    for claimed, actual in FEWER_BYTES.findall(sound.extra_info):
        if int(claimed) < PIPED_BYTES:
            return sound.frames * int(claimed) / max(1, int(actual))
    return 0 if sound.frames == UNKNOWN_FRAMES else sound.frames


def audio_seconds(path: Source) -> float:
    """Duration by the file's header; decoded and counted only if the header has none.

    Raises AudioError as `read_audio` does, for what shows without decoding.
    """
    with open_audio(path) as (sound, name):
        frames = sound.frames
        if frames == UNKNOWN_FRAMES:
            frames = sum(len(block) for block in _blocks(sound, name))
        if frames <= 0:
            raise NoSamples(f"{name}: no audio, 0 samples")
        return frames / sound.samplerate


@contextmanager
def open_audio(path: Source) -> Iterator[tuple[soundfile.SoundFile, str]]:
    """The open file, and its name for messages: on one line, whatever it holds.

    Raises AudioError for what is not audio, and at the end for a tar that cannot be read.
    """
    name = IN_MEMORY if isinstance(path, bytes) else name_of(path)
    with ExitStack() as stack:
        try:
            source, beginning, size = _source(path, name, stack)
            if not beginning:
                raise AudioError(f"{name}: the file is empty (0 bytes)")
            if beginning.startswith(SDS):
                raise AudioError(f"{name}: not readable as audio (a MIDI sample dump)")
            if beginning not in INDEXED and size > MAX_SEARCHED:
                most = f"{size} bytes, more than {MAX_SEARCHED}"
                raise AudioError(f"{name}: {most}; convert it to FLAC or WAV")
            with suppress_stderr(beginning not in QUIET):
                sound = stack.enter_context(soundfile.SoundFile(source, closefd=False))
        except (soundfile.SoundFileError, TypeError, ValueError, OSError) as error:
            raise AudioError(f"{name}: not readable as audio ({sound_error(error)})") from error
        whole_rate(sound.samplerate, name)
        yield sound, name
        if isinstance(source, Window) and source.error:
            raise AudioError(f"{name}: the tar cannot be read: {source.error.strerror}")


def _source(path: Source, name: str, stack: ExitStack) -> tuple[str | int | Window, bytes, int]:
    """What soundfile opens, its first four bytes and its size."""
    if isinstance(path, bytes):
        return Window(io.BytesIO(path), 0, len(path)), path[:4], len(path)
    member = member_of(path)
    try:
        if member is None:
            number = stack.enter_context(open_regular(path)).fileno()
            source = f"/dev/fd/{number}" if HAS_FILE_NAMES else number
            return source, os.pread(number, 4, 0), os.fstat(number).st_size
        window = stack.enter_context(open_member(member))
        return window, window.file.read(min(4, window.size)), window.size
    except PackedError as error:
        raise AudioError(f"{name}: {error}") from None
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a null character
        raise AudioError(f"{name}: no such file") from None


def _blocks(
    sound: soundfile.SoundFile,
    name: str,
    max_seconds: float | None = None,
    sample_rate: int | None = None,
    inspect: Callable[[np.ndarray], None] | None = None,
) -> Iterator[np.ndarray]:
    """The file, averaged over channels and checked, (S,) at a time; also at `sample_rate`, a block
    has at most BLOCK_VALUES. AudioError without samples, or soon after `max_seconds`.
    """
    limit = math.inf if max_seconds is None else max_seconds * sound.samplerate
    values = BLOCK_VALUES * min(1.0, sound.samplerate / (sample_rate or sound.samplerate))
    length = max(1, min(sound.frames, int(values) // sound.channels))
    block = np.empty((length, sound.channels), np.float32)
    count, read = 0, length
    while read == length:
        read = _read_block(sound, block, name)
        count += read
        if count > limit:
            raise AudioError(f"{name}: longer than the limit of {max_seconds:g} seconds")
        if read:
            with np.errstate(invalid="ignore", over="ignore"):  # such values are refused next
                mono = block[:read].mean(axis=1) if sound.channels > 1 else block[:read, 0].copy()
            check_values(torch.from_numpy(mono), name)
            if inspect:
                inspect(block[:read])
            yield mono
    if not count:
        raise NoSamples(f"{name}: no audio, 0 samples")


def _read_block(sound: soundfile.SoundFile, block: np.ndarray, name: str) -> int:
    """Fills `block` (S, C) from its start; returns the number of samples read, less at the end."""
    if sound.frames == UNKNOWN_FRAMES:
        block.fill(np.nan)
    try:
        with suppress_stderr(sound.format == "MP3"):
            return len(sound.read(out=block))
    except (soundfile.SoundFileError, ValueError) as error:
        # soundfile seeks after reading, which fails at the end of a file of unknown length: the
        # samples are read, but their number is lost. Such files are FLAC, hence never NaN.
        if sound.frames == UNKNOWN_FRAMES and "fseek" in str(error):
            return int((~np.isnan(block[:, 0])).sum())
        fault = "broken, or shorter than its header claims"
        raise AudioError(f"{name}: {fault} ({sound_error(error)})") from error


def sound_error(error: Exception) -> str:
    """libsndfile's message, without the path."""
    names = ("error_string", "strerror")
    text = next(filter(None, (getattr(error, name, None) for name in names)), str(error))
    return " ".join(text.split()).rstrip(".")

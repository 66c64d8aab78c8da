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
import logging
import math
import os
import re
import stat
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import lru_cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torchaudio.transforms import Resample

from asr.features import AudioError, NoSamples
from asr.features.streams import (
    TOLERANCE,
    Mp3Stream,
    Stream,
    Window,
    find_streams,
    is_read_whole,
    joined_wavs,
    ogg_end,
)

logger = logging.getLogger(__name__)

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
def open_member(member: TarMember) -> Iterator[Window]:
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
UNKNOWN_SAMPLES = 2**63 - 1  # libsndfile's length if the header has none (FLAC written to a pipe)
# libsndfile's note on WAV, RF64, W64, AIFF and AU with fewer bytes than their header claims, which
# it then trusts no more. A file written to a pipe claims PIPED_BYTES or more.
FEWER_BYTES = re.compile(r"(?:data|SSND|Data Size|[Rr]iff(?: size)?) +: (\d+) \(should be (\d+)\)")
PIPED_BYTES = 2**31 - 2**25
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
# Seconds of an Ogg Vorbis that are decoded before a part of it, since a seek into the last page of
# a file, which has about a second, leads to another place.
OGG_LEAD = 10.0
KEPT = 8  # decoded files of which parts are cut
REPORTED = 10  # files that a process names
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


@contextmanager
def open_audio(path: Source) -> Iterator["Sound"]:
    """The open file. Raises AudioError for what is not audio, and at the end where reading failed,
    which libsndfile takes for the end of the file.
    """
    name = IN_MEMORY if isinstance(path, bytes) else name_of(path)
    with ExitStack() as stack:
        source, window = _open_bytes(path, name, stack)
        try:
            beginning = window.read_at(0, 4)
            if not beginning:
                raise AudioError(f"{name}: the file is empty (0 bytes)")
            if beginning.startswith(SDS):
                raise AudioError(f"{name}: not readable as audio (a MIDI sample dump)")
            if beginning not in INDEXED and window.size > MAX_SEARCHED:
                most = f"{window.size} bytes, more than {MAX_SEARCHED}"
                raise AudioError(f"{name}: {most}; convert it to FLAC or WAV")
            wavs = joined_wavs(window)
            if len(wavs) > 1:  # libsndfile refuses another behind a WAV
                source = window.part(wavs[0])
            with suppress_stderr(beginning not in QUIET):
                file = stack.enter_context(_File(source, closefd=False))
        except (soundfile.SoundFileError, TypeError, ValueError, OSError) as error:
            _check_read(window, name)
            raise AudioError(f"{name}: not readable as audio ({sound_error(error)})") from error
        whole_rate(file.samplerate, name)
        yield Sound(path, name, file, window)
        _check_read(window, name)


def _open_bytes(path: Source, name: str, stack: ExitStack) -> tuple[str | int | Window, Window]:
    """What soundfile opens, and the same bytes as a window."""
    if isinstance(path, bytes):
        window = Window(io.BytesIO(path), 0, len(path))
        return window, window
    member = member_of(path)
    try:
        if member is None:
            file = stack.enter_context(open_regular(path))
            number = file.fileno()
            source = f"/dev/fd/{number}" if HAS_FILE_NAMES else number
            return source, Window(file, 0, os.fstat(number).st_size)
        window = stack.enter_context(open_member(member))
        return window, window
    except PackedError as error:
        raise AudioError(f"{name}: {error}") from None
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a null character
        raise AudioError(f"{name}: no such file") from None
    except OSError as error:
        raise AudioError(f"{name}: not readable as audio ({error.strerror})") from None


class _File(soundfile.SoundFile):
    """Reads without soundfile's seek behind every block, which fails at the end of a FLAC without a
    length, and behind which an MP3 of variable bit rate is decoded wrongly.
    """

    def seekable(self) -> bool:
        return False

    def seeks_exactly(self) -> bool:
        """Whether samples are the same behind a seek. Opus may differ until the end of the file."""
        return super().seekable() and self.subtype != "OPUS"

    def seek_near(self, sample: int) -> int:
        """Seek to a sample, or so far before it that it is decoded exactly; -> the distance."""
        lead = round(OGG_LEAD * self.samplerate) if self.format == "OGG" else 0
        begin = max(0, sample - lead)
        if begin:
            self.seek(begin)
        return sample - begin


class Sound:
    """An open audio file; of several streams in a row it is all.

    name: for messages, on one line. rate: in Hz. format, subtype: libsndfile's names of the
    container (WAV, MP3) and the coding.
    """

    def __init__(self, path: Source, name: str, file: _File, window: Window) -> None:
        self.name, self.rate, self.channels = name, file.samplerate, file.channels
        self.format, self.subtype = file.format, file.subtype
        self._path, self._file, self._window = path, file, window
        # What is read in place of the file; nothing where libsndfile reads all of it.
        self._streams = [] if file.format == "FLAC" else self._find_streams()

    def samples(self) -> int:
        """The number of samples (a channel) by the headers; UNKNOWN_SAMPLES if they have none."""
        if self._file.format == "MP3" and self._streams:
            return sum(stream.samples for stream in self._streams)
        return min(UNKNOWN_SAMPLES, self._of_headers(lambda file: file.frames))

    def search(self) -> None:
        """Look for a second FLAC behind the first, which reads all of the file."""
        if self._file.format == "FLAC":
            self._streams = self._find_streams()

    def exact_samples(self) -> int:
        """The number of samples, decoded and counted if the headers have none."""
        samples = self.samples()
        if samples != UNKNOWN_SAMPLES:
            return samples
        if isinstance(self._path, bytes):
            return _count(self._path)
        return _counted(os.fspath(self._path), self._version())

    def claimed_samples(self) -> float:
        """The number of samples by the headers, also where the file has fewer; 0 without one."""
        if self._file.format != "MP3":
            return self._of_headers(_claimed)
        missing = sum(stream.stated - stream.count for stream in self._streams)
        return self.samples() + missing * self._streams[0].frame.samples if missing > 0 else 0

    def ogg_ends(self) -> set[str]:
        """How the streams of an Ogg end: `ogg_end`; empty for other files."""
        if self.format != "OGG":
            return set()
        ends = [stream.offset + stream.size for stream in self._streams] or [self._window.size]
        return {ogg_end(self._window, end) for end in ends}

    def blocks(self, dtype: str, values: float, start: int = 0) -> Iterator[np.ndarray]:
        """All samples from `start` on, (S, C) with at most `values` at once, or all of them as a
        map of a file; the next block overwrites the one before. Raises AudioError.
        """
        if start and not self._file.seeks_exactly():
            yield self._decoded(dtype)[start:]
            return
        length = max(1, min(self.samples(), int(values) // self.channels))
        block = np.empty((length, self.channels), dtype)
        for file, skip, most in self._files(start):
            read = length
            while read == length and most > 0:
                read = self._read(file, block)
                part = block[min(skip, read) : min(read, skip + most)]
                skip, most = max(0, skip - read), most - len(part)
                if len(part):
                    yield part
            if most > 0 and file.format == "FLAC" and file.frames != UNKNOWN_SAMPLES:
                raise AudioError(f"{self.name}: broken, or shorter than its header claims")

    def _files(self, start: int) -> Iterator[tuple[_File, int, int]]:
        """What is read from sample `start` on: files, the samples of each to be dropped before it
        is exact, and how many are read then.
        """
        self.search()
        if not self._streams or (start == 0 and is_read_whole(self._streams)):
            yield self._file, self._file.seek_near(start), self._file.frames - start
        elif self._file.format == "MP3":
            for stream in self._streams:
                if start < stream.samples:
                    part, skip = stream.starting_at(self._window, start)
                    with self._open(part) as file:
                        yield file, skip, stream.samples - start
                start = max(0, start - stream.samples)
        else:
            for stream in self._streams:
                with self._open(stream) as file:
                    if start and file.frames == UNKNOWN_SAMPLES and len(self._streams) > 1:
                        what = "holds streams without a length, of which no part can be cut"
                        raise AudioError(f"{self.name}: {what}; convert it to one FLAC or WAV")
                    if start < file.frames:
                        yield file, file.seek_near(start), file.frames - start
                    start = max(0, start - file.frames)

    def _decoded(self, dtype: str) -> np.ndarray:
        """All samples (S, C), decoded once for all parts that are cut of a file."""
        if isinstance(self._path, bytes):
            return np.concatenate([block.copy() for block in self.blocks(dtype, BLOCK_VALUES)])
        return _decoded_file(os.fspath(self._path), dtype, self._version()).samples()

    def _read(self, file: _File, block: np.ndarray) -> int:
        """Fill `block` (S, C) from its start -> the number of samples, less at the end."""
        try:
            with suppress_stderr(file.format == "MP3"):
                return len(file.read(out=block))
        except (soundfile.SoundFileError, ValueError) as error:
            fault = "broken, or shorter than its header claims"
            raise AudioError(f"{self.name}: {fault} ({sound_error(error)})") from error

    def _of_headers(self, number: Callable[[_File], float]) -> float:
        """The sum of a number over the streams."""
        if not self._streams:
            return number(self._file)
        total = 0
        for stream in self._streams:
            with self._open(stream) as file:
                total += number(file)
        return total

    @contextmanager
    def _open(self, stream: Stream) -> Iterator[_File]:
        """A stream as a file of its own."""
        try:
            with suppress_stderr(self._file.format == "MP3"):
                file = _File(self._window.part(stream))
        except soundfile.SoundFileError as error:
            what = f"the stream at byte {stream.offset} is not readable as audio"
            raise AudioError(f"{self.name}: {what} ({sound_error(error)})") from error
        with file:
            self._check_format(file.samplerate, file.channels)
            yield file

    def _check_format(self, rate: int, channels: int) -> None:
        if (rate, channels) != (self.rate, self.channels):
            formats = f"of {self.rate} Hz, {self.channels} channels and {rate} Hz, {channels}"
            remedy = "split it, or convert it to FLAC or WAV"
            raise AudioError(f"{self.name}: holds streams {formats} channels; {remedy}")

    def _find_streams(self) -> Sequence[Stream] | Sequence[Mp3Stream]:
        kind = self._file.format
        if isinstance(self._path, bytes):
            streams = find_streams(self._window, kind)
        else:
            streams = _streams_of(os.fspath(self._path), kind, self._version())
        for stream in streams:
            if isinstance(stream, Mp3Stream):
                self._check_format(stream.frame.rate, stream.frame.channels)
            elif stream.stated is not None:
                stated = f"its header states {stream.stated} bytes of samples"
                _report(self.name, f"{stated}, and {stream.size} are there: read to its end")
        return streams

    def _version(self) -> tuple[int, ...]:
        """What another content of the file changes."""
        status = os.fstat(self._window.file.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)  # an index of an hour of MP3 has 140 kB
def _streams_of(path: str, kind: str, version: tuple[int, ...]) -> Sequence[Stream | Mp3Stream]:
    """`find_streams` in a file, once for all of its parts that are cut. version: for the cache."""
    with ExitStack() as stack:
        _, window = _open_bytes(path, name_of(path), stack)
        streams = find_streams(window, kind)
        _check_read(window, name_of(path))
        return streams


@lru_cache(maxsize=4096)
def _counted(path: str, version: tuple[int, ...]) -> int:
    """`_count` of a file, once for all of its parts that are cut."""
    return _count(path)


def _count(path: Source) -> int:
    """The number of samples that are decoded."""
    with open_audio(path) as sound:
        return sum(len(block) for block in sound.blocks("int16", BLOCK_VALUES))


class _DecodedFile:
    """The samples of a file, decoded into a temporary file when they are first asked for."""

    def __init__(self, path: str, dtype: str) -> None:
        self._path, self._dtype, self._lock = path, dtype, threading.Lock()
        self._samples: np.ndarray | None = None

    def samples(self) -> np.ndarray:
        """(S, C), mapped. Raises AudioError."""
        with self._lock:
            if self._samples is None:
                with TemporaryFile() as file, open_audio(self._path) as sound:
                    for block in sound.blocks(self._dtype, BLOCK_VALUES):
                        file.write(block)
                    file.flush()
                    self._samples = np.memmap(file, self._dtype, "r").reshape(-1, sound.channels)
            return self._samples


@lru_cache(maxsize=KEPT)
def _decoded_file(path: str, dtype: str, version: tuple[int, ...]) -> _DecodedFile:
    return _DecodedFile(path, dtype)


def _claimed(file: _File) -> float:
    """The header's number of samples; 0 if it has none."""
    for claimed, actual in FEWER_BYTES.findall(file.extra_info):
        if int(claimed) < PIPED_BYTES:
            return file.frames * int(claimed) / max(1, int(actual))
    return 0 if file.frames == UNKNOWN_SAMPLES else file.frames


def _check_read(window: Window, name: str) -> None:
    """AudioError if reading failed, which libsndfile takes for the end of the file."""
    for error in window.errors:
        what = "the tar cannot be read" if member_of(name) else "cannot be read"
        raise AudioError(f"{name}: {what}: {error.strerror}")


def _check_end(sound: Sound, samples: int, refuse: bool) -> None:
    """Report a file that ends before its stream, of which `samples` were decoded.

    With `refuse` AudioError, but for an Ogg of whole pages, as some encoders do not mark the last.
    """
    ends, claimed = sound.ogg_ends(), sound.claimed_samples() / sound.rate
    there = f"{samples / sound.rate:.3f}"
    if claimed > samples / sound.rate + TOLERANCE:
        fault = f"its header says {claimed:.3f} seconds and {there} are there"
    elif "cut" in ends:
        fault = f"{there} seconds are there, and a part of a page"
    elif "open" in ends:
        fault, refuse = f"{there} seconds are there, and no page that ends it", False
    else:
        return
    if refuse:
        raise AudioError(f"{sound.name}: breaks off: {fault}")
    _report(sound.name, f"the file ends before its stream does: {fault}")


_reported: set[str] = set()  # files


def _report(name: str, fault: str) -> None:
    """Log a line for each of the first files; a process that loads training batches logs none."""
    if name not in _reported and len(_reported) < REPORTED and get_worker_info() is None:
        _reported.add(name)
        more = "; further files like it are not named" if len(_reported) == REPORTED else ""
        logger.warning("%s: %s%s", name, fault, more)


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
    _check_end(sound, count, refuse_truncated)


def sound_error(error: Exception) -> str:
    """libsndfile's message, without the path."""
    names = ("error_string", "strerror")
    text = next(filter(None, (getattr(error, name, None) for name in names)), str(error))
    return " ".join(text.split()).rstrip(".")

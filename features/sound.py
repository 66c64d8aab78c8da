"""An open audio file: what is read of it, by the length of its streams and not by its header alone.

No header is trusted: its claims are checked against what can be decoded, so a WAV that announces
4 GB over 1 kB of data costs 1 kB.

Shapes: S samples, C channels.
"""

import io
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import soundfile
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from asr.features import AudioError
from asr.features.files import (
    CONVERSION,
    IN_MEMORY,
    UNREAD_SUFFIXES,
    Source,
    Window,
    name_of,
    open_regular,
)
from asr.features.libsndfile import (
    HAS_FILE_NAMES,
    QUIET,
    SDS,
    UNKNOWN_SAMPLES,
    DecodedFile,
    sound_error,
    suppress_stderr,
)
from asr.features.mp3 import Mp3Stream, mp3_streams
from asr.features.streams import (
    BEGINNINGS,
    TOLERANCE,
    Stream,
    chained_streams,
    ogg_end,
    unfinished_stream,
)
from asr.features.tar import PackedError, member_of, open_member

logger = logging.getLogger(__name__)

SAMPLE_RATES = (1_000, 1_000_000)  # a header may claim 1 Hz, which would turn 1 MB into 30 GB
MAX_PEAK = 8.0  # lossy decoders overshoot a little; above it samples are not scaled to [-1, 1]
BLOCK_VALUES = 2**22  # decoded at once, over all channels: 16 MB, which most utterances fit
KEPT = 8  # decoded files of which parts are cut
REPORTED = 10  # files that a process names


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


@contextmanager
def open_audio(path: Source) -> Iterator["Sound"]:
    """The open file. Raises AudioError for what is not audio, and at the end where reading failed,
    which libsndfile takes for the end of the file.
    """
    name = name_of(path)
    with ExitStack() as stack:
        source, window = _open_bytes(path, name, stack)
        try:
            beginning = window.read_at(0, 4)
            if not beginning:
                raise AudioError(f"{name}: the file is empty (0 bytes)")
            if beginning.startswith(SDS):
                raise AudioError(f"{name}: not readable as audio (a MIDI sample dump)")
            with suppress_stderr(beginning not in QUIET):
                file = stack.enter_context(DecodedFile(source, closefd=False))
        except (soundfile.SoundFileError, TypeError, ValueError, OSError) as error:
            _check_read(window, name)
            remedy = f"; {CONVERSION}" if Path(name).suffix.lower() in UNREAD_SUFFIXES else ""
            reason = f"not readable as audio ({sound_error(error)}){remedy}"
            raise AudioError(f"{name}: {reason}") from error
        if file.subtype in ("MPEG_LAYER_I", "MPEG_LAYER_II"):
            raise AudioError(f"{name}: MPEG audio, but no MP3; {CONVERSION}")
        whole_rate(file.samplerate, name)
        yield Sound(path, name, file, window)
        _check_read(window, name)


def _open_bytes(path: Source, name: str, stack: ExitStack) -> tuple[str | Window, Window]:
    """What soundfile opens, and the same bytes as a window."""
    if isinstance(path, bytes):
        window = Window(io.BytesIO(path), 0, len(path))
        return window, window
    member = member_of(path)
    try:
        if member is None:
            file = stack.enter_context(open_regular(path))
            number = file.fileno()
            window = Window(file, 0, os.fstat(number).st_size)
            return f"/dev/fd/{number}" if HAS_FILE_NAMES else window, window
        window = stack.enter_context(open_member(member))
        return window, window
    except PackedError as error:
        raise AudioError(f"{name}: {error}") from None
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a null character
        raise AudioError(f"{name}: no such file") from None
    except OSError as error:
        raise AudioError(f"{name}: not readable as audio ({error.strerror})") from None


class Sound:
    """An open audio file; of several streams in a row it is all.

    name: for messages, on one line. rate: in Hz. format, subtype: libsndfile's names of the
    container (WAV, MP3) and the coding.
    """

    def __init__(self, path: Source, name: str, file: DecodedFile, window: Window) -> None:
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

    def _claimed_samples(self) -> float:
        """The number of samples by the headers, also where the file has fewer; 0 without one."""
        if self._file.format != "MP3":
            return self._of_headers(DecodedFile.claimed_samples)
        missing = sum(stream.stated - stream.count for stream in self._streams)
        return self.samples() + missing * self._streams[0].frame.samples if missing > 0 else 0

    def _ogg_ends(self) -> set[str]:
        """How the streams of an Ogg end: `ogg_end`; empty for other files."""
        if self.format != "OGG":
            return set()
        ends = [stream.offset + stream.size for stream in self._streams] or [self._window.size]
        return {ogg_end(self._window, end) for end in ends}

    def check_end(self, samples: int, refuse: bool) -> None:
        """Report a file that ends before its stream, of which `samples` were decoded.

        With `refuse` AudioError, but not for an Ogg of whole pages: some encoders mark no last one.
        """
        ends, claimed = self._ogg_ends(), self._claimed_samples() / self.rate
        there = f"{samples / self.rate:.3f}"
        if claimed > samples / self.rate + TOLERANCE:
            fault = f"its header says {claimed:.3f} seconds and {there} are there"
        elif "cut" in ends:
            fault = f"{there} seconds are there, and a part of a page"
        elif "open" in ends:
            fault, refuse = f"{there} seconds are there, and no page that ends it", False
        else:
            return
        if refuse:
            raise AudioError(f"{self.name}: breaks off: {fault}")
        _report(self.name, f"the file ends before its stream does: {fault}")

    def blocks(self, dtype: str, values: float, start: int = 0) -> Iterator[np.ndarray]:
        """All samples from `start` on, (S, C) with at most `values` at once, or all of them as a
        map of a file; the next block overwrites the one before. Raises AudioError.
        """
        self.search()
        if start and (len(self._streams) > 1 or not self._file.seeks_exactly()):
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

    def _files(self, start: int) -> Iterator[tuple[DecodedFile, int, int]]:
        """What is read from sample `start` of the only stream on, or of all streams: files, the
        samples of each to be dropped, and how many are read then.
        """
        if not self._streams or is_read_whole(self._streams):
            yield self._file.starting_at(start), 0, self._file.frames - start
        elif self._file.format == "MP3":
            for stream in self._streams:
                part, skip = stream.whole()
                with self._open(part) as file:
                    yield file, skip, stream.samples
        else:
            for stream in self._streams:
                with self._open(stream) as file:
                    yield file.starting_at(start), 0, file.frames - start

    def _decoded(self, dtype: str) -> np.ndarray:
        """All samples (S, C), decoded once for all parts that are cut of a file."""
        if isinstance(self._path, bytes):
            return np.concatenate([block.copy() for block in self.blocks(dtype, BLOCK_VALUES)])
        with _decoding:
            return _decoded_file(os.fspath(self._path), dtype, self._version())

    def _read(self, file: DecodedFile, block: np.ndarray) -> int:
        """Fill `block` (S, C) from its start -> the number of samples, less at the end."""
        try:
            with suppress_stderr(file.format == "MP3"):
                return len(file.read(out=block))
        except (soundfile.SoundFileError, ValueError) as error:
            fault = "broken, or shorter than its header claims"
            raise AudioError(f"{self.name}: {fault} ({sound_error(error)})") from error

    def _of_headers(self, number: Callable[[DecodedFile], float]) -> float:
        """The sum of a number over the streams."""
        if not self._streams:
            return number(self._file)
        total = 0
        for stream in self._streams:
            with self._open(stream) as file:
                total += number(file)
        return total

    @contextmanager
    def _open(self, stream: Stream) -> Iterator[DecodedFile]:
        """A stream as a separate file."""
        try:
            with suppress_stderr(self._file.format == "MP3"):
                file = DecodedFile(self._window.part(*stream[:3]))
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


@lru_cache(maxsize=256)
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


_decoding = threading.Lock()  # else each thread would decode the file of its part


@lru_cache(maxsize=KEPT)
def _decoded_file(path: str, dtype: str, version: tuple[int, ...]) -> np.ndarray:
    """The samples (S, C) of a file, mapped from a temporary file. Raises AudioError."""
    with TemporaryFile() as file, open_audio(path) as sound:
        for block in sound.blocks(dtype, BLOCK_VALUES):
            file.write(block)
        file.flush()
        return np.memmap(file, dtype, "r").reshape(-1, sound.channels)


def _check_read(window: Window, name: str) -> None:
    """AudioError if reading failed, which libsndfile takes for the end of the file."""
    for error in window.errors:
        what = "the tar cannot be read" if member_of(name) else "cannot be read"
        raise AudioError(f"{name}: {what}: {error.strerror}")


def find_streams(window: Window, kind: str) -> Sequence[Stream] | Sequence[Mp3Stream]:
    """The streams of a file of libsndfile's format `kind`, to be read in its place; none where
    libsndfile reads all of it. All streams of an MP3, since their samples are found by its frames.
    """
    if kind == "MP3":
        return mp3_streams(window)
    if kind in BEGINNINGS:
        streams = chained_streams(window, kind)
        return streams if len(streams) > 1 else []
    return unfinished_stream(window)


def is_read_whole(streams: Sequence[Stream] | Sequence[Mp3Stream]) -> bool:
    """Whether libsndfile reads all samples of these, if it reads from the start of the file."""
    first = streams[0]
    return len(streams) == 1 and isinstance(first, Mp3Stream) and first.stated == first.count


_reported: set[str] = set()  # files


def _report(name: str, fault: str) -> None:
    """Log a line for each of the first files; a process that loads training batches logs none."""
    if name not in _reported and len(_reported) < REPORTED and get_worker_info() is None:
        _reported.update({name} - {IN_MEMORY})
        more = "; further files like it are not named" if len(_reported) == REPORTED else ""
        logger.warning("%s: %s%s", name, fault, more)

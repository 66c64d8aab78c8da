"""M4A, MP4, WebM and Matroska, which libsndfile cannot read -> waveform, decoded by ffmpeg.

ffmpeg is a separate program, used where it is installed. It runs as a process that may read the
one file and no address of a network, and writes samples to a pipe, so memory is bounded for files
of any length, as in features/audio.py. Which container a file is, its first bytes decide.

Shapes: S samples.
"""

import io
import re
import resource
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import soundfile
import torch
from torch import Tensor

from asr.features import AudioError, NoSamples
from asr.features.cut import MAX_PART
from asr.features.files import Source, name_of, open_regular
from asr.features.resample import resample_blocks
from asr.features.sound import BLOCK_VALUES, check_values, whole_rate

MEMORY = 2 << 30  # bytes that ffmpeg may have, in which it holds a gap that it fills
MAX_GAP = 250_000_000  # samples: 1.4 hours at 48 kHz
# Silence where the container has no audio: before it starts, and in gaps of its time stamps. Of a
# longer gap ffmpeg would fill a part, so the audio ends there, and both of its ends are printed.
BEFORE = "if(isnan(prev_t),0,prev_t)"
ENDS = f"st(0,1)*print({BEFORE},0)*print(t,0)*0"
FILL = f"aselect='if(ld(0),0,if(gt((t-{BEFORE})*sample_rate,{MAX_GAP}),{ENDS},1))',"
# Channels are averaged as those of other files: floats would be summed by 0.7 each, beyond 1.
FILL += "aresample=async=1:first_pts=0:rematrix_maxval=1"
AU = struct.Struct(">4sIIIII")  # magic, offset of the samples, bytes, encoding, rate, channels


def container_of(source: Source) -> str | None:
    """The name of ffmpeg's demuxer for the file, None for files of other kinds or none at all."""
    start = b""
    if isinstance(source, bytes):
        start = source[:12]
    else:
        with suppress(OSError, ValueError), open_regular(source) as file:
            start = file.read(12)
    if start[4:8] == b"ftyp":
        return "mov"
    return "matroska" if start.startswith(b"\x1aE\xdf\xa3") else None


def stream_container(source: Source, demuxer: str, sample_rate: int) -> Iterator[Tensor]:
    """The first audio track, its channels mixed, in blocks (S,), each decoded when asked for.

    Sample 0 is at time 0 of the container's clock: where the track starts later, or its time stamps
    have a gap, there is silence, so that times of words are those of the video.

    Raises AudioError as asr.features.audio.stream_audio does, where ffmpeg is not installed, and at
    a gap of more than MAX_GAP samples.
    """
    name = name_of(source)
    with _decoder(source, demuxer, name) as (pipe, gap):
        rate = _read_header(pipe, name)
        length = max(1, int(BLOCK_VALUES * min(1.0, rate / sample_rate)))
        blocks = _blocks(pipe, gap, length, name)
        for block in resample_blocks(blocks, rate, sample_rate):
            yield block.clamp(-1.0, 1.0)


def container_as_flac(source: Source, demuxer: str) -> bytes:
    """The track as `stream_container` has it, at its own rate, as FLAC of 16 bits.

    Raises AudioError as stream_container does, and for more than MAX_PART seconds.
    """
    name, file = name_of(source), io.BytesIO()
    with _decoder(source, demuxer, name) as (pipe, gap):
        rate = _read_header(pipe, name)
        with soundfile.SoundFile(file, "w", rate, 1, "PCM_16", format="FLAC") as flac:
            rest = int(MAX_PART * rate)
            for block in _blocks(pipe, gap, BLOCK_VALUES, name):
                rest -= len(block)
                if rest < 0:
                    raise AudioError(f"{name}: over {MAX_PART:g} seconds; convert it to FLAC")
                flac.write((32768 * block).round().clamp(-32768, 32767).short().numpy())
    return file.getvalue()


def _read_header(pipe: IO[bytes], name: str) -> int:
    """The sample rate by the AU header, which is read. Raises AudioError where there is none."""
    start = pipe.read(AU.size)
    if len(start) < AU.size:
        raise AudioError(f"{name}: not readable as audio (ffmpeg finds no audio in it)")
    _, offset, _, _, rate, _ = AU.unpack(start)
    pipe.read(offset - AU.size)
    return whole_rate(rate, name)


@contextmanager
def _decoder(source: Source, demuxer: str, name: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Pipes with the samples in float32 in Sun's AU format, whose header has their rate, and with
    the ends of a gap of more than MAX_GAP samples.
    """
    program = shutil.which("ffmpeg")
    if program is None:
        remedy = "install it (apt-get install ffmpeg), or convert the file to FLAC or WAV"
        raise AudioError(f"{name}: M4A, MP4 and WebM need the program ffmpeg; {remedy}")
    with TemporaryFile() if isinstance(source, bytes) else open_regular(source) as file:
        if isinstance(source, bytes):  # ffmpeg seeks in files alone
            file.write(source)
            file.seek(0)
        line = [program, "-nostdin", "-v", "panic", "-protocol_whitelist", "file", "-f", demuxer]
        line += ["-copyts", "-i", f"/dev/fd/{file.fileno()}", "-map", "0:a:0"]
        line += ["-ac", "1", "-af", FILL, "-c:a", "pcm_f32be", "-f", "au", "-"]
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[file.fileno()]
        )
        try:
            if hasattr(resource, "prlimit"):  # Linux
                with suppress(OSError):
                    resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
            yield process.stdout, process.stderr
            if process.wait():
                raise AudioError(f"{name}: broken: ffmpeg cannot decode all of it")
        finally:
            process.kill()
            process.stdout.close()
            process.stderr.close()
            process.wait()


def _blocks(pipe: IO[bytes], gap: IO[bytes], length: int, name: str) -> Iterator[Tensor]:
    """All samples, (S,) at a time with S at most `length`, checked. gap: the ends of a long one."""
    empty = True
    while content := pipe.read(4 * length):
        samples = np.frombuffer(content, ">f4", len(content) // 4).astype(np.float32)
        block = torch.from_numpy(samples)
        if len(block):
            check_values(block, name)
            empty = False
            yield block
    if ends := re.match(rb"(-?[\d.]+)\s+([\d.]+)\s", gap.read()):
        times = "no audio from {:.3f} s to {:.3f} s".format(*map(float, ends.groups()))
        what = f"{times}, too long to fill with silence"
        remedy = "convert it to FLAC or WAV with ffmpeg, which leaves the gap out"
        raise AudioError(f"{name}: {what}; {remedy}")
    if empty:
        raise NoSamples(f"{name}: no audio, 0 samples")

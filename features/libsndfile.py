"""libsndfile, which decodes audio, as soundfile opens it, and its faults that are to be avoided.

It decodes WAV, FLAC, OGG Vorbis, Opus, MP3, AIFF and more by content, not by name.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import soundfile

UNKNOWN_SAMPLES = 2**63 - 1  # libsndfile's length if the header has none (FLAC written to a pipe)
# libsndfile's note on WAV, RF64, W64, AIFF and AU with fewer bytes than their header claims, which
# it then trusts no more. A file written to a pipe claims PIPED_BYTES or more.
FEWER_BYTES = re.compile(r"(?:data|SSND|Data Size|[Rr]iff(?: size)?) +: (\d+) \(should be (\d+)\)")
PIPED_BYTES = 2**31 - 2**25
# libsndfile opens a file by name, not through Python (Window), where Ctrl-C is raised in a callback
# and lost, and the recording ends there. An open file has a name here, beside which no file ._NAME
# can be: libsndfile would open it as the file's resource fork, which a FIFO would block. For an
# open file without a name it opens ./._
# On other systems it is the open file itself, with its position, not the file anew.
HAS_FILE_NAMES = sys.platform == "linux" and Path("/dev/fd").is_dir()
SDS = b"\xf0\x7e"  # first bytes of a MIDI sample dump, whose decoder writes to stdout
# First bytes of WAV, FLAC, OGG and AIFF; other files may be MP3, whose decoder writes to stderr.
QUIET = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"FORM")

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


class DecodedFile(soundfile.SoundFile):
    """Reads without soundfile's seek behind every block, which fails at the end of a FLAC without a
    length, and behind which an MP3 of variable bit rate is decoded wrongly.
    """

    def seekable(self) -> bool:
        return False

    def seeks_exactly(self) -> bool:
        """Whether samples are the same behind a seek, which lossy decoders do not grant."""
        return super().seekable() and self.format not in ("OGG", "MP3")

    def starting_at(self, sample: int) -> "DecodedFile":
        """The file, at a sample."""
        if sample:
            self.seek(sample)
        return self

    def claimed_samples(self) -> float:
        """The number of samples by the header, also where the file has fewer; 0 without one."""
        for claimed, actual in FEWER_BYTES.findall(self.extra_info):
            if int(claimed) < PIPED_BYTES:
                return self.frames * int(claimed) / max(1, int(actual))
        return 0 if self.frames == UNKNOWN_SAMPLES else self.frames


def sound_error(error: Exception) -> str:
    """libsndfile's message, without the path."""
    names = ("error_string", "strerror")
    text = next(filter(None, (getattr(error, name, None) for name in names)), str(error))
    return " ".join(text.split()).rstrip(".")

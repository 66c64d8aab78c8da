"""From the rows of any corpus to manifests: check, select, measure, cut, normalise, write.

Rows are read, measured and written one after another, in bounded memory: a million rows cost their
ids, and a number each for audio and text. Relative paths start from the folder in which the first
files exist. Audio that is a whole file stays where it is; NAME.audio becomes a link to its folder.
Parts of files, single channels, M4A, MP4, WebM and audio inside files of the corpus go into
NAME-*.tar (shards.py), parts and what ffmpeg decodes as FLAC of the same rate. Nothing is written
if a row is faulty, unless such rows are to be skipped.
"""

import math
import os
import sys
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from asr.data.corpus import Utterance, link_audio, linked_folder
from asr.data.importers.rows import Fault, FaultReport, Row, Split
from asr.data.importers.text_normalization import TextNormalizer
from asr.data.manifest import COLUMNS, check_names, join_fields, parse_seconds, seconds_field
from asr.data.shards import TarWriter
from asr.errors import UserError, one_line, print_line, terminal
from asr.features import AudioError
from asr.features.audio import audio_seconds, decoded_seconds
from asr.features.containers import container_as_flac, container_of
from asr.features.cut import audio_channels, cut_audio
from asr.features.files import RECORDING_SUFFIXES, Source
from asr.features.sound import open_audio
from asr.io import atomic_writer, made_folder, usable_cores

TOLERANCE = 0.1  # seconds between what a table says and what its file has
PADDING = 0.5  # seconds that lossy codecs add, most at low rates: MP3 of 8 kHz 0.3
LOSSY = ("MP3", "OGG")  # libsndfile's names
SILENT = 2**-14  # from lowest to highest value: two steps of 16 bits, as of dither
CANCELLED = 1e-4  # of the power, where channels of opposite phase are averaged
EXACT = 1e-3  # seconds: a part that ends so near to its file's end is the whole file
TAR_BYTES = 1e9
IN_FLIGHT = 8  # rows measured ahead, per thread
SAMPLED = 10  # rows whose files show where relative paths start
FOLDERS = ("", "clips", "wavs", "wav", "audio", "audios")  # below a corpus, that may hold its audio


@dataclass(frozen=True)
class Options:
    """What the user chose. None: not limited."""

    audio: Path | None = None  # the folder that must hold all audio, and the first base of paths
    headers_only: bool = False  # whole files are not decoded
    max_seconds: float | None = None
    hours: float | None = None  # a random part of each split
    skip_bad: bool = False


class Measured(NamedTuple):
    """An utterance's audio: its seconds, and a content that is to be stored, if there is one."""

    seconds: float
    content: bytes | None
    name: str  # of the content
    padded: bool  # whether the table's duration differs by more than TOLERANCE
    is_file: bool  # whether it is all of a file that has no other utterance


class _Levels:
    """Whether decoded audio holds anything once its channels are averaged and the mean is removed.

    That is all the features see; the mean is removed as in log-mel.
    """

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf  # of the average of the channels
        self.count = 0
        self.sums = np.zeros((2, 1))  # of the values and of their squares: (2, 1 + C)

    def add(self, block: np.ndarray) -> None:
        """A further block (S, C)."""
        mono = block.mean(axis=1, keepdims=True)
        self.low, self.high = min(self.low, mono.min()), max(self.high, mono.max())
        if block.shape[1] > 1:
            values = np.concatenate([mono, block], axis=1)
            squares = np.einsum("sc,sc->c", values, values, dtype=np.float64)
            self.count += len(block)
            self.sums = self.sums + np.stack([values.sum(axis=0, dtype=np.float64), squares])

    def check(self) -> None:
        """Raise ValueError for audio without content."""
        if self.count:
            mean, square = self.sums / self.count
            power = square - mean**2  # of the average, and of each channel
            if power[0] < CANCELLED * power[1:].mean() and power[1:].mean() > SILENT**2:
                raise ValueError(
                    "its channels have opposite phase and cancel when they are averaged; write one "
                    "of them to a separate file"
                )
        if self.low <= self.high <= self.low + SILENT:  # none if nothing was decoded
            value = (self.high + self.low) / 2
            raise ValueError(f"holds no sound: all samples are near {value:.3g}")


class _Output:
    """One split on its way to a manifest."""

    def __init__(self, split: Split, to: Path, options: Options, stack: ExitStack) -> None:
        self.split, self.options, self.stack = split, options, stack
        self.manifest = to / f"{split.name}.tsv"
        if self.manifest.resolve() == split.location.resolve():
            raise UserError(f"{self.manifest}: is the table itself; give --to another folder")
        # Absolute, but links are not followed: audio may be reached through some.
        self.root = os.path.abspath(options.audio or split.root)  # noqa: PTH100
        self.base, self.suffix = _find_audio(split, self.root)
        self.faults, self.rows = FaultReport(), 0
        self.padded = 0  # rows whose duration is not their audio's
        self.retold = 0  # rows of a whole file that an earlier row gives another text
        self.outside = ""  # the folder common to all audio outside the root
        self.links = False  # whether the manifest names files outside its tars
        self._linked = linked_folder(self.manifest, Path(self.root)).relative_to(to).as_posix()
        self._tars: TarWriter | None = None
        self._texts: dict[int, int] = {}  # hash of the path of a whole file -> that of its text

    def path_of(self, row: Row) -> str:
        """The absolute path of a row's file. Raises ValueError for a row with a fault."""
        if not row.audio or "\0" in row.audio:
            raise ValueError("no audio file is given")
        if not row.id:
            raise ValueError("the id is empty")
        if not row.text:
            raise ValueError("the text is empty")
        audio = row.audio + ("" if _has_suffix(row.audio) else self.suffix)
        path = os.path.abspath(_joined(self.base, audio))  # noqa: PTH100
        if row.load is None and not path.startswith(os.path.join(self.root, "")):  # noqa: PTH118
            if not os.path.lexists(path):
                raise ValueError(f"no such file: {row.audio!r}")
            folder = os.path.dirname(path)  # noqa: PTH120
            self.outside = os.path.commonpath([self.outside or folder, folder])
            raise ValueError(f"audio {row.audio!r} is outside {self.root}")
        check_names(row.id, row.speaker)
        if row.seconds:
            parse_seconds(row.seconds)
        return path

    def folder_with_missing(self) -> Path | None:
        """A folder of the corpus that has one of the first files, if the base has none of them."""
        names = [row.audio for row in islice(self.split.rows(), SAMPLED) if isinstance(row, Row)]
        folders = sorted(path for path in self.split.root.iterdir() if path.is_dir())
        return next((f for f in folders for name in names if (f / name).is_file()), None)

    def line_of(self, row: Row, path: str, measured: Measured, text: str) -> bytes | None:
        """The line of the manifest; None if it is a fault."""
        fields = [row.id, row.speaker or row.id, path, seconds_field(measured.seconds), text]
        try:
            if not text:
                raise ValueError(f"no text is left of {row.text[:100]!r}")
            join_fields([*fields, *row.more])
        except ValueError as error:
            self.faults.add(row, str(error))
            return None
        if measured.is_file:
            self.retold += self._texts.setdefault(hash(path), hash(text)) != hash(text)
        if measured.content is None:
            self.links = True
            below = os.path.relpath(path, self.root)
            fields[2] = os.path.normpath(os.path.join(self._linked, below))  # noqa: PTH118
        else:
            fields[2] = self._store(row, measured, text)
        self.rows += 1
        self.padded += measured.padded
        return join_fields([*fields, *row.more])

    def _store(self, row: Row, measured: Measured, text: str) -> str:
        """Put a content into the current tar -> its location as the manifest names it."""
        if self._tars is None:
            self._tars = TarWriter(self.manifest.with_name(self.split.name), TAR_BYTES)
            self.stack.enter_context(self._tars)
        speaker, named = row.speaker or row.id, Path(measured.name)
        utterance = Utterance(row.id, speaker, named, measured.seconds, text)
        return self._tars.add(self.rows, utterance, measured.content or b"")

    def check_amount(self, seconds: float, full: bool, only: bool) -> None:
        """Raise UserError for no row, and for the only split with less than options.hours."""
        name, hours = self.split.location, self.options.hours or 0.0
        if hours and only and not full and seconds < 3600 * hours - 1e-3:
            have = f"the good rows have {seconds / 3600:.2f}"
            raise UserError(f"{name}: a part of {hours:g} hours; it must be above 0, and {have}")
        if not self.rows and full:
            raise UserError(f"{name}: a part of {hours:g} hours is too short for one row")
        if not self.rows:
            reason = self.faults.messages[0] if len(self.faults) else "it has none"
            raise UserError(f"{name}: no row is good, nothing is written: {reason}")

    def finish(self) -> None:
        """Complete the tars, and link the folder of the other audio."""
        if self._tars is not None:
            self._tars.finish()
        if self.links:
            link_audio(self.manifest, Path(self.root))
        location = self.split.location
        if self.padded:
            print_line(
                f"{location}: {self.padded:,} durations differ by {TOLERANCE} to {PADDING} s from "
                "the audio, as codecs pad or segments end after their recording; the audio's are "
                "written"
            )
        if self.retold:
            print_line(
                f"warning: {location}: {self.retold:,} rows name a whole file that an earlier row "
                "gives another text; parts of a recording need their times"
            )


def convert(
    splits: Sequence[Split], to: Path, options: Options, normalize: TextNormalizer
) -> list[Path]:
    """Write TO/NAME.tsv for each split -> their paths. Prints faults to standard error.

    Raises UserError if a row is faulty, unless options.skip_bad; if a split has no valid row, or is
    the only one and has fewer hours than options.hours; and if a manifest would replace its
    table. Then nothing is written but the lists of faults.
    """
    names = [split.name for split in splits]
    for name in names:  # which a data set from elsewhere may have chosen
        if not name or "/" in name or name.startswith(".") or not name.isprintable():
            raise UserError(
                f"{splits[0].location}: {name!r} cannot be the name of a manifest; rename"
            )
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{splits[0].location}: two splits would be {twice[0]}.tsv; rename one")
    with made_folder(to), ExitStack() as stack:
        outputs = [_Output(split, to, options, stack) for split in splits]
        for output in outputs:
            _write_split(output, normalize, only=len(outputs) == 1)
        if not options.skip_bad:
            _refuse_faults(outputs)
        for output in outputs:
            output.finish()
    return [output.manifest for output in outputs]


def _refuse_faults(outputs: list[_Output]) -> None:
    faulty = [output for output in outputs if len(output.faults)]
    if not faulty:
        return
    first, count = faulty[0], sum(len(output.faults) for output in faulty)
    total = count + sum(output.rows for output in outputs)
    remedy = ""
    if outside := [output.outside for output in faulty if output.outside]:
        # --audio replaces the folder of every split.
        inside = [output.root for output in outputs if output.rows]
        folder = os.path.commonpath([*outside, *inside])
        remedy = f"--audio {folder} accepts its audio, if you trust this corpus; "
    elif any(kind.startswith("no such file") for kind in first.faults.kinds):
        folder = first.folder_with_missing() or "FOLDER"
        remedy = f"relative paths start from {first.base}, with --audio {folder} from there; "
    message = f"{first.split.location}: {remedy}{count} of {total} rows are faulty, nothing is "
    raise UserError(f"{message}written; correct them, or skip them with --skip-bad")


def _has_suffix(audio: str) -> bool:
    return os.path.splitext(audio)[1].lower() in RECORDING_SUFFIXES  # noqa: PTH122 (of every row)


def _find_audio(split: Split, root: str) -> tuple[str, str]:
    """The folder that relative paths start from, and the suffix that some names lack.

    The first folder with one of the first files: `root`, that of the corpus, the working directory,
    that above the corpus, and each one's FOLDERS and folder of the split's name, as SPGISpeech's
    val.csv and val/. If there is none, `root`.
    """
    sampled = islice((row for row in split.rows() if isinstance(row, Row)), SAMPLED)
    names = [row.audio for row in sampled if row.audio and row.load is None]
    corpus = os.path.abspath(split.root)  # noqa: PTH100 (links are not followed)
    bases = (root, corpus, os.getcwd(), os.path.dirname(corpus))  # noqa: PTH109, PTH120
    for base, below in product(bases, (*FOLDERS, split.name)):
        folder = os.path.normpath(os.path.join(base, below))  # noqa: PTH118
        for name in names:
            for suffix in ("",) if _has_suffix(name) else ("", *sorted(RECORDING_SUFFIXES)):
                if os.path.isfile(_joined(folder, name + suffix)):  # noqa: PTH113
                    return folder, suffix
    return root, ""


def _joined(folder: str, name: str) -> str:
    """The path; macOS and its archives decompose letters, so that of a file in either form."""
    path = os.path.join(folder, name)  # noqa: PTH118
    if name.isascii() or os.path.lexists(path):
        return path
    names = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    paths = (os.path.join(folder, name) for name in names)  # noqa: PTH118
    return next(filter(os.path.lexists, paths), path)


def _write_split(output: _Output, normalize: TextNormalizer, only: bool) -> None:
    """Write the valid rows, of which the first that fill options.hours, to the open manifest."""
    hours, name = output.options.hours, output.split.location
    limit = math.inf if hours is None else 3600 * hours
    file = output.stack.enter_context(atomic_writer(output.manifest, sync=True))
    file.write(join_fields([*COLUMNS, *output.split.more]))
    rows: Iterable[Checked] = _checked_rows(output)
    if hours is not None:
        # Depends on the ids alone, not on the rows' order; a shorter part is a subset.
        rows = sorted(rows, key=lambda checked: sha256(checked[0].id.encode()).digest())
    total, full, lines = 0.0, False, []
    for (row, path), measured in _with_progress(_measured(rows, output.options), name.name):
        if isinstance(measured, str):
            output.faults.add(row, measured, path)
            continue
        if full := total + measured.seconds > limit:
            break
        if line := output.line_of(row, path, measured, normalize(row.text)):
            total += measured.seconds
            if hours is None:
                file.write(line)
            else:
                lines.append((row.line, line))
    for _, line in sorted(lines):
        file.write(line)
    output.faults.show(output.manifest.with_suffix(".faults.txt"), output.options.skip_bad)
    if output.options.skip_bad or not len(output.faults):
        output.check_amount(total, full, only)


Checked = tuple[Row, str]  # a row and the path of its audio


def _checked_rows(output: _Output) -> Iterator[Checked]:
    """The rows without a fault that shows before the audio is opened."""
    lines: dict[str, int] = {}
    for row in output.split.rows():
        if isinstance(row, Fault):
            output.faults.add(row, row.message)
            continue
        try:
            path = output.path_of(row)
            if row.id in lines:
                raise ValueError(f"id {row.id!r} is already in line {lines[row.id]}")
        except ValueError as error:
            output.faults.add(row, str(error))
        else:
            lines[row.id] = row.line
            yield row, path


def _measured(
    rows: Iterable[Checked], options: Options
) -> Iterator[tuple[Checked, Measured | str]]:
    """Every row with its audio's measure or fault, in order, some of them ahead in threads."""
    threads = usable_cores()
    waiting: deque[tuple[Checked, Future]] = deque()
    # Threads, since the decoder releases the interpreter.
    with ThreadPoolExecutor(threads) as pool:
        try:
            for checked in rows:
                waiting.append((checked, pool.submit(_measure, *checked, options)))
                if len(waiting) >= IN_FLIGHT * threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _measure(row: Row, path: str, options: Options) -> Measured | str:
    """Open a row's audio -> its measure, or what is wrong with it."""
    try:
        return _cut_or_measure(row, path, options)
    except (AudioError, ValueError) as error:
        return str(error)


def _cut_or_measure(row: Row, path: str, options: Options) -> Measured:
    """Cut what is not a whole file. Raises AudioError and ValueError."""
    content = row.load() if row.load else None
    source: Source = path if content is None else content
    audio, limit, name, levels = source, options.max_seconds, row.audio, _Levels()
    if row.length is not None and limit is not None and row.length > limit + TOLERANCE:
        raise ValueError(f"{row.length:.2f} seconds long, over the limit of {limit:g}")
    if demuxer := container_of(source):  # which training does not read
        if row.channel is not None:
            raise AudioError(f"{path}: a channel of M4A, MP4 or WebM; convert the file to FLAC")
        if row.load is None and (row.start is not None or row.length is not None):
            audio = content = _flac_of(path, os.stat(path).st_mtime_ns, demuxer)  # noqa: PTH116
        else:
            audio = content = container_as_flac(source, demuxer)
        name = "part.flac"
    if is_part := _is_part(row, audio, source):
        content, seconds = cut_audio(audio, row.start or 0.0, row.length, row.channel)
        decoded_seconds(content, inspect=levels.add)
        name = "part.flac"
    elif options.headers_only:
        seconds = audio_seconds(audio)
    else:
        seconds = decoded_seconds(audio, limit, levels.add)
    seconds_field(seconds)
    if limit is not None and seconds > limit:
        raise ValueError(f"{seconds:.2f} seconds long, over the limit of {limit:g}")
    padded = _is_padded(row, seconds, source)
    levels.check()
    return Measured(seconds, content, name, padded, not is_part and row.load is None)


_decoding = Lock()  # else each thread would decode the file of its part


def _flac_of(path: str, version: int, demuxer: str) -> bytes:
    """container_as_flac of a file with many parts, decoded once. Raises AudioError."""
    with _decoding:
        found = _decoded(path, version, demuxer)
    if isinstance(found, AudioError):
        raise found
    return found


@lru_cache(maxsize=2)
def _decoded(path: str, version: int, demuxer: str) -> bytes | AudioError:
    try:
        return container_as_flac(path, demuxer)
    except AudioError as error:
        return error


def _is_part(row: Row, audio: Source, source: Source) -> bool:
    """Whether a row is less than its file, `source`, or `audio` in FLAC. Raises AudioError."""
    if row.start or (row.channel is not None and (row.channel or audio_channels(audio) > 1)):
        return True
    if row.length is None:
        return False
    more = audio_seconds(audio) - row.length
    if row.start is None and TOLERANCE < more <= PADDING:
        return not _is_lossy(source)
    return more > (TOLERANCE if row.start is None else EXACT)


def _is_padded(row: Row, seconds: float, source: Source) -> bool:
    """Whether the row's duration differs by more than TOLERANCE from its audio's.

    Raises ValueError if it differs by more than PADDING, or the audio is a whole file without loss,
    which a codec cannot have padded.
    """
    stated, name = row.length, "duration"
    if row.seconds:
        stated, name = float(row.seconds), "seconds"
    difference = 0.0 if stated is None else abs(stated - seconds)
    if difference <= TOLERANCE:
        return False
    if difference > PADDING or not (row.start is not None or _is_lossy(source)):
        raise ValueError(f"{name} is {stated:g}, but the file has {seconds:.3f}")
    return True


def _is_lossy(source: Source) -> bool:
    if container_of(source):
        return True
    with open_audio(source) as sound:
        return sound.format in LOSSY


def _with_progress(items: Iterable[Any], name: str) -> Iterator[Any]:
    """The items, with a line that counts them where standard error is a terminal."""
    console = Console(file=terminal(sys.stderr))
    text = TextColumn("checking {task.description}: {task.completed:,.0f} rows")
    columns = (text, TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield from progress.track(items, description=one_line(name)[:40])

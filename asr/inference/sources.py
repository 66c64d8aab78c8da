"""The recordings that a command line names: files, folders and standard input.

Standard input is copied into a temporary file, because most formats cannot be read from a pipe. So
it needs room on the disk, and no more memory than any file.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from tempfile import NamedTemporaryFile
from typing import IO, NamedTuple

from asr.errors import writing
from asr.features.files import CONVERSION, RECORDING_SUFFIXES, UNREAD_SUFFIXES, name_of

STDIN = Path("-")


class Source(NamedTuple):
    """A recording."""

    path: Path  # where it is read
    name: Path  # how it is printed
    target: PurePath  # its name, or its path below a named folder


@contextmanager
def open_sources(names: Sequence[Path], faults: dict[Path, str]) -> Iterator[list[Source]]:
    """The recordings in the order of the names, each once; those of a folder are sorted.

    A folder without any, and standard input that cannot be read, are added to `faults`.
    """
    with NamedTemporaryFile(prefix="stdin-") as copy:
        sources: dict[Path, Source] = {}
        for name in names:
            if name == STDIN:
                found = _read_stdin(copy, faults)
            elif os.path.isdir(name):  # noqa: PTH112 (also for a name that no file can have)
                found = _below(name, faults)
            else:
                found = [Source(name, name, PurePath(name.name))]
            for source in found:
                sources.setdefault(source.path, source)
        yield list(sources.values())


def targets(sources: Sequence[Source]) -> dict[Path, PurePath]:
    """The path of each source -> its transcript's path in a folder, without a suffix.

    That is its target without the suffix. Where two would share one, all are named by their paths
    below the folder that they share, with the suffix: a/x.wav, b/x.wav and b/y.mp3 by these paths.
    """
    chosen = {source.path: source.target.with_suffix("") for source in sources}
    if len(set(chosen.values())) == len(chosen):
        return chosen
    # Links to folders are resolved, since `..` after one leads elsewhere.
    files = [source for source in sources if source.name != STDIN]
    paths = {s.path: Path(os.path.realpath(s.name.parent), s.name.name) for s in files}
    shared = os.path.commonpath([path.parent for path in paths.values()])
    return chosen | {source: path.relative_to(shared) for source, path in paths.items()}


def _below(folder: Path, faults: dict[Path, str]) -> list[Source]:
    """The audio files below a folder, by suffix, without hidden ones and those behind links."""
    found = []

    def report(error: OSError) -> None:
        path = Path(error.filename)
        faults[path] = f"{name_of(path)}: cannot be read ({error.strerror})"

    for root, folders, names in os.walk(folder, onerror=report):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(root, name) for name in sorted(names) if not name.startswith(".")):
            suffix = path.suffix.lower()
            if suffix in RECORDING_SUFFIXES and path.is_file():
                found.append(path)
            elif suffix in UNREAD_SUFFIXES:
                faults[path] = f"{name_of(path)}: {suffix} is not read; {CONVERSION}"
    if not found and folder not in faults:
        faults[folder] = f"{name_of(folder)}: no audio file in this folder"
    return [Source(path, path, path.relative_to(folder)) for path in found]


def _read_stdin(copy: IO[bytes], faults: dict[Path, str]) -> list[Source]:
    """Standard input in the file `copy`."""
    if sys.stdin is None or sys.stdin.isatty():
        faults[STDIN] = "-: standard input is no file and no pipe; use: ... < FILE"
        return []
    with writing(Path(copy.name)):
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
    return [Source(Path(copy.name), STDIN, PurePath("stdin"))]

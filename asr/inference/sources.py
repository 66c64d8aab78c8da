"""The recordings that a command line names: files, folders and standard input.

Standard input is copied into a temporary file, because most formats cannot be read from a pipe. So
it needs room on the disk, and no more memory than any file.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from tempfile import NamedTemporaryFile
from typing import IO, NamedTuple

from asr.errors import UserError, writing
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

    That is its target. Where several in different folders would have the same, it is the path
    below the folder that they share; where several in one folder would, the name has the suffix of
    the recording: a/x.wav, b/x.wav and b/x.mp3 give a/x, b/x.wav and b/x.mp3. Raises UserError
    where that does not separate two.
    """
    paths = {source: Path(os.path.abspath(source.name)) for source in sources}  # noqa: PTH100
    chosen = {source: source.target.parent / source.target.stem for source in sources}
    for _ in range(2):
        for group in _sharing(chosen):
            folders = {paths[source].parent for source in group}
            for source in group:
                if len(folders) == 1:
                    chosen[source] = chosen[source].parent / paths[source].name
                else:
                    target = paths[source].relative_to(os.path.commonpath(folders))
                    chosen[source] = target.parent / target.stem
    for group in _sharing(chosen):
        both = " and ".join(name_of(source.name) for source in group[:2])
        raise UserError(f"{both} would share a file in --out: give each call files of other names")
    return {source.path: target for source, target in chosen.items()}


def _sharing(chosen: Mapping[Source, PurePath]) -> list[list[Source]]:
    """The groups of sources that have one target."""
    groups: dict[PurePath, list[Source]] = {}
    for source, target in chosen.items():
        groups.setdefault(target, []).append(source)
    return [group for group in groups.values() if len(group) > 1]


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

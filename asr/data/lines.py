"""The lines of a text of any size, found by their number.

A text is read once, cleaned, and its lines indexed: from then on a line is found by its place. Up
to SMALL bytes are held in memory; of a larger one the cleaned text and the index lie beside it in
PATH.lines/ (or below a folder of the user's choice) and are mapped, so that 40 million lines cost
no more memory than their lengths and their order do: 8 bytes a line.

N lines.
"""

import gzip
import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from asr.data.table import own_name, read_rows
from asr.errors import UserError

SMALL = 16 << 20  # bytes of a file
LONGEST = 1 << 20  # bytes of a line; what has longer ones is no text of sentences
PACKED = 50  # gzip makes a third of a language, a tenth of phrases; what shrinks more is a bomb
VERSION = 2  # of the index on disk


@dataclass(frozen=True)
class Lines:
    """The lines of one text: `lines[i]` is a string. `folder` is where its index lies."""

    text: np.ndarray  # (bytes,) uint8: every line with a line break behind it
    ends: np.ndarray  # (N,) int64: where each line's break is
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] + 1 if index else 0
        return self.text[start : self.ends[index]].tobytes().decode()

    @property
    def lengths(self) -> np.ndarray:
        """UTF-8 bytes of each line, (N,) int32."""
        lengths = np.empty(len(self), np.int32)
        lengths[0] = self.ends[0] + 1
        # Straight into 32 bits: numpy's diff would hold three copies of 64.
        np.subtract(self.ends[1:], self.ends[:-1], out=lengths[1:], casting="unsafe")
        return lengths - 1

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's process maps the files itself: numpy would send it their content.
        if self.folder:
            return _mapped, (self.folder,)
        return Lines, (self.text, self.ends)


def read_lines(path: Path, cache: Path | None = None) -> Lines:
    """The lines of a .txt, .txt.gz or manifest (.tsv, its column text); empty ones are left out.

    Raises UserError naming the file for one that is missing, damaged, empty or not UTF-8, and
    where the index of a large one cannot be written.
    """
    try:
        about = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if about.st_size <= (SMALL // 8 if path.suffix == ".gz" else SMALL):
        text, ends = bytearray(), _Numbers()
        for line in clean_lines(path):
            text += line.encode() + b"\n"
            ends.append(len(text) - 1)
        return _not_empty(Lines(np.frombuffer(text, np.uint8), ends.array()), path)
    folder = cache / f"{own_name(path)}.lines" if cache else path.with_name(f"{path.name}.lines")
    source = {"version": VERSION, "size": about.st_size, "modified": about.st_mtime_ns}
    if not _is_index_of(folder, source):
        print(f"indexing the lines of {path} in {folder} (once)", flush=True)
        try:
            _write_index(path, folder, source)
        except OSError as error:
            raise UserError(
                f"{folder}: the index of {path.name} cannot be written: {error.strerror}; "
                "choose another place with data.cache=FOLDER"
            ) from None
    return _not_empty(_mapped(folder), path)


def clean_lines(path: Path) -> Iterator[str]:
    """Its sentences, words parted by single spaces."""
    if path.suffix == ".tsv":
        texts = (" ".join(row["text"].split()) for _, row in read_rows(path, ["text"]))
        yield from filter(None, texts)
        return
    try:
        if path.suffix != ".gz":
            with path.open("rb") as file:
                yield from _sentences(file, path)
            return
        most = max(SMALL, PACKED * path.stat().st_size)
        with gzip.open(path) as file:
            yield from _sentences(file, path, most)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it ends early"
        raise UserError(f"{path}: cannot be read: {reason}") from None


def _sentences(file: IO[bytes], path: Path, most: float = math.inf) -> Iterator[str]:
    number = read = 0
    while line := file.readline(LONGEST + 1):
        number, read = number + 1, read + len(line)
        if read > most:
            raise UserError(f"{path}: unpacks to more than {most} bytes; is this a text?")
        if len(line) > LONGEST:
            raise UserError(f"{path}:{number}: over {LONGEST} bytes long; is this a text file?")
        try:
            # A byte-order mark may stand before the first.
            words = line.decode("utf-8-sig" if number == 1 else "utf-8").split()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: not UTF-8 text ({error.reason})") from None
        if words:
            yield " ".join(words)


class _Numbers:
    """int64 numbers, gathered in 8 bytes each."""

    def __init__(self) -> None:
        self.full: list[np.ndarray] = []
        self.last: list[int] = []

    def append(self, number: int) -> None:
        self.last.append(number)
        if len(self.last) == 1 << 16:
            self.full.append(self._packed())
            self.last = []

    def array(self) -> np.ndarray:
        return np.concatenate([*self.full, self._packed()])

    def _packed(self) -> np.ndarray:
        return np.array(self.last, dtype=np.int64)


def _write_index(path: Path, folder: Path, source: dict[str, int]) -> None:
    """Beside its place first: an index is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        ends, place = _Numbers(), 0
        with (part / "text").open("wb") as file:
            for line in clean_lines(path):
                place += file.write(line.encode() + b"\n")
                ends.append(place - 1)
        np.save(part / "ends.npy", ends.array())
        (part / "source.json").write_text(json.dumps(source))
        part.chmod(0o755)  # mkdtemp makes it private
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_index_of(folder: Path, source: dict[str, int]) -> bool:
    try:
        return json.loads((folder / "source.json").read_text()) == source
    except (OSError, ValueError):
        return False


def _mapped(folder: Path) -> Lines:
    text = folder / "text"
    content = np.memmap(text, np.uint8, "r") if text.stat().st_size else np.zeros(0, np.uint8)
    return Lines(content, np.load(folder / "ends.npy", mmap_mode="r"), folder)


def _not_empty(lines: Lines, path: Path) -> Lines:
    if not len(lines):
        raise UserError(f"{path}: holds no sentence; one a line is expected")
    return lines

"""Rows: utterances as their corpus describes them, before any check; and the faults of an import.

Every importer is a module with two functions, and convert.py makes manifests of what they give:

    recognise(source) -> bool          whether `source` has the importer's form, for format `auto`
    read(source)      -> list[Split]   its splits; UserError for what is not of this form
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asr.errors import UserError, one_line, print_line
from asr.io import atomic_write

LONG = 20.0  # seconds: data.max_seconds of the recipes
# Usual names of columns; none is a standard.
SPEAKER_KEYS = ("speaker", "speaker_id", "spk", "spk_id", "client_id", "speaker_name")
TEXT_KEYS = (
    "transcription", "text", "sentence", "transcript", "normalized_text", "raw_text",
    "normalised_text", "txt", "words", "wrd",
)  # fmt: skip
# Names of splits, as of the datasets library (datasets/data_files.py) -> that of the manifest.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "valid"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


@dataclass(slots=True)
class Row:
    """One utterance, a file or a part of it, from a line of a table."""

    file: Path
    line: int  # 0: the whole file
    id: str
    audio: str  # a path, or the name of what `load` gives
    text: str
    speaker: str = ""  # "": a speaker of this utterance alone
    seconds: str = ""  # of the whole file, which is checked
    start: float | None = None  # seconds; None: of a file that should have the length `length`
    length: float | None = None  # seconds; None: to the end
    channel: int | None = None  # counted from 0; None: all, averaged
    load: Callable[[], bytes] | None = None  # the audio file's content, where the corpus has it
    more: tuple[str, ...] = ()  # the fields of the split's columns `more`


@dataclass(slots=True)
class Fault:
    """A line of a corpus that gives no row, and why."""

    file: Path
    line: int  # 0: the whole file
    message: str


@dataclass
class Split:
    """The rows that become the manifest NAME.tsv. `rows` may be called more than once."""

    name: str
    location: Path  # the table or the folder, for messages
    root: Path  # the folder that must hold all audio
    rows: Callable[[], Iterable[Row | Fault]]
    more: tuple[str, ...] = field(default=())  # names of the columns beyond manifest.COLUMNS


def text_of(record: Mapping[str, Any], *keys: str) -> str:
    """The first value of these keys that is a text or a number, as text; "" if there is none."""
    values = (record.get(key) for key in keys)
    found = (str(value) for value in values if isinstance(value, str | int | float))
    return next((text.strip() for text in found if text.strip()), "")


def choose_text_column(columns: Iterable[str], wanted: str | None, location: Path) -> str:
    """The column of the text: `wanted`, or the first of TEXT_KEYS. UserError if there is none."""
    keys = {key_of(name): name for name in columns}
    found = [keys[key] for key in ([key_of(wanted)] if wanted else TEXT_KEYS) if key in keys]
    if not found:
        missing = f"no column {wanted}" if wanted else f"none of the columns {', '.join(TEXT_KEYS)}"
        has = ", ".join(list(keys.values())[:50]) or "none"
        raise UserError(f"{location}: {missing}; it has {has}. --text-column NAME chooses one")
    if len(found) > 1:
        others = ", ".join(found[1:])
        print_line(f"{location}: the text is column {found[0]}; --text-column: also {others}")
    return found[0]


def key_of(name: str) -> str:
    """The name of a column in lower case: `Audio Path` is audio_path."""
    return re.sub(r"[\s-]+", "_", name.strip().strip('"').lower())


def split_of(name: str) -> str:
    """The split that a name such as my-train.csv has as a word: train, valid, test; or ""."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def number_of(record: Mapping[str, Any], key: str) -> float | None:
    """A time in seconds; None where the key is missing or null. Raises ValueError for another."""
    value = record.get(key)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} is {value!r}, not a number") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{key} is {value!r}; it must be 0 or more, and finite")
    return number


SHOWN = 10  # faults; of more the counts by kind, the first, and a file with all
# What differs between faults of one kind: what is quoted or in brackets, and numbers.
_VARIABLE = re.compile(r"""(?:"[^"]*"|'(?:[^'\\]|\\.)*'|\([^)]*\)|[-+]?\d[\d.,e]*)""")


class FaultReport:
    """The faults of one split: `add` each, then `show` them on standard error."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, int, str]] = []  # file, line, message
        self.kinds: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.faults)

    @property
    def messages(self) -> list[str]:
        """A line for each fault, in the order of files and lines."""
        return [
            one_line(f"{file}:{line}: {message}" if line else f"{file}: {message}")
            for file, line, message in sorted(self.faults)
        ]

    def add(self, row: Row | Fault, message: str, path: str = "") -> None:
        """Add a fault of a row. path: of its audio, which the kind leaves out."""
        self.faults.append((str(row.file), row.line, message))
        text = message.removeprefix(f"{path}: ") if path else message
        self.kinds[_VARIABLE.sub("...", text)[:200]] += 1

    def show(self, file: Path, skipped: bool) -> None:
        """Print them. file: for all of more than SHOWN, removed where there are fewer."""
        messages = self.messages
        if len(messages) <= SHOWN:
            file.unlink(missing_ok=True)
            for line in messages:
                print(f"skipped: {line}" if skipped else line, file=sys.stderr)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, "".join(f"{line}\n" for line in messages))
        lines = [f"{len(self):,} rows are {'skipped' if skipped else 'faulty'}:"]
        lines += [f"{count:9,}  {kind}" for kind, count in self.kinds.most_common(SHOWN)]
        if len(self.kinds) > SHOWN:
            rest = sum(count for _, count in self.kinds.most_common()[SHOWN:])
            lines.append(f"{rest:9,}  of {len(self.kinds) - SHOWN} other kinds")
        lines += [f"the first {SHOWN}:", *messages[:SHOWN], f"all of them: {file}"]
        print("\n".join(lines), file=sys.stderr)

"""Own data: a table of recordings, every row of it checked before a manifest is written.

The table has a header and columns separated by tabs: `id`, `audio` and `text`, perhaps `speaker`
(otherwise every utterance is its own speaker) and `seconds` (otherwise it is measured), and any
others, which are kept. `audio` is relative to the table.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.progress import track

from asr.data.corpus import audio_field, link_audio
from asr.data.manifest import (
    COLUMNS,
    check_names,
    is_outside,
    parse_seconds,
    read_rows,
    seconds_field,
    write_rows,
)
from asr.errors import UserError, terminal
from features import AudioError
from features.audio import audio_seconds, decoded_seconds

REQUIRED = ("id", "audio", "text")
TOLERANCE = 0.1  # seconds between the table and the file


@dataclass(slots=True)
class CheckedTable:
    """The valid rows of a table by line, and the faults of the others."""

    path: Path
    root: Path  # of all audio of the valid rows
    rows: dict[int, dict[str, str]] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)

    def messages(self) -> list[str]:
        return [f"{self.path}:{line}: {self.faults[line]}" for line in sorted(self.faults)]

    def audio_path(self, row: Mapping[str, str]) -> Path:
        return _absolute(self.path.parent / row["audio"])

    def keep_part(self, hours: float) -> None:
        """Keep a random part of the valid rows, the longest of at most `hours`.

        It depends on ids and durations alone, not on the rows' order, and a shorter part is a
        subset of a longer one. Raises UserError if `hours` is not above 0 or more than there are.
        """
        total = sum(float(row["seconds"]) for row in self.rows.values()) / 3600
        if not 0 < hours <= total:
            bounds = f"it must be above 0, and the good rows have {total:.2f}"
            raise UserError(f"{self.path}: a part of {hours:g} hours; {bounds}")
        drawn = sorted(self.rows, key=lambda line: sha256(self.rows[line]["id"].encode()).digest())
        ends = accumulate(float(self.rows[line]["seconds"]) for line in drawn)
        kept = {line for line, end in zip(drawn, ends, strict=True) if end <= 3600 * hours}
        if not kept:
            raise UserError(f"{self.path}: a part of {hours:g} hours is too short for one row")
        self.rows = {line: row for line, row in self.rows.items() if line in kept}


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 (resolve follows links)


def check(
    table: str | Path,
    audio: str | Path | None = None,
    headers_only: bool = False,
    max_seconds: float | None = None,
) -> CheckedTable:
    """Check every row and every audio file; faults are in the result.

    audio: the folder that must hold all audio, by default the table's. Every file is decoded to its
    end, unless `headers_only`: then truncated files pass. Raises UserError for an unreadable table.
    """
    table = Path(table)
    checked = CheckedTable(table, Path(audio) if audio else table.parent)
    first: dict[str, int] = {}
    for line, row in read_rows(table, REQUIRED, checked.faults):
        if fault := _fault(row, first.setdefault(row["id"], line), line, checked):
            checked.faults[line] = fault
        else:
            checked.rows[line] = row
    _measure(checked, headers_only, max_seconds)
    return checked


def _fault(row: Mapping[str, str], first: int, line: int, checked: CheckedTable) -> str | None:
    """What is wrong with a row before its audio is opened; first: the line of its id."""
    if not row["id"]:
        return "the id is empty"
    if first != line:
        return f"id {row['id']!r} is already in line {first}"
    if not row["audio"]:
        return "no audio file is given"
    if not row["text"]:
        return "the text is empty"
    if is_outside(str(checked.audio_path(row)), checked.root):
        return f"audio {row['audio']!r} is outside {checked.root}; --audio names another folder"
    try:
        check_names(row["id"], row.get("speaker", ""))
        if row.get("seconds"):
            parse_seconds(row["seconds"])
    except ValueError as error:
        return str(error)
    return None


def _measure(checked: CheckedTable, headers_only: bool, max_seconds: float | None) -> None:
    """Open every file; its duration goes into its row, or its fault replaces the row."""

    def measure(row: Mapping[str, str]) -> float | str:
        try:
            path = checked.audio_path(row)
            seconds = audio_seconds(path) if headers_only else decoded_seconds(path, max_seconds)
            seconds_field(seconds)
        except (AudioError, ValueError) as error:
            return str(error)
        if max_seconds is not None and seconds > max_seconds:
            return f"{seconds:.2f} seconds long, over the limit of {max_seconds:g}"
        if row.get("seconds") and abs(float(row["seconds"]) - seconds) > TOLERANCE:
            return f"seconds is {row['seconds']}, but the file has {seconds:.3f}"
        return seconds

    rows, console = checked.rows, Console(file=terminal(sys.stderr))
    # Threads, since the decoder releases the interpreter.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        measured, title = pool.map(measure, rows.values()), f"checking {checked.path.name}"
        hidden = not console.is_terminal
        results = track(measured, title, len(rows), console=console, disable=hidden)
        for line, result in zip(list(rows), results, strict=True):
            if isinstance(result, str):
                checked.faults[line] = result
            else:
                rows[line]["seconds"] = seconds_field(result)
    for line in checked.faults:
        rows.pop(line, None)


def write(checked: CheckedTable, to: str | Path, case: str = "as-is") -> Path:
    """Write the valid rows to a manifest of the table's name in the folder `to` -> its path.

    If the audio is not below `to`, NAME.audio becomes a link to its folder. case: as-is, upper or
    lower. Raises UserError if no row is valid, and if the manifest would be the table itself.
    """
    manifest = Path(to) / checked.path.with_suffix(".tsv").name
    if not checked.rows:
        raise UserError(f"{checked.path}: no row is good, nothing is written")
    if manifest.resolve() == checked.path.resolve():
        raise UserError(f"{manifest}: is the table itself; give --to another folder")
    link = link_audio(manifest, checked.root)
    extra = [name for name in next(iter(checked.rows.values())) if name not in COLUMNS]

    def fields() -> Iterator[list[str]]:
        change_case = {"as-is": str, "upper": str.upper, "lower": str.lower}[case]
        for row in checked.rows.values():
            below = checked.audio_path(row).relative_to(_absolute(checked.root))
            audio, speaker = audio_field(link / below, manifest), row.get("speaker") or row["id"]
            own = [row["id"], speaker, audio, row["seconds"], change_case(row["text"])]
            yield own + [row[name] for name in extra]

    write_rows(manifest, (*COLUMNS, *extra), fields())
    return manifest

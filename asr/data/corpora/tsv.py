"""Own data: a table of recordings, every row of it checked before a manifest is written.

The table has a header and columns parted by tabs: `id`, `audio` and `text`, perhaps `speaker`
(else every utterance is its own speaker) and `seconds` (else it is measured), and any others, which
are kept. `audio` is relative to the table.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.progress import track

from asr.data.corpus import audio_field, link_audio
from asr.data.manifest import COLUMNS, leaves, parse_seconds, seconds_field
from asr.data.table import read_rows, write_rows
from asr.errors import UserError
from features.audio import audio_seconds, decoded_seconds
from features.samples import AudioError

REQUIRED = ("id", "audio", "text")
TOLERANCE = 0.1  # seconds between the table and the file


@dataclass(slots=True)
class Checked:
    """A table's rows that are good, by line, and what is wrong with the others."""

    path: Path
    root: Path  # below it lies all audio of the good rows
    rows: dict[int, dict[str, str]] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)

    def messages(self) -> list[str]:
        return [f"{self.path}:{line}: {self.faults[line]}" for line in sorted(self.faults)]

    def keep_part(self, hours: float) -> None:
        """Leaves a random part of the good rows, the longest that is not above `hours`.

        Whether a row is in it hangs on its id and the lengths alone: the same part on every
        machine, whatever the rows' order, and a shorter part lies within a longer one.
        Raises UserError where `hours` is not above 0 or there is not so much.
        """
        whole = sum(float(row["seconds"]) for row in self.rows.values()) / 3600
        if not 0 < hours <= whole:
            raise UserError(
                f"{self.path}: a part of {hours:g} hours; it must be above 0, and the good rows "
                f"have {whole:.2f}"
            )
        drawn = sorted(self.rows, key=lambda line: _draw(self.rows[line]["id"]))
        ends = accumulate(float(self.rows[line]["seconds"]) for line in drawn)
        kept = {line for line, end in zip(drawn, ends, strict=True) if end <= 3600 * hours}
        if not kept:
            raise UserError(f"{self.path}: a part of {hours:g} hours is too short for one row")
        self.rows = {line: row for line, row in self.rows.items() if line in kept}


def _draw(name: str) -> bytes:
    """A place in an order that is random to anyone but a hash."""
    return hashlib.sha256(name.encode()).digest()


def check(
    table: str | Path,
    audio: str | Path | None = None,
    headers_only: bool = False,
    max_seconds: float | None = None,
) -> Checked:
    """Looks at every row and every file.

    `audio` is the folder that all audio must lie in, by default the table's own. Every file is
    decoded to its end, unless `headers_only`: then a file that breaks off midway passes.
    Raises UserError where the table itself cannot be read; all else is in the result.
    """
    table = Path(table)
    checked = Checked(table, Path(audio) if audio else table.parent)
    first: dict[str, int] = {}
    for line, row in read_rows(table, REQUIRED, checked.faults):
        fault = _fault(row, first.setdefault(row["id"], line), line, checked)
        if fault:
            checked.faults[line] = fault
        else:
            checked.rows[line] = row
    _measure(checked, headers_only, max_seconds)
    return checked


def _fault(row: Mapping[str, str], first: int, line: int, checked: Checked) -> str | None:
    """What is wrong with a row by its own words, before its file is opened."""
    if not row["id"]:
        return "the id is empty"
    if first != line:
        return f"id {row['id']!r} stands in line {first} already"
    if not row["audio"]:
        return "no audio file is named"
    if not row["text"]:
        return "the text is empty"
    if leaves(str(_place(row, checked)), checked.root):
        return f"audio {row['audio']!r} lies outside {checked.root}; --audio names another folder"
    return _duration_fault(row.get("seconds", ""))


def _duration_fault(seconds: str) -> str | None:
    if not seconds:
        return None
    try:
        parse_seconds(seconds)
    except ValueError as error:
        return str(error)
    return None


def _place(row: Mapping[str, str], checked: Checked) -> Path:
    return _absolute(checked.path.parent / row["audio"])


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 (resolve follows links)


def _measure(checked: Checked, headers_only: bool, max_seconds: float | None) -> None:
    """Opens every file; puts the measured length into its row, or the row among the faults."""

    def look(row: Mapping[str, str]) -> float | str:
        try:
            place = _place(row, checked)
            found = audio_seconds(place) if headers_only else decoded_seconds(place, max_seconds)
            seconds_field(found)
        except (AudioError, ValueError) as error:
            return str(error)
        if max_seconds is not None and found > max_seconds:
            return f"{found:.2f} seconds long, over the limit of {max_seconds:g}"
        if row.get("seconds") and abs(float(row["seconds"]) - found) > TOLERANCE:
            return f"seconds is {row['seconds']}, but the file has {found:.3f}"
        return found

    rows, console = checked.rows, Console(stderr=True)
    # Threads, since the decoder lets go of the interpreter.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        looks = track(
            pool.map(look, rows.values()),
            f"checking {checked.path.name}",
            len(rows),
            console=console,
            disable=not console.is_terminal,
        )
        for line, found in zip(list(rows), looks, strict=True):
            if isinstance(found, str):
                checked.faults[line] = found
            else:
                rows[line]["seconds"] = seconds_field(found)
    for line in checked.faults:
        rows.pop(line, None)


def write(checked: Checked, to: str | Path, case: str = "as-is") -> Path:
    """Writes the good rows to a manifest of the table's name in the folder `to`.

    Where the audio does not lie below `to`, a link NAME.audio to its folder is made there.
    `case` is as-is, upper or lower. Raises UserError where no row is good, and where the manifest
    would be the table itself.
    """
    manifest = Path(to) / checked.path.with_suffix(".tsv").name
    if not checked.rows:
        raise UserError(f"{checked.path}: no row is good, nothing is written")
    if manifest.resolve() == checked.path.resolve():
        raise UserError(f"{manifest}: is the table itself; give --to another folder")
    shown = link_audio(manifest, checked.root)
    extra = [name for name in next(iter(checked.rows.values())) if name not in COLUMNS]
    write_rows(manifest, (*COLUMNS, *extra), _rows(checked, manifest, shown, case, extra))
    return manifest


def _rows(
    checked: Checked, manifest: Path, shown: Path, case: str, extra: Iterable[str]
) -> Iterator[list[str]]:
    turn = {"as-is": str, "upper": str.upper, "lower": str.lower}[case]
    for row in checked.rows.values():
        below = _place(row, checked).relative_to(_absolute(checked.root))
        audio = audio_field(shown / below, manifest)
        speaker = row.get("speaker") or row["id"]
        yield [
            row["id"],
            speaker,
            audio,
            row["seconds"],
            turn(row["text"]),
            *(row[name] for name in extra),
        ]

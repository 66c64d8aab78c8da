"""The faults of an import: all of few; of many the counts by kind, the first, and a file."""

import re
import sys
from collections import Counter
from pathlib import Path

from asr.data.importers.rows import Fault, Row
from asr.errors import one_line
from asr.io import atomic_write

SHOWN = 10
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

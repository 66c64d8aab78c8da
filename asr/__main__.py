"""List the commands, from the first line of their files: python -m asr"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from asr.errors import UserError, run_command

CALL = "python -m asr."


def main() -> None:
    """Print the commands. UserError where one is called as an argument."""
    lines = dict(commands())
    if len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help"):
        name = sys.argv[1]
        remedy = f"use {CALL}{name} ..." if name in lines else "python -m asr lists them"
        raise UserError(f"{name[:80]!r}: a command is called with a dot; {remedy}")
    print(*lines.values(), "Each has --help.", sep="\n")


def commands() -> Iterator[tuple[str, str]]:
    """Name, purpose and usage of every command, without importing it."""
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        purpose, call, usage = docstring.partition("\n")[0].partition(f"{CALL}{path.stem} ")
        if call:
            yield path.stem, f"{purpose.rstrip(' :')}\n    {call}{usage}"


if __name__ == "__main__":
    run_command(main)

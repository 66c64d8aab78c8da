"""The commands, told from the first line of their files: python -m asr"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CALL = "python -m asr."


def main() -> int:
    """Lists the commands; 2 where one is asked for by an argument."""
    told = dict(commands())
    if len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help"):
        name = sys.argv[1]
        remedy = f"say {CALL}{name} ..." if name in told else "python -m asr alone lists them"
        print(f"error: {name}: a command is called with a dot; {remedy}", file=sys.stderr)
        return 2
    print(*told.values(), "Each has --help.", sep="\n")
    return 0


def commands() -> Iterator[tuple[str, str]]:
    """Name, purpose and usage of every command; none is imported."""
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        purpose, call, usage = told.partition("\n")[0].partition(f"{CALL}{path.stem} ")
        if call:
            yield path.stem, f"{purpose.rstrip(' :')}\n    {call}{usage}"


if __name__ == "__main__":
    sys.exit(main())

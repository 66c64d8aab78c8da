"""All commands: layernorm-asr COMMAND ..., python -m asr COMMAND ...; without COMMAND, their list.

python -m asr.COMMAND is the same.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import asr
from asr.arguments import EXAMPLES, call_of
from asr.errors import UserError, run_command


def console() -> None:
    """Run the console command `layernorm-asr`."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        from asr.completion import complete

        complete()
    run_command(main)


def main() -> int | None:
    """Run the command that the first argument names, or print the version or all commands."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(*listing(), sep="\n")
        return 0
    if name == "--version":
        print(f"layernorm-asr {asr.__version__}")
        return 0
    names = [name for group in EXAMPLES.values() for name in group]
    if name not in names:
        near = difflib.get_close_matches(name[:80], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(names)}"
        raise UserError(f"{name[:80]!r} is not a command; {hint}")
    del sys.argv[1]
    return importlib.import_module(f"asr.{name}").main()


def listing() -> Iterator[str]:
    """The help text: each command with its purpose and an example, by task."""
    yield f"usage: {call_of('COMMAND')} ...     each command has --help"
    for task, commands in EXAMPLES.items():
        yield f"\n{task}:"
        for name, example in commands.items():
            yield f"  {name:<11} {purpose(name)}"
            yield f"  {'':<11} {call_of(name)} {example}"


def purpose(name: str) -> str:
    """The purpose of a command, from the first line of its file, without importing it."""
    with Path(__file__).with_name(f"{name}.py").open(encoding="utf-8") as file:
        return file.readline().strip('"\n').partition(" python -m ")[0].rstrip(":")


if __name__ == "__main__":
    run_command(main)

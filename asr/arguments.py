"""Arguments of commands; every mistake in them is one line.

Imports nothing that takes time, so that --help is fast.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from asr.errors import UserError
from asr.shipped import find_run

LONGEST = 300  # characters of a message, since it may quote an argument of any length

# Task -> command -> an example of its arguments.
EXAMPLES = {
    "Data": {"prepare": "table my/train.tsv --to data/own"},
    "Training": {
        "train": "demo model.listener.norm=none run=plain",
        "sweep": "demo model.listener.norm=none,ba seed=1,2,3 --out runs/norms",
        "recipe": "demo",
    },
    "Measuring": {
        "evaluate": "runs/demo --split test",
        "compare": "runs/norms",
    },
    "Using a model": {
        "transcribe": "conformer my.wav other.mp3",
        "export": "runs/demo --to shared/demo",
        "prune": "runs/demo_transformer --to runs/shallow --encoder 3",
    },
}
MODULES = "python -m asr."
RECIPE_KEY_FLAG = re.compile(r"^unrecognized arguments: .*?(--(\w+(?:\.\w+)+|seed)\b)")
CONSOLE = "layernorm-asr"


def call_of(command: str) -> str:
    """The call of a command as the user types it: `layernorm-asr train`, `python -m asr.train`."""
    is_console = Path(sys.argv[0]).name == CONSOLE
    return f"{CONSOLE} {command}" if is_console else f"{MODULES}{command}"


class Completing(Exception):
    """Ends a command when the shell only completes its arguments."""

    def __init__(self, parser: "CommandParser") -> None:
        self.parser = parser


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses empty values, repeated flags and abbreviated flags.

    prog: `python -m asr.COMMAND`. The help of a command ends with its example. While `completing`,
    parsing raises Completing.
    """

    completing = False

    def __init__(self, prog: str, **options: object) -> None:
        _, module, self.command = prog.partition(MODULES)
        super().__init__(
            prog=call_of(self.command) if module else prog, allow_abbrev=False, **options
        )
        for name in (None, "store"):
            self.register("action", name, StoreOnce)
        self.register("type", None, not_empty)
        self.register("type", Path, _path)

    def add_overrides(self) -> None:
        """Add `overrides`: keys of the recipe with values."""
        self.add_argument("overrides", nargs="*", metavar="key.path=value")

    def parse(self) -> argparse.Namespace:
        """Parse the command line; flags may be anywhere in it."""
        if self.completing:
            raise Completing(self)
        args = self.parse_intermixed_args()
        if overrides := getattr(args, "overrides", None):
            args.overrides = last_of_each(overrides)
        return args

    def parse_args(self, *args: Any, **options: Any) -> argparse.Namespace:
        """Parse a command line with subcommands, as argparse does."""
        if self.completing:
            raise Completing(self)
        return super().parse_args(*args, **options)

    def format_help(self) -> str:
        """The help text with the example."""
        examples = [group[self.command] for group in EXAMPLES.values() if self.command in group]
        lines = [f"\nexample:\n  {self.prog} {example}\n" for example in examples]
        return "".join([super().format_help(), *lines])

    def error(self, message: str) -> NoReturn:
        """Raise UserError, without the usage lines."""
        # parse_intermixed_args lists them as required.
        message = message.replace(", key.path=value", "")[:LONGEST]
        if dashed := RECIPE_KEY_FLAG.search(message):
            raise UserError(f"{dashed[1]}: drop the --: keys of a recipe are {dashed[2]}=VALUE")
        raise UserError(f"{message}; {self.prog} --help lists the arguments")


class StoreOnce(argparse.Action):
    is_set = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string and self.is_set:
            raise argparse.ArgumentError(self, "given twice")
        self.is_set = True
        setattr(namespace, self.dest, values)


def key_of(override: str) -> str:
    """The key of an override `key.path=value`."""
    return override.partition("=")[0].strip()


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """The last override of every key, with a note on each that a later one replaces.

    Scripts add keys after those of a base command.
    """
    last = {key_of(text): text for text in overrides}
    for text in overrides:
        if text != (kept := last[key_of(text)]):
            print(f"note: {kept[:LONGEST]} replaces {text[:LONGEST]}", file=sys.stderr)
    return list(last.values())


# Types of arguments, for argparse.


def not_empty(text: str) -> str:
    """Any text that is not empty: an empty path would be the working directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _path(text: str) -> Path:
    return Path(not_empty(text))


def run_folder(text: str) -> Path:
    """The folder of a run; a name can stand for a shipped run."""
    return find_run(_path(text))


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def _whole(text: str, low: int) -> int:
    # int() raises ValueError for more than 4,300 digits.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) >= low):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {low} up")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be above 0, and finite")
    return number


def share(text: str) -> float:
    """A number between 0 and 1, both excluded."""
    if (number := above_zero(text)) >= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be below 1")
    return number

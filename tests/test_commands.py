"""The list of `python -m asr`, against the files that are commands."""

import subprocess
import sys
from pathlib import Path

import pytest

import asr.__main__ as listing
from asr.__main__ import commands

PACKAGE = Path(listing.__file__).parent


def test_every_file_that_can_be_called_is_listed():
    files = {
        path.stem
        for path in PACKAGE.glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    }
    assert {name for name, _ in commands()} == files - {"__main__"} >= {"train", "compare"}


def test_the_list_is_printed():
    shown = subprocess.run(
        [sys.executable, "-m", "asr"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Train a recipe\n    python -m asr.train RECIPE.yaml" in shown.stdout


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("train", "use python -m asr.train"), ("x", "lists them"), ("\x1b[2J" * 99, "lists them")],
)
def test_a_command_as_an_argument_is_one_line(name, remedy, commands):
    assert remedy in (line := commands.refused(listing, name, "recipes/demo.yaml"))
    assert line.isprintable() and len(line) < 250

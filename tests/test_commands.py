"""What `python -m asr` lists, against the files that can be called."""

import subprocess
import sys
from pathlib import Path

import pytest

import asr.__main__ as listing
from asr.__main__ import commands

ROOM = Path(listing.__file__).parent


def test_every_file_that_can_be_called_is_listed():
    callable_ones = {
        path.stem
        for path in ROOM.glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    }
    assert {name for name, _ in commands()} == callable_ones - {"__main__"} >= {"train", "compare"}


def test_the_list_is_what_one_sees():
    shown = subprocess.run(
        [sys.executable, "-m", "asr"], cwd=ROOM.parent, capture_output=True, text=True, check=True
    )
    assert "Train a recipe\n    python -m asr.train RECIPE.yaml" in shown.stdout


@pytest.mark.parametrize(("name", "remedy"), [("train", "say python -m asr.train"), ("x", "alone")])
def test_a_command_as_an_argument_is_one_line(name, remedy, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["asr", name, "recipes/demo.yaml"])
    assert listing.main() == 2
    said = capsys.readouterr()
    assert remedy in said.err and said.err.count("\n") == 1 and not said.out

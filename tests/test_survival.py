"""A few kills and a few damaged files, by the benchmarks that do hundreds of each."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            ["kills.py", "--kills", "1", "--saves", "1", "--stops", "1"],
            "curves differ in 0",
        ),
        (["fuzz.py", "--recipes", "20", "--files", "12", "--clock", "100"], "32 cases, 0 wrong"),
    ],
    ids=["kills", "fuzz"],
)
def test_nothing_is_lost(line, expected):
    command = [sys.executable, BENCHMARKS / line[0], *line[1:]]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].endswith(expected)

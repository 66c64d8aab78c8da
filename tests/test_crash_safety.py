"""One kill, one signal and some hostile inputs, by benchmarks/kills.py and benchmarks/fuzz.py."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
LINES = {
    "kills": ["--kills", "0", "--saves", "1", "--stops", "1", "--torchrun", "0"],
    "fuzz": ["--cases", "16"],
}
# Both in one process, whose imports take longer than the cases.
SCRIPT = """
import importlib, sys
for name, line in {LINES}.items():
    sys.argv = [name, *line]
    code = importlib.import_module(name).main()
    print(f"{{name}} ends with {{code}}", flush=True)
"""


@pytest.fixture(scope="module")
def output():
    """The output of both."""
    command = [sys.executable, "-c", SCRIPT.format(LINES=LINES)]
    ended = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kills", "final weights, moments, position and curves are wrong in 0"),
        ("fuzz", "18 cases, 0 wrong"),
    ],
)
def test_nothing_is_lost_or_half_written(name, line, output):
    assert f"{line}\n{name} ends with 0\n" in output, output

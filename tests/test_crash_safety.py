"""One kill in a save and one signal, by benchmarks/kills.py."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parent / "benchmarks"


def test_nothing_is_lost_or_half_written():
    line = [sys.executable, "kills.py", "--kills=0", "--saves=1", "--stops=1", "--torchrun=0"]
    ended = subprocess.run(line, cwd=BENCHMARKS, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "final weights, moments, position and curves are wrong in 0\n" in ended.stdout

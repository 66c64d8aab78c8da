"""Memory over many steps: tests/benchmarks/flat_memory.py measures it, this holds its two means."""

import os
import subprocess
import sys
from pathlib import Path

GROWN = """
import os, sys
from asr.training.flat import bound_caches
if sys.argv[1] != "unbound":
    bound_caches(rounded=sys.argv[1] == "rounded")
import torch
from torch import nn
torch.set_num_threads(1)
def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
layer = nn.Conv1d(3, 16, 11, padding=5)
for length in range(100, 200):
    layer(torch.ones(2, 3, length))
before = held()
for length in range(200, 900):
    layer(torch.ones(2, 3, length))
print(held() - before)
"""
RINGS = """
import gc, os, torch
from asr.training.flat import give_back
gc.disable()
def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = held()
for _ in range(300):
    ring = [[bytearray(1000) for _ in range(100)]]
    ring.append(ring)
ring = None
full = held()
give_back()
print(full - before, held() - before)
"""


def ask(script, *arguments):
    """What it prints, as numbers, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    line = [sys.executable, "-c", script, *arguments]
    root = Path(__file__).parent.parent
    said = subprocess.run(line, cwd=root, env=clean, capture_output=True, text=True, check=True)
    return list(map(int, said.stdout.split()))


def test_convolutions_of_seven_hundred_lengths_cost_little():
    (bound,), (unbound,), (rounded,) = (ask(GROWN, how) for how in ("bound", "unbound", "rounded"))
    assert unbound > 15e6, "the caches that are to be bound keep nothing here"
    assert bound < 0.3 * unbound
    assert rounded > 0.9 * unbound  # all are kept where they come back


def test_rings_of_objects_are_given_back():
    taken, left = ask(RINGS)
    assert taken > 25e6 and left < 0.2 * taken

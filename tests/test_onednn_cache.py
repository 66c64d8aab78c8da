"""Bounded memory over many steps: the oneDNN cache limit and garbage collection.

tests/benchmarks/memory_growth.py measures the effect on a whole training.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

GROWN = """
import os
import torch
from torch import nn
from asr.training.oom import SHAPES, SHAPES_ROUNDED, limit_onednn_cache
def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def grown():
    torch.set_num_threads(1)
    layer = nn.Conv1d(3, 16, 11, padding=5)
    for length in range(100, 200):
        layer(torch.ones(2, 3, length))
    before = held()
    for length in range(200, 500):
        layer(torch.ones(2, 3, length))
    return held() - before
for shapes in (SHAPES, None, SHAPES_ROUNDED):
    if not os.fork():  # the limit is read once in a process
        if shapes:
            limit_onednn_cache(shapes)
        print(grown(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
RINGS = """
import gc, os, torch
from asr.training.oom import release_memory
gc.disable()
def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = held()
for _ in range(300):
    ring = [[bytearray(1000) for _ in range(100)]]
    ring.append(ring)
ring = None
full = held()
release_memory()
print(full - before, held() - before)
"""


def ask(script):
    """The numbers that a script prints in a separate process."""
    clean = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    line = [sys.executable, "-c", script]
    finished = subprocess.run(line, env=clean, capture_output=True, text=True, check=True)
    return list(map(int, finished.stdout.split()))


def test_convolutions_of_three_hundred_lengths_need_little_memory():
    bound, unbound, rounded = ask(GROWN)
    assert unbound > 6e6, "the caches that are to be bound keep nothing here"
    assert bound < 0.3 * unbound
    assert rounded > 0.7 * unbound  # all are cached when the lengths repeat


def test_reference_cycles_are_collected():
    taken, left = ask(RINGS)
    assert taken > 25e6 and left < 0.2 * taken

"""What the C++ kernels alone can get wrong: work dealt out, memory used again, what is loaded."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from test_lstm_backends import NORMS, gradients, make, start_of
from test_lstm_choice import CPU

from asr.nn.kernels.cpu import build
from asr.nn.kernels.cpu.buffers import Lease, Pool
from asr.nn.kernels.cpu.library import has_bf16

pytestmark = CPU
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("norm", "threads"), [("ba", 1), *((norm, 5) for norm in NORMS)])
def test_many_ragged_utterances_in_several_threads_are_the_references(norm, threads):
    """More rows than the backward pass takes at once, in more than one worker's share."""
    B, T = 23, 61
    judge, ours = (make(norm, backend, gain=0.3).double() for backend in ("reference", "cpu"))
    x = torch.randn(B, T, 3, dtype=torch.float64, requires_grad=True)
    lengths = torch.randint(1, T + 1, (B,)).tolist()
    start, before, found = start_of(judge, B), torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for lstm in (judge, ours):
            output, state = lstm(x, lengths, tuple(start))
            found.append([output, *state, *gradients((output, *state), (x, *lstm.parameters()))])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=1e-10)


@pytest.mark.skipif(not has_bf16(), reason="this processor multiplies no bf16")
def test_bf16_is_not_left_out():
    exact, half = (make("ba", "cpu", size=(13, 37), precision=p) for p in ("fp32", "bf16"))
    x = torch.randn(5, 11, 13, requires_grad=True)
    outputs = exact(x)[0], half(x)[0]
    assert not torch.equal(*outputs)
    found = [gradients([y], [x])[0] for y in (half(x)[0], outputs[1], outputs[0])]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_what_dies_is_given_back_without_waiting():
    """Garbage may be collected, and a graph die, in a thread that holds the pool's lock."""
    pool = Pool()
    buffer = pool.take(7, torch.float32)
    with pool._lock:
        giving = threading.Thread(target=pool.give, args=(buffer,), daemon=True)
        giving.start()
        giving.join(20)
        assert not giving.is_alive()
    assert pool.lent() == 0
    assert pool.take(7, torch.float32) is buffer


def test_the_pool_keeps_no_more_than_was_lent_at_once():
    pool = Pool()
    for count in (64, 640, 6400):
        pool.give(pool.take(count, torch.float32))
    pool.lent()
    assert sum(b.nbytes for b in pool._free) == pool._most


def test_memory_that_ends_in_the_middle_of_a_lease_is_given_back(monkeypatch):
    pool = Pool()
    monkeypatch.setattr("asr.nn.kernels.cpu.buffers.POOL", pool)
    with pytest.raises(RuntimeError):
        Lease(torch.float32, ah=7, raw=1 << 60)
    assert pool.lent() == 0


COMPILED = """
import torch
from asr.nn.lstm import LayerNormLSTM

torch.manual_seed(1)
lstm, x = LayerNormLSTM(3, 7, 2, True, backend="cpu"), torch.randn(2, 5, 3)
found = []
for called in (lstm, torch.compile(lstm, backend="eager")):
    output = called(x)[0]
    found.append([output, *torch.autograd.grad(output.sin().sum(), list(lstm.parameters()))])
assert all(map(torch.equal, *found))
"""


def test_torch_compile_leaves_the_kernels_alone():
    """In a process of its own: torch.compile starts threads, after which no test may fork."""
    subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, check=True, timeout=300)


def test_a_temporary_folder_of_another_is_not_used(tmp_path, monkeypatch):
    """What lies in the cache is run."""
    own = tmp_path / "own"
    assert build._own_folder(own).stat().st_mode & 0o777 == 0o700
    assert build._own_folder(own) == own
    own.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for folder in (own, tmp_path / "link"):
        with pytest.raises((RuntimeError, OSError)):
            build._own_folder(folder)
    own.chmod(0o700)
    monkeypatch.setattr("os.getuid", lambda: own.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="not ours alone; set LAYERNORM_LSTM_CACHE"):
        build._own_folder(own)

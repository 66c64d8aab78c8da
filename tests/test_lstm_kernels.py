"""Specific to the C++ kernels: sharing of work, reuse of memory, and loading."""

import threading

import pytest
import torch
from reference_lstm import NORMS
from test_lstm_backends import gradients, make, start_of
from test_lstm_choice import CPU

from asr.kernels.cpu import compiler
from asr.kernels.cpu.library import BufferPool

pytestmark = CPU


MANY = [*NORMS, "joined carried", "ba state", "per_gate state hidden"]


@pytest.mark.parametrize(("norm", "threads"), [("ba", 1), *((norm, 5) for norm in MANY)])
def test_many_ragged_utterances_in_several_threads_match_the_reference(norm, threads):
    """More rows than the backward pass processes at once, over more than one worker."""
    B, T = 23, 61
    judge, ours = (make(norm, backend, gain=0.3).double() for backend in ("reference", "cpu"))
    x = torch.randn(B, T, 3, dtype=torch.float64, requires_grad=True)
    lengths = torch.randint(1, T + 1, (B,)).tolist()
    start, before, results = start_of(judge, B), torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for lstm in (judge, ours):
            output, state = lstm(x, tuple(start), lengths=lengths)
            results.append([output, *state, *gradients((output, *state), (x, *lstm.parameters()))])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(results[1], results[0], atol=1e-10, rtol=1e-10)


def test_freed_buffers_return_to_the_pool_without_waiting():
    """A graph may be garbage-collected in a thread that holds the pool's lock."""
    pool = BufferPool()
    buffer = pool.take(7, torch.float32)
    with pool._lock:
        giving = threading.Thread(target=pool.give, args=(buffer,), daemon=True)
        giving.start()
        giving.join(20)
        assert not giving.is_alive()
    assert pool.lent() == 0
    assert pool.take(7, torch.float32) is buffer


def test_a_temporary_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    """Libraries in the cache are executed."""
    own = tmp_path / "own"
    assert compiler._own_folder(own).stat().st_mode & 0o777 == 0o700
    assert compiler._own_folder(own) == own
    own.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for folder in (own, tmp_path / "link"):
        with pytest.raises((RuntimeError, OSError)):
            compiler._own_folder(folder)
    own.chmod(0o700)
    monkeypatch.setattr("os.getuid", lambda: own.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="not ours alone; set LAYERNORM_LSTM_CACHE"):
        compiler._own_folder(own)

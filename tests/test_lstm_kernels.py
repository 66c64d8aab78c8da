"""Specific to the C++ kernels: sharing of work, reuse of memory, and loading."""

import threading
import weakref

import pytest
import torch
from reference_lstm import NORMS
from test_decoder_kernel import SIZES, drawn, speller
from test_lstm_backends import gradients, make, start_of
from test_lstm_choice import CPU
from torch.utils.checkpoint import checkpoint

from asr.kernels import python
from asr.kernels.cpu import compiler
from asr.kernels.cpu.library import POOL, BufferPool, pooled
from asr.nn.attention import Memory
from asr.nn.lstm import LayerNormLSTMCell

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


def test_backward_returns_the_memory_of_a_graph_whose_loss_is_kept():
    lstm, before = make("ba", "cpu"), POOL.lent()
    loss = lstm(torch.randn(2, 5, 3))[0].sum()
    assert POOL.lent() > before
    loss.backward()
    assert POOL.lent() == before


def test_backward_frees_what_the_python_backend_saved(monkeypatch):
    lstm, run, saved = make("ba", "python"), python._run, []

    def remember(*arguments):
        result = run(*arguments)
        saved.append(weakref.ref(result[2].gates))
        return result

    monkeypatch.setattr(python, "_run", remember)
    loss = lstm(torch.randn(2, 5, 3))[0].sum()
    assert saved[0]() is not None
    loss.backward()
    assert saved[0]() is None


def test_backward_returns_the_memory_of_a_decoder_whose_loss_is_kept():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    before = POOL.lent()
    loss = ours.run_sequence(Memory(states, valid), tokens)[0].sum()
    assert POOL.lent() > before
    loss.backward()
    assert POOL.lent() == before


def test_checkpointing_lends_nothing_and_changes_nothing():
    """Two layers: the second must not get memory that the first still reads."""
    judge, ours = (make("ba", backend, layers=2).double() for backend in ("reference", "cpu"))
    assert pooled(torch.float64, one=7)["one"].shape == (7,)  # the sizes of both passes must agree
    x, before = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True), POOL.lent()
    output, state = checkpoint(ours, x, use_reentrant=False)
    assert POOL.lent() == before
    found = gradients((output, *state), (x, *ours.parameters()))
    assert POOL.lent() == before
    output, state = judge(x)
    expected = gradients((output, *state), (x, *judge.parameters()))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_checkpointing_changes_nothing_on_the_python_backend():
    """Whose backward pass may ask for its saved tensors only once."""
    judge, ours = (make("ba", backend).double() for backend in ("reference", "python"))
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    output, state = checkpoint(ours, x, use_reentrant=False)
    found = gradients((output, *state), (x, *ours.parameters()))
    output, state = judge(x)
    expected = gradients((output, *state), (x, *judge.parameters()))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_a_default_device_changes_nothing():
    lstm, x = make("ba", "cpu", layers=2, dropout=0.3), torch.randn(3, 5, 3)
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(1)
        with torch.device(device):
            output, state = lstm(x, lengths=[5, 2, 3])
            total = output.square().sum() + state[1].sum()
            results.append([output, *torch.autograd.grad(total, list(lstm.parameters()))])
    torch.testing.assert_close(*results, atol=0, rtol=0)


WRONG_WEIGHTS = {
    r"gain_hh has shape \(\); expected \(28,\)": torch.tensor(0.5),
    "gain_hh is torch.float64 on cpu; expected torch.float32 on cpu": torch.ones(28).double(),
    "gain_hh is missing": None,
}


@pytest.mark.parametrize("message", WRONG_WEIGHTS)
def test_a_weight_that_does_not_fit_is_reported(message):
    """C++ would read beyond its end."""
    lstm, cell, weight = make("ba", "cpu"), LayerNormLSTMCell(3, 7), WRONG_WEIGHTS[message]
    new = weight if weight is None else torch.nn.Parameter(weight)
    lstm.gain_hh_l0 = cell.gain_hh = new
    with pytest.raises(ValueError, match=message):
        lstm(torch.randn(2, 5, 3))
    if weight is not None:
        with pytest.raises(ValueError, match=message.replace("gain_hh", "gain_h")):
            cell(torch.randn(2, 3))


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

"""When an attention step runs in C++; results do not depend on the number of threads."""

import copy

import pytest
import torch
from test_attention_kernel import KINDS, SIZES, all_of, drawn, make

from asr.errors import UserError
from asr.kernels import dispatch
from asr.kernels.cpu import compiler
from asr.nn.attention import AttentionState, Memory

pytestmark = pytest.mark.skipif(
    compiler.obstacle() is not None, reason=f"no kernels: {compiler.obstacle()}"
)


@pytest.fixture(autouse=True)
def choice_of_this_test():
    """Backends are chosen once in a process, and tests replace them."""
    dispatch.choose_backend.cache_clear()
    yield
    dispatch.choose_backend.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(all_of(make(kind, SIZES[2]), *drawn(SIZES[2])))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-12, rtol=1e-12)


def test_uncovered_cases_use_torch_operators(monkeypatch):
    called = []
    cpu = dispatch.BACKENDS["cpu"]._replace(attend=lambda *given: called.append(given))
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", cpu)
    sizes, (inputs, valid) = SIZES[0], drawn(SIZES[0], torch.float32)
    module = make("location", sizes, "auto", torch.float32)
    half = [x.bfloat16() for x in inputs]
    copy.deepcopy(module).bfloat16()(*half[:2], valid, AttentionState(*half[2:]))
    monkeypatch.setenv("LAYERNORM_LSTM_BACKEND", "python")
    make("location", sizes, "auto", torch.float32)(*inputs[:2], valid, AttentionState(*inputs[2:]))
    assert not called
    module(*inputs[:2], valid, AttentionState(*inputs[2:]))
    assert called


def test_autocast_leaves_keys_energies_and_weights_in_single_precision():
    sizes, (inputs, valid) = SIZES[0], drawn(SIZES[0], torch.float32)
    module = make("location", sizes, "auto", torch.float32)
    past, states = (
        AttentionState(*inputs[2:]),
        torch.randn(*inputs[1].shape[:2], module.to_key.in_features),
    )
    judge = module(*inputs[:2], valid, past).weights
    with torch.autocast("cpu", torch.bfloat16):
        keys, actual = module.keys(Memory(states, valid)), module(*inputs[:2], valid, past).weights
    assert keys.dtype == actual.dtype == torch.float32
    assert not torch.equal(actual, judge)  # the query's product is in half precision
    torch.testing.assert_close(actual, judge, atol=2e-2, rtol=0)


def test_a_backend_that_cannot_run_is_reported(monkeypatch):
    with pytest.raises(ValueError, match="backend 'cqu' is not known; choose one of auto"):
        make("location", SIZES[0], "cqu")
    module = make("location", SIZES[0])
    monkeypatch.setattr(
        compiler, "load", lambda: (_ for _ in ()).throw(compiler.BuildError("no disk"))
    )
    (query, keys, *past), valid = drawn(SIZES[0])
    with pytest.raises(UserError, match="backend 'cpu' of the LSTM cannot run: no disk"):
        module(query, keys, valid, AttentionState(*past))

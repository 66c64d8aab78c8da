"""Where attention's look runs in C++, and that threads and processes do not matter."""

import copy
import multiprocessing
import warnings

import pytest
import torch
from test_attention_kernel import KINDS, SIZES, all_of, drawn, make, weights_of

from asr.errors import UserError
from asr.nn.attention import Look
from asr.nn.kernels.cpu import attention as cpu
from asr.nn.kernels.cpu import build
from asr.nn.memory import Memory

pytestmark = pytest.mark.skipif(
    build.obstacle() is not None, reason=f"no kernels: {build.obstacle()}"
)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(all_of(make(kind, SIZES[2]), *drawn(SIZES[2])))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-12, rtol=1e-12)


def fingerprint():
    """The norms of a look's gradients with two threads."""
    # Torch's own parallel loops hang in a process forked from one that has run such a loop; only
    # the kernels are to be judged, so nothing else runs with two threads.
    torch.set_num_threads(1)
    module, ((query, keys, *past), valid) = make("location", SIZES[2]), drawn(SIZES[2])
    wanted = module.to_query(query).detach()
    given = [wanted, keys, *past, *weights_of(module)[1:]]
    torch.set_num_threads(2)
    names = ("wanted", "keys", "past_weights", "past_total", "conv", "place", "v")
    given = [x.detach().requires_grad_() for x in given]
    look = cpu.look(cpu.Given(**dict(zip(names, given, strict=True))), valid)
    gradients = torch.autograd.grad(look[0][..., 0].sum() + look[1].sum(), given)
    torch.set_num_threads(1)
    return [float(part.norm()) for part in gradients]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_compute_the_same(method):
    before = torch.get_num_threads()
    try:
        here = fingerprint()  # threads exist before the fork
    finally:
        torch.set_num_threads(before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
        with multiprocessing.get_context(method).Pool(1) as pool:
            there = pool.apply_async(fingerprint).get(timeout=100)
    assert there == pytest.approx(here, rel=1e-12)


def test_what_the_kernels_do_not_cover_is_torchs(monkeypatch):
    called = []
    monkeypatch.setattr("asr.nn.attention.cpu.look", lambda *given: called.append(given))
    sizes, (inputs, valid) = SIZES[0], drawn(SIZES[0], torch.float32)
    module = make("location", sizes, "auto", torch.float32)
    half = [x.bfloat16() for x in inputs]
    copy.deepcopy(module).bfloat16()(*half[:2], valid, Look(*half[2:]))
    monkeypatch.setenv("LAYERNORM_LSTM_BACKEND", "python")
    module(*inputs[:2], valid, Look(*inputs[2:]))
    assert not called


def test_autocast_leaves_keys_energies_and_weights_in_single_precision():
    sizes, (inputs, valid) = SIZES[0], drawn(SIZES[0], torch.float32)
    module = make("location", sizes, "auto", torch.float32)
    past, states = Look(*inputs[2:]), torch.randn(*inputs[1].shape[:2], module.to_key.in_features)
    judge = module(*inputs[:2], valid, past).weights
    with torch.autocast("cpu", torch.bfloat16):
        keys, found = module.keys(Memory(states, valid)), module(*inputs[:2], valid, past).weights
    assert keys.dtype == found.dtype == torch.float32
    assert not torch.equal(found, judge)  # the query's product is in half precision
    torch.testing.assert_close(found, judge, atol=2e-2, rtol=0)


def test_a_backend_that_cannot_run_is_named(monkeypatch):
    with pytest.raises(ValueError, match="backend 'cqu' is not known; choose one of auto"):
        make("location", SIZES[0], "cqu")
    monkeypatch.setattr(build, "load", lambda: (_ for _ in ()).throw(build.BuildError("no disk")))
    (query, keys, *past), valid = drawn(SIZES[0])
    with pytest.raises(UserError, match="backend 'cpu' of the LSTM cannot run: no disk"):
        make("location", SIZES[0])(query, keys, valid, Look(*past))

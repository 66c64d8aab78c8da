"""A decoder's loop of recorded steps, which are run here and replayed on a GPU, against others."""

import copy
import logging
import pickle

import pytest
import torch
from test_decoder_kernel import SIZES, all_of, drawn, speller, step_by_step

from asr.kernels import dispatch
from asr.kernels.cuda import recorded
from asr.models import las
from asr.models.las import Speller
from asr.nn import dropout, lstm
from asr.nn.attention import Memory


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Room for a step or two more than there are tokens."""
    monkeypatch.setattr(recorded, "BUCKET", 3)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("kind", "norm", "layers"),
    [("location", "ba", 1), ("additive", "none", 3), ("dot", "per_gate state hidden", 2)],
)
def test_values_and_gradients_are_those_of_single_steps(kind, norm, layers, sizes):
    ours, judge = (speller(sizes, kind, norm, "reference", layers) for _ in range(2))
    actual = all_of(ours, Speller.run_recorded, *drawn(sizes))
    expected = all_of(judge, step_by_step, *drawn(sizes))
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_buffers_keep_nothing_of_other_batches():
    """Two batches of a shape, one after the other, then both before their backward passes."""
    ours, judge = (speller(SIZES[0], backend="reference") for _ in range(2))
    expected = []
    for seed in (2, 5):
        states, valid, tokens = drawn(SIZES[0], seed=seed)
        tokens = tokens[:, : 7 if seed == 2 else 4]  # shorter, in the same buffers
        expected.append(all_of(judge, step_by_step, states, valid, tokens))
        recorded.BUCKET = 9
        actual = all_of(ours, Speller.run_recorded, states, valid, tokens)
        torch.testing.assert_close(actual, expected[-1], atol=1e-10, rtol=1e-10)
    assert len(ours.recorded.runners) == 1
    inputs = [drawn(SIZES[0], seed=seed) for seed in (2, 5)]
    results = [
        model.run_recorded(Memory(s, v), t)[0].square().sum() if model is ours
        else step_by_step(model, Memory(s, v), t)[0].square().sum()
        for model in (ours, judge) for s, v, t in inputs
    ]  # fmt: skip
    found = [
        torch.autograd.grad(own, (s, model.cells[0].weight_hh))
        for own, model, (s, _, _) in zip(results, [ours] * 2 + [judge] * 2, inputs * 2, strict=True)
    ]
    torch.testing.assert_close(found[:2], found[2:], atol=1e-10, rtol=1e-10)


def test_few_shapes_are_kept():
    ours = speller(SIZES[0], backend="reference")
    for frames in range(1, recorded.MOST + 3):
        states, valid, tokens = drawn((3, frames, *SIZES[0][2:]))
        ours.run_recorded(Memory(states, valid), tokens)
    assert len(ours.recorded.runners) == recorded.MOST
    dispatch.release_memory()
    assert not ours.recorded.runners


def test_autocast_errs_as_much_as_in_single_steps():
    exact = all_of(speller(SIZES[0], backend="reference"), step_by_step, *drawn(SIZES[0]))
    errors = []
    for spell in (Speller.run_recorded, step_by_step):
        ours = speller(SIZES[0], backend="reference", dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            actual = all_of(ours, spell, *drawn(SIZES[0], torch.float32))
        errors.append([float((y - judge).detach().norm() / judge.detach().norm())
                       for y, judge in zip(actual, exact, strict=True)])  # fmt: skip
    ours, single = (sum(own) / len(own) for own in errors)
    assert 0 < ours <= 1.5 * single < 0.1, errors


def test_dropout_is_that_of_the_decoder_kernel(monkeypatch):
    """Every mask is a function of its last two sizes, and some elements are dropped."""

    def factors(shape):
        own = torch.arange(torch.Size(shape[-2:]).numel()).view(shape[-2:])
        return own.remainder(3).double().expand(shape).contiguous()

    def masked(module, x):
        return x * factors(x.shape)

    monkeypatch.setattr(dropout.Dropout, "forward", masked)
    for module in (las, lstm):
        monkeypatch.setattr(module, "draw_mask", lambda like, shape, rate: factors(shape))
    ours, judge = (
        speller(SIZES[0], layers=2, backend=name, dropout=0.3, recurrent_dropout=0.3)
        for name in ("reference", "cpu")
    )
    actual = all_of(ours, Speller.run_recorded, *drawn(SIZES[0]))
    expected = all_of(judge, Speller.run_sequence, *drawn(SIZES[0]))
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_copies_record_for_themselves():
    ours = speller(SIZES[0], backend="reference")
    states, valid, tokens = drawn(SIZES[0])
    expected, _ = ours.run_recorded(Memory(states, valid), tokens)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied.recorded is None
        with torch.no_grad():
            copied.cells[0].bias_ih.add_(1)
        assert not torch.equal(copied.run_recorded(Memory(states, valid), tokens)[0], expected)
    assert torch.equal(ours.run_recorded(Memory(states, valid), tokens)[0], expected)


def test_steps_that_differ_when_replayed_are_not_used(monkeypatch, caplog):
    class Wrong(recorded._Runner):
        def __init__(self, *given):
            super().__init__(*given)
            self.run_forward = lambda: (self._forward(), self.history[0][1].mul_(1.1))

    monkeypatch.setattr(recorded, "_Runner", Wrong)
    monkeypatch.setattr(dispatch, "_failed", set())
    dispatch._warn_once.cache_clear()
    ours = speller(SIZES[0], backend="reference")
    states, valid, tokens = drawn(SIZES[0])
    with caplog.at_level(logging.WARNING):
        assert ours.run_recorded(Memory(states, valid), tokens) is None
    (record,) = caplog.records
    assert record.message.startswith(
        "a decoder's steps are slower, not recorded as a CUDA graph: a"
    )
    assert not dispatch.can_record("auto", torch.empty(1), [])


def test_out_of_memory_is_no_reason_to_stop_recording(monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(recorded, "_Runner", full)
    ours = speller(SIZES[0], backend="reference")
    states, valid, tokens = drawn(SIZES[0])
    with pytest.raises(torch.OutOfMemoryError):
        ours.run_recorded(Memory(states, valid), tokens)

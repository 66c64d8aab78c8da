"""The decoder in one call: when it is used, what it rejects, what memory it keeps and returns."""

import ctypes

import pytest
import torch
from test_decoder_kernel import SIZES, drawn, pytestmark, speller

from asr.kernels.cpu import compiler, decoder
from asr.kernels.cpu import library as buffers
from asr.nn.attention import Memory

__all__ = ["pytestmark"]


def test_a_released_graph_returns_its_memory():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    before = buffers.POOL.lent()
    outputs = ours.run_sequence(Memory(states, valid), tokens)
    assert buffers.POOL.lent() > before
    del outputs
    assert buffers.POOL.lent() == before


def test_changing_what_backward_reads_is_an_error():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    output, _ = ours.run_sequence(Memory(states, valid), tokens)
    with torch.no_grad():
        ours.cells[0].weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("settings", "covered"),
    [
        ({}, True),
        ({"kind": "dot"}, False),
        ({"norm": "thesis"}, True),
        ({"norm": "joined hidden rms"}, True),
        ({"zero_variance": "raw", "backend": "auto"}, False),
        ({"backend": "python"}, False),
        ({"dtype": torch.bfloat16, "backend": "auto"}, False),
    ],
)
def test_uncovered_settings_run_step_by_step(settings, covered):
    made, dtype = speller(SIZES[0], **settings), settings.get("dtype", torch.float64)
    states, valid, tokens = drawn(SIZES[0], dtype)
    assert made.can_run_sequence(Memory(states, valid), tokens) is covered


@pytest.mark.parametrize("when", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
@pytest.mark.parametrize("hooked", ["cells.0", "attend", "attend.to_query", "dropout"])
def test_a_module_with_a_hook_is_called_in_every_step(hooked, when):
    made, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    register = getattr(made.get_submodule(hooked), f"register_{when}_hook")
    hook = register(lambda *_: None)
    assert not made.can_run_sequence(Memory(states, valid), tokens)
    hook.remove()
    assert made.can_run_sequence(Memory(states, valid), tokens)


def test_python_and_cpp_agree_on_the_structures():
    library = compiler.load()
    assert library.decoder_call_size() == ctypes.sizeof(decoder.DecoderCall)
    assert library.decoder_layer_size() == ctypes.sizeof(decoder.DecoderLayer)


def test_dropout_follows_its_own_module():
    made, (states, valid, tokens) = speller(SIZES[0], dropout=0.5), drawn(SIZES[0])
    memory = Memory(states.detach(), valid)
    made.dropout.eval()
    assert torch.equal(*(made.run_sequence(memory, tokens)[0] for _ in range(2)))
    made.eval().dropout.train()
    assert not torch.equal(*(made.run_sequence(memory, tokens)[0] for _ in range(2)))


def test_saved_tensors_may_move():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    results = []
    for moved in (False, True):
        pack = torch.clone if moved else lambda x: x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output, weights = ours.run_sequence(Memory(states * 1.0, valid), tokens)
        wasted = [
            torch.full_like(output, torch.nan) for _ in range(9)
        ]  # overwrites the freed memory
        loss = output.sin().sum() + weights.square().sum()
        del output, weights
        results.append(torch.autograd.grad(loss, [states, *ours.cells.parameters()]))
        del wasted
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda x, valid, t: (x[:2], valid[:2], t),
            r"states has shape \(2, 23, 11\); expected \(5",
        ),
        (
            lambda x, valid, t: (x, valid[:, 1:], t),
            r"valid has shape \(5, 22\); expected \(5, 2",
        ),
        (lambda x, valid, t: (x, valid.int(), t), r"valid is torch.int32; expected torch.bool"),
        (lambda x, valid, t: (x[..., 1:], valid, t), "mat1 and mat2|shape"),
        (lambda x, valid, t: (x, valid, t[:, :0]), r"shape \(0, 5, 3\): no tokens or no frames"),
    ],
)
def test_mismatched_shapes_are_reported(spoil, message):
    states, valid, tokens = spoil(*drawn(SIZES[0]))
    with pytest.raises((ValueError, RuntimeError), match=message):
        speller(SIZES[0]).run_sequence(Memory(states, valid), tokens)

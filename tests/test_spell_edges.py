"""A transcript spelled in one call: who may, what is refused, what is kept and given back."""

import ctypes

import pytest
import torch
from test_spell import SIZES, drawn, pytestmark, speller

from asr.nn.kernels.cpu import buffers, build
from asr.nn.kernels.cpu import spell as cpu_spell
from asr.nn.memory import Memory

__all__ = ["pytestmark"]


def test_a_graph_that_is_dropped_gives_its_memory_back():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    before = buffers.POOL.lent()
    outputs = ours.at_once(Memory(states, valid), tokens)
    assert buffers.POOL.lent() > before
    del outputs
    assert buffers.POOL.lent() == before


def test_changing_what_backward_reads_is_an_error():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    output, _ = ours.at_once(Memory(states, valid), tokens)
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
        ({"zero_rows": "raw", "backend": "auto"}, False),
        ({"backend": "python"}, False),
        ({"precision": "bf16"}, False),
        ({"dtype": torch.bfloat16, "backend": "auto"}, False),
    ],
)
def test_what_is_not_covered_goes_step_by_step(settings, covered):
    made = speller(SIZES[0], **settings)
    dtype = settings.get("dtype", torch.float64)
    states, valid, tokens = drawn(SIZES[0], dtype)
    assert made.runs_at_once(Memory(states, valid), tokens) is covered


@pytest.mark.parametrize("when", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
@pytest.mark.parametrize("watched", ["cells.0", "attend", "attend.to_query", "dropout"])
def test_who_watches_a_module_sees_every_step(watched, when):
    made, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    register = getattr(made.get_submodule(watched), f"register_{when}_hook")
    hook = register(lambda *_: None)
    assert not made.runs_at_once(Memory(states, valid), tokens)
    hook.remove()
    assert made.runs_at_once(Memory(states, valid), tokens)


def test_python_and_cpp_agree_on_the_structures():
    library = build.load()
    assert library.spell_call_size() == ctypes.sizeof(cpu_spell.SpellCall)
    assert library.spell_layer_size() == ctypes.sizeof(cpu_spell.SpellLayer)


def test_no_token_goes_step_by_step():
    made, (states, valid, _) = speller(SIZES[0]), drawn(SIZES[0])
    nothing = torch.empty(len(valid), 0, dtype=torch.long)
    assert not made.runs_at_once(Memory(states, valid), nothing)


def test_dropout_follows_its_own_module():
    made, (states, valid, tokens) = speller(SIZES[0], dropout=0.5), drawn(SIZES[0])
    memory = Memory(states.detach(), valid)
    made.dropout.eval()
    assert torch.equal(*(made.at_once(memory, tokens)[0] for _ in range(2)))
    made.eval().dropout.train()
    assert not torch.equal(*(made.at_once(memory, tokens)[0] for _ in range(2)))


def test_what_autograd_keeps_may_move():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    found = []
    for moved in (False, True):
        pack = torch.clone if moved else lambda x: x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output, looks = ours.at_once(Memory(states * 1.0, valid), tokens)
        wasted = [torch.full_like(output, torch.nan) for _ in range(9)]  # over what was freed
        loss = output.sin().sum() + looks.square().sum()
        del output, looks
        found.append(torch.autograd.grad(loss, [states, *ours.cells.parameters()]))
        del wasted
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("spoil", "said"),
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
        (lambda x, valid, t: (x, valid, t[:, :0]), r"shape \(0, 5, 3\): nothing to spell"),
    ],
)
def test_what_does_not_fit_is_named(spoil, said):
    states, valid, tokens = spoil(*drawn(SIZES[0]))
    with pytest.raises((ValueError, RuntimeError), match=said):
        speller(SIZES[0]).at_once(Memory(states, valid), tokens)


def test_a_part_of_another_dtype_is_named():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    ours.embedding.float()
    with pytest.raises(ValueError, match=r"embedded is torch.float32; expected torch.float64"):
        ours.at_once(Memory(states, valid), tokens)

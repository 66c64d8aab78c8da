"""Attention against the papers' equations, written as slow loops over single frames."""

import math

import pytest
import torch

from asr.nn.attention import Attention, AttentionState, Memory, initial_attention

B, K, T, E, Q, A, FILTERS, REACH = 2, 3, 11, 5, 7, 13, 4, 3
KINDS = ("additive", "dot", "location")
LENGTHS = [11, 6]


@pytest.fixture
def memory():
    torch.manual_seed(1)
    valid = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    return Memory(torch.randn(B, T, E, dtype=torch.float64), valid)


def attention(kind, backend="auto"):
    torch.manual_seed(2)
    return Attention(kind, E, Q, A, FILTERS, REACH, backend=backend).double()


def past_of(memory, seed=3):
    """Past attention: last weights and a running sum of two steps, zero in the padding."""
    draw = torch.Generator().manual_seed(seed)
    two = torch.rand(2, B, K, T, generator=draw, dtype=torch.float64) * memory.valid[:, None]
    two = two / two.sum(-1, keepdim=True)
    return AttentionState(two[1], two.sum(0))


def slow_energy(module, kind, query, states, past, frame):
    """One query (Q,), one frame of one utterance; past holds (T,) weights and (T,) their sum."""
    key = module.to_key.weight @ states[frame] + module.to_key.bias
    wanted = module.to_query.weight @ query
    if kind == "dot":
        return float(wanted @ key) / math.sqrt(A)
    mixed = wanted + key
    if kind == "location":  # Chorowski et al. 2015, equations 8 and 9: f = F * alpha, then U f
        for number in range(FILTERS):
            f = 0.0
            for channel, seen in enumerate(past):
                for tap in range(2 * REACH + 1):
                    position = frame + tap - REACH
                    if 0 <= position < T:
                        f += module.conv.weight[number, channel, tap] * seen[position]
            mixed = mixed + module.to_place.weight[:, number] * f
    return float(module.to_energy.weight[0] @ torch.tanh(mixed))


@pytest.mark.parametrize("backend", ["auto", "python"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_match_the_equations(kind, backend, memory):
    module, past = attention(kind, backend), past_of(memory)
    query = torch.randn(B, K, Q, dtype=torch.float64)
    with torch.no_grad():
        state = module(query, module.keys(memory), memory.valid, past)
        for b in range(B):
            for k in range(K):
                seen = (past.weights[b, k], past.total[b, k])
                energy = torch.tensor(
                    [
                        slow_energy(module, kind, query[b, k], memory.states[b], seen, t)
                        for t in range(LENGTHS[b])
                    ],
                    dtype=torch.float64,
                )
                expected = torch.zeros(T, dtype=torch.float64)
                expected[: LENGTHS[b]] = energy.exp() / energy.exp().sum()
                torch.testing.assert_close(state.weights[b, k], expected)
                torch.testing.assert_close(state.total[b, k], past.total[b, k] + expected)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_batch_mates_change_nothing(kind, memory):
    module, past = attention(kind), past_of(memory)
    query = torch.randn(B, K, Q, dtype=torch.float64)
    together = module(query, module.keys(memory), memory.valid, past)
    n = LENGTHS[1]
    alone = Memory(memory.states[1:, :n], memory.valid[1:, :n])
    short = AttentionState(past.weights[1:, :, :n], past.total[1:, :, :n])
    state = module(query[1:], module.keys(alone), alone.valid, short)
    torch.testing.assert_close(state.weights, together.weights[1:, :, :n])
    assert (together.weights[1, :, n:] == 0).all()


def test_attention_starts_on_the_first_frame(memory):
    state = initial_attention(memory)
    expected = torch.zeros(B, 1, T, dtype=torch.float64)
    expected[:, :, 0] = 1.0
    assert torch.equal(state.weights, expected) and torch.equal(state.total, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_has_a_gradient(kind, memory):
    module = attention(kind)
    query = torch.randn(B, K, Q, dtype=torch.float64)
    state = module(query, module.keys(memory), memory.valid, past_of(memory))
    (state.weights * torch.randn(B, K, T, dtype=torch.float64)).sum().backward()
    for name, weight in module.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        if (kind, name) != ("dot", "to_key.bias"):  # one constant for all frames of a query
            assert weight.grad.any(), name


@pytest.mark.parametrize("kind", ["additive", "location"])
def test_half_precision_keeps_small_differences(kind, memory):
    """A sigmoid in bf16 would round sums this small to two or three values."""
    module, past = attention(kind), past_of(memory)
    query = torch.randn(B, K, Q, dtype=torch.float64)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.mul_(1000 if "to_energy" in name else 0.002 if weight.dim() > 2 else 0.01)
        exact = module(query, module.keys(memory), memory.valid, past).weights
        half = [x.bfloat16() for x in (query, memory.states, *past)]
        module.bfloat16()
        keys = module.keys(Memory(half[1], memory.valid))
        rounded = module(half[0], keys, memory.valid, AttentionState(*half[2:])).weights
    assert exact.std() > 0.05  # the weights do differ
    torch.testing.assert_close(rounded.double(), exact, atol=0.04, rtol=0.1)

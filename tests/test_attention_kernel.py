"""Attention in C++ against torch's operators and itself."""

import pytest
import torch

from asr.kernels.cpu import compiler
from asr.nn.attention import Attention, AttentionState

pytestmark = pytest.mark.skipif(
    compiler.obstacle() is not None, reason=f"no kernels: {compiler.obstacle()}"
)
KINDS = ("additive", "location")
# B, K, T, A, filters, reach: primes; more filters than a vector; fewer frames than a filter's
# reach; full vectors of A; more frames than one tile; the sizes of a search.
SIZES = [
    (3, 2, 19, 37, 11, 5),
    (2, 3, 7, 5, 19, 13),
    (5, 1, 101, 32, 10, 25),
    (1, 7, 1, 3, 1, 0),
]


def make(kind, sizes, backend="cpu", dtype=torch.float64):
    """Attention with E 5 and Q 7."""
    torch.manual_seed(1)
    *_, A, filters, reach = sizes
    return Attention(kind, 5, 7, A, filters, reach, backend=backend).to(dtype)


def weights_of(module):
    return [weight for name, weight in module.named_parameters() if "to_key" not in name]


def drawn(sizes, dtype=torch.float64):
    """Query, keys and past weights with gradients, and the valid frames of a ragged batch."""
    B, K, T, A, *_ = sizes
    draw = torch.Generator().manual_seed(2)
    shapes = [(B, K, 7), (B, T, A), (B, K, T), (B, K, T)]
    parts = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    valid = torch.arange(T) < torch.tensor([T, *range(T, 0, -3)])[:B, None].clamp(min=1)
    parts[2:] = [part.softmax(-1) * valid[:, None] for part in parts[2:]]
    return [part.to(dtype).requires_grad_() for part in parts], valid


def all_of(module, inputs, valid):
    """Both outputs and every gradient of a random projection of them."""
    query, keys, *past = inputs
    state = module(query, keys, valid, AttentionState(*past))
    draw = torch.Generator().manual_seed(3)
    slopes = [
        torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y.dtype) * valid[:, None]
        for y in state
    ]
    learned = [*inputs, *weights_of(module)]
    gradients = torch.autograd.grad(state, learned, slopes, materialize_grads=True)
    return [*state, *gradients]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_match_torch(kind, sizes):
    results = [all_of(make(kind, sizes, b), *drawn(sizes)) for b in ("cpu", "python")]
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_error_is_at_most_twice_torchs(kind, sizes):
    exact = all_of(make(kind, sizes, "python"), *drawn(sizes))
    results = [
        all_of(make(kind, sizes, b, torch.float32), *drawn(sizes, torch.float32))
        for b in ("cpu", "python")
    ]
    for ours, torchs, judge in zip(*results, exact, strict=True):
        allowed = 2 * (torchs - judge).norm() + 2e-7 * judge.norm()
        assert (ours - judge).norm() <= allowed


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_small_and_saturated_sums_are_as_exact_as_in_torch(scale):
    sizes = (2, 3, 23, 17, 5, 3)
    results = []
    for backend, dtype in (("cpu", torch.float32), ("python", torch.float32),
                           ("python", torch.float64)):  # fmt: skip
        module, (inputs, valid) = make("additive", sizes, backend, dtype), drawn(sizes, dtype)
        inputs[1] = inputs[1].detach().mul(scale).requires_grad_()
        inputs[0] = inputs[0].detach().mul(scale).requires_grad_()
        results.append(all_of(module, inputs, valid))
    for ours, torchs, judge in zip(*results, strict=True):
        assert (ours - judge).norm() <= 2 * (torchs - judge).norm() + 1e-6 * judge.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_the_values_are_the_same(kind):
    module, (inputs, valid) = make(kind, SIZES[0]), drawn(SIZES[0])
    query, keys, *past = inputs
    tracked = module(query, keys, valid, AttentionState(*past))
    with torch.no_grad():
        plain = module(query, keys, valid, AttentionState(*past))
    assert tracked.weights.requires_grad and not plain.weights.requires_grad
    torch.testing.assert_close(tuple(plain), tuple(tracked), atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_with_other_strides(kind):
    """Hypotheses expanded from one; keys and valid frames as views of larger tensors."""
    sizes = (3, 4, 19, 37, 11, 5)
    (query, keys, weights, total), valid = drawn(sizes)
    keys = torch.stack([keys, keys], dim=-1)[..., 0]
    valid = torch.stack([valid, ~valid], dim=-1)[..., 0]
    past = [x[:, :1].detach().requires_grad_() for x in (weights, total)]
    results = []
    for backend in ("cpu", "python"):
        expanded = [x.expand_as(weights) for x in past]
        state = make(kind, sizes, backend)(query, keys, valid, AttentionState(*expanded))
        loss = (state.weights * weights.detach().cos()).sum() + state.total.sum()
        results.append([*state, *torch.autograd.grad(loss, past, materialize_grads=True)])
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-11)


def test_two_graphs_coexist_and_backward_runs_twice():
    module = make("location", SIZES[0])
    (inputs, valid), slope = drawn(SIZES[0]), torch.randn(3, 2, 19, dtype=torch.float64)
    others = [x.detach().mul(0.7).requires_grad_() for x in inputs]

    def attend(parts):
        return module(*parts[:2], valid, AttentionState(*parts[2:])).weights

    alone = [torch.autograd.grad(attend(parts), parts, slope) for parts in (inputs, others)]
    graphs = attend(inputs), attend(others)
    for _ in range(2):
        for graph, parts, expected in zip(graphs, (inputs, others), alone, strict=True):
            actual = torch.autograd.grad(graph, parts, slope, retain_graph=True)
            assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_values_change_nothing(kind):
    """NaN keys and NaN gradients in the padding change no output and no gradient."""
    module, (inputs, valid) = make(kind, SIZES[0]), drawn(SIZES[0])
    clean = all_of(module, inputs, valid)
    with torch.no_grad():
        inputs[1][~valid] = torch.nan
    poisoned = all_of(module, inputs, valid)
    assert all(torch.equal(*pair) for pair in zip(poisoned, clean, strict=True))
    assert (poisoned[0].transpose(1, 2)[~valid] == 0).all()
    assert (poisoned[3][~valid] == 0).all()
    query, keys, *past = inputs
    state = module(query, keys, valid, AttentionState(*past))
    slope = torch.where(valid[:, None], 1.0, torch.nan).double().expand_as(state.weights)
    for actual in torch.autograd.grad(state.weights, [query, keys, past[0]], slope,
                                     materialize_grads=True):  # fmt: skip
        assert actual.isfinite().all()


def test_valid_frames_need_not_come_first():
    sizes = (2, 3, 23, 5, 3, 2)
    inputs, _ = drawn(sizes)
    valid = torch.rand(2, 23, generator=torch.Generator().manual_seed(5)) < 0.5
    results = [all_of(make("location", sizes, b), inputs, valid) for b in ("cpu", "python")]
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-11)


def test_changing_what_backward_reads_is_an_error():
    module, (inputs, valid) = make("location", SIZES[0]), drawn(SIZES[0])
    state = module(*inputs[:2], valid, AttentionState(*inputs[2:]))
    with torch.no_grad():
        module.conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        state.weights.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mismatched_shape_is_reported(kind):
    module, ((query, keys, *past), valid) = make(kind, SIZES[0]), drawn(SIZES[0])
    one = AttentionState(*(part[:, :1] for part in past))
    with pytest.raises(
        ValueError, match=r"past_weights has shape \(3, 1, 19\); expected \(3, 2, 19"
    ):
        module(query, keys, valid, one)
    with pytest.raises(ValueError, match=r"valid has shape \(3, 18\); expected \(3, 19\)"):
        module(query, keys, valid[:, 1:], AttentionState(*past))

"""Dropout, LayerDrop, DropHead: rates, expectations, schedules."""

import math

import pytest
import torch
from torch import nn

from asr.config.schema import TransformerConfig
from asr.nn.dropout import DropHead, Dropout
from asr.nn.transformer import Stack


def close(rate, expected, draws):
    """Within five standard deviations of a Bernoulli mean."""
    return abs(rate - expected) < 5 * math.sqrt(expected * (1 - expected) / draws)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.93])
def test_dropout_drops_at_its_rate_and_scales_the_rest(rate, dtype):
    torch.manual_seed(0)
    x = torch.full((101, 307), 3.0, dtype=dtype, requires_grad=True)
    y = Dropout(rate)(x)
    assert close((y == 0).double().mean().item(), rate, x.numel())
    kept = y[y != 0]
    rounding = torch.finfo(dtype).eps
    expected = torch.full_like(kept, 3 / (1 - rate))
    torch.testing.assert_close(kept, expected, rtol=max(1e-3, rounding), atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach() / 3, rtol=2 * rounding, atol=0)


def test_dropped_positions_are_independent():
    torch.manual_seed(1)
    kept = (Dropout(0.3)(torch.ones(4000, 13)) != 0).float()
    covariance = torch.cov(kept.T)
    torch.testing.assert_close(covariance, 0.21 * torch.eye(13), rtol=0, atol=0.02)


def test_dropout_does_nothing_in_evaluation_or_at_zero():
    x = torch.randn(7, 11)
    assert Dropout(0.5).eval()(x) is x
    before = torch.get_rng_state()
    assert Dropout(0.0)(x) is x
    assert torch.equal(before, torch.get_rng_state())


def test_layer_drop_keeps_each_layer_at_its_rate_in_order():
    torch.manual_seed(3)
    layers = [nn.Identity() for _ in range(7)]
    stack = Stack(layers, None, None, 0.2)
    counts, draws = [0] * 7, 4000
    for _ in range(draws):
        kept = [number - 1 for number, _ in stack.passing()]
        assert kept == sorted(set(kept))
        for i in kept:
            counts[i] += 1
    assert all(close(count / draws, 0.8, draws) for count in counts)
    assert close(sum(counts) / (7 * draws), 0.8, 7 * draws)  # expected depth 0.8 * 7


def test_layer_drop_at_zero_keeps_all_and_draws_nothing():
    layers = [nn.Identity() for _ in range(5)]
    before = torch.get_rng_state()
    every = list(enumerate(layers, start=1))
    assert list(Stack(layers, None, None, 0.0).passing()) == every
    assert list(Stack(layers, None, None, 0.5).eval().passing()) == every
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("rate", [0.2, 0.95])
def test_drop_head_masks_per_utterance_and_never_all(rate):
    torch.manual_seed(4)
    batch, heads = 20011, 5
    factor = DropHead(rate)(torch.ones(batch, heads, 2, 3))
    assert (factor == factor[:, :, :1, :1]).all()
    factor = factor[:, :, 0, 0]
    kept = factor != 0
    assert kept.any(1).all()
    torch.testing.assert_close(factor.sum(1), torch.full((batch,), float(heads)))
    # A head is kept by its own draw, or as the one restored when all H are dropped.
    expected = (1 - rate) + rate**heads / heads
    assert close(kept.double().mean().item(), expected, batch * heads)
    assert len(kept.unique(dim=0)) > heads


def test_drop_head_does_nothing_in_evaluation():
    x = torch.randn(3, 5, 7)
    assert DropHead(0.9).eval()(x) is x
    assert DropHead(0.0)(x) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_bad_rates_give_one_clear_line(rate):
    message = f"{rate} is not a rate: it must be at least 0 and below 1$"
    with pytest.raises(ValueError, match=f"^dropout {message}"):
        Dropout(rate)
    bound = r"\n  Input should be (greater than or equal to 0|less than 1|a finite number)"
    with pytest.raises(ValueError, match=f"drop_head{bound}"):
        TransformerConfig(kind="transformer", drop_head=rate)


def test_layer_drop_by_seed_and_step_whatever_else_is_drawn():
    """Two processes whose other random numbers differ skip the same layers in every step."""

    def choices(seed, stack, noise):
        torch.manual_seed(noise)
        choices = []
        for step in (0, 1, 2, 0):
            stack.layer_drop.seed(*seed, step)
            for _ in range(3):  # batches of a step
                torch.rand(noise)
                choices.append([number for number, _ in stack.passing()])
        return choices

    one, other, third = (
        Stack([nn.Identity() for _ in range(11)], None, None, 0.5) for _ in range(3)
    )
    first = choices((5, 0), one, 3)
    assert first == choices((5, 0), other, 7) != choices((5, 1), third, 3)
    assert first[:3] == first[9:] and len({str(kept) for kept in first[:9]}) == 9

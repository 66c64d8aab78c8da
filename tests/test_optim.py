"""Schedules against the papers' formulae and torch's schedulers; the choice of decayed weights."""

import pytest
import torch
from torch import nn, optim

from asr.config.schema import OptimizerConfig
from asr.training.optim import constant, load_moments, make_optimizer, noam, tri_stage


def torch_rates(make, steps, lr=0.7):
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_constant_matches_torch_linear_warm_up():
    judge = torch_rates(lambda o: optim.lr_scheduler.LinearLR(o, 1 / 13, 1.0, 12), 40)
    rate = constant(0.7, 13)
    assert [rate(step, 0.0) for step in range(1, 41)] == pytest.approx(judge)
    assert constant(0.7, 0)(1, 0.0) == 0.7


def test_noam_is_the_formula():
    """Vaswani et al. 2017, eq. 3: d^-0.5 * min(step^-0.5, step * warmup^-1.5)."""
    rate = noam(2.0, 4000, 512)
    for step in (1, 17, 3999, 4000, 4001, 100_000):
        expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert rate(step, 0.5) == pytest.approx(expected, rel=1e-12)
    assert max(range(1, 9000, 7), key=lambda s: rate(s, 0)) == pytest.approx(4000, abs=7)
    assert noam(1.0, 0, 4)(1, 0.0) == 0.5


def test_tri_stage_matches_three_torch_schedulers_in_a_row():
    steps, warmup, hold, floor = 200, 10, 0.4, 0.01

    def judge(optimizer):
        gamma = floor ** (1 / (steps * (1 - hold)))
        parts = [
            optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1),
            optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            optim.lr_scheduler.ExponentialLR(optimizer, gamma),
        ]
        return optim.lr_scheduler.SequentialLR(optimizer, parts, [warmup, int(steps * hold) - 1])

    rate = tri_stage(0.7, warmup, hold, floor)
    ours = [rate(step, step / steps) for step in range(1, steps + 1)]
    assert ours == pytest.approx(torch_rates(judge, steps), rel=1e-9)
    assert ours[-1] == pytest.approx(0.7 * floor)


def test_tri_stage_at_its_edges():
    assert tri_stage(1.0, 0, 1.0, 0.1)(9, 1.0) == 1.0  # never falls
    assert tri_stage(1.0, 0, 0.0, 0.1)(9, 0.5) == pytest.approx(0.1**0.5)
    assert tri_stage(1.0, 0, 0.5, 0.1)(9, 1.7) == pytest.approx(0.1)  # beyond the end


@pytest.mark.parametrize(("kind", "judge"), [("adam", optim.Adam), ("adamw", optim.AdamW)])
def test_optimizer_matches_torch_and_does_not_decay_gains_and_biases(kind, judge):
    torch.manual_seed(1)
    ours, theirs = nn.Linear(5, 7), nn.Linear(5, 7)
    theirs.load_state_dict(ours.state_dict())
    settings = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-5}
    first = make_optimizer(OptimizerConfig(kind=kind, weight_decay=0.2, **settings), ours)
    second = [
        judge([theirs.weight], weight_decay=0.2, **settings),
        judge([theirs.bias], weight_decay=0.0, **settings),
    ]
    for _ in range(5):
        for module in (ours, theirs):
            module.zero_grad()
            module(torch.ones(3, 5)).square().sum().backward()
        first.step()
        for each in second:
            each.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_frozen_weights_are_not_optimised():
    module = nn.Linear(5, 7)
    module.weight.requires_grad_(False)
    optimizer = make_optimizer(OptimizerConfig(), module)
    assert [p.shape for group in optimizer.param_groups for p in group["params"]] == [(7,)]


@pytest.mark.parametrize(("kind", "judge"), [("adam", optim.Adam), ("adamw", optim.AdamW)])
def test_moments_are_loaded_and_settings_are_not(kind, judge):
    """Against torch's own optimizer, built with the old settings and changed by hand."""
    torch.manual_seed(1)
    ours, theirs = nn.Linear(5, 7, bias=False), nn.Linear(5, 7, bias=False)
    theirs.load_state_dict(ours.state_dict())
    first = make_optimizer(OptimizerConfig(lr=0.03, betas=(0.9, 0.99)), ours)
    second = judge([theirs.weight], lr=0.03, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)

    def steps(optimizer, module):
        for _ in range(3):
            module.zero_grad()
            module(torch.ones(3, 5)).square().sum().backward()
            optimizer.step()

    steps(first, ours)
    steps(second, theirs)
    after = {"betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.3}
    resumed = make_optimizer(OptimizerConfig(kind=kind, lr=0.03, **after), ours)
    load_moments(resumed, first.state_dict())
    second.param_groups[0].update(after)
    steps(resumed, ours)
    steps(second, theirs)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())

"""The Transformer's norms against their formulas, and edge cases."""

import math
import pickle
from typing import get_args

import pytest
import torch
from reference_transformer import norm
from torch.autograd import gradcheck

from asr.config.cell import CellSettings
from asr.config.registered import REGISTERED
from asr.config.schema import NormKind
from asr.nn.lstm import LayerNormLSTM
from asr.nn.norm import ROW_NORMS, SQUASHING, make_norm, register_norm

KINDS = (*ROW_NORMS, *SQUASHING)


def test_recipes_know_every_norm():
    assert get_args(NormKind) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_norm_is_its_formula(kind):
    torch.manual_seed(1)
    made = make_norm(kind, 7).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    expected = norm(kind, list(made.parameters()), x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(made(x), expected, atol=1e-6, rtol=1e-6)  # scale's loop has no eps
    assert gradcheck(made, x.requires_grad_())


@pytest.mark.parametrize("kind", ROW_NORMS)
def test_a_vector_keeps_its_size_at_initialisation(kind):
    x = 100 * torch.randn(3, 64)
    size = make_norm(kind, 64)(x).norm(dim=-1)
    torch.testing.assert_close(size, torch.full((3,), 8.0), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["dyt", "derf"])
def test_large_values_are_squashed_and_small_ones_scaled(kind):
    made, slope = make_norm(kind, 3), {"dyt": 0.5, "derf": 0.5 * 2 / math.pi**0.5}[kind]
    torch.testing.assert_close(made(torch.tensor([-99.0, 0, 99])), torch.tensor([-1.0, 0, 1]))
    small = torch.full((3,), 1e-3)
    torch.testing.assert_close(made(small), slope * small)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_vector_gives_zero_and_a_finite_gradient(kind):
    x = torch.zeros(2, 7, requires_grad=True)
    y = make_norm(kind, 7)(x)
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_bf16_statistics_are_taken_in_float32(kind):
    torch.manual_seed(2)
    x = torch.randn(3, 513).bfloat16()
    exact = make_norm(kind, 513)(x.float())
    assert torch.equal(make_norm(kind, 513)(x), exact.bfloat16())  # bit for bit, and in bf16


def test_eps_of_the_norms():
    assert make_norm("layer", 3).eps == 1e-6
    x = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(make_norm("rms", 4)(x), x / 2e-6**0.5)


def test_an_unpickled_lstm_does_not_replace_an_unknown_norm():
    register_norm("mine", torch.nn.Identity)
    saved = pickle.dumps(LayerNormLSTM(3, 7, norm=CellSettings("ba", norm_kind="mine")))
    del REGISTERED["mine"]
    message = "norm_kind 'mine' is not registered in this process: call asr.register_norm first"
    with pytest.raises(ValueError, match=message):
        pickle.loads(saved)(torch.randn(5, 2, 3))

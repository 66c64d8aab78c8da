"""Norms that a user's program registers by a name."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import asr
from asr.config.loader import RecipeError, override, read_recipe
from asr.config.registered import REGISTERED
from asr.models.build import build_speech_model
from asr.nn.norm import make_norm


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    for name in list(REGISTERED):
        monkeypatch.delitem(REGISTERED, name)
    yield
    REGISTERED.clear()


def layer_norm(eps):
    return lambda size: lambda x: functional.layer_norm(x, (size,), eps=eps)


def test_a_norm_without_weights_gets_a_gain_and_a_bias():
    asr.register_norm("mine", layer_norm(1e-6))
    ours, judge = make_norm("mine", 7), nn.LayerNorm(7, eps=1e-6)
    with torch.no_grad():
        for weight, other in zip(ours.parameters(), judge.parameters(), strict=True):
            other.copy_(weight.uniform_())
    x = torch.randn(2, 3, 5, 7)
    torch.testing.assert_close(ours(x), judge(x))


def test_a_norm_with_weights_keeps_them():
    asr.register_norm("groups", lambda size: nn.GroupNorm(32, size, affine=False))
    asr.register_norm("group", lambda size: nn.GroupNorm(2, size))
    ours, x = make_norm("group", 6), torch.randn(3, 5, 6)
    assert [p.shape for p in ours.parameters()] == [(6,), (6,)]
    halves = x.unflatten(2, (2, 3))
    expected = (halves - halves.mean(3, keepdim=True)) / (
        halves.var(3, keepdim=True, correction=0) + 1e-5
    ).sqrt()
    torch.testing.assert_close(ours(x), expected.flatten(2))


@pytest.mark.parametrize("norm", ["ba", "joined", "per_gate"])
def test_an_lstm_with_a_registered_layer_norm_is_that_with_layer_norm(norm):
    asr.register_norm("mine", layer_norm(1e-5))
    torch.manual_seed(1)
    ours = asr.LayerNormLSTM(5, 7, 2, norm=asr.CellSettings(norm, norm_kind="mine"))
    judge = asr.LayerNormLSTM(5, 7, 2, norm=norm, backend="reference")
    judge.load_state_dict(ours.state_dict())
    x = torch.randn(11, 3, 5)
    for output, expected in zip(_with_gradients(ours, x), _with_gradients(judge, x), strict=True):
        torch.testing.assert_close(output, expected)


def _with_gradients(lstm, x):
    output, _ = lstm(x)
    output.square().sum().backward()
    return [output, *(p.grad for p in lstm.parameters())]


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda size: lambda x: x[:, 1:], "changes"),
        (lambda size: lambda x: x.double(), "changes"),
        (lambda size: lambda x: x / 0.0, "NaN"),
        (lambda size: lambda x: x.detach(), "passes no gradient"),
        (lambda size: lambda x: x / x.std(0, correction=0).add(1), "depends on the other rows"),
        (nn.BatchNorm1d, "depends on the other rows of a batch: Expected more than 1 value"),
        (lambda x: functional.normalize(x, dim=-1), "make must be a function of the size"),
        (nn.LayerNorm(960), "make must be a function of the size"),
    ],
)
def test_what_is_no_norm_of_rows_is_refused(make, fault):
    with pytest.raises(ValueError, match=fault):
        asr.register_norm("mine", make)
    assert not REGISTERED


class WithBuffer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("ones", torch.ones(size))

    def forward(self, x):
        return functional.layer_norm(x, x.shape[-1:]) * self.ones


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nn.LayerNorm, "has weights or buffers"),
        (WithBuffer, "has weights or buffers"),
        (lambda size: lambda x: x / x.norm(dim=-1, keepdim=True), "gives NaN for a row of zeros"),
        (
            lambda size: lambda x: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6),
            "gives NaN for a row of zeros",
        ),
    ],
    ids=["weights", "buffer", "value", "gradient"],
)
def test_a_norm_that_is_not_for_lstms_is_one_for_transformers(make, reason):
    asr.register_norm("mine", make)
    assert make_norm("mine", 6)(torch.randn(2, 3, 6)).isfinite().all()
    with pytest.raises(ValueError, match=f"norm_kind 'mine' {reason}"):
        asr.CellSettings("ba", norm_kind="mine")


@pytest.mark.parametrize("other", [{"eps": 1.0}, {"zero_variance": "raw"}])
def test_settings_that_a_registered_norm_would_ignore_are_refused(other):
    asr.register_norm("mine", layer_norm(1e-5))
    settings = asr.CellSettings("ba", norm_kind="mine")
    assert replace(settings, cell_norm="state").eps == settings.eps
    with pytest.raises(ValueError, match="eps and zero_variance are its own"):
        asr.CellSettings("ba", norm_kind="mine", **other)


@pytest.mark.parametrize("name", ["layer", "dyt", "batch", "", "a b"])
def test_a_name_that_is_not_free(name):
    with pytest.raises(ValueError, match="must be an identifier"):
        asr.register_norm(name, layer_norm(1e-5))


def test_recipes_of_this_process_may_use_the_name():
    transformer, las = read_recipe("demo_transformer"), read_recipe("demo")
    of_lstm = ["model.listener.norm_kind=mine", "model.speller.norm_kind=mine"]
    with pytest.raises(RecipeError, match=r"a name given to asr\.register_norm"):
        override(transformer, ["model.norm=mine"], "recipe")
    asr.register_norm("mine", layer_norm(1e-5))
    for recipe, keys in ((transformer, ["model.norm=mine"]), (las, of_lstm)):
        model = build_speech_model(override(recipe, keys, "recipe").model, 5, 7)
        memory = model.encode(torch.randn(2, 60, 5), torch.tensor([60, 31]))
        assert bool(memory.states.isfinite().all())
    asr.register_norm("mine", lambda size: nn.GroupNorm(1, size))
    with pytest.raises(RecipeError, match="norm_kind 'mine' has weights"):
        override(las, of_lstm, "recipe")


def test_a_run_with_it_is_trained_and_loaded(tiny, tmp_path):
    asr.register_norm("mine", layer_norm(1e-5))
    keys = ["model.listener.norm_kind=mine", "train.steps=2"]
    before = torch.get_num_threads()
    run = asr.api.train(tiny, [*keys, f"train.threads={before + 1}"], tmp_path / "run")
    assert torch.get_num_threads() == before
    assert isinstance(run.load()(tiny.parent / "test-0.flac").text, str)
    REGISTERED.clear()
    with pytest.raises(
        RecipeError, match=r"listener.norm_kind = 'mine': should be 'layer' or 'rms'"
    ):
        run.load()

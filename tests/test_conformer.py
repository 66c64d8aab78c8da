"""The Conformer's layer against a slow loop over the paper's equations."""

from functools import partial

import pytest
import torch
from reference_transformer import residual
from small_transformer import batch, config, model
from test_convolution import slow as slow_convolution
from test_transformer_layers import slow_feed_forward, slow_norm, slow_self_attention

from asr.nn.conformer import ConformerLayer
from asr.nn.transformer import LayerScales, Residual

E, KERNEL, T = 14, 5, 11  # the sizes of those loops


def layer(**settings):
    """A layer in evaluation mode with norms and biases moved from their initial values."""
    sizes = {"d_model": E, "heads": 1, "feed_forward": 23, "kernel": KERNEL, "activation": "relu"}
    settings = config("conformer", **(sizes | settings))
    made = ConformerLayer(settings, LayerScales(1.0)).double().eval()
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


@pytest.mark.parametrize("position", ["pre", "post", "peri", "reordered", "hybrid", "sub"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@torch.no_grad()
def test_equals_a_slow_loop(position, kind, monkeypatch):
    monkeypatch.setattr("test_transformer_layers.H", 1)
    torch.manual_seed(1)
    made = layer(norm_position=position, norm=kind)
    x = torch.randn(2, T, E, dtype=torch.float64)
    valid = (torch.arange(T) < torch.tensor([[T], [7]]))[:, None, None]
    out = made(x, valid)
    parts = [
        partial(slow_feed_forward, kind, made.first_feed_forward),
        partial(slow_self_attention, kind, made.self_attention, False),
        partial(slow_convolution, made.convolution, kind),
        partial(slow_feed_forward, kind, made.feed_forward),
    ]
    around = [part for part in made.children() if isinstance(part, Residual)]
    for row, length in enumerate((T, 7)):
        y = x[row, :length]
        for number, (part, function) in enumerate(zip(around, parts, strict=True)):
            half = 0.5 if number in (0, 3) else 1.0
            norms = [slow_norm(kind, part.norm), slow_norm(kind, part.out_norm)]
            if position in ("peri", "reordered"):  # the half is of the normed output
                scaled = norms[-1 if position == "peri" else 0]
                norms[-1 if position == "peri" else 0] = lambda z, n=scaled, h=half: h * n(z)
                sublayer = function
            else:
                sublayer = lambda z, f=function, h=half: h * f(z)  # noqa: E731
            y = residual(y, norms, position, 1.0, sublayer, number == 1)
        expected = slow_norm(kind, made.norm)(y)
        torch.testing.assert_close(out[row, :length], expected, rtol=1e-5, atol=1e-6)  # of angles


def test_the_last_layer_ends_with_the_only_norm_of_the_stack():
    made = model(kind="conformer", heads=1)
    assert not list(made.encoder.last_norm.parameters())
    assert all(list(layer.norm.parameters()) for layer in made.encoder.layers)


def test_batch_statistics_are_saved_and_used_in_evaluation():
    made = model(kind="conformer", heads=1, convolution_norm="batch", dropout=0.0)
    features, lengths, _ = batch()
    before = made.encode(features, lengths).states
    made.train().encode(features, lengths)
    after = made.eval().encode(features, lengths).states
    assert not torch.allclose(before, after)
    again = model(kind="conformer", heads=1, convolution_norm="batch", dropout=0.0)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again.encode(features, lengths).states, after)

"""The listener against a slow pyramid built from one-frame-at-a-time loops and nn.LSTM."""

import pytest
import torch
from torch import nn

from asr.config.schema import ListenerConfig
from asr.models.las import Listener

B, F, H = 3, 7, 5
LENGTHS = [13, 6, 1]


def listener(**settings):
    torch.manual_seed(1)
    made = Listener(F, ListenerConfig(hidden=H, backend="reference", **settings))
    for weight in made.parameters():  # gains and biases too: all 1 or 0 would hide an exchange
        nn.init.normal_(weight, std=0.4)
    return made.double()


def batch(seed=2, lengths=LENGTHS):
    torch.manual_seed(seed)
    x = torch.randn(len(lengths), max(lengths), F, dtype=torch.float64)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    return x, torch.tensor(lengths)


def slow_pairs(frames):
    """[(E,)] -> [(2E,)], the last of an odd number joined with zeros."""
    frames = [*frames, torch.zeros_like(frames[0])] if len(frames) % 2 else frames
    return [torch.cat([frames[i], frames[i + 1]]) for i in range(0, len(frames), 2)]


def slow_listener(ours, features, pyramid):
    """One utterance (T, F) through a plain BLSTM stack with nn.LSTM, pairs joined by a loop."""
    frames = list(features)
    for number, layer in enumerate(ours.layers, start=1):
        frames = slow_pairs(frames) if number in pyramid else frames
        judge = nn.LSTM(len(frames[0]), H, batch_first=True, bidirectional=True).double()
        judge.load_state_dict(layer.state_dict())
        frames = list(judge(torch.stack(frames)[None])[0][0])
    return torch.stack(frames)


@pytest.mark.parametrize("pyramid", [(), (1,), (2, 3), (1, 2, 3)])
def test_listener_equals_the_slow_pyramid(pyramid):
    ours = listener(layers=3, pyramid=pyramid, norm="none")
    features, lengths = batch()
    with torch.no_grad():
        memory = ours(features, lengths)
        for row, length in enumerate(LENGTHS):
            expected = slow_listener(ours, features[row, :length], pyramid)
            assert memory.valid[row].sum() == len(expected)
            assert memory.valid[row, : len(expected)].all()
            torch.testing.assert_close(memory.states[row, : len(expected)], expected)


@pytest.mark.parametrize("convolution", [1, 2, 4, 6])
@pytest.mark.parametrize("pyramid", [(1,), (2,)])
def test_padding_and_batch_mates_change_nothing(pyramid, convolution):
    ours = listener(layers=2, pyramid=pyramid, norm="ba", convolution=convolution)
    features, lengths = batch()
    with torch.no_grad():
        memory = ours(features, lengths)
        for row, length in enumerate(LENGTHS):
            alone = ours(features[row : row + 1, :length], lengths[row : row + 1])
            frames = alone.states.size(1)
            assert alone.valid.all() and memory.valid[row].sum() == frames
            torch.testing.assert_close(memory.states[row, :frames], alone.states[0])
            assert (memory.states[row, frames:] == 0).all()


def test_poisoned_padding_reaches_no_gradient():
    ours = listener(layers=2, pyramid=(1,), convolution=2)
    features, lengths = batch()
    features.requires_grad_()
    memory = ours(features, lengths)
    memory.states.square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in ours.parameters())
    for row, length in enumerate(LENGTHS):
        assert (features.grad[row, length:] == 0).all()
        assert (features.grad[row, :length] != 0).any(dim=1).all()


@pytest.mark.parametrize("convolution", [1, 2, 4, 6])
@pytest.mark.parametrize("pyramid", [(), (2,), (1, 2)])
def test_output_lengths_are_exact(convolution, pyramid):
    ours = listener(layers=2, pyramid=pyramid, convolution=convolution)
    lengths = torch.arange(1, 20)
    expected = ours.output_lengths(lengths)
    with torch.no_grad():
        memory = ours(torch.randn(19, 19, F, dtype=torch.float64), lengths)
    assert expected.tolist() == memory.valid.sum(dim=1).tolist()
    assert memory.states.shape == (19, int(expected.max()), 2 * H) and ours.size == 2 * H


@pytest.mark.parametrize(
    ("where", "normed"), [("all", [1, 2, 3]), ("pyramid", [2, 3]), ("first", [1])]
)
def test_norm_layers_selects_the_normalised_layers(where, normed):
    ours = listener(layers=3, pyramid=(2, 3), norm="ba", norm_layers=where)
    assert [n for n, layer in enumerate(ours.layers, 1) if layer.settings.norm == "ba"] == normed
    assert all(layer.settings.norm in ("ba", "none") for layer in ours.layers)


def test_dropout_acts_in_training_only():
    ours = listener(layers=1, pyramid=(), dropout=0.5)
    features, lengths = batch()
    torch.manual_seed(3)
    first, second = ours(features, lengths), ours(features, lengths)
    assert not torch.equal(first.states, second.states)
    ours.eval()
    torch.testing.assert_close(ours(features, lengths).states, ours(features, lengths).states)

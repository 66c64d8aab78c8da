"""Convolutional subsampling: lengths, and independence of padding and batch mates."""

import pytest
import torch
from torch.nn import functional

from asr.nn.subsampling import ConvSubsampling
from asr.nn.transformer import ACTIVATIONS

FACTORS = (2, 4, 6, 8)


def slow_convolution(x, conv, stride):
    """x (C, T, F) -> (C', ceil(T/s), ceil(F/s)), one output position at a time."""
    pad = stride - 1
    x = functional.pad(x, (pad, pad, pad, pad))
    side = 2 * stride - 1
    rows = []
    for t in range(0, x.size(1) - side + 1, stride):
        row = [
            (conv.weight * x[:, t : t + side, f : f + side]).sum((1, 2, 3)) + conv.bias
            for f in range(0, x.size(2) - side + 1, stride)
        ]
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("factor", FACTORS)
def test_equals_a_slow_convolution_of_each_utterance_alone(factor):
    torch.manual_seed(0)
    front = ConvSubsampling(11, 7, factor, channels=3)
    features, lengths = torch.randn(2, 29, 11), torch.tensor([29, 17])
    x, out_lengths = front(features, lengths)
    for b in range(2):
        slow = features[b : b + 1, : lengths[b]]
        for conv, stride in zip(front.convs, front.strides, strict=True):
            slow = slow_convolution(slow, conv, stride).relu()
        slow = front.out(slow.permute(1, 2, 0).flatten(1))
        assert len(slow) == out_lengths[b]
        torch.testing.assert_close(x[b, : len(slow)], slow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", FACTORS)
def test_lengths_are_exact(factor):
    front = ConvSubsampling(5, 3, factor, channels=2)
    lengths = torch.arange(0, 4 * factor + 2)
    expected = [-(-int(n) // factor) for n in lengths]  # nested ceilings are one ceiling
    assert front.output_lengths(lengths).tolist() == expected
    for length, short in zip(lengths.tolist(), expected, strict=True):
        x, out = front(torch.randn(1, length, 5), torch.tensor([length]))
        assert x.shape == (1, short, 3)
        assert out.tolist() == [short]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
def test_padding_and_batch_mates_change_nothing(factor, activation):
    torch.manual_seed(1)
    front = ConvSubsampling(13, 7, factor, channels=3)
    front.activation = ACTIVATIONS[activation]()
    short = torch.randn(19, 13)
    alone, _ = front(short[None], torch.tensor([19]))
    for fill in (0.0, 1e4, float("nan")):
        batch = torch.full((3, 41, 13), fill)
        batch[0], batch[2] = torch.randn(41, 13), torch.randn(41, 13)
        batch[1, :19] = short
        front.zero_grad()
        x, lengths = front(batch, torch.tensor([41, 19, 0]))
        torch.testing.assert_close(x[1, : lengths[1]], alone[0])
        assert lengths[2] == 0
        x[1, : lengths[1]].sum().backward()
        assert all(p.grad.isfinite().all() for p in front.parameters())


def test_gradient_stops_at_the_utterance_end():
    torch.manual_seed(2)
    front = ConvSubsampling(5, 3, 4, channels=2)
    front.activation = ACTIVATIONS["gelu"]()  # no inactive units, unlike relu
    features = torch.randn(2, 23, 5, requires_grad=True)
    front(features, torch.tensor([23, 13]))[0].sum().backward()
    assert (features.grad[1, 13:] == 0).all()
    assert (features.grad[1, :13].abs().sum(-1) > 0).all()

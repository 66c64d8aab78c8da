"""The convolution module against a loop over frames, neighbours and channels."""

import pytest
import torch
from reference_transformer import linear, norm
from torch import nn

from asr.config.schema import TransformerConfig
from asr.nn.convolution import ConvolutionModule
from asr.nn.norm import ROW_NORMS, SQUASHING, BatchNorm
from asr.nn.transformer import EncoderLayer, LayerScales, Residual

E, KERNEL, T, B = 7, 5, 13, 3
LENGTHS = [T, 11, 2]
NORMS = (*ROW_NORMS, *SQUASHING)


def module(kind="layer", kernel=KERNEL):
    """A module with weights moved from their initial values."""
    torch.manual_seed(0)
    made = ConvolutionModule(E, kernel, kind, gain=1.0).double()
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def layers_config(**settings):
    return TransformerConfig(kind="transformer", d_model=E, heads=1, **settings)


def valid():
    return torch.arange(T) < torch.tensor(LENGTHS)[:, None]


def slow(made, kind, x):
    """One utterance (T, E): Gulati et al. 2020, figure 2, after the residual's own norm."""
    wide, gate = linear(x, *made.gated[0].parameters()).chunk(2, -1)
    gated = wide / (1 + torch.exp(-gate))
    frames = []
    for t in range(len(x)):
        seen = made.depthwise.bias.clone()
        for k in range(KERNEL):
            neighbour = t + k - KERNEL // 2
            if 0 <= neighbour < len(x):
                seen = seen + made.depthwise.weight[:, 0, k, 0] * gated[neighbour]
        frames.append(seen)
    normed = norm(kind, list(made.norm.parameters()), torch.stack(frames))
    return linear(normed / (1 + torch.exp(-normed)), *made.out.parameters())


@pytest.mark.parametrize("kind", NORMS)
def test_equals_a_slow_loop_with_gradients(kind):
    made = module(kind)
    x = torch.randn(B, T, E, dtype=torch.float64)
    out = made(x, valid())
    ours = torch.cat([row[:n] for row, n in zip(out, LENGTHS, strict=True)])
    expected = torch.cat([slow(made, kind, row[:n]) for row, n in zip(x, LENGTHS, strict=True)])
    torch.testing.assert_close(ours, expected)
    parameters = list(made.parameters())
    gradients = torch.autograd.grad(ours.square().sum(), parameters)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), parameters))


class TestBatchNorm:
    @pytest.mark.parametrize("training", [True, False])
    def test_equals_torch_over_the_valid_frames(self, training):
        ours, judge = BatchNorm(E, 1e-6).double(), nn.BatchNorm1d(E, 1e-6).double()
        for parameter, other in zip(ours.parameters(), judge.parameters(), strict=True):
            nn.init.normal_(parameter)
            other.data.copy_(parameter)
        for norm_ in (ours, judge):
            norm_.train(training)
        x = torch.randn(4, B, T, E, dtype=torch.float64, requires_grad=True)
        for batch in x:
            out, expected = ours(batch, valid())[valid()], judge(batch[valid()])
            torch.testing.assert_close(out, expected)
        gradients = [torch.autograd.grad(o.square().sum(), x)[0] for o in (out, expected)]
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close(ours.running_mean, judge.running_mean)
        torch.testing.assert_close(ours.running_var, judge.running_var)

    def test_a_batch_without_a_valid_frame_changes_no_statistics(self):
        ours = BatchNorm(E, 1e-6)
        before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
        assert ours(torch.randn(B, T, E), torch.zeros(B, T, dtype=torch.bool)).isfinite().all()
        assert all(torch.equal(before[name], ours.state_dict()[name]) for name in before)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_a_batch_whose_step_is_skipped_changes_no_statistics(self, value):
        ours, x = BatchNorm(E, 1e-6), torch.randn(B, T, E)
        ours(x, valid())
        before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
        x[0, 0, 1] = value
        ours(x, valid())
        assert all(torch.equal(before[name], ours.state_dict()[name]) for name in before)

    def test_one_frame_has_no_variance_and_finite_statistics(self):
        ours = BatchNorm(E, 1e-6)
        ours(torch.randn(1, 1, E), torch.ones(1, 1, dtype=torch.bool))
        assert ours.running_var.isfinite().all()

    @torch.no_grad()
    def test_in_evaluation_padding_and_batch_mates_change_nothing(self):
        made = module("batch")
        made.train()(torch.randn(B, T, E, dtype=torch.float64), valid())
        check_padding(made.eval())


@torch.no_grad()
def test_padding_and_batch_mates_change_nothing():
    check_padding(module())


def check_padding(made):
    x = torch.randn(B, T, E, dtype=torch.float64)
    batched = made(x.masked_fill(~valid()[..., None], float("nan")), valid())
    for row, length in enumerate(LENGTHS):
        alone = made(x[row : row + 1, :length], torch.ones(1, length, dtype=torch.bool))
        torch.testing.assert_close(batched[row, :length], alone[0])


@pytest.mark.parametrize("shape", [(0, T), (B, 0)])
def test_empty_input_gives_empty_output(shape):
    out = module()(torch.zeros(*shape, E, dtype=torch.float64), torch.ones(shape).bool())
    assert out.shape == (*shape, E)


def test_half_precision_is_finite():
    made = module().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = made(100 * torch.randn(B, T, E), valid())
    out.float().square().sum().backward()
    assert out.isfinite().all() and all(p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("position", ["pre", "post"])
def test_an_encoder_layer_has_it_between_attention_and_feed_forward(position):
    torch.manual_seed(1)
    config = layers_config(feed_forward=11, norm="rms", norm_position=position)
    layer = EncoderLayer(config, LayerScales(1.5, 0.3), None, KERNEL, "rms").double().eval()
    x, seen = torch.randn(B, T, E, dtype=torch.float64), valid()[:, None, None]
    parts = [
        (layer.around_self_attention, lambda y: layer.self_attention(y, seen)),
        (layer.around_convolution, lambda y: layer.convolution(y, valid())),
        (layer.around_feed_forward, layer.feed_forward),
    ]
    expected = x
    for around, sublayer in parts:
        assert isinstance(around, Residual) and around.alpha == 1.5
        stream, entering = around.enter(expected)
        expected = around.leave(stream, sublayer(entering))
    torch.testing.assert_close(layer(x, seen), expected)
    assert sum(type(m).__name__ == "RMSNorm" for m in layer.modules()) == 4  # one within


@pytest.mark.parametrize("kernel", [0, 4, -3])
def test_a_kernel_without_a_middle_is_refused(kernel):
    message = "must be odd: choose 3 or 5" if kernel == 4 else "greater than or equal to 1"
    with pytest.raises(ValueError, match=message):
        layers_config(encoder_convolution=kernel)

"""Layers against torch's own and slow loops; independence of padding and future positions."""

import math
from functools import partial

import pytest
import torch
from reference_transformer import feed_forward, multi_head, residual, sinusoid
from torch import nn

from asr.config.schema import DropPerStack, PerStack, TransformerConfig
from asr.errors import UserError
from asr.nn.positions import make_positions
from asr.nn.transformer import (
    ACTIVATIONS,
    DecoderLayer,
    EncoderLayer,
    Residual,
    ResidualScales,
    Stack,
    decoder_stack,
    encoder_stack,
    per_stack,
    residual_scales,
)

E, H, F, T, U, B = 14, 2, 23, 11, 7, 3
POSITIONS = ("pre", "post")
NORMS = ("layer", "rms", "scale")


def places(lengths, size=T):
    return (torch.arange(size) < torch.tensor(lengths)[:, None])[:, None, None]


def config(**settings):
    sizes = {"d_model": E, "heads": H, "feed_forward": F, "dropout": 0.0}
    return TransformerConfig(kind="transformer", **(sizes | settings))


def layer(kind, norm="layer", position="pre", alpha=1.0, activation="relu"):
    """A layer in evaluation mode with norms and biases moved from their initial values."""
    settings = config(norm=norm, norm_position=position, activation=activation)
    extras = (None, None) if kind is EncoderLayer else ()
    made = kind(settings, ResidualScales(alpha), *extras)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made.eval()


def judge_of(ours, judge):
    """torch's layer with our weights."""
    pairs = {"self_attn.out_proj": ours.self_attention.out}
    pairs |= {"linear1": ours.feed_forward[0], "linear2": ours.feed_forward[3]}
    norms = [part.norm for part in ours.children() if isinstance(part, Residual)]
    pairs |= {f"norm{i}": norm for i, norm in enumerate(norms, 1)}
    judge.self_attn.in_proj_weight.data.copy_(ours.self_attention.query_key_value.weight)
    judge.self_attn.in_proj_bias.data.copy_(ours.self_attention.query_key_value.bias)
    if isinstance(ours, DecoderLayer):
        cross, theirs = ours.cross_attention, judge.multihead_attn
        pairs["multihead_attn.out_proj"] = cross.out
        weights, biases = zip(
            *(p.parameters() for p in (cross.query, cross.key_value)), strict=True
        )
        theirs.in_proj_weight.data.copy_(torch.cat(weights))
        theirs.in_proj_bias.data.copy_(torch.cat(biases))
    for name, module in pairs.items():
        judge.get_submodule(name).load_state_dict(module.state_dict())
    return judge.eval()


def gradients_agree(ours, judge, shared):
    """Gradients of the inputs, and of all parameters as one vector."""
    for mine, theirs in shared:
        torch.testing.assert_close(mine.grad, theirs.grad)
    norms = [sum(p.grad.square().sum() for p in m.parameters()) for m in (ours, judge)]
    torch.testing.assert_close(*norms)


def twins(*shape):
    x = torch.randn(*shape)
    return x.clone().requires_grad_(), x.clone().requires_grad_()


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_equals_torch(position, activation):
    torch.manual_seed(0)
    ours = layer(EncoderLayer, position=position, activation=activation)
    settings = {"dropout": 0.0, "activation": activation, "layer_norm_eps": 1e-6}
    settings |= {"batch_first": True, "norm_first": position == "pre"}
    judge = judge_of(ours, nn.TransformerEncoderLayer(E, H, F, **settings))
    (x, y), valid = twins(B, T, E), places([T, 5, 8])
    out, expected = ours(x, valid), judge(y, src_key_padding_mask=~valid[:, 0, 0])
    torch.testing.assert_close(out, expected)
    seen = valid[:, 0, 0, :, None]
    (out * seen).square().sum().backward()
    (expected * seen).square().sum().backward()
    gradients_agree(ours, judge, [(x, y)])


@pytest.mark.parametrize("position", POSITIONS)
def test_decoder_layer_equals_torch(position):
    torch.manual_seed(1)
    ours = layer(DecoderLayer, position=position)
    settings = {"dropout": 0.0, "layer_norm_eps": 1e-6, "batch_first": True}
    settings["norm_first"] = position == "pre"
    judge = judge_of(ours, nn.TransformerDecoderLayer(E, H, F, **settings))
    (x, y), (memory, other), valid = twins(B, U, E), twins(B, T, E), places([T, 5, 8])
    out, _ = ours(x, ours.cross_attention.project(memory), valid)
    future = torch.ones(U, U, dtype=torch.bool).triu(1)
    expected = judge(y, other, tgt_mask=future, memory_key_padding_mask=~valid[:, 0, 0])
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    gradients_agree(ours, judge, [(x, y), (memory, other)])


def slow_self_attention(module, causal, x):
    contexts, _ = multi_head(*module.query_key_value(x).chunk(3, -1), H, causal)
    return module.out(contexts)


def slow_cross_attention(module, memory, x):
    contexts, _ = multi_head(module.query(x), *module.key_value(memory).chunk(2, -1), H)
    return module.out(contexts)


def slow_layer(ours, norm, position, alpha, x, memory=None):
    """One utterance x (T, E) through the papers' equations with our weights."""
    feed = [p for i in (0, 3) for p in ours.feed_forward[i].parameters()]
    sublayers = [partial(slow_self_attention, ours.self_attention, memory is not None)]
    if memory is not None:
        sublayers.append(partial(slow_cross_attention, ours.cross_attention, memory))
    sublayers.append(lambda y: feed_forward(y, *feed))
    around = [part for part in ours.children() if isinstance(part, Residual)]
    for part, sublayer in zip(around, sublayers, strict=True):
        parameters = list(part.norm.parameters())
        x = residual(x, parameters, norm, position, alpha, sublayer)
    return x


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("alpha", [1.0, 1.7])
@torch.no_grad()
def test_layers_equal_slow_loops(norm, position, alpha):
    torch.manual_seed(2)
    encoder = layer(EncoderLayer, norm, position, alpha).double()
    decoder = layer(DecoderLayer, norm, position, alpha).double()
    x = torch.randn(2, T, E, dtype=torch.float64)
    tokens = torch.randn(2, U, E, dtype=torch.float64)
    valid = places([T, 5])
    states = encoder(x, valid)
    out, _ = decoder(tokens, decoder.cross_attention.project(states), valid)
    for b, length in enumerate((T, 5)):
        slow = slow_layer(encoder, norm, position, alpha, x[b, :length])
        torch.testing.assert_close(states[b, :length], slow)
        slow = slow_layer(decoder, norm, position, alpha, tokens[b], slow)
        torch.testing.assert_close(out[b], slow)


def test_the_future_changes_nothing():
    torch.manual_seed(3)
    ours, valid = layer(DecoderLayer), places([T, 5, 8])
    x, memory = torch.randn(B, U, E), ours.cross_attention.project(torch.randn(B, T, E))
    before, _ = ours(x, memory, valid)
    for u in range(1, U):
        changed = x.clone()
        changed[:, u:] += torch.randn(B, U - u, E)
        after, _ = ours(changed, memory, valid)
        torch.testing.assert_close(after[:, :u], before[:, :u])
        assert not torch.isclose(after[:, u], before[:, u]).any(-1).all()


def test_dropout_is_on_the_sublayer_output_only():
    torch.manual_seed(4)
    around = Residual(config(norm_position="pre", dropout=0.5), alpha=2.0)
    x, output = torch.randn(101, E), torch.ones(101, E)
    added = around.leave(x, output) - 2 * x
    assert {round(v, 4) for v in added.flatten().tolist()} == {0.0, 2.0}
    torch.testing.assert_close(around.eval().leave(x, output), output + 2 * x)


@pytest.mark.parametrize("position", POSITIONS)
def test_each_sublayer_has_one_norm_and_pre_adds_one_to_the_stack(position):
    settings = (config(norm_position=position), 5, ResidualScales(1.0), 0.0)
    stacks = ((encoder_stack(*settings, None, None), 2), (decoder_stack(*settings), 3))
    for stack, sublayers in stacks:
        norms = sum(isinstance(module, nn.LayerNorm) for module in stack.modules())
        assert norms == 5 * sublayers + (position == "pre")
        assert isinstance(stack.last_norm, nn.LayerNorm) == (position == "pre")


def test_layer_drop_skips_layers_in_training_only():
    torch.manual_seed(5)
    stack = Stack([nn.Identity() for _ in range(11)], None, layer_drop=0.5)
    depths = {len(list(stack.passing())) for _ in range(97)}
    assert len(depths) > 3 and max(depths) < 11
    assert len(list(stack.eval().passing())) == 11


def test_deepnet_scales_from_the_paper():
    encoder, decoder = residual_scales("deepnet", 18, 6)
    assert encoder.alpha == pytest.approx(0.81 * (18**4 * 6) ** 0.0625)
    assert encoder.gain == pytest.approx(0.87 * (18**4 * 6) ** -0.0625)
    assert decoder.alpha == pytest.approx(18**0.25)
    assert decoder.gain == pytest.approx(72**-0.25)
    assert residual_scales(1.5, 3, 2) == (ResidualScales(1.5), ResidualScales(1.5))
    assert residual_scales(PerStack(encoder=2, decoder=3.0), 3, 2) == (
        ResidualScales(2),
        ResidualScales(3.0),
    )


def test_deepnet_scales_values_outputs_and_feed_forward_only():
    torch.manual_seed(6)
    size, gain = 199, 0.3
    settings = config(d_model=size, heads=1, feed_forward=size)
    made = DecoderLayer(settings, ResidualScales(1.0, gain))
    xavier = math.sqrt(1 / size)  # sqrt(2 / (inputs + outputs))
    query, key, value = made.self_attention.query_key_value.weight.chunk(3)
    cross_key, cross_value = made.cross_attention.key_value.weight.chunk(2)
    plain = [query, key, made.cross_attention.query.weight, cross_key]
    scaled = [value, cross_value, made.self_attention.out.weight, made.cross_attention.out.weight]
    scaled += [made.feed_forward[0].weight, made.feed_forward[3].weight]
    for weights, expected in ((plain, xavier), (scaled, gain * xavier)):
        for weight in weights:
            assert weight.std().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("size", [8, 7])
def test_sinusoidal_positions(size):
    positions = make_positions("sinusoidal", size, 13)
    slow = torch.stack([sinusoid(place, size) for place in range(1300)]).float()
    torch.testing.assert_close(positions(0, 3), slow[:3])
    torch.testing.assert_close(positions(1290, 10), slow[1290:])  # the table grows
    assert not positions.state_dict()


def test_learned_positions_end_with_one_clear_line():
    positions = make_positions("learned", 5, 13)
    torch.testing.assert_close(positions(11, 2), positions.table[11:])
    with pytest.raises(UserError, match=r"^a sequence of length 14 is longer than the 13 learned"):
        positions(10, 4)


@pytest.mark.parametrize("name", ["relu", "gelu", "swish"])
def test_activations(name):
    x = torch.tensor([-1.3, 0.0, 0.7])
    slow = {
        "relu": lambda v: max(v, 0.0),
        "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        "swish": lambda v: v / (1 + math.exp(-v)),
    }[name]
    torch.testing.assert_close(
        ACTIVATIONS[name]()(x.clone()), torch.tensor([*map(slow, x.tolist())])
    )


def test_a_number_for_both_stacks_or_for_each():
    assert per_stack(0.3) == (0.3, 0.3)
    assert per_stack(PerStack(decoder=2)) == (1.0, 2.0)
    assert per_stack(DropPerStack(encoder=0.1)) == (0.1, 0.0)


def test_an_unknown_norm_has_one_clear_line():
    with pytest.raises(ValueError, match=r"^norm 'batch' is not known"):
        Residual(config().model_copy(update={"norm": "batch"}), 1.0)

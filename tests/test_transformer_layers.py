"""Layers against torch's own and slow loops; independence of padding and future positions."""

import math
from functools import partial

import pytest
import torch
from reference_transformer import (
    feed_forward,
    linear,
    multi_head,
    norm,
    residual,
    rotated,
    sinusoid,
)
from torch import nn

from asr.config.schema import PerStack, TransformerConfig
from asr.nn.norm import ROW_NORMS, SQUASHING
from asr.nn.positions import RotaryPositions, make_positions
from asr.nn.transformer import (
    ACTIVATIONS,
    DecoderLayer,
    EncoderLayer,
    LayerScales,
    Residual,
    layer_scales,
    make_stack,
    per_stack,
)

E, H, F, T, U, B = 14, 2, 23, 11, 7, 3
POSITIONS = ("pre", "post")  # torch's layers have no others
ALL_POSITIONS = (*POSITIONS, "peri", "reordered", "hybrid", "sub")
NORMS = (*ROW_NORMS, *SQUASHING)


def valid_mask(lengths, size=T):
    return (torch.arange(size) < torch.tensor(lengths)[:, None])[:, None, None]


def config(**settings):
    sizes = {"d_model": E, "heads": H, "feed_forward": F, "dropout": 0.0}
    return TransformerConfig(kind="transformer", **(sizes | settings))


def layer(kind, norm="layer", position="pre", alpha=1.0, scale=1.0, **more):
    """A layer in evaluation mode with norms and biases moved from their initial values."""
    settings = config(norm=norm, norm_position=position, **more)
    extras = (None, None, norm) if kind is EncoderLayer else ()
    made = kind(settings, LayerScales(alpha, norm_output=scale), *extras)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made.eval()


def stacks_of(settings):
    """Five layers of an encoder, and of a decoder."""
    encoder = EncoderLayer, None, None, "layer"
    return [make_stack(settings, 5, LayerScales(1.0), *make) for make in (encoder, (DecoderLayer,))]


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
    (x, y), valid = twins(B, T, E), valid_mask([T, 5, 8])
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
    (x, y), (memory, other), valid = twins(B, U, E), twins(B, T, E), valid_mask([T, 5, 8])
    out, _ = ours(x, ours.cross_attention.project(memory), valid)
    future = torch.ones(U, U, dtype=torch.bool).triu(1)
    expected = judge(y, other, tgt_mask=future, memory_key_padding_mask=~valid[:, 0, 0])
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    gradients_agree(ours, judge, [(x, y), (memory, other)])


def slow_norm(kind, module):
    """The norm of each position by itself; the identity where the layer has none."""
    parameters = list(module.parameters())
    return lambda x: norm(kind, parameters, x) if parameters else x


def slow_attention(kind, module, query, keys, values, causal=False):
    """Projections (Q, E), (T, E), (T, E) -> the output of attention (Q, E)."""
    norms = module.query_norm, module.key_norm, module.value_norm
    parts = [slow_norm(kind, norm)(x) for norm, x in zip(norms, (query, keys, values), strict=True)]
    if getattr(module, "rotary", None) is not None:
        parts[:2] = [rotated(part, H) for part in parts[:2]]
    contexts, _ = multi_head(*parts, H, causal)
    return linear(slow_norm(kind, module.inner_norm)(contexts), module.out.weight, module.out.bias)


def slow_self_attention(kind, module, causal, x):
    return slow_attention(kind, module, *module.query_key_value(x).chunk(3, -1), causal)


def slow_cross_attention(kind, module, memory, x):
    return slow_attention(kind, module, module.query(x), *module.key_value(memory).chunk(2, -1))


def slow_feed_forward(kind, module, x):
    first, last = module[0], module[-1]
    if len(module) == 4:
        return feed_forward(x, first.weight, first.bias, last.weight, last.bias)
    hidden = linear(x, first.weight, first.bias).relu()
    return linear(slow_norm(kind, module[3])(hidden), last.weight, last.bias)


def slow_layer(ours, kind, position, alpha, x, memory=None, scale=1.0):
    """One utterance x (T, E) through the papers' equations with our weights."""
    sublayers = [partial(slow_self_attention, kind, ours.self_attention, memory is not None)]
    if memory is not None:
        sublayers.append(partial(slow_cross_attention, kind, ours.cross_attention, memory))
    sublayers.append(partial(slow_feed_forward, kind, ours.feed_forward))
    around = [part for part in ours.children() if isinstance(part, Residual)]
    for part, sublayer in zip(around, sublayers, strict=True):
        scaled = slow_norm(kind, part.norm)
        norms = [lambda y, n=scaled: scale * n(y), slow_norm(kind, part.out_norm)]
        x = residual(x, norms, position, alpha, sublayer, sublayer.func is not slow_feed_forward)
    return x


@pytest.mark.parametrize(
    ("kind", "position", "alpha", "more"),
    [
        *((kind, "pre", 1.7, {}) for kind in NORMS),
        *(("layer", position, 1.7, {}) for position in ALL_POSITIONS),
        *(("rms", position, 1.0, {}) for position in ALL_POSITIONS),
        ("dyt", "hybrid", 1.0, {}),
        ("layer", "pre", 1.0, {"qk_norm": True}),
        ("scale", "post", 1.0, {"qk_norm": True}),
        ("layer", "pre", 1.0, {"positions": "rope", "heads": 1}),
        ("rms", "sub", 1.0, {"positions": "rope", "heads": 1, "qk_norm": True}),
        ("layer", "pre", 1.0, {"depth_scaled": True, "scale": 5**-0.5}),
    ],
)
@torch.no_grad()
def test_layers_equal_slow_loops(kind, position, alpha, more, monkeypatch):
    torch.manual_seed(2)
    monkeypatch.setitem(globals(), "H", more.get("heads", H))
    encoder = layer(EncoderLayer, kind, position, alpha, **more).double()
    decoder = layer(DecoderLayer, kind, position, alpha, **more).double()
    x = torch.randn(2, T, E, dtype=torch.float64)
    tokens = torch.randn(2, U, E, dtype=torch.float64)
    valid, scale = valid_mask([T, 5]), more.get("scale", 1.0)
    states = encoder(x, valid)
    memory = decoder.cross_attention.project(states)
    out, _ = decoder(tokens, memory, valid)
    past, steps = torch.empty(0, 2, 2, E, dtype=torch.float64), []
    for u in range(U):
        past = torch.cat((past, torch.full_like(states[:1, :2, None].expand(-1, -1, 2, -1), 9.0)))
        steps.append(decoder.step(tokens[:, u : u + 1], past, memory, valid))
    torch.testing.assert_close(torch.cat(steps, 1), out)
    for b, length in enumerate((T, 5)):
        slow = slow_layer(encoder, kind, position, alpha, x[b, :length], scale=scale)
        torch.testing.assert_close(states[b, :length], slow)
        slow = slow_layer(decoder, kind, position, alpha, tokens[b], slow, scale)
        torch.testing.assert_close(out[b], slow)


def test_dropout_is_on_the_sublayer_output_only():
    torch.manual_seed(4)
    around = Residual(config(norm_position="pre", dropout=0.5), LayerScales(2.0))
    x, output = torch.randn(101, E), torch.ones(101, E)
    added = around.leave(x, output) - 2 * x
    assert {round(v, 4) for v in added.flatten().tolist()} == {0.0, 2.0}
    torch.testing.assert_close(around.eval().leave(x, output), output + 2 * x)


@pytest.mark.parametrize(
    ("position", "in_encoder", "in_decoder", "around"),
    [
        ("pre", 2, 3, 1),
        ("post", 2, 3, 0),
        ("peri", 4, 6, 2),
        ("reordered", 2, 3, 1),
        ("hybrid", 3 + 1, 2 * 3 + 1, 1),
        ("sub", 2 * 2, 2 * 3, 1),
    ],
)
def test_number_of_norms(position, in_encoder, in_decoder, around):
    stacks = stacks_of(config(norm_position=position))
    for stack, in_layer in zip(stacks, (in_encoder, in_decoder), strict=True):
        norms = sum(isinstance(module, nn.LayerNorm) for module in stack.modules())
        assert norms == 5 * in_layer + around
        ends = stack.first_norm, stack.last_norm
        assert sum(isinstance(norm, nn.LayerNorm) for norm in ends) == around


def test_depth_scaled_norms_are_divided_by_the_root_of_the_layer():
    x = torch.randn(3, E)
    for stack in stacks_of(config(depth_scaled=True)):
        for number, layer in enumerate(stack.layers, start=1):
            around = [part for part in layer.children() if isinstance(part, Residual)]
            for part in around:
                torch.testing.assert_close(part.enter(x)[1], part.norm(x) / math.sqrt(number))


def test_rotary_positions_make_scores_depend_on_distance_alone():
    rotary = RotaryPositions(6)
    query, key = torch.randn(1, 1, 1, 6), torch.randn(1, 1, 1, 6)
    scores = [(rotary(query, start + 7) * rotary(key, start)).sum() for start in (0, 3, 511, 2000)]
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rotary(query, 0), query)
    assert not rotary.state_dict()


def test_deepnet_scales_from_the_paper():
    encoder, decoder = layer_scales("deepnet", "post", 18, 6)
    assert encoder.alpha == pytest.approx(0.81 * (18**4 * 6) ** 0.0625)
    assert encoder.gain == pytest.approx(0.87 * (18**4 * 6) ** -0.0625)
    assert decoder.alpha == pytest.approx(18**0.25)
    assert decoder.gain == pytest.approx(72**-0.25)
    assert layer_scales(1.5, "pre", 3, 2) == (LayerScales(1.5), LayerScales(1.5))
    both = layer_scales(PerStack(encoder=2, decoder=3.0), "post", 3, 2)
    assert both == (LayerScales(2), LayerScales(3.0))


def test_the_gains_of_sub_from_the_paper():
    encoder, decoder = layer_scales(1.0, "sub", 18, 6)
    assert (encoder.alpha, decoder.alpha) == (1.0, 1.0)
    assert encoder.gain == pytest.approx((math.log(18) * math.log(36) / 3) ** 0.5)
    assert decoder.gain == pytest.approx(math.log(18) ** 0.5)


def test_deepnet_scales_values_outputs_and_feed_forward_only():
    torch.manual_seed(6)
    size, gain = 199, 0.3
    settings = config(d_model=size, heads=1, feed_forward=size)
    made = DecoderLayer(settings, LayerScales(1.0, gain))
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
    positions = make_positions("sinusoidal", size)
    slow = torch.stack([sinusoid(position, size) for position in range(1300)]).float()
    torch.testing.assert_close(positions(0, 3), slow[:3])
    torch.testing.assert_close(positions(1290, 10), slow[1290:])  # the table grows
    assert not positions.state_dict()


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

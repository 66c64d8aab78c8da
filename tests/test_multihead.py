"""Attention against slow loops and torch's own module; masks, weights, one step at a time."""

import pytest
import torch
from pydantic import ValidationError
from reference_transformer import attend, multi_head
from torch import nn

from asr.config.language import TransformerLanguageModelConfig
from asr.config.schema import TransformerConfig
from asr.nn.transformer import CrossAttention, SelfAttention, attention_weights

E, H, T, Q, B = 21, 3, 11, 5, 2


def config(**rates):
    return TransformerConfig(kind="transformer", d_model=E, heads=H, **rates)


def self_attention(dropout=0.0, drop_head=0.0):
    rates = config(attention_dropout=dropout, drop_head=drop_head)
    return SelfAttention(rates, gain=1.0, windows=None)


def valid_mask(lengths, size=T):
    """The mask (B, 1, 1, T) of these lengths."""
    return (torch.arange(size) < torch.tensor(lengths)[:, None])[:, None, None]


def reference(module, query, key, value, causal=False):
    contexts, weights = multi_head(query, key, value, H, causal)
    return contexts @ module.out.weight.T + module.out.bias, weights


def test_the_worked_example():
    x = torch.arange(1.0, 7.0)[None, None, :, None]  # Q = K = V = (1..6)'
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    out = attention_weights(x, x, causal) @ x
    expected = torch.tensor([1, 1.8808, 2.9480, 3.9813, 4.9932, 5.9975])
    torch.testing.assert_close(out.flatten(), expected, rtol=0, atol=5e-5)
    slow = [attend(x[0, 0, t], x[0, 0, : t + 1], x[0, 0, : t + 1])[0] for t in range(6)]
    torch.testing.assert_close(torch.cat(slow), expected, rtol=0, atol=5e-5)


def test_cross_attention_and_its_weights_equal_slow_loops():
    torch.manual_seed(1)
    module = CrossAttention(config(), gain=1.0).double()
    x = torch.randn(B, Q, E, dtype=torch.float64)
    memory = torch.randn(B, T, E, dtype=torch.float64)
    valid = valid_mask([T, 7])
    out, nothing = module(x, module.project(memory), valid)
    same, weights = module(x, module.project(memory), valid, need_weights=True)
    assert nothing is None
    torch.testing.assert_close(out, same)
    for b, length in enumerate([T, 7]):
        key, value = module.key_value(memory[b, :length]).chunk(2, -1)
        slow, slow_weights = reference(module, module.query(x[b]), key, value)
        torch.testing.assert_close(out[b], slow)
        torch.testing.assert_close(weights[b, :, :length], slow_weights)
        assert (weights[b, :, length:] == 0).all()


def copied(judge, ours):
    """Our self-attention's weights in torch's module, whose fused layout is the same."""
    with torch.no_grad():
        judge.in_proj_weight.copy_(ours.query_key_value.weight)
        judge.in_proj_bias.copy_(ours.query_key_value.bias)
        judge.out_proj.load_state_dict(ours.out.state_dict())
    return judge


@pytest.mark.parametrize("train", [False, True])
def test_equals_torch_with_gradients(train):
    torch.manual_seed(2)
    ours = self_attention(1e-9 if train else 0.5).train(train)  # rounds to no dropout
    judge = copied(nn.MultiheadAttention(E, H, batch_first=True), ours)
    x, valid = torch.randn(B, T, E, requires_grad=True), valid_mask([T, 7])
    y = x.detach().clone().requires_grad_()
    out = ours(x, valid)
    expected, _ = judge(y, y, y, key_padding_mask=~valid[:, 0, 0])
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(ours.query_key_value.weight.grad, judge.in_proj_weight.grad)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("train", [False, True])
def test_a_position_without_a_visible_key_gets_zeros(train, dropout):
    ours = self_attention(dropout).train(train)
    x = torch.randn(B, T, E, requires_grad=True)
    out = ours(x, valid_mask([T, 0]))
    torch.testing.assert_close(out[1], ours.out.bias.expand(T, E))
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.slow
def test_attention_dropout_keeps_the_expectation():
    torch.manual_seed(3)
    ours = self_attention(dropout=0.4)
    x, valid = torch.randn(1, T, E), valid_mask([T])
    mean = torch.stack([ours(x, valid) for _ in range(4000)]).mean(0)
    assert not torch.equal(ours(x, valid), ours(x, valid))
    ours.eval()
    torch.testing.assert_close(mean, ours(x, valid), rtol=0, atol=0.06)
    torch.testing.assert_close(ours(x, valid), ours(x, valid), rtol=0, atol=0)


def test_drop_head_silences_whole_heads():
    torch.manual_seed(4)
    ours = self_attention(drop_head=0.5)
    ours.out = nn.Identity()
    x, valid = torch.randn(97, T, E), valid_mask([T] * 97)
    dropped = ours(x, valid).unflatten(-1, (H, -1))
    plain = ours.eval()(x, valid).unflatten(-1, (H, -1))
    kept = (dropped != 0).any(1).any(-1)  # (B, H)
    assert kept.any(1).all() and kept.sum(1).unique().tolist() == [1, 2, 3]
    factor = kept * (H / kept.sum(1, keepdim=True))
    torch.testing.assert_close(dropped, plain * factor[:, None, :, None])


@pytest.mark.parametrize("heads", [4, 0, -1])
def test_bad_sizes_give_one_clear_line(heads):
    for kind in (TransformerConfig, TransformerLanguageModelConfig):
        with pytest.raises(ValidationError) as caught:
            kind(kind="transformer", d_model=21, heads=heads)
        (error,) = caught.value.errors()
        assert error["loc"] == ("heads",)
        message = "must divide d_model = 21: choose 1, 3, 7" if heads == 4 else "greater than or"
        assert message in error["msg"]

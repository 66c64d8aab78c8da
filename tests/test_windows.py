"""Gaussian windows on self-attention, against a loop over heads, queries and keys."""

import math

import pytest
import torch

from asr.config.schema import TransformerConfig, WindowsConfig
from asr.nn.transformer import LOWEST, GaussianWindows, SelfAttention

E, H, T, B = 21, 3, 11, 2
GIVEN = WindowsConfig(offsets=[-2.0, 0.5, 3.0], width=0.7)


def attention_with(windows):
    config = TransformerConfig(kind="transformer", d_model=E, heads=H)
    return SelfAttention(config, 1.0, windows)


def attention():
    """Self-attention with windows moved from their initial values."""
    torch.manual_seed(0)
    made = attention_with(GIVEN).double()
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def slow(module, x):
    """One utterance (T, E), a score at a time."""
    query, key, value = module.query_key_value(x).chunk(3, -1)
    D = E // H
    heads = []
    for h in range(H):
        part = slice(h * D, (h + 1) * D)
        width, offset = module.windows.log_widths[h].exp(), module.windows.offsets[h]
        rows = []
        for i in range(len(x)):
            scores = [
                query[i, part] @ key[j, part] / math.sqrt(D)
                + (-(((j - i - offset) / width) ** 2) / 2).clamp_min(LOWEST)
                for j in range(len(x))
            ]
            rows.append(torch.stack(scores).softmax(0) @ value[:, part])
        heads.append(torch.stack(rows))
    return module.out(torch.cat(heads, -1))


@pytest.mark.parametrize("train", [False, True])
def test_equals_a_slow_loop_with_gradients(train):
    module = attention().train(train)
    x = torch.randn(B, T, E, dtype=torch.float64)
    lengths = [T, 7]
    valid = (torch.arange(T) < torch.tensor(lengths)[:, None])[:, None, None]
    ours = torch.cat([out[:n] for out, n in zip(module(x, valid), lengths, strict=True)])
    expected = torch.cat([slow(module, x[b, :n]) for b, n in enumerate(lengths)])
    torch.testing.assert_close(ours, expected)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(ours.square().sum(), parameters)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), parameters))


def test_each_head_starts_at_its_offset():
    scores = GaussianWindows([-2.0, 0.0, 3.0], 0.7)(T)  # of the windows alone
    seen = scores.softmax(-1)
    middle = T // 2
    assert seen[:, middle].argmax(-1).tolist() == [middle - 2, middle, middle + 3]
    assert (seen[:, middle].max(-1).values > 0.5).all()
    assert seen[0, 0].argmax() == 0  # a position before the utterance is its first frame


def test_a_window_far_outside_does_not_change_attention():
    """So a short utterance has no NaN and attends to all its frames."""
    module = attention_with(WindowsConfig(offsets=[5000.0] * H, width=0.7)).double()
    x = torch.randn(B, T, E, dtype=torch.float64)
    with_windows = module(x)
    module.windows = None
    torch.testing.assert_close(with_windows, module(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_over_a_long_utterance(dtype):
    module = attention_with(GIVEN).to(dtype)
    x = torch.randn(1, 1999, E, dtype=dtype, requires_grad=True)
    out = module(x)
    out.float().square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_bad_settings_give_one_clear_line():
    windows = WindowsConfig(offsets=[1.0, 2.0], width=0.7)
    with pytest.raises(ValueError, match=r"has 2 offsets for 3 heads: give one each"):
        TransformerConfig(kind="transformer", d_model=E, heads=3, encoder_windows=windows)
    for width in (0.0, -1.0, math.nan):
        message = r"width\n  Input should be (greater than or equal to 0\.001|a finite)"
        with pytest.raises(ValueError, match=message):
            WindowsConfig(offsets=[1.0], width=width)


def test_windows_are_not_for_causal_attention():
    """They would replace the causal mask, and every position would attend to later ones."""
    module = attention_with(GIVEN)
    with pytest.raises(AssertionError, match=r"bias .* causal"):
        module(torch.randn(B, T, E), causal=True)

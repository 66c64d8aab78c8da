"""The whole Transformer: padding, options, and errors."""

import re

import pytest
import torch
from pydantic import ValidationError
from reference_transformer import fixnorm, sinusoid
from small_transformer import SETTINGS, E, F, batch, config, model
from test_norm import KINDS

from asr.data.tokenizer import BLANK


@pytest.mark.parametrize("settings", SETTINGS)
@torch.no_grad()
def test_padding_and_batch_mates_change_nothing(settings):
    ours = model(**settings)
    features, lengths, tokens = batch()
    for b, length in enumerate(lengths.tolist()):
        alone = ours.encode(features[b : b + 1, :length], lengths[b : b + 1])
        decoded = ours.decode(alone, tokens[b : b + 1, : 7 - b])
        padded = torch.full((3, 59, F), float("nan"))
        padded[:, :41] = features
        padded[b, length:] = float("nan")
        memory = ours.encode(padded, lengths)
        size = ours.memory_lengths(lengths)[b]
        assert memory.valid[b].sum() == size == alone.states.size(1)
        torch.testing.assert_close(memory.states[b, :size], alone.states[0])
        torch.testing.assert_close(ours.ctc(memory)[b, :size], ours.ctc(alone)[0])
        right_padded = tokens.clone()
        right_padded[b, 7 - b :] = BLANK
        out = ours.decode(memory, right_padded)
        torch.testing.assert_close(out[b, : 7 - b], decoded[0])
        weights = ours.decode_and_attend(memory, right_padded)[1][b, : 7 - b]
        torch.testing.assert_close(weights.sum(-1), torch.ones(7 - b))
        assert (weights[:, size:] == 0).all()


@pytest.mark.parametrize("settings", SETTINGS)
@torch.no_grad()
def test_mixed_precision_keeps_the_residual_stream_in_float32(settings):
    """Sums over layers: in bf16 each would round what the layers before have added."""
    ours, streams = model(**settings), []
    for stack in (ours.encoder, ours.decoder):
        for layer in stack.layers:
            layer.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].dtype))
    features, lengths, tokens = batch()
    with torch.autocast("cpu", torch.bfloat16):
        ours.decode(ours.encode(features, lengths), tokens)
    assert len(streams) == 5 and set(streams) == {torch.float32}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's RMSNorm, slower for it
@pytest.mark.parametrize("settings", SETTINGS)
@torch.no_grad()
def test_a_model_in_bf16_computes_in_bf16(settings):
    ours = model(**settings).to(torch.bfloat16)
    features, lengths, tokens = batch()
    memory = ours.encode(features.bfloat16(), lengths)
    assert memory.states.dtype == ours.decode(memory, tokens).dtype == torch.bfloat16
    assert ours.ctc(memory).dtype == torch.float32  # logarithms


@pytest.mark.parametrize("train", [False, True])
def test_poisoned_padding_and_empty_utterances_give_finite_gradients(train):
    ours = model(dropout=0.1, attention_dropout=0.1).train(train)
    features, _, tokens = batch()
    lengths = torch.tensor([41, 0, 23])
    for b, length in enumerate(lengths):
        features[b, length:] = float("nan")
    memory = ours.encode(features, lengths)
    logits, log_probs = ours.decode(memory, tokens), ours.ctc(memory)
    assert logits.isfinite().all() and log_probs[memory.valid].isfinite().all()
    (logits.sum() + log_probs[memory.valid].sum()).backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


@torch.no_grad()
def test_fixnorm_tied_behind_scale_norm_gives_scaled_cosines():
    ours = model(norm="scale", norm_position="post", fixnorm=True, tied=True).double()
    features, lengths, tokens = batch()
    memory = ours.encode(features.double(), lengths)
    logits = ours.decode(memory, tokens)
    g = ours.decoder.layers[-1].around_feed_forward.norm.weight
    words = torch.stack([fixnorm(row) for row in ours.words.weight])
    assert (logits.abs() <= g * (1 + 1e-9)).all()
    expected = words[tokens] * E**0.5
    torch.testing.assert_close(ours.words(tokens), expected)
    hidden = torch.linalg.lstsq(words, logits[0].T).solution.T  # the hidden states of these logits
    torch.testing.assert_close(hidden.norm(dim=-1), g.expand(7))
    cosine = torch.nn.functional.cosine_similarity(hidden[:, None], words[None], dim=-1)
    torch.testing.assert_close(logits[0], g * cosine)


@torch.no_grad()
def test_inputs_are_scaled_and_get_positions():
    ours = model(tied=True).double()
    tokens = torch.tensor([[5, 9, 5]])
    inputs_seen = []
    for stack in (ours.encoder, ours.decoder):
        stack.layers[0].register_forward_pre_hook(lambda _, inputs: inputs_seen.append(inputs[0]))
    features, lengths, _ = batch(1)
    ours.decode(ours.encode(features.double(), lengths), tokens)
    frames, _ = ours.front(features.double(), lengths)
    slow = [frame * E**0.5 + sinusoid(t, E) for t, frame in enumerate(frames[0])]
    torch.testing.assert_close(inputs_seen[0][0], torch.stack(slow), rtol=1e-6, atol=1e-6)
    slow = [ours.words.weight[t] * E**0.5 + sinusoid(u, E) for u, t in enumerate([5, 9, 5])]
    torch.testing.assert_close(inputs_seen[1][0], torch.stack(slow), rtol=1e-6, atol=1e-6)


def test_without_drops_training_equals_evaluation():
    plain = model(dropout=0.0)
    dropping = model(dropout=0.0, layer_drop=0.7, drop_head=0.7)
    features, lengths, tokens = batch()
    expected = plain.decode(plain.encode(features, lengths), tokens)
    for ours in (dropping, plain.train()):
        out = ours.decode(ours.encode(features, lengths), tokens)
        torch.testing.assert_close(out, expected)
    dropping.train()
    assert not torch.allclose(dropping.decode(dropping.encode(features, lengths), tokens), expected)


def test_layer_drop_with_attention_keeps_the_last_layer():
    """As without attention, where it keeps the last one too."""
    ours = model(dropout=0.0, layer_drop=0.5, decoder_layers=3).train()
    features, lengths, tokens = batch()
    memory, drop = ours.eval().encode(features, lengths), ours.decoder.layer_drop
    ours.train()
    for draws, alike in (([0.1, 0.9, 0.9], [0.1, 0.9, 0.9]), ([0.9, 0.1, 0.1], [0.9, 0.1, 0.9])):
        drop.draw = iter(draws).__next__
        logits, weights = ours.decode_and_attend(memory, tokens)
        drop.draw = iter(alike).__next__
        torch.testing.assert_close(logits, ours.decode(memory, tokens))
        torch.testing.assert_close(weights.sum(2), torch.ones_like(weights.sum(2)))


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_parameter_has_a_gradient_and_is_saved(settings):
    ours = model(**settings)
    features, lengths, tokens = batch()
    memory = ours.encode(features, lengths)
    (ours.decode(memory, tokens).square().sum() + ours.ctc(memory).square().sum()).backward()
    silent = [name for name, p in ours.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
    again = model(**settings)
    for parameter in again.parameters():
        torch.nn.init.zeros_(parameter)
    again.load_state_dict(ours.state_dict())
    out = again.decode(again.encode(features, lengths), tokens)
    assert torch.equal(out, ours.decode(ours.encode(features, lengths), tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "must divide d_model = 10: choose 1, 2, 5, 10"),
        ({"residual_scale": 0.0}, "should be a number above 0, .* or deepnet"),
        ({"norm": "group"}, f"should be {', '.join(map(repr, KINDS[:-1]))} or {KINDS[-1]!r}"),
        ({"norm": "batch"}, "normalises over a whole batch and is for convolution modules alone"),
        ({"norm_position": "both"}, "should be 'pre', 'post', 'peri', 'reordered', 'hybrid' or"),
        ({"dropout": 1.0}, "should be less than 1"),
        ({"attention_drop": 0.1}, "Extra inputs are not permitted"),
    ],
)
def test_bad_settings_give_one_clear_line(settings, message):
    with pytest.raises(ValidationError) as caught:
        config(**settings)
    (error,) = caught.value.errors()
    assert error["loc"] == tuple(settings)
    assert re.match(f"(Value error, |Input )?{message}", error["msg"])
    assert "\n" not in error["msg"]


@pytest.mark.parametrize(
    ("settings", "keys", "fits"),
    [
        (
            {"residual_scale": "deepnet"},
            ("residual_scale = deepnet", "norm_position = post, not pre"),
            "model.residual_scale=1",
        ),
        (
            {"residual_scale": 1.3, "norm_position": "sub"},
            ("norm_position = sub", "residual_scale=1"),
            "model.norm_position=pre",
        ),
        (
            {"depth_scaled": True, "norm_position": "peri"},
            ("depth_scaled = true", "norm_position = pre, not peri"),
            "model.depth_scaled=false",
        ),
        (
            {"qk_norm": True, "norm_position": "hybrid"},
            ("qk_norm = true", "norm_position = hybrid"),
            "model.qk_norm=false",
        ),
        (
            {"positions": "rope"},
            ("positions = rope", "d_model / heads, which is 10 / 2 = 5"),
            "model.positions=sinusoidal",
        ),
        (
            {"convolution_norm": "batch"},
            ("convolution_norm = batch", "encoder_convolution=15"),
            "model.convolution_norm=null",
        ),
        (
            {"kind": "conformer", "heads": 1, "residual_scale": "deepnet", "norm_position": "post"},
            ("residual_scale = deepnet", "kind = conformer"),
            "model.kind=transformer",
        ),
    ],
)
def test_settings_that_do_not_fit_together_name_both_keys_and_a_remedy(settings, keys, fits):
    with pytest.raises(ValidationError) as caught:
        config(**settings)
    (error,) = caught.value.errors()
    assert all(part in error["msg"] for part in (*keys, fits)) and "\n" not in error["msg"]

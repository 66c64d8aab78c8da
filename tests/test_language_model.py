"""Language models: step by step against the full pass, against torch's own parts, and padding."""

import pytest
import torch
from small_language_model import KINDS, language_model, lstm, transformer
from torch import nn

from asr.data.tokenizer import BLANK, SOS
from asr.nn.attention import Memory

V, B, U = 13, 3, 11


def sentences():
    torch.manual_seed(5)
    tokens = torch.randint(4, V, (B, U))
    tokens[:, 0] = SOS
    return tokens


def memory(size):
    return Memory(torch.zeros(size, 2, 3), torch.ones(size, 2, dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_is_the_full_pass(kind):
    model, tokens = language_model(kind, V), sentences()
    judge = model(tokens).log_softmax(-1)
    state = model.start(memory(B))
    for place in range(U):
        log_probs, state = model.step(state, tokens[:, place : place + 1])
        torch.testing.assert_close(log_probs[:, 0], judge[:, place], atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_selected_hypotheses_continue_their_own_sentences(kind):
    """Hypotheses are swapped, copied and dropped, and utterance 0 is finished."""
    model = language_model(kind, V)
    state = model.select(model.start(memory(2)), torch.tensor([[0, 0, 0], [1, 1, 1]]))
    _, state = model.step(state, torch.full((2, 3), SOS))
    _, state = model.step(state, torch.tensor([[4, 5, 6], [7, 8, 9]]))
    state = model.select(state, torch.tensor([[5, 3, 5, 4]]))
    log_probs, state = model.step(state, torch.tensor([[10, 11, 12, 4]]))
    tokens = torch.tensor([[SOS, 9, 10], [SOS, 7, 11], [SOS, 9, 12], [SOS, 8, 4]])
    torch.testing.assert_close(
        log_probs[0], model(tokens)[:, -1].log_softmax(-1), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_change_its_state(kind):
    model = language_model(kind, V)
    _, before = model.step(model.start(memory(1)), torch.tensor([[SOS]]))
    first, _ = model.step(before, torch.tensor([[5]]))
    model.step(before, torch.tensor([[6]]))
    again, _ = model.step(before, torch.tensor([[5]]))
    assert torch.equal(first, again)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_batch_mates_change_nothing(kind):
    model, tokens = language_model(kind, V), sentences()
    tokens[1, 7:] = BLANK
    alone = model(tokens[1:2, :7])
    torch.testing.assert_close(model(tokens)[1:2, :7], alone, atol=1e-12, rtol=0)
    loud = tokens.clone()
    loud[1, 7:] = 12
    torch.testing.assert_close(model(loud)[1:2, :7], alone, atol=1e-12, rtol=0)


def test_without_norms_the_lstm_matches_torch():
    ours = lstm(V, norm="none").double()
    judge = nn.LSTM(5, 7, 2, batch_first=True).double()
    judge.load_state_dict(ours.lstm.state_dict())
    tokens = sentences()
    expected = ours.out(judge(ours.embedding(tokens))[0])
    torch.testing.assert_close(ours(tokens), expected, atol=1e-9, rtol=0)


def test_the_transformer_is_torchs_encoder_behind_a_causal_mask():
    ours = transformer(V, dropout=0.0).double()
    layer = nn.TransformerEncoderLayer(
        6, 2, 11, dropout=0.0, batch_first=True, norm_first=True, layer_norm_eps=1e-6
    )
    judge = nn.TransformerEncoder(layer, 3, nn.LayerNorm(6, 1e-6), enable_nested_tensor=False)
    judge.double()
    ours.stack.last_norm.load_state_dict(judge.norm.state_dict())
    for own, other in zip(ours.stack.layers, judge.layers, strict=True):
        other.self_attn.in_proj_weight.data = own.self_attention.query_key_value.weight.data
        other.self_attn.in_proj_bias.data = own.self_attention.query_key_value.bias.data
        other.self_attn.out_proj.load_state_dict(own.self_attention.out.state_dict())
        other.linear1.load_state_dict(own.feed_forward[0].state_dict())
        other.linear2.load_state_dict(own.feed_forward[3].state_dict())
    tokens = sentences()
    x = ours.words.weight[tokens] * 6**0.5 + ours.positions(0, U)
    mask = nn.Transformer.generate_square_subsequent_mask(U, dtype=torch.float64)
    expected = ours.output(judge(x, mask=mask, is_causal=True))
    torch.testing.assert_close(ours(tokens), expected, atol=1e-9, rtol=0)


def test_tied_weights_are_one_parameter():
    for kind in ("lstm none tied", "transformer tied"):
        sizes = [tuple(p.shape) for p in language_model(kind, V).parameters()]
        assert sum(shape[:1] == (V,) and len(shape) == 2 for shape in sizes) == 1
    for kind in ("lstm ba", "transformer pre"):
        sizes = [tuple(p.shape) for p in language_model(kind, V).parameters()]
        assert sum(shape[:1] == (V,) and len(shape) == 2 for shape in sizes) == 2


def test_dropout_acts_in_training_alone():
    tokens = sentences()
    for make in (lstm, transformer):
        model = make(V, dropout=0.5)
        model.train()
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_deepnets_scales_are_those_of_a_decoder_alone():
    """Wang et al. 2022, figure 2: alpha = (2 M)^(1/4), beta = (8 M)^(-1/4)."""
    settings = {"d_model": 64, "heads": 2, "layers": 18, "feed_forward": 32}
    model = transformer(V, **settings, residual_scale="deepnet", norm_position="post")
    layer = model.stack.layers[0]
    assert layer.around_self_attention.alpha == pytest.approx(36**0.25)
    fan = (2 / (64 + 64)) ** 0.5
    query, _, value = layer.self_attention.query_key_value.weight.detach().chunk(3)
    assert float(query.std()) == pytest.approx(fan, rel=0.05)
    assert float(value.std()) == pytest.approx(fan * 144**-0.25, rel=0.05)

"""Intermediate and self-conditioned CTC against a slow loop over the papers' equations."""

import pytest
import torch
from small_transformer import F, V, batch, config, model
from torch.nn import functional

from asr.config.loader import RecipeError, read_recipe
from asr.config.schema import LasConfig
from asr.data.batching import Batch
from asr.models.las import LAS, join_pairs
from asr.training.losses import SpeechObjective

KINDS = [{"norm_position": "post"}, {"kind": "conformer", "heads": 1}]
LAS_KIND = {"kind": "las"}
LAYERS = {"layers": [1, 2], "weight": 0.3}


def las(listener=None, **settings):
    """In evaluation mode, with biases and norms moved from their initial values."""
    torch.manual_seed(0)
    listener = {"layers": 3, "hidden": 7, "pyramid": [1], "convolution": 2} | (listener or {})
    made = LAS(F, V, LasConfig(kind="las", listener=listener, **settings)).eval()
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made


def made(kind, **intermediate):
    if kind == LAS_KIND:
        return las(intermediate_ctc=LAYERS | intermediate)
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "feed_forward_dropout": 0.0}
    return model(encoder_layers=3, intermediate_ctc=LAYERS | intermediate, **rates, **kind)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_encoder_reads_its_own_predictions(kind):
    network = made(kind).double()
    features, lengths, _ = batch()
    memory, inner = network.encode_with_intermediate_ctc(features.double(), lengths)
    for row, length in enumerate(lengths):
        x, _ = network.front(features[row : row + 1, :length].double(), lengths[row : row + 1])
        x = x * x.size(-1) ** 0.5 + network.frame_positions(0, x.size(1))
        for number, layer in enumerate(network.encoder.layers):
            x = layer(x, torch.ones(1, 1, 1, x.size(1), dtype=torch.bool))
            if number < 2:
                logits = network.encoder.last_norm(x) @ network.ctc_head.weight.T
                predictions = (logits + network.ctc_head.bias).softmax(-1)
                torch.testing.assert_close(inner[number][row, : x.size(1)].exp(), predictions[0])
                x = x + predictions @ network.conditioning.weight.T + network.conditioning.bias
        expected = network.encoder.last_norm(x)[0]
        torch.testing.assert_close(memory.states[row, : len(expected)], expected)
    assert memory.valid.sum(1).tolist() == network.memory_lengths(lengths).tolist()


@torch.no_grad()
def test_the_listener_reads_its_own_predictions():
    network = made(LAS_KIND).double()
    features, lengths, _ = batch()
    poisoned = features.double()
    for row, length in enumerate(lengths):
        poisoned[row, length:] = torch.nan
    memory, inner = network.encode_with_intermediate_ctc(poisoned, lengths)
    listener = network.listener
    for row, length in enumerate(lengths):
        x, _ = listener.front(features[row : row + 1, :length].double(), lengths[row : row + 1])
        x, _ = join_pairs(x, torch.tensor([x.size(1)]))
        for number, layer in enumerate(listener.layers):
            x, _ = layer(x)
            if number < 2:
                predictions = network.ctc_head(x).softmax(-1)
                torch.testing.assert_close(inner[number][row, : x.size(1)].exp(), predictions[0])
                x = x + predictions @ network.conditioning.weight.T + network.conditioning.bias
        torch.testing.assert_close(memory.states[row, : x.size(1)], x[0])
        assert not memory.states[row, x.size(1) :].any()
    assert memory.valid.sum(1).tolist() == network.memory_lengths(lengths).tolist()


@pytest.mark.parametrize("kind", [{}, LAS_KIND])
@torch.no_grad()
def test_without_self_conditioning_the_memory_is_that_of_the_plain_model(kind):
    plain = las() if kind else model(encoder_layers=3)
    network = made(kind, self_conditioning=False)
    network.load_state_dict(plain.state_dict())
    features, lengths, _ = batch()
    memory, inner = network.encode_with_intermediate_ctc(features, lengths)
    assert torch.equal(memory.states, plain.encode(features, lengths).states)
    assert [each.shape for each in inner] == [plain.ctc(memory).shape] * 2


@pytest.mark.parametrize("kind", [*KINDS, LAS_KIND])
def test_the_loss_weighs_the_last_layer_and_the_mean_of_the_others(kind):
    network = made(kind)
    features, lengths, tokens = batch(tokens=3)
    counts = torch.tensor([3, 2, 1])
    examples = Batch(("a", "b", "c"), features, lengths, tokens, counts, 1.0)
    objective = SpeechObjective(network, 0.4, 0.0, intermediate_weight=0.3)
    network.train()  # without dropout by default
    sums = objective(examples)
    memory, inner = network.encode_with_intermediate_ctc(features, lengths)
    frames = memory.valid.sum(1)

    def ctc(log_probs):
        rows = [
            functional.ctc_loss(p[:t], y[:n], t, n, reduction="sum")
            for p, y, t, n in zip(log_probs, tokens, frames, counts, strict=True)
        ]
        return torch.stack(rows).sum()

    last, mean = ctc(network.ctc(memory)), (ctc(inner[0]) + ctc(inner[1])) / 2
    expected = 0.6 * sums["nll"].total + 0.4 * (0.7 * last + 0.3 * mean)
    torch.testing.assert_close(sums["objective"].total, expected)
    torch.testing.assert_close(sums["intermediate_ctc"].total, mean)
    plain = objective.eval()(examples)
    assert "intermediate_ctc" not in plain
    torch.testing.assert_close(
        plain["objective"].total, 0.6 * plain["nll"].total + 0.4 * plain["ctc"].total
    )


def test_a_layer_that_layer_drop_skips_has_no_loss():
    network = made({}, layers=[2])
    network.encoder.layer_drop.rate = 0.5
    network.encoder.layer_drop.draw = iter([0.9, 0.1, 0.9]).__next__  # the second layer is skipped
    features, lengths, _ = batch()
    assert network.train().encode_with_intermediate_ctc(features, lengths)[1] == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "{layers: [6]}",
            "model.intermediate_ctc.layers = [6]: of model.encoder_layers = 6 choose 1 to 5",
        ),
        ("{layers: []}", "model.intermediate_ctc.layers"),
        ("{layers: [2], weight: 1.0}", "model.intermediate_ctc.weight = 1.0"),
        ("{layers: [0]}", "model.intermediate_ctc.layers"),
    ],
)
def test_layers_that_do_not_exist_are_refused(overrides, words):
    keys = ["model.encoder_layers=6", f"model.intermediate_ctc={overrides}"]
    with pytest.raises(RecipeError) as error:
        read_recipe("demo_conformer", keys)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("listener", "layers", "words"),
    [
        ({}, [3], r"layers = 3 with pyramid = \[1\] choose 1 to 2"),
        ({"pyramid": [2]}, [1, 2], r"choose 2 to 2"),  # layer 1 has twice the frames
        ({"pyramid": [2, 3]}, [2], r"set model\.intermediate_ctc=null"),
    ],
)
def test_listener_layers_of_another_frame_rate_are_refused(listener, layers, words):
    with pytest.raises(ValueError, match=words):
        las(listener, intermediate_ctc={"layers": layers})


@pytest.mark.parametrize("build", [las, config])
def test_without_a_ctc_head_it_is_refused(build):
    with pytest.raises(ValueError, match=r"set model\.ctc_weight=0\.3"):
        build(ctc_weight=0, intermediate_ctc=LAYERS)


class HeldTwice(torch.nn.Module):
    """A model under two names, of which torch.export makes proxies."""

    def __init__(self, network):
        super().__init__()
        self.network = self.same = network

    def forward(self, features, lengths):
        return self.network.encode(features, lengths).states


@pytest.mark.slow
@torch.no_grad()
def test_an_exported_encoder_reads_its_own_predictions():
    """Compared by identity, a layer is not the one of its number in a program of torch.export."""
    network, (features, lengths, _) = model(intermediate_ctc={"layers": [1]}), batch(frames=29)
    program = torch.export.export(HeldTwice(network), (features, lengths)).module()
    memory = network.encode(features, lengths)
    states = program(features, lengths)
    torch.testing.assert_close(states[memory.valid], memory.states[memory.valid])


@pytest.mark.parametrize("kind", [*KINDS, LAS_KIND])
@torch.no_grad()
def test_mixed_precision_does_not_round_the_logarithms_of_probabilities(kind):
    network, (features, lengths, _) = made(kind), batch()
    with torch.autocast("cpu", torch.bfloat16):
        memory, inner = network.encode_with_intermediate_ctc(features, lengths)
        log_probs = [network.ctc(memory), *inner]
        logits = network.ctc_head(memory.states)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(log_probs[0], logits.double().log_softmax(-1).float())
    for each in log_probs:
        sums = each.exp().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-6, rtol=0)

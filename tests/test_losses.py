"""The training objective against torch's own cross_entropy and ctc_loss."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from asr.config.schema import ConsistencyConfig, GuidedAttentionConfig
from asr.data.batching import Batch
from asr.data.tokenizer import BLANK, EOS, SOS
from asr.nn.attention import Memory
from asr.training import distributed
from asr.training.losses import (
    Perplexity,
    SpeechObjective,
    Sum,
    add,
    cross_entropy,
    ctc_loss,
    means,
    off_diagonal,
    shift,
    symmetric_kl,
)

B, U, V, T, F = 3, 5, 11, 13, 2
TOKENS = torch.tensor([[4, 5, 5, 10, 9], [7, 4, 0, 0, 0], [0, 0, 0, 0, 0]])
LENGTHS = torch.tensor([5, 2, 0])


def test_shift_puts_sos_first_and_eos_last():
    inputs, targets = shift(TOKENS, LENGTHS)
    assert inputs.tolist() == [[SOS, 4, 5, 5, 10, 9], [SOS, 7, 4, 0, 0, 0], [SOS, 0, 0, 0, 0, 0]]
    assert targets.tolist() == [[4, 5, 5, 10, 9, EOS], [7, 4, EOS, 0, 0, 0], [EOS, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.37])
def test_cross_entropy_matches_torch_with_label_smoothing(smoothing):
    torch.manual_seed(1)
    logits = torch.randn(B, U + 1, V, dtype=torch.float64, requires_grad=True)
    _, targets = shift(TOKENS, LENGTHS)
    sums = cross_entropy(logits, targets, smoothing)
    flat = logits.flatten(0, 1), targets.flatten()
    judge = functional.cross_entropy(
        *flat, ignore_index=BLANK, reduction="sum", label_smoothing=smoothing
    )
    nats = functional.cross_entropy(*flat, ignore_index=BLANK, reduction="sum")
    torch.testing.assert_close(sums["objective"].total, judge)
    torch.testing.assert_close(sums["nll"].total, nats.detach())
    assert all(int(s.count) == 10 for s in sums.values())  # 7 tokens and 3 <eos>
    assert not sums["nll"].total.requires_grad
    (ours,) = torch.autograd.grad(sums["objective"].total, logits)
    (theirs,) = torch.autograd.grad(judge, logits)
    torch.testing.assert_close(ours, theirs)
    assert not ours[targets == BLANK].any()


def test_accuracy_counts_the_most_probable_token():
    logits = torch.zeros(1, 4, V)
    for place, token in enumerate([4, 5, 6, 7]):
        logits[0, place, token] = 1.0
    sums = cross_entropy(logits, torch.tensor([[4, 9, EOS, BLANK]]), 0.1)
    assert (int(sums["accuracy"].total), int(sums["accuracy"].count)) == (1, 3)


def test_ctc_matches_torch_utterance_by_utterance():
    torch.manual_seed(2)
    log_probs = torch.randn(B, T, V, dtype=torch.float64).log_softmax(-1)
    frames = torch.tensor([13, 7, 3])
    expected = sum(
        functional.ctc_loss(
            log_probs[b, : frames[b]][:, None],
            TOKENS[b : b + 1, : LENGTHS[b]],
            frames[b : b + 1],
            LENGTHS[b : b + 1],
            blank=BLANK,
            reduction="sum",
        )
        for b in range(B)
    )
    torch.testing.assert_close(ctc_loss(log_probs, frames, TOKENS, LENGTHS), expected)


def test_no_ctc_path_adds_nothing_and_no_nan():
    log_probs = torch.randn(1, 5, V, requires_grad=True)
    tokens = torch.tensor([[4, 5, 5, 10, 9]])  # needs 6 frames: a blank between equal labels
    total = ctc_loss(log_probs.log_softmax(-1), torch.tensor([5]), tokens, torch.tensor([5]))
    total.backward()
    assert float(total.detach()) == 0.0 and not log_probs.grad.any()


class FixedModel(nn.Module):
    """A model whose outputs are given: states (B, T, F), logits and CTC log-probs."""

    def __init__(self, logits, log_probs, valid):
        super().__init__()
        self.logits, self.log_probs, self.valid = logits, log_probs, valid

    def encode_with_intermediate_ctc(self, features, lengths):
        return Memory(features, self.valid), []

    def memory_lengths(self, lengths):
        return self.valid.sum(dim=1)

    def decode(self, memory, tokens):
        assert tokens[:, 0].eq(SOS).all()
        return self.logits

    def ctc(self, memory):
        return self.log_probs


def batch():
    features = torch.zeros(B, T, F)
    lengths = torch.full((B,), T)
    return Batch(("a", "b", "c"), features, lengths, TOKENS, LENGTHS, 0.39)


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_attention_and_ctc_are_weighted_per_target_token(weight):
    torch.manual_seed(3)
    logits, raw = torch.randn(B, U + 1, V), torch.randn(B, T, V).log_softmax(-1)
    frames = torch.tensor([13, 7, 3])
    model = FixedModel(logits, raw, torch.arange(T) < frames[:, None])
    sums = SpeechObjective(model, weight, 0.1)(batch())
    _, targets = shift(TOKENS, LENGTHS)
    smoothed = functional.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=0,
        reduction="sum",
        label_smoothing=0.1,
    )
    ctc = functional.ctc_loss(raw.transpose(0, 1), TOKENS, frames, LENGTHS, reduction="sum")
    torch.testing.assert_close(sums["objective"].total, (1 - weight) * smoothed + weight * ctc)
    torch.testing.assert_close(sums["ctc"].total, ctc)
    assert {int(s.count) for s in sums.values()} == {10}


def test_without_a_ctc_head_it_is_cross_entropy_alone():
    logits = torch.randn(B, U + 1, V)
    objective = SpeechObjective(FixedModel(logits, None, torch.ones(B, T).bool()), 0.3, 0.1)
    sums = objective(batch())
    assert set(sums) == {"objective", "nll", "accuracy"}
    expected = cross_entropy(logits, shift(TOKENS, LENGTHS)[1], 0.1)["objective"].total
    torch.testing.assert_close(sums["objective"].total, expected)


def test_off_diagonal_is_the_paper_s_equation():
    """Tachibana et al. 2018, eq. 6, by a loop over every token and frame of each utterance."""
    torch.manual_seed(4)
    tokens, frames, width = [6, 3, 1], [13, 7, 3], 0.2
    weights = torch.rand(B, U + 1, T, dtype=torch.float64)
    expected = 0.0
    for b in range(B):
        for u in range(tokens[b]):
            for t in range(frames[b]):
                distance = u / tokens[b] - t / frames[b]
                cost = 1 - math.exp(-(distance**2) / (2 * width**2))
                expected += cost * float(weights[b, u, t])
    real = torch.arange(U + 1) < torch.tensor(tokens)[:, None]
    valid = torch.arange(T) < torch.tensor(frames)[:, None]
    # As in attention: padding frames have no weight, padding tokens have arbitrary weights.
    actual = off_diagonal(weights * valid[:, None], real, valid, width)
    assert float(actual) == pytest.approx(expected, rel=1e-5)


def test_guided_attention_acts_in_training_before_its_last_step():
    class Attending(FixedModel):
        def decode_and_attend(self, memory, tokens):
            return self.logits, weights

    torch.manual_seed(5)
    weights = torch.rand(B, U + 1, T)
    logits, valid = torch.randn(B, U + 1, V), torch.ones(B, T).bool()
    guide = GuidedAttentionConfig(weight=0.7, width=0.1, steps=3)
    objective = SpeechObjective(Attending(logits, None, valid), 0.0, 0.1, guide)
    _, targets = shift(TOKENS, LENGTHS)
    plain = cross_entropy(logits, targets, 0.1)["objective"].total
    off = off_diagonal(weights, targets != BLANK, valid, 0.1)

    def sums_at(step, training):
        objective.set_step(step)
        return objective.train(training)(batch())

    for step in (0, 2):
        sums = sums_at(step, training=True)
        torch.testing.assert_close(sums["objective"].total, plain + 0.7 * off)
        torch.testing.assert_close(sums["off_diagonal"].total, off)
        torch.testing.assert_close(sums_at(step, training=False)["objective"].total, plain)
    sums = sums_at(3, training=True)
    torch.testing.assert_close(sums["objective"].total, plain)
    assert "off_diagonal" not in sums


def divergence(wanted, actual):
    """KL(wanted || found) over V, by torch.distributions."""
    pair = [torch.distributions.Categorical(logits=logits) for logits in (wanted, actual)]
    return torch.distributions.kl_divergence(*pair)


def test_symmetric_kl_is_the_divergence_both_ways_over_real_frames():
    torch.manual_seed(6)
    scores = torch.randn(2 * B, T, V, dtype=torch.float64, requires_grad=True)
    real = (torch.arange(T) < torch.tensor([13, 7, 0])[:, None]).repeat(2, 1)
    ours = symmetric_kl(scores.log_softmax(-1), real)
    a, b = scores.chunk(2)
    judge = (divergence(a.detach(), b) + divergence(b.detach(), a))[real[:B]].sum()
    torch.testing.assert_close(ours, judge)
    (actual,), (expected,) = (torch.autograd.grad(x, scores) for x in (ours, judge))
    torch.testing.assert_close(actual, expected)
    assert actual[real].any() and not actual[~real].any()


def test_both_views_are_trained_on_and_compared_in_training_only():
    torch.manual_seed(7)
    logits = torch.randn(2 * B, U + 1, V)
    raw = torch.randn(2 * B, T, V).log_softmax(-1)
    valid = (torch.arange(T) < torch.tensor([13, 7, 3])[:, None]).repeat(2, 1)
    targets = shift(TOKENS, LENGTHS)[1].repeat(2, 1)
    two = replace(batch(), second_view=torch.ones(B, T, F))

    class TwoViews(FixedModel):
        def encode_with_intermediate_ctc(self, features, lengths):
            self.features = features
            return Memory(features, self.valid[: len(features)]), []

        def memory_lengths(self, lengths):
            return self.valid.sum(dim=1)[: len(lengths)]

        def decode(self, memory, tokens):
            return self.logits[: len(tokens)]

        def ctc(self, memory):
            return self.log_probs[: len(memory.states)]

    model = TwoViews(logits, raw, valid)
    consistency = ConsistencyConfig(ctc=0.7, decoder=1.3)
    objective = SpeechObjective(model, 0.3, 0.1, consistency=consistency)
    plain = SpeechObjective(model, 0.3, 0.1)
    once = plain(two)
    for name, value in objective.eval()(two).items():
        torch.testing.assert_close(value, once[name])
    assert torch.equal(model.features, two.features)
    sums = objective.train()(two)
    assert torch.equal(model.features, torch.cat([two.features, two.second_view]))
    decoder, frames = (
        symmetric_kl(logits.log_softmax(-1), targets != BLANK),
        symmetric_kl(raw, valid),
    )
    loss = cross_entropy(logits, targets, 0.1)["objective"].total
    ctc = ctc_loss(raw, valid.sum(1), TOKENS.repeat(2, 1), LENGTHS.repeat(2))
    expected = 0.7 * (loss + 1.3 * decoder) + 0.3 * (ctc + 0.7 * frames)
    torch.testing.assert_close(sums["objective"].total, expected)
    torch.testing.assert_close(
        (sums["decoder_symmetric_kl"].total, sums["ctc_symmetric_kl"].total), (decoder, frames)
    )
    assert {int(s.count) for s in sums.values()} == {20}  # every token in both views
    model.log_probs = None
    model.ctc = lambda memory: None
    assert "ctc_symmetric_kl" not in objective(two)


def test_sums_add_up_before_they_are_divided():
    sums = {}
    add(sums, {"nll": Sum(torch.tensor(6.0, requires_grad=True), torch.tensor(3))})
    add(sums, {"nll": Sum(torch.tensor(1.0), torch.tensor(4)), "none": Sum(*torch.zeros(2))})
    assert means(sums) == {"nll": 1.0}
    assert sums["nll"].total.dtype == torch.float64 and not sums["nll"].total.requires_grad


def test_a_perplexity_is_the_exponential_over_all_batches_and_ranks(monkeypatch):
    sums, (nats, tokens) = {}, ((6.0, 1.0), (3, 4))
    for total, count in zip(nats, tokens, strict=True):
        add(sums, {"perplexity": Perplexity(torch.tensor(total), torch.tensor(count))})
    assert means(sums) == {"perplexity": pytest.approx(math.e)}
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda value: [value, value])
    both, _ = distributed.add_sums(sums)
    assert means(both) == means(sums) and both["perplexity"].count == 14

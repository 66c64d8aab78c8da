"""LAS through the common model interface: exact padding, single steps equal to whole sequences."""

import pytest
import torch
from torch import nn

from asr.config.schema import LasConfig, ListenerConfig, SpellerConfig
from asr.data.batching import Batch
from asr.data.tokenizer import BLANK, SOS
from asr.kernels.dispatch import backends
from asr.models.las import LAS
from asr.nn.attention import Memory
from asr.training.losses import SpeechObjective

F, H, V = 7, 5, 13
LENGTHS = [11, 6, 3]
TOKEN_LENGTHS = [4, 0, 2]


def las(sampling=0.0, kind="location", std=0.5, backend="reference"):
    torch.manual_seed(1)
    listener = ListenerConfig(layers=2, hidden=H, pyramid=(2,), norm="ba", backend="reference")
    speller = SpellerConfig(
        layers=1, hidden=11, embedding=3, scheduled_sampling=sampling, norm="ba", backend=backend
    )
    parts = {"listener": listener, "speller": speller, "ctc_weight": 0.3}
    model = LAS(F, V, LasConfig(kind="las", attention=kind, attention_size=7, **parts))
    for weight in model.parameters():
        nn.init.normal_(weight, std=std)
    return model.double().eval()


def batch(seed=2):
    torch.manual_seed(seed)
    features = torch.randn(3, max(LENGTHS), F, dtype=torch.float64)
    tokens = torch.randint(4, V, (3, max(TOKEN_LENGTHS)))
    for row, (frames, count) in enumerate(zip(LENGTHS, TOKEN_LENGTHS, strict=True)):
        features[row, frames:] = torch.nan
        tokens[row, count:] = BLANK
    lengths = torch.tensor(LENGTHS), torch.tensor(TOKEN_LENGTHS)
    return Batch(("a", "b", "c"), features, lengths[0], tokens, lengths[1], 0.2)


def one(full, row):
    frames, count = LENGTHS[row], TOKEN_LENGTHS[row]
    return Batch(
        (full.ids[row],),
        full.features[row : row + 1, :frames],
        full.lengths[row : row + 1],
        full.tokens[row : row + 1, :count],
        full.token_lengths[row : row + 1],
        0.1,
    )


@torch.no_grad()
def test_padding_and_batch_mates_change_nothing():
    model, padded = las(), batch()
    memory = model.encode(padded.features, padded.lengths)
    inputs = torch.cat([torch.full((3, 1), SOS), padded.tokens], dim=1)
    logits, weights = model.decode_and_attend(memory, inputs)
    ctc = model.ctc(memory)
    frames = model.memory_lengths(padded.lengths).tolist()
    assert frames == memory.valid.sum(dim=1).tolist()
    for row, t in enumerate(frames):
        single = one(padded, row)
        alone = model.encode(single.features, single.lengths)
        u = TOKEN_LENGTHS[row] + 1
        torch.testing.assert_close(alone.states[0], memory.states[row, :t])
        torch.testing.assert_close(
            model.decode(alone, inputs[row : row + 1, :u])[0], logits[row, :u]
        )
        expected = model.decode_and_attend(alone, inputs[row : row + 1, :u])[1][0]
        torch.testing.assert_close(weights[row, :u, :t], expected)
        torch.testing.assert_close(weights[row].sum(-1), torch.ones(len(inputs[0])).double())
        assert (weights[row, :, t:] == 0).all()
        torch.testing.assert_close(model.ctc(alone)[0], ctc[row, :t])
        torch.testing.assert_close(ctc[row, :t].exp().sum(-1), torch.ones(t).double())


def gradients(model, batches):
    objective = SpeechObjective(model, 0.3, 0.1)
    model.zero_grad()
    totals = []
    for each in batches:
        sums = objective(each)
        sums["objective"].total.backward()
        totals.append({name: (s.total.item(), s.count.item()) for name, s in sums.items()})
    return totals, [weight.grad.clone() for weight in model.parameters()]


def test_the_loss_and_its_gradient_are_those_of_each_utterance_alone():
    model, full = las(), batch()
    (together,), grads = gradients(model, [full])
    alone, expected = gradients(model, [one(full, row) for row in range(3)])
    for name, (total, count) in together.items():
        assert total == pytest.approx(sum(single[name][0] for single in alone)), name
        assert count == sum(single[name][1] for single in alone), name
    # The loss is computed in float32, whatever the model's dtype.
    torch.testing.assert_close(grads, expected, atol=1e-5, rtol=1e-5)
    assert all(grad.isfinite().all() and grad.any() for grad in grads[:4])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["additive", "dot", "location"])
def test_steps_equal_the_whole_sequence(kind):
    model, full = las(kind=kind), batch()
    memory = model.encode(full.features, full.lengths)
    tokens = torch.tensor([[SOS, 4, 9, 9, 5], [SOS, 12, 4, 7, 8], [SOS, 6, 6, 6, 6]])
    expected = model.decode(memory, tokens).log_softmax(-1)
    logits, weights = model.decode_and_attend(memory, tokens)
    torch.testing.assert_close(logits, model.decode(memory, tokens))
    state = model.start(memory)
    for u, token in enumerate(tokens.unbind(dim=1)):
        log_probs, state = model.step(state, token[:, None])
        torch.testing.assert_close(log_probs[:, 0], expected[:, u])
        torch.testing.assert_close(state.attended.weights[:, 0], weights[:, u])


@torch.no_grad()
def test_a_beam_follows_its_hypotheses():
    """Three hypotheses each, reordered twice, one utterance dropped: as if decoded again."""
    model, padded = las(), batch()
    memory = model.encode(padded.features, padded.lengths)
    _, state = model.step(model.start(memory), torch.full((3, 1), SOS))
    state = model.select(state, torch.arange(3)[:, None].expand(3, 3))
    words = [[[4], [5], [6]], [[7], [8], [9]], [[10], [11], [12]]]
    draw = torch.Generator().manual_seed(0)
    utterances = [0, 1, 2]
    for turn in range(3):
        tokens = torch.tensor([[h[-1] for h in beam] for beam in words])
        log_probs, state = model.step(state, tokens)
        for b, beam in enumerate(words):
            row = utterances[b]
            alone = Memory(memory.states[row : row + 1], memory.valid[row : row + 1])
            for k, hypothesis in enumerate(beam):
                expected = model.decode(alone, torch.tensor([[SOS, *hypothesis]]))[0, -1]
                torch.testing.assert_close(log_probs[b, k], expected.log_softmax(-1))
        kept = [0, 2] if turn == 1 else list(range(len(words)))
        rows = torch.stack([b * 3 + torch.randint(0, 3, (3,), generator=draw) for b in kept])
        state = model.select(state, rows)
        words = [
            [[*words[r // 3][r % 3], 4 + (5 * i + turn) % 9] for i, r in enumerate(line)]
            for line in rows.tolist()
        ]
        utterances = [utterances[b] for b in kept]
    assert utterances == [0, 2]


class TestScheduledSampling:
    """Bengio et al. 2015: in training the speller sometimes reads its own last output."""

    tokens = torch.tensor([[SOS, 4, 9, 5, 7], [SOS, 12, 4, 7, 8], [SOS, 6, 10, 6, 11]])

    @pytest.fixture(params=["reference", "cpu"])  # cpu: one kernel call without sampling
    def backend(self, request):
        if backends()[request.param]:
            pytest.skip(f"no {request.param}: {backends()[request.param]}")
        return request.param

    @torch.no_grad()
    def logits(self, model, seed=3):
        full = batch()
        torch.manual_seed(seed)
        return model.decode(model.encode(full.features, full.lengths), self.tokens)

    def test_evaluation_reads_the_true_tokens(self, backend):
        torch.testing.assert_close(
            self.logits(las(0.7, backend=backend)), self.logits(las(0.0, backend=backend))
        )

    def test_rates_of_0_and_near_0_read_the_true_tokens(self, backend):
        never, hardly_ever = (las(rate, backend=backend).train() for rate in (0.0, 1e-9))
        torch.testing.assert_close(self.logits(never), self.logits(hardly_ever))

    def test_always_reads_its_own_choice(self, backend):
        model = las(1.0 - 1e-9, std=1.0, backend=backend)
        sampled = self.logits(model.train())
        model.eval()
        full = batch()
        with torch.no_grad():
            state = model.start(model.encode(full.features, full.lengths))
            token = self.tokens[:, :1]
            for u in range(5):
                log_probs, state = model.step(state, token)
                torch.testing.assert_close(sampled[:, u].log_softmax(-1), log_probs[:, 0])
                token = log_probs.argmax(-1)

    def test_the_share_of_own_choices_is_the_rate(self):
        model = las(0.3).train()
        torch.manual_seed(4)
        true, output = torch.zeros(10_007, dtype=torch.long), torch.zeros(10_007, 1, 11 + 2 * H)
        model.speller.out.bias.data[7] += 100.0  # its own output is always 7
        own = model._sample(true, output.double())
        assert set(own.tolist()) == {0, 7}
        share = float((own == 7).double().mean())
        assert abs(share - 0.3) < 4 * (0.3 * 0.7 / 10_007) ** 0.5

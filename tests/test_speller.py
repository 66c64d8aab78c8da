"""The speller against a loop over single hypotheses with nn.LSTMCell, and its beam bookkeeping."""

import pytest
import torch
from torch import nn

from asr.config.schema import LasConfig, SpellerConfig
from asr.data.tokenizer import SOS
from asr.models.las import Speller
from asr.nn.attention import Memory

B, T, E, H, D, A, V = 2, 7, 5, 11, 3, 13, 17  # D embedding
LENGTHS = [7, 4]


def speller(attention="location", **settings):
    torch.manual_seed(1)
    cells = SpellerConfig(hidden=H, embedding=D, backend="reference", **settings)
    config = LasConfig(kind="las", attention=attention, attention_size=A, speller=cells)
    made = Speller(V, E, config)
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.5)
    return made.double().eval()


@pytest.fixture
def memory():
    torch.manual_seed(2)
    valid = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    states = torch.randn(B, T, E, dtype=torch.float64)
    return Memory(states.masked_fill(~valid[..., None], 0.0), valid)


def slow_speller(ours, memory, tokens):
    """One utterance without padding, tokens [U] -> logits (U, V), weights (U, T)."""
    cells = [nn.LSTMCell(c.input_size, H).double() for c in ours.cells]
    for judge, cell in zip(cells, ours.cells, strict=True):
        judge.load_state_dict(cell.state_dict())
    states = [(torch.zeros(1, H).double(), torch.zeros(1, H).double()) for _ in cells]
    context, attended = torch.zeros(1, E).double(), ours.start(memory).attended
    logits, weights = [], []
    for token in tokens:
        x = torch.cat([ours.embedding.weight[token][None], context], dim=1)
        for i, cell in enumerate(cells):
            states[i] = cell(x, states[i])
            x = states[i][0]
        keys = ours.attend.keys(memory)
        attended = ours.attend(x[:, None], keys, memory.valid, attended)
        context = sum(attended.weights[0, 0, t] * memory.states[:, t] for t in range(len(keys[0])))
        merged = torch.tanh(ours.merge(torch.cat([x, context], dim=1)))
        logits.append(ours.out(merged)[0])
        weights.append(attended.weights[0, 0])
    return torch.stack(logits), torch.stack(weights)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["additive", "dot", "location"])
def test_speller_equals_the_slow_loop(kind, tied, memory):
    ours = speller(layers=2, norm="none", attention=kind, tied=tied)
    sentences = [[SOS, 5, 9, 9, 4], [SOS, 16, 4, 5, 7]]
    state = ours.start(memory)
    with torch.no_grad():
        for u in range(5):
            outputs, state = ours.advance(state, torch.tensor([[s[u]] for s in sentences]))
            logits = ours.logits(outputs)
            for b, length in enumerate(LENGTHS):
                alone = Memory(memory.states[b : b + 1, :length], memory.valid[b : b + 1, :length])
                expected, weights = slow_speller(ours, alone, sentences[b][: u + 1])
                torch.testing.assert_close(logits[b, 0], expected[-1])
                torch.testing.assert_close(state.attended.weights[b, 0, :length], weights[-1])
                assert (state.attended.weights[b, 0, length:] == 0).all()


def test_a_step_does_not_change_the_state_before_it(memory):
    ours = speller()
    before = ours.start(memory)
    sos = torch.full((B, 1), SOS)
    with torch.no_grad():
        first, _ = ours.advance(before, sos)
        ours.advance(before, torch.full((B, 1), 7))
        again, _ = ours.advance(before, sos)
    assert torch.equal(first, again)


def test_selecting_all_copies_no_memory(memory):
    ours = speller()
    state = ours.select(ours.start(memory), torch.arange(B)[:, None].expand(B, 5))
    assert state.constants.memory.states.data_ptr() == memory.states.data_ptr()


def test_tied_weights_are_one_tensor_with_gradients_from_both_uses(memory):
    ours = speller(tied=True)
    assert ours.out.weight is ours.embedding.weight
    names = [name for name, _ in ours.named_parameters()]
    assert "embedding.weight" in names and "out.weight" not in names
    outputs, _ = ours.advance(ours.start(memory), torch.full((B, 1), SOS))
    ours.logits(outputs)[..., 9].sum().backward()
    rows = ours.embedding.weight.grad.any(dim=1).nonzero().squeeze(1).tolist()
    assert rows == [SOS, 9]  # read as input, scored as output
    assert speller(tied=False).out.weight.shape == (V, H)


def test_recurrent_dropout_draws_one_mask_for_the_sentence(memory):
    ours = speller(recurrent_dropout=0.5, layers=2).train()
    torch.manual_seed(5)
    state = ours.start(memory)
    assert [mask.shape for mask in state.constants.masks] == [(B, H), (B, H)]
    _, later = ours.advance(state, torch.full((B, 1), SOS))
    assert later.constants is state.constants
    assert speller(recurrent_dropout=0.5).start(memory).constants.masks == (None,)


def test_dropout_acts_in_training_only(memory):
    ours = speller(dropout=0.5)
    sos = torch.full((B, 1), SOS)
    assert torch.equal(*(ours.advance(ours.start(memory), sos)[0] for _ in range(2)))
    ours.train()
    assert not torch.equal(*(ours.advance(ours.start(memory), sos)[0] for _ in range(2)))

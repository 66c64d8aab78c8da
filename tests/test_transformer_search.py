"""Decoding step by step: the cache, beams, and memory stored once per utterance."""

import pytest
import torch
from small_transformer import SETTINGS, E, V, batch, model

from asr.data.tokenizer import SOS
from asr.nn.attention import Memory


@pytest.mark.parametrize("settings", SETTINGS)
@torch.no_grad()
def test_the_cache_equals_the_full_pass(settings):
    ours = model(**settings)
    features, lengths, tokens = batch()
    memory = ours.encode(features, lengths)
    expected = ours.decode(memory, tokens).log_softmax(-1)
    state = ours.start(memory)
    for u in range(tokens.size(1)):
        log_probs, state = ours.step(state, tokens[:, u : u + 1])
        torch.testing.assert_close(log_probs[:, 0], expected[:, u])


@torch.no_grad()
def test_beams_equal_the_full_pass_of_every_hypothesis():
    """Random reordering, widths and finished utterances, against prefixes kept in lists."""
    torch.manual_seed(1)
    ours = model()
    features, lengths, _ = batch()
    memory = ours.encode(features, lengths)
    state, unfinished = ours.start(memory), [0, 1, 2]
    prefixes = [[[SOS]] for _ in unfinished]
    tokens = torch.full((3, 1), SOS)
    for step, (width, staying) in enumerate([(4, 3), (4, 3), (5, 2), (2, 2), (3, 1), (3, 1)]):
        log_probs, state = ours.step(state, tokens)
        for line, b in enumerate(unfinished):
            one = Memory(memory.states[b : b + 1], memory.valid[b : b + 1])
            for k, prefix in enumerate(prefixes[line]):
                full = ours.decode(one, torch.tensor([prefix]))[0, -1].log_softmax(-1)
                torch.testing.assert_close(log_probs[line, k], full)
        old, lines = tokens.size(1), torch.randperm(len(unfinished))[:staying]
        rows = lines[:, None] * old + torch.randint(old, (staying, width))
        state, tokens = ours.select(state, rows), torch.randint(4, V, (staying, width))
        prefixes = [
            [[*prefixes[r // old][r % old], t] for r, t in zip(*line, strict=True)]
            for line in zip(rows.tolist(), tokens.tolist(), strict=True)
        ]
        unfinished = [unfinished[i] for i in lines.tolist()]
        assert len(prefixes[0][0]) == step + 2


@torch.no_grad()
def test_a_state_can_be_stepped_from_twice():
    ours = model()
    features, lengths, tokens = batch()
    memory = ours.encode(features, lengths)
    _, state = ours.step(ours.start(memory), tokens[:, :1])
    first, after = ours.step(state, tokens[:, 1:2])
    ours.step(state, tokens[:, 2:3])
    again, _ = ours.step(state, tokens[:, 1:2])
    assert torch.equal(first, again)
    expected = ours.decode(memory, tokens[:, [0, 1, 3]])[:, -1].log_softmax(-1)
    torch.testing.assert_close(ours.step(after, tokens[:, 3:4])[0][:, 0], expected)


@torch.no_grad()
def test_the_memory_is_never_copied_per_hypothesis():
    ours = model()
    features, lengths, _ = batch()
    state = ours.start(ours.encode(features, lengths))
    wide = ours.select(state, torch.arange(3)[:, None].expand(3, 5))
    _, wide = ours.step(wide, torch.full((3, 5), SOS))
    for (keys, values), (same_keys, same_values) in zip(state.memory, wide.memory, strict=True):
        assert keys is same_keys and values is same_values
        assert keys.shape == (3, 2, 11, E // 2)

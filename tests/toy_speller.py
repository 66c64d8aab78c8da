"""A tiny random encoder-decoder with attention, for the tests of decoding.

Its state stores nothing of the search; `spell` decodes one whole sentence in a plain loop.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asr.config.schema import BeamConfig
from asr.data.tokenizer import SOS
from asr.decoding import beam_search as search
from asr.nn.attention import Memory


class ToyState(NamedTuple):
    memory: Memory
    hidden: Tensor  # (B, K, H)


class ToySpeller:
    """An Elman network with dot-product attention; sharpness scales its logits."""

    def __init__(self, vocabulary=7, size=5, sharpness=3.0, seed=0):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.embedding = normal(vocabulary, size)
        self.recurrent = normal(size, size)
        self.output = normal(2 * size, vocabulary) * sharpness / (2 * size) ** 0.5
        self.size = size
        self.steps = 0  # rows computed, for tests of a search's cost

    def start(self, memory):
        return ToyState(memory, torch.zeros(len(memory.valid), 1, self.size).double())

    def step(self, state, tokens):
        self.steps += tokens.numel()
        memory = state.memory
        hidden = torch.tanh(state.hidden @ self.recurrent + self.embedding[tokens])  # (B, K, H)
        energy = hidden @ memory.states.transpose(1, 2)  # (B, K, T)
        energy = energy.masked_fill(~memory.valid[:, None], -torch.inf)
        weights = energy.softmax(dim=2)
        features = torch.cat([hidden, weights @ memory.states], dim=2)
        log_probs = (features @ self.output).log_softmax(dim=2)
        return log_probs, ToyState(memory, hidden)

    def select(self, state, rows):
        beam = state.hidden.shape[1]
        utterances = rows[:, 0] // beam
        assert (rows // beam == utterances[:, None]).all(), "a line of rows mixes utterances"
        memory = Memory(state.memory.states[utterances], state.memory.valid[utterances])
        return ToyState(memory, state.hidden.flatten(0, 1)[rows])

    def spell(self, memory, tokens):
        """One utterance's memory, tokens without SOS -> log-probs (U + 1, V)."""
        state, rows = self.start(memory), []
        for token in [SOS, *tokens]:
            log_probs, state = self.step(state, torch.tensor([[token]]))
            rows.append(log_probs[0, 0])
        return torch.stack(rows)


def toy_memory(*lengths, size=5, seed=1):
    """Random states (B, T, E) float64 with lengths real frames each; the padding is 1000."""
    draw = torch.Generator().manual_seed(seed)
    frames = torch.arange(max(lengths))
    valid = frames < torch.tensor(lengths)[:, None]
    states = torch.randn(len(lengths), max(lengths), size, generator=draw, dtype=torch.float64)
    return Memory(states.masked_fill(~valid[..., None], 1e3), valid)


def alone(memory, utterance):
    """The memory of one utterance, without padding."""
    length = int(memory.valid[utterance].sum())
    rows = slice(utterance, utterance + 1)
    return Memory(memory.states[rows, :length], memory.valid[rows, :length])


NO_FRAMES = 1e-9  # the max_ratio with which only max_constant matters


def beam_search(model, memory, beam=8, **settings):
    """Beam search with recipe keys as arguments, without length penalty and EOS threshold."""
    keys = {"beam": beam, "length_penalty": 0.0, "eos_threshold": None} | settings
    config = BeamConfig(**{key: keys[key] for key in keys if key in BeamConfig.model_fields})
    rest = {key: settings[key] for key in settings if key not in BeamConfig.model_fields}
    return search.beam_search(model, memory, config, **rest)

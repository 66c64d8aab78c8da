"""Both model families in the beam, against brute force by teacher forcing over every sentence."""

import itertools

import pytest
import torch
from toy_speller import NO_FRAMES, beam_search

from asr.config.schema import LasConfig, ListenerConfig, SpellerConfig, TransformerConfig
from asr.data.tokenizer import EOS, SOS, UNK
from asr.models.las import LAS
from asr.models.transformer import Transformer
from asr.nn.attention import Memory

F, V = 5, 6
WORDS = (UNK, 4, 5)
LENGTHS = (31, 19, 23)
TRANSFORMER = TransformerConfig(
    kind="transformer",
    d_model=8,
    encoder_layers=1,
    decoder_layers=2,
    heads=2,
    subsampling_channels=3,
)


def las(attention):
    listener = ListenerConfig(layers=2, hidden=7, pyramid=(2,), backend="reference")
    speller = SpellerConfig(layers=1, hidden=11, embedding=3, backend="reference")
    parts = {"listener": listener, "speller": speller}
    return LAS(F, V, LasConfig(kind="las", attention=attention, attention_size=7, **parts))


FAMILIES = {
    "las location": lambda: las("location"),
    "las dot": lambda: las("dot"),
    "transformer": lambda: Transformer(F, V, TRANSFORMER),
}


def tiny(family):
    """A model with weights large enough for its sentences to differ."""
    torch.manual_seed(11)
    model = FAMILIES[family]()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return model.double().eval()


def encoded(model):
    draw = torch.Generator().manual_seed(2)
    features = torch.randn(len(LENGTHS), max(LENGTHS), F, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        memory = model.encode(features, torch.tensor(LENGTHS))
        return memory, model.ctc(memory)


def alone(memory, ctc, b):
    frames = int(memory.valid[b].sum())
    rows = slice(b, b + 1)
    return Memory(memory.states[rows, :frames], memory.valid[rows, :frames]), ctc[rows, :frames]


@torch.no_grad()
def brute_force(model, memory, ctc, longest, *, weight, alpha, reward):
    """One utterance: [(score, tokens)], best first, by decode and torch's CTC loss."""
    results = []
    for length in range(longest + 1):
        sentences = list(itertools.product(WORDS, repeat=length))
        n, frames = len(sentences), ctc.shape[1]
        tokens = torch.tensor(sentences, dtype=torch.long).view(n, length)
        inputs = torch.cat([torch.full((n, 1), SOS), tokens], dim=1)
        targets = torch.cat([tokens, torch.full((n, 1), EOS)], dim=1)
        many = Memory(memory.states.expand(n, -1, -1), memory.valid.expand(n, -1))
        log_probs = model.decode(many, inputs).log_softmax(2).gather(2, targets[..., None])
        losses = torch.nn.functional.ctc_loss(
            ctc.expand(n, -1, -1).transpose(0, 1),
            tokens,
            torch.full((n,), frames),
            torch.full((n,), length),
            reduction="none",
        )
        total = (1 - weight) * log_probs.sum((1, 2)) - (weight * losses if weight else 0.0)
        total = total / ((6 + length) / 6) ** alpha + reward * (length + 1)
        results += zip(total.tolist(), sentences, strict=True)
    return sorted(results, reverse=True)


WEIGHTS = [
    {"weight": 0.0, "alpha": 0.0, "reward": 0.0},
    {"weight": 0.3, "alpha": 0.6, "reward": 0.2},
    {"weight": 0.7, "alpha": 0.0, "reward": 0.9},
]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_beam_as_wide_as_the_space_is_brute_force(family, weights):
    model = tiny(family)
    memory, ctc = encoded(model)
    results = beam_search(
        model,
        memory,
        beam=150,
        nbest=4,
        max_ratio=NO_FRAMES,
        max_constant=4,
        ctc=ctc,
        ctc_weight=weights["weight"],
        length_penalty=weights["alpha"],
        token_reward=weights["reward"],
    )
    for b, ours in enumerate(results):
        judge = brute_force(model, *alone(memory, ctc, b), 4, **weights)[:4]
        assert [h.tokens for h in ours] == [tokens for _, tokens in judge]
        assert [h.score for h in ours] == pytest.approx([score for score, _ in judge], abs=1e-5)

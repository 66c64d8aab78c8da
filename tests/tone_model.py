"""A model that needs no training: it hears which tone is loudest, and says what it heard.

It has the face of every speech model over features of the tiny corpus' tones (tiny_speech.py), so
that what lies around a model can be judged by audio whose every word has a known time.
"""

from typing import NamedTuple

import numpy as np
import torch
from tiny_speech import PITCH, RATE, tones
from torch import Tensor, nn

from asr.data.text import Characters
from asr.nn.memory import Memory
from asr.recognizer import Recognizer
from asr.settings import Decode
from asr.tokens import BLANK, EOS
from features.fbank import Fbank
from features.front_end import FrontEnd
from features.normalize import MeanVarianceNorm

LETTER = 0.12  # seconds of a tone
REDUCTION = 4
SYMBOLS = " abc"
BINS = 23


class Said(NamedTuple):
    """State: each utterance's tokens, how many of them each hypothesis has said, and attention."""

    tokens: list[list[int]]
    places: list[list[int]]
    count: Tensor  # (B, K)
    attention: Tensor | None  # (B, K, T)


class ToneModel(nn.Module):
    """memory.states: one-hot over blank and SYMBOLS, per 4 frames."""

    def __init__(self, with_ctc: bool = True) -> None:
        super().__init__()
        self.with_ctc = with_ctc
        self.unused = nn.Parameter(torch.zeros(1))
        extract = Fbank(RATE, num_mel_bins=BINS)
        time = np.arange(RATE) / RATE
        pictures = [
            extract(torch.from_numpy(0.3 * np.sin(2 * np.pi * PITCH[s] * time)).float()).mean(dim=0)
            for s in "abc"
        ]
        self.bins = [int(picture.argmax()) for picture in pictures]

    def memory_lengths(self, lengths: Tensor) -> Tensor:
        return (lengths + REDUCTION - 1) // REDUCTION

    def encode(self, features: Tensor, lengths: Tensor) -> Memory:
        """features (B, T, F), not normalised."""
        B, T, F = features.shape
        spare = -T % REDUCTION
        padded = torch.cat([features, features.new_full((B, spare, F), -20.0)], dim=1)
        pooled = padded.view(B, -1, REDUCTION, F)[:, :, 0]  # (B, T', F), the first of each four
        tone = pooled[..., self.bins]  # (B, T', 3)
        loud = tone.amax(dim=2) > 13.0
        label = torch.where(loud, tone.argmax(dim=2) + 2, 1)  # a space, or a letter
        begins = torch.ones_like(loud)
        begins[:, 1:] = label[:, 1:] != label[:, :-1]
        label = torch.where(begins, label, 0)  # a letter where it begins, then blanks
        valid = torch.arange(label.shape[1]) < self.memory_lengths(lengths)[:, None]
        return Memory(nn.functional.one_hot(label, 1 + len(SYMBOLS)).float(), valid)

    def ctc(self, memory: Memory) -> Tensor | None:
        if not self.with_ctc:
            return None
        probs = torch.full((*memory.valid.shape, 4 + len(SYMBOLS)), 1e-4)
        probs[..., BLANK] += memory.states[..., 0]
        probs[..., 4:] += memory.states[..., 1:]
        return probs.log().log_softmax(dim=-1)

    def start(self, memory: Memory) -> Said:
        tokens, places = [], []
        for states, valid in zip(memory.states, memory.valid, strict=True):
            labels = states[valid].argmax(dim=1).tolist()
            heard = [(t, label + 3) for t, label in enumerate(labels) if label]
            while heard and heard[0][1] == 4:  # no spaces around a sentence
                del heard[0]
            while heard and heard[-1][1] == 4:
                del heard[-1]
            places.append([t for t, _ in heard] + [int(valid.sum()) - 1])
            tokens.append([token for _, token in heard])
        count = torch.zeros(len(tokens), 1, dtype=torch.long)
        self.frames = memory.valid.shape[1]
        return Said(tokens, places, count, None)

    def step(self, state: Said, tokens: Tensor) -> tuple[Tensor, Said]:
        B, K = tokens.shape
        probs = torch.full((B, K, 4 + len(SYMBOLS)), 1e-3)
        attention = torch.zeros(B, K, self.frames)
        for b in range(B):
            for k in range(K):
                at = min(int(state.count[b, k]), len(state.tokens[b]))
                probs[b, k, [*state.tokens[b], EOS][at]] = 1.0
                attention[b, k, state.places[b][at]] = 1.0
        count = state.count + 1
        return probs.log().log_softmax(-1), Said(state.tokens, state.places, count, attention)

    def select(self, state: Said, rows: Tensor) -> Said:
        K = state.count.shape[1]
        utterances = (rows[:, 0] // K).tolist()
        return Said(
            [state.tokens[b] for b in utterances],
            [state.places[b] for b in utterances],
            state.count.flatten()[rows],
            state.attention.flatten(0, 1)[rows],
        )

    def attention(self, memory: Memory, tokens: Tensor) -> Tensor:
        state, rows = self.start(memory), []
        for token in tokens.unbind(dim=1):
            _, state = self.step(state, token[:, None])
            rows.append(state.attention)
        return torch.cat(rows, dim=1)


def tone_recognizer(longest: float = 30.0, with_ctc: bool = True, **decode: float) -> Recognizer:
    """A recogniser that hears tones without a mistake."""
    front_end = FrontEnd(Fbank(RATE, num_mel_bins=BINS), MeanVarianceNorm("none"), RATE)
    model = ToneModel(with_ctc)
    return Recognizer(model, Characters(list(SYMBOLS)), front_end, Decode(**decode), longest)


def spoken(words: list[str], pause: float, seed: int = 0) -> tuple[np.ndarray, list[float]]:
    """Words of tones with near silence between: samples, and when each word begins."""
    gap = 1e-4 * np.random.default_rng(seed).standard_normal(int(pause * RATE))
    parts, starts, at = [gap], [], pause
    for number, word in enumerate(words):
        parts += [tones(word, seed + number), gap]
        starts.append(at)
        at += LETTER * len(word) + pause
    return np.concatenate(parts), starts

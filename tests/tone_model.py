"""A model that needs no training: it recognises the loudest tone.

It has the interface of every speech model, over features of the tones in tiny_speech.py, so that
the code around a model can be tested with audio in which the time of every word is known.
"""

from typing import NamedTuple

import numpy as np
import torch
from tiny_speech import PITCH, RATE, tones
from torch import Tensor, nn

from asr.config.schema import DecodeConfig
from asr.data.tokenizer import BLANK, EOS, Characters
from asr.features.fbank import Fbank
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm
from asr.inference.recognition import Recognizer
from asr.nn.attention import Memory

LETTER = 0.12  # seconds of a tone
REDUCTION = 4
SYMBOLS = " abc"
BINS = 23


class ToneState(NamedTuple):
    """Each utterance's tokens and their frames, the length of each hypothesis, and attention."""

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
        label = torch.where(begins, label, 0)  # a letter at its first frame, then blanks
        valid = torch.arange(label.shape[1]) < self.memory_lengths(lengths)[:, None]
        return Memory(nn.functional.one_hot(label, 1 + len(SYMBOLS)).float(), valid)

    def ctc(self, memory: Memory) -> Tensor | None:
        if not self.with_ctc:
            return None
        probs = torch.full((*memory.valid.shape, 4 + len(SYMBOLS)), 1e-4)
        probs[..., BLANK] += memory.states[..., 0]
        probs[..., 4:] += memory.states[..., 1:]
        return probs.log().log_softmax(dim=-1)

    def start(self, memory: Memory) -> ToneState:
        tokens, places = [], []
        for states, valid in zip(memory.states, memory.valid, strict=True):
            labels = states[valid].argmax(dim=1).tolist()
            labelled = [(t, label + 3) for t, label in enumerate(labels) if label]
            while labelled and labelled[0][1] == 4:  # no spaces around a sentence
                del labelled[0]
            while labelled and labelled[-1][1] == 4:
                del labelled[-1]
            places.append([t for t, _ in labelled] + [int(valid.sum()) - 1])
            tokens.append([token for _, token in labelled])
        count = torch.zeros(len(tokens), 1, dtype=torch.long)
        self.frames = memory.valid.shape[1]
        return ToneState(tokens, places, count, None)

    def step(self, state: ToneState, tokens: Tensor) -> tuple[Tensor, ToneState]:
        B, K = tokens.shape
        probs = torch.full((B, K, 4 + len(SYMBOLS)), 1e-3)
        attention = torch.zeros(B, K, self.frames)
        for b in range(B):
            for k in range(K):
                at = min(int(state.count[b, k]), len(state.tokens[b]))
                probs[b, k, [*state.tokens[b], EOS][at]] = 1.0
                attention[b, k, state.places[b][at]] = 1.0
        count = state.count + 1
        return probs.log().log_softmax(-1), ToneState(state.tokens, state.places, count, attention)

    def select(self, state: ToneState, rows: Tensor) -> ToneState:
        K = state.count.shape[1]
        utterances = (rows[:, 0] // K).tolist()
        return ToneState(
            [state.tokens[b] for b in utterances],
            [state.places[b] for b in utterances],
            state.count.flatten()[rows],
            state.attention.flatten(0, 1)[rows],
        )

    def decode_and_attend(self, memory: Memory, tokens: Tensor) -> tuple[Tensor, Tensor]:
        state, scores, rows = self.start(memory), [], []
        for token in tokens.unbind(dim=1):
            log_probs, state = self.step(state, token[:, None])
            scores.append(log_probs)
            rows.append(state.attention)
        return torch.cat(scores, dim=1), torch.cat(rows, dim=1)


def tone_recognizer(
    max_segment_seconds: float = 30.0, with_ctc: bool = True, **decode: float
) -> Recognizer:
    """A recogniser of tones without errors."""
    front_end = FrontEnd(Fbank(RATE, num_mel_bins=BINS), MeanVarianceNorm("none"))
    model = ToneModel(with_ctc)
    config = DecodeConfig(**decode)
    return Recognizer(model, Characters(list(SYMBOLS)), front_end, config, max_segment_seconds)


def spoken(words: list[str], pause: float, seed: int = 0) -> tuple[np.ndarray, list[float]]:
    """Words of tones with near silence between: samples, and the start of each word in seconds."""
    gap = 1e-4 * np.random.default_rng(seed).standard_normal(int(pause * RATE))
    parts, starts, at = [gap], [], pause
    for number, word in enumerate(words):
        parts += [tones(word, seed + number), gap]
        starts.append(at)
        at += LETTER * len(word) + pause
    return np.concatenate(parts), starts

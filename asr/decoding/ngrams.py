"""N-gram language models (ARPA files or kenlm's own) as scorers of a search.

The unit of the n-grams is set, not guessed:

    word    A word's log-prob is added with the token that ends it, a space, a piece that begins a
            new word, or <eos>; all other tokens score 0. So whatever the tokens are, a sentence
            scores exactly what its text scores, its end included, though a beam learns of a
            word only behind it.
    token   The n-grams are over tokens as Tokenizer.surface writes them, spaces as the sign
            U+2581. Every token scores at once.

Both give natural logarithms; kenlm has base 10. An unknown word scores what the file gives <unk>.
kenlm is an extra: pip install layernorm-asr[lm]. Heafield 2011.

B utterances, K hypotheses of each, V vocabulary.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asr.errors import UserError
from asr.nn.memory import Memory
from asr.tokens import EOS, SPECIAL

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's sign for a space
LN10 = math.log(10.0)
END = "</s>"


class Ngrams(Protocol):
    """What is used of kenlm.Model."""

    def BeginSentenceWrite(self, state: Any) -> None: ...

    def BaseScore(self, state: Any, word: str, out: Any) -> float: ...


class Place(NamedTuple):
    """Where a hypothesis stands: the n-gram model's state, and the letters of an unended word."""

    state: Any
    word: str = ""


class NgramState(NamedTuple):
    """One Place for every hypothesis, in rows of K."""

    places: list[list[Place]]
    attention: None = None


class NgramScorer:
    """A Scorer. `surfaces` (V,): each token as it stands in text, spaces and all, "" for the
    special ones; `unit` is word or token.
    """

    def __init__(
        self, ngrams: Ngrams, new_state: Any, surfaces: Sequence[str], unit: str = "word"
    ) -> None:
        self.ngrams, self.new_state, self.unit = ngrams, new_state, unit
        self.surfaces = list(surfaces)
        self.words = [surface.replace(" ", SPACE) for surface in surfaces]
        self.begins = torch.tensor([surface.startswith(" ") for surface in surfaces])

    def start(self, memory: Memory) -> NgramState:
        """One hypothesis per utterance, before <sos>."""
        first = self.new_state()
        self.ngrams.BeginSentenceWrite(first)
        return NgramState([[Place(first)] for _ in memory.valid])

    def step(self, state: NgramState, tokens: Tensor) -> tuple[Tensor, NgramState]:
        """tokens (B, K), <sos> first -> scores (B, K, V) of the next ones, next state."""
        said = [
            [self._said(place, token) for place, token in zip(*row, strict=True)]
            for row in zip(state.places, tokens.tolist(), strict=True)
        ]
        offer = self._word_scores if self.unit == "word" else self._token_scores
        scores = torch.stack([torch.stack([offer(place) for place in row]) for row in said])
        return scores.to(tokens.device), NgramState(said)

    def select(self, state: NgramState, rows: Tensor) -> NgramState:
        """rows (B', K') number old hypotheses b * K + k."""
        flat = [place for row in state.places for place in row]
        return NgramState([[flat[number] for number in row] for row in rows.tolist()])

    def _said(self, place: Place, token: int) -> Place:
        surface = self.surfaces[token]
        if self.unit == "token":
            return self._read(place, self.words[token])[1] if surface else place
        if surface.startswith(" "):
            place = self._ended(place)[1]
        return place._replace(word=place.word + surface.strip(" "))

    def _word_scores(self, place: Place) -> Tensor:
        score, after = self._ended(place)
        scores = torch.where(self.begins, score, 0.0)
        scores[EOS] = score + self._read(after, END)[0]
        return scores

    def _token_scores(self, place: Place) -> Tensor:
        sayable = [self._read(place, word)[0] for word in self.words[len(SPECIAL) :]]
        scores = torch.tensor([0.0] * len(SPECIAL) + sayable)
        scores[EOS] = self._read(place, END)[0]
        return scores

    def _ended(self, place: Place) -> tuple[float, Place]:
        """The score of the word that a hypothesis is at, and its place behind it."""
        return self._read(place, place.word) if place.word else (0.0, place)

    def _read(self, place: Place, word: str) -> tuple[float, Place]:
        after = self.new_state()
        return LN10 * self.ngrams.BaseScore(place.state, word, after), Place(after)


def load_ngrams(path: Path, surfaces: Sequence[str], unit: str = "word") -> NgramScorer:
    """The n-grams of an ARPA file (.arpa, .arpa.gz) or of kenlm's build_binary.

    Raises UserError where kenlm is not installed and where it cannot read the file.
    """
    try:
        import kenlm
    except ImportError:
        raise UserError(
            f"decode.lm = {path}: n-grams need the package kenlm, which is not installed: "
            "pip install layernorm-asr[lm]"
        ) from None
    try:
        ngrams = kenlm.Model(str(path))
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else "no n-grams"
        raise UserError(f"decode.lm = {path}: kenlm cannot read it: {reason}") from None
    return NgramScorer(ngrams, kenlm.State, surfaces, unit)

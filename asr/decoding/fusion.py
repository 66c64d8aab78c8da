"""Scores of several models in one search: the mean of an ensemble, and n-gram language models.

N-grams are read from ARPA files or kenlm's binary ones (Heafield 2011; kenlm is the extra `lm`).
Their unit is set, not guessed:

    word    A word's log-probability is added at the token that ends it: a space, a piece that
            begins a new word, or <eos>. All other tokens score 0. So a sentence scores exactly
            what its text scores, end included, whatever the tokens are.
    token   The n-grams are over tokens as in Tokenizer.surfaces, with U+2581 for spaces, and
            <unk>. Every token scores at once.

Both give natural logarithms; kenlm's have base 10. An unknown word scores as <unk> of the file.

Shapes: B utterances, K hypotheses of each, V vocabulary.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.data.tokenizer import EOS, SPECIAL, UNK
from asr.decoding.scorer import Scorer
from asr.errors import UserError, missing_package
from asr.nn.attention import Memory
from asr.words import is_unspaced

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's sign for a space
LN10 = math.log(10.0)
END, UNKNOWN = "</s>", "<unk>"
CLOSED = -99.0  # kenlm's log10 of an unknown word where the file has no <unk> is -100
MANY = 0.1  # share of unknown words, or of tokens without spaces, that is a fault


class Ensemble:
    """A Scorer: the mean of its members' log-probabilities. Its state is the list of theirs.

    Every member has a memory of the same utterances, with any number of frames. What is
    impossible for one member, as a sentence longer than its frames for CTC, is so for all.
    """

    def __init__(self, members: Sequence[tuple[Scorer, Memory]]) -> None:
        self.members = members

    def start(self, memory: Memory) -> list[Any]:
        """Of `memory` only the number of utterances is used; it must be the members'."""
        assert all(len(other.valid) == len(memory.valid) for _, other in self.members)
        return [scorer.start(other) for scorer, other in self.members]

    def step(self, state: list[Any], tokens: Tensor) -> tuple[Tensor, list[Any]]:
        """tokens (B, K), SOS first -> mean scores (B, K, V), next state."""
        pairs = zip(self.members, state, strict=True)
        stepped = [scorer.step(one, tokens) for (scorer, _), one in pairs]
        scores, states = zip(*stepped, strict=True)
        return torch.stack(scores).mean(dim=0), list(states)

    def select(self, state: list[Any], rows: Tensor) -> list[Any]:
        """rows (B', K'): numbers b * K + k of hypotheses, the same for every member."""
        pairs = zip(self.members, state, strict=True)
        return [scorer.select(one, rows) for (scorer, _), one in pairs]


class NgramContext(NamedTuple):
    state: Any  # kenlm's
    word: str = ""  # letters of the unfinished word


NgramState = list[list[NgramContext]]  # of all hypotheses, in rows of K


class NgramScorer:
    """A Scorer by a kenlm.Model, whose states new_state makes; unit is word or token.

    surfaces (V,): each token as written in text, with its spaces, "" for the special ones.
    """

    def __init__(
        self, ngrams: Any, new_state: Callable[[], Any], surfaces: Sequence[str], unit: str
    ) -> None:
        self.ngrams, self.new_state, self.unit = ngrams, new_state, unit
        self.surfaces = list(surfaces)
        self.words = [surface.replace(" ", SPACE) for surface in surfaces]
        self.words[UNK] = UNKNOWN
        if all(surface.startswith(" ") for surface in self.surfaces[len(SPECIAL) :]):
            self.surfaces[UNK] = f" {UNKNOWN}"  # a word, in a vocabulary of words
        self.begins_word = torch.tensor([surface.startswith(" ") for surface in self.surfaces])

    def start(self, memory: Memory) -> NgramState:
        """-> state before SOS with one hypothesis per utterance."""
        first = self.new_state()
        self.ngrams.BeginSentenceWrite(first)
        return [[NgramContext(first)] for _ in memory.valid]

    def step(self, state: NgramState, tokens: Tensor) -> tuple[Tensor, NgramState]:
        """tokens (B, K), SOS first -> scores (B, K, V) of the next token, next state."""
        contexts = [
            [self._append(context, token) for context, token in zip(*row, strict=True)]
            for row in zip(state, tokens.tolist(), strict=True)
        ]
        score = self._word_scores if self.unit == "word" else self._token_scores
        scores = torch.stack([torch.stack([score(one) for one in row]) for row in contexts])
        return scores.to(tokens.device), contexts

    def select(self, state: NgramState, rows: Tensor) -> NgramState:
        """rows (B', K'): numbers b * K + k of hypotheses."""
        flat = [context for row in state for context in row]
        return [[flat[number] for number in row] for row in rows.tolist()]

    def _append(self, context: NgramContext, token: int) -> NgramContext:
        if self.unit == "token":
            return self._score(context, word)[1] if (word := self.words[token]) else context
        surface = self.surfaces[token]
        if surface.startswith(" "):
            context = self._end_word(context)[1]
        return context._replace(word=context.word + surface.strip(" "))

    def _word_scores(self, context: NgramContext) -> Tensor:
        score, after = self._end_word(context)
        scores = torch.where(self.begins_word, score, 0.0)
        scores[EOS] = score + self._score(after, END)[0]
        return scores

    def _token_scores(self, context: NgramContext) -> Tensor:
        scores = [self._score(context, word)[0] for word in self.words[len(SPECIAL) :]]
        scores = torch.tensor([0.0] * len(SPECIAL) + scores)
        scores[UNK] = self._score(context, UNKNOWN)[0]
        scores[EOS] = self._score(context, END)[0]
        return scores

    def _end_word(self, context: NgramContext) -> tuple[float, NgramContext]:
        """Log-probability of the unfinished word, and the context after it."""
        return self._score(context, context.word) if context.word else (0.0, context)

    def _score(self, context: NgramContext, word: str) -> tuple[float, NgramContext]:
        """Log-probability of a word, and the context after it."""
        after = self.new_state()
        return LN10 * self.ngrams.BaseScore(context.state, word, after), NgramContext(after)

    def note(self, texts: Sequence[str]) -> str | None:
        """How many words of texts the file lacks, if these are many or it allows no other."""
        counts = Counter(chain.from_iterable(map(str.split, texts)))
        lacking = {word: n for word, n in counts.items() if word not in self.ngrams}
        share = sum(lacking.values()) / max(counts.total(), 1)
        score = self._score(NgramContext(self.new_state()), UNKNOWN)[0]
        closed = score <= LN10 * CLOSED and bool(lacking)
        if self.unit == "token" or (share < MANY and not closed):
            return None
        line = f"{100 * share:.3g} % of the words are not in it, such as {next(iter(lacking))!r}"
        remedy = "; check its case, and decode.lm_unit" if share >= MANY else ""
        return line + ", and it has no <unk>: transcripts hardly contain them" * closed + remedy


def load_ngrams(path: Path, surfaces: Sequence[str], unit: str) -> NgramScorer:
    """The n-grams of an ARPA file (.arpa, .arpa.gz) or of kenlm's build_binary.

    Raises UserError where kenlm is not installed or cannot read the file, for unit `word` where no
    space ends a word, and for unit `token` where the file lacks most tokens.
    """
    unspaced = [surface for surface in surfaces if is_unspaced(surface)]
    if unit == "word" and len(unspaced) > MANY * len(surfaces):  # a few are of names
        raise UserError(
            f"decode.lm_unit = word: no space ends a word after tokens such as {unspaced[0]!r}; "
            "set decode.lm_unit=token, for n-grams over the tokens of the vocabulary"
        )
    try:
        import kenlm
    except ImportError:
        reason = missing_package("kenlm", "lm")
        if sys.version_info >= (3, 13):
            reason = "it cannot be compiled for Python 3.13 or later; use Python 3.12"
        raise UserError(f"decode.lm = {path}: n-grams need kenlm: {reason}") from None
    try:
        ngrams = kenlm.Model(str(path))
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else "no n-grams"
        reason = reason.rpartition(" threw ")[2].partition(". ")[2] or reason
        raise UserError(f"decode.lm = {path}: kenlm cannot read it: {reason}") from None
    scorer = NgramScorer(ngrams, kenlm.State, surfaces, unit)
    known = [word in ngrams for word in scorer.words[len(SPECIAL) :]]
    if unit == "token" and sum(known) < len(known) / 2:
        raise UserError(
            f"decode.lm = {path}: it has {sum(known)} of the vocabulary's {len(known)} tokens; "
            f"write its training text in tokens, with {SPACE} for a space, or set "
            "decode.lm_unit=word for n-grams of words"
        )
    return scorer

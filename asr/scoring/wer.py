"""Word and character error rates of a set of utterances, with bootstrap intervals.

    WER = (S + D + I) / N,  N words in the references; CER the same over characters

Texts are compared as they are: case and punctuation count, runs of white space are one space, and
the spaces between words are characters. jiwer finds the alignments.

Empty texts are scored, not skipped. An empty hypothesis deletes every word of its reference. An
empty reference adds errors (insertions) and no words. Where a whole rate has no reference words
(one utterance, a speaker, everything), N counts as 1: without errors the rate is 0, otherwise it is
the number of inserted words. So every rate is finite.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Literal

import jiwer
import numpy as np
from numpy.typing import NDArray

from asr.errors import UserError
from asr.scoring.alignment import align, tidy
from asr.scoring.bootstrap import percentile_interval, resampled_sums, summed_by

Units = Literal["utterances", "speakers"]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Counts:
    """What is counted; the counts of any sets of utterances add up."""

    sentences: int
    sentence_errors: int  # sentences with at least one wrong word
    words: int  # in the references, as are characters
    substitutions: int
    deletions: int
    insertions: int
    characters: int
    character_errors: int

    @property
    def errors(self) -> int:
        """Wrong words: S + D + I."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float:
        """Word error rate, a fraction; above 1 where there are many insertions."""
        return self.errors / max(self.words, 1)

    @property
    def cer(self) -> float:
        """Character error rate, a fraction."""
        return self.character_errors / max(self.characters, 1)

    @property
    def sentence_error_rate(self) -> float:
        """Fraction of the sentences with at least one wrong word."""
        return self.sentence_errors / max(self.sentences, 1)


COUNTS = tuple(field.name for field in fields(Counts))
_counts_of = attrgetter(*COUNTS)


@dataclass(frozen=True, slots=True)
class UtteranceScore(Counts):
    """One utterance; its texts have single spaces."""

    id: str
    speaker: str
    reference: str
    hypothesis: str


@dataclass(frozen=True, slots=True)
class SpeakerScore(Counts):
    """All utterances of one speaker."""

    speaker: str


@dataclass(frozen=True, slots=True)
class Score(Counts):
    """All utterances, in the order given; speakers in alphabetical order.

    The intervals are 95 % percentile bootstrap intervals (Bisani & Ney 2004) over what
    `interval_over` names, None where there is only one such unit. Few or no errors make them too
    narrow: without any error they are (0, 0).
    """

    wer_interval: Interval | None
    cer_interval: Interval | None
    interval_over: Units
    speakers: tuple[SpeakerScore, ...]
    utterances: tuple[UtteranceScore, ...]


def score(
    references: Sequence[str],
    hypotheses: Sequence[str],
    ids: Sequence[str] | None = None,
    speakers: Sequence[str] | None = None,
    *,
    interval_over: Units = "utterances",
    draws: int = 1000,
    seed: int = 0,
) -> Score:
    """Score hypotheses against references, one of each an utterance.

    `ids` default to "1", "2", ...; `speakers` to one speaker without a name. Utterances of one
    speaker go wrong together, so an interval for other speakers needs interval_over="speakers".

    Raises UserError where there are no utterances, the lengths differ or an id comes twice.
    """
    ids = [str(number + 1) for number in range(len(references))] if ids is None else list(ids)
    speakers = [""] * len(ids) if speakers is None else list(speakers)
    _check(ids, references, hypotheses, speakers)
    references, hypotheses = [tidy(t) for t in references], [tidy(t) for t in hypotheses]
    rows = _count(references, hypotheses).tolist()
    texts = zip(ids, speakers, references, hypotheses, strict=True)
    utterances = tuple(UtteranceScore(*row, *t) for row, t in zip(rows, texts, strict=True))
    return summarize(utterances, interval_over=interval_over, draws=draws, seed=seed)


def summarize(
    utterances: Sequence[UtteranceScore],
    *,
    interval_over: Units = "utterances",
    draws: int = 1000,
    seed: int = 0,
) -> Score:
    """The Score of utterances that are scored already, say a part of another Score's.

    Raises UserError where there are none.
    """
    if not utterances:
        raise UserError("nothing to score: there are no utterances")
    rows = count_rows(utterances)
    names, by_speaker = summed_by([u.speaker for u in utterances], rows)
    units = {"utterances": rows, "speakers": by_speaker}[interval_over]
    wer_interval, cer_interval = _intervals(units, draws, seed)
    return Score(
        *rows.sum(axis=0).tolist(),
        wer_interval=wer_interval,
        cer_interval=cer_interval,
        interval_over=interval_over,
        speakers=tuple(map(SpeakerScore, *by_speaker.T.tolist(), names)),
        utterances=tuple(utterances),
    )


def count_rows(utterances: Sequence[UtteranceScore]) -> NDArray[np.int64]:
    """The counts of N utterances as a matrix (N, 8), columns COUNTS."""
    return np.array([_counts_of(u) for u in utterances], dtype=np.int64)


def _check(
    ids: list[str], references: Sequence[str], hypotheses: Sequence[str], speakers: list[str]
) -> None:
    for name, given in (("hypotheses", hypotheses), ("ids", ids), ("speakers", speakers)):
        if len(given) != len(references):
            raise UserError(
                f"{len(references)} references but {len(given)} {name}: give one for each utterance"
            )
    twice = [id for id, times in Counter(ids).items() if times > 1]
    if twice:
        raise UserError(f"utterance id {twice[0]!r} comes more than once: make the ids unique")


def _count(references: list[str], hypotheses: list[str]) -> NDArray[np.int64]:
    """The counts of each utterance (N, 8), columns COUNTS."""
    rows = []
    characters = _character_errors(references, hypotheses)
    alignments = align(references, hypotheses)
    for reference, edits, wrong in zip(references, alignments, characters, strict=True):
        marks = Counter(edit.mark for edit in edits)
        words = len(edits) - marks["I"]
        sdi = (marks["S"], marks["D"], marks["I"])
        rows.append((1, int(any(sdi)), words, *sdi, len(reference), wrong))
    return np.array(rows, dtype=np.int64).reshape(len(rows), 8)


def _character_errors(references: list[str], hypotheses: list[str]) -> list[int]:
    if not references:
        return []
    return [
        sum(
            max(c.ref_end_idx - c.ref_start_idx, c.hyp_end_idx - c.hyp_start_idx)
            for c in chunks
            if c.type != "equal"
        )
        for chunks in jiwer.process_characters(references, hypotheses).alignments
    ]


def _intervals(
    units: NDArray[np.int64], draws: int, seed: int
) -> tuple[Interval | None, Interval | None]:
    """Bootstrap intervals of WER and CER over units (N, 8)."""
    if len(units) < 2:
        return None, None  # one unit says nothing about the spread between units
    words, wrong, characters, wrong_characters = resampled_sums(
        np.column_stack((units[:, 2], units[:, 3:6].sum(axis=1), units[:, 6:8])), draws, seed
    ).T
    return (
        percentile_interval(wrong / np.maximum(words, 1)),
        percentile_interval(wrong_characters / np.maximum(characters, 1)),
    )

"""Word and character error rates, alignments and confusions of a set of utterances.

    WER = (S + D + I) / N,  N words in the references; CER the same over characters

A word is what white space separates, or one letter of a script without spaces (asr/words.py):
the WER of Chinese is over characters, that of mixed text is the mixed error rate.

Texts are compared as they are: case and punctuation count, runs of white space are one space. The
spaces between words are characters, except beside a letter of a script without spaces. jiwer finds
an alignment with the fewest errors. The marks are sclite's: C correct, S substituted, D deleted
(only in the reference), I inserted (only in the hypothesis). Empty texts are scored, not skipped.
If the reference has no words N counts as 1, so every rate is finite: 0 or the number of inserted
words.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, repeat
from operator import attrgetter
from typing import Literal, NamedTuple

import jiwer
import numpy as np
from numpy.typing import NDArray

from asr.analysis.statistics import Interval, percentile_interval, resampled_sums, summed_by
from asr.errors import UserError
from asr.words import split_words, without_loose_spaces

Units = Literal["utterances", "speakers"]
UNTRAINED = 0.9  # WER from which a model counts as untrained
_MARKS = {"equal": "C", "substitute": "S", "delete": "D", "insert": "I"}


class Edit(NamedTuple):
    """One column of an alignment; the word is empty on the side that has none."""

    mark: str
    reference: str
    hypothesis: str


def align(references: Sequence[str], hypotheses: Sequence[str]) -> list[list[Edit]]:
    """Align each reference with its hypothesis word by word, with the fewest errors.

    Two empty texts give an empty list.
    """
    if not references:
        return []
    spaced = ([" ".join(split_words(t)) for t in texts] for texts in (references, hypotheses))
    result = jiwer.process_words(*spaced)
    texts = zip(result.alignments, result.references, result.hypotheses, strict=True)
    return [list(_edits(*utterance)) for utterance in texts]


def tidy(text: str) -> str:
    """The text with single spaces, in Unicode's composed form."""
    return unicodedata.normalize("NFC", " ".join(text.split()))


def _edits(
    chunks: list[jiwer.AlignmentChunk], reference: list[str], hypothesis: list[str]
) -> Iterator[Edit]:
    for chunk in chunks:
        ours = reference[chunk.ref_start_idx : chunk.ref_end_idx] or repeat("")
        theirs = hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx] or repeat("")
        # Both sides of a chunk have the same length; a missing side repeats the empty word.
        yield from map(Edit, repeat(_MARKS[chunk.type]), ours, theirs)


@dataclass(frozen=True, slots=True)
class Confusions:
    """The most frequent errors, most frequent first, each with how often it occurred."""

    substitutions: tuple[tuple[str, str, int], ...]  # reference word, hypothesis word, count
    deletions: tuple[tuple[str, int], ...]
    insertions: tuple[tuple[str, int], ...]


def confusions(alignments: Iterable[Sequence[Edit]], most: int = 20) -> Confusions:
    """Count the errors of many alignments; equally frequent ones in alphabetical order."""
    counts = Counter(edit for edit in chain.from_iterable(alignments) if edit.mark != "C")
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    by_mark = {mark: [(e, n) for e, n in ranked if e.mark == mark][:most] for mark in "SDI"}
    return Confusions(
        tuple((e.reference, e.hypothesis, n) for e, n in by_mark["S"]),
        tuple((e.reference, n) for e, n in by_mark["D"]),
        tuple((e.hypothesis, n) for e, n in by_mark["I"]),
    )


def alignment_text(reference: str, hypothesis: str, width: int = 100) -> str:
    """Lines REF, HYP and the marks of errors, wrapped at `width` characters."""
    result = jiwer.process_words(*(" ".join(split_words(t)) for t in (reference, hypothesis)))
    text = jiwer.visualize_alignment(result, False, False, width)
    return text.partition("\n\n")[2].rstrip()  # without the number of the sentence


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a set of utterances; counts of disjoint sets add up."""

    sentences: int
    sentence_errors: int  # sentences with at least one wrong word
    words: int  # in the references, like characters
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
        """Word error rate, a fraction; above 1 with many insertions."""
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
    """All utterances in input order; speakers in alphabetical order, none where the speaker of each
    utterance is its id, which asr.prepare writes for an unknown one.

    The intervals are 95 % percentile bootstrap intervals (Bisani & Ney 2004) over utterances, None
    for a single one. Few utterances (MIN_UNITS) or errors make them too narrow: without errors they
    are (0, 0).
    """

    wer_interval: Interval | None
    cer_interval: Interval | None
    speakers: tuple[SpeakerScore, ...] = field(repr=False)
    utterances: tuple[UtteranceScore, ...] = field(repr=False)


def score(
    references: Sequence[str],
    hypotheses: Sequence[str],
    ids: Sequence[str] | None = None,
    speakers: Sequence[str] | None = None,
    *,
    draws: int = 1000,
) -> Score:
    """Score hypotheses against references, one of each per utterance.

    `ids` default to "1", "2", ...; `speakers` to one speaker without a name.
    Raises UserError if there are no utterances, the lengths differ, an id repeats, or references
    or hypotheses are one text instead of a list.
    """
    for text in (references, hypotheses):
        if isinstance(text, str):
            raise UserError(f"{text[:60]!r} is one text: give a list, with a text per utterance")
    ids = [str(number + 1) for number in range(len(references))] if ids is None else list(ids)
    speakers = [""] * len(ids) if speakers is None else list(speakers)
    _check(ids, references, hypotheses, speakers)
    references, hypotheses = [tidy(t) for t in references], [tidy(t) for t in hypotheses]
    counts = _count(references, hypotheses)
    texts = zip(ids, speakers, references, hypotheses, strict=True)
    utterances = tuple(UtteranceScore(*c, *t) for c, t in zip(counts, texts, strict=True))
    return summarize(utterances, draws)


def summarize(utterances: Sequence[UtteranceScore], draws: int = 1000) -> Score:
    """The Score of utterances such as a subset of another Score's. UserError if there are none."""
    if not utterances:
        raise UserError("nothing to score: there are no utterances")
    rows = np.array([_counts_of(u) for u in utterances], dtype=np.int64)  # (N, 8), columns COUNTS
    wer_interval, cer_interval = _intervals(rows, draws)
    speakers: tuple[SpeakerScore, ...] = ()
    if any(u.speaker != u.id for u in utterances):
        names, by_speaker = summed_by([u.speaker for u in utterances], rows)
        speakers = tuple(map(SpeakerScore, *by_speaker.T.tolist(), names))
    return Score(
        *rows.sum(axis=0).tolist(),
        wer_interval=wer_interval,
        cer_interval=cer_interval,
        speakers=speakers,
        utterances=tuple(utterances),
    )


def pooled(scores: Sequence[Score], draws: int = 1000) -> Score:
    """One Score of several runs on one split: each utterance's counts summed over the runs.

    They have the same references. The bootstrap resamples the same utterances in every run.
    """
    if len(scores) == 1:
        return scores[0]
    rows = [{u.id: u for u in score.utterances} for score in scores]
    sums = [
        replace(u, **{c: sum(getattr(row[u.id], c) for row in rows) for c in COUNTS})
        for u in scores[0].utterances
    ]
    return summarize(sums, draws)


def _check(
    ids: list[str], references: Sequence[str], hypotheses: Sequence[str], speakers: list[str]
) -> None:
    for name, texts in (("hypotheses", hypotheses), ("ids", ids), ("speakers", speakers)):
        if len(texts) != len(references):
            raise UserError(
                f"{len(references)} references but {len(texts)} {name}: give one for each utterance"
            )
    if twice := [id for id, times in Counter(ids).items() if times > 1]:
        raise UserError(f"utterance id {twice[0]!r} is not unique")


def _count(references: list[str], hypotheses: list[str]) -> list[tuple[int, ...]]:
    """The counts of each utterance, in the order of COUNTS."""
    if not references:
        return []
    rows = []
    alignments = align(references, hypotheses)
    references, hypotheses = (
        [without_loose_spaces(text) for text in texts] for texts in (references, hypotheses)
    )
    characters = jiwer.process_characters(references, hypotheses).alignments
    for reference, edits, chunks in zip(references, alignments, characters, strict=True):
        marks = Counter(edit.mark for edit in edits)
        sdi = (marks["S"], marks["D"], marks["I"])
        wrong = sum(_size(chunk) for chunk in chunks if chunk.type != "equal")
        rows.append((1, int(any(sdi)), len(edits) - marks["I"], *sdi, len(reference), wrong))
    return rows


def _size(chunk: jiwer.AlignmentChunk) -> int:
    return max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)


def interval_over_speakers(score: Score, draws: int = 1000) -> Interval | None:
    """That of the WER for other speakers, since errors within a speaker are correlated."""
    return _intervals(np.array([_counts_of(s) for s in score.speakers]), draws)[0]


def _intervals(units: NDArray[np.int64], draws: int) -> tuple[Interval | None, Interval | None]:
    """Bootstrap intervals of WER and CER over units (N, 8)."""
    if len(units) < 2:
        return None, None  # the spread between units is unknown
    words, wrong, characters, wrong_characters = resampled_sums(
        np.column_stack((units[:, 2], units[:, 3:6].sum(axis=1), units[:, 6:8])), draws, seed=0
    ).T
    return (
        percentile_interval(wrong / np.maximum(words, 1)),
        percentile_interval(wrong_characters / np.maximum(characters, 1)),
    )


def by_group(score: Score, group_of: Mapping[str, str]) -> dict[str, Score]:
    """The Score of each group with its interval, by name. group_of: utterance id -> group."""
    groups: dict[str, list[UtteranceScore]] = {}
    for utterance in score.utterances:
        groups.setdefault(group_of[utterance.id], []).append(utterance)
    return {name: summarize(groups[name]) for name in sorted(groups)}


def group_lines(by: str, groups: Mapping[str, Score]) -> list[str]:
    """A table of groups: utterances, words, S, D, I, WER and its 95 % interval, CER."""
    rows = [(by, "utt.", "words", "S", "D", "I", "WER", "95 %", "CER")]
    for name, part in groups.items():
        counts = (part.sentences, part.words, part.substitutions, part.deletions, part.insertions)
        interval = between(part.wer_interval) if part.wer_interval else "-"
        rows.append(
            (name or "(none)", *map(str, counts), percent(part.wer), interval, percent(part.cer))
        )
    return table(rows)


def untrained(wer: float) -> str:
    """A remark on a rate hardly below that of an empty transcript; "" for other rates."""
    if wer < UNTRAINED:
        return ""
    return "typical of an untrained model: an empty transcript has 100 %"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells -> lines: the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()
        for first, *others in rows
    ]


def percent(fraction: float) -> str:
    """A fraction as text: 12.34 %."""
    return f"{100 * fraction:.2f} %"


def between(interval: Interval, form: str = "{:.2%}") -> str:
    """An interval as text: 1.20 % to 3.45 %."""
    low, high = map(form.format, interval)
    return f"{low} to {high}".replace("%", " %")

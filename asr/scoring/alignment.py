"""Word alignments of references and hypotheses: as edits, as text, and as counted confusions.

Marks are sclite's: C correct, S substituted, D deleted (only in the reference), I inserted (only
in the hypothesis). Among alignments of equally few errors the one jiwer finds is taken.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple
from unicodedata import combining, east_asian_width

import jiwer

_MARKS = {"equal": "C", "substitute": "S", "delete": "D", "insert": "I"}


class Edit(NamedTuple):
    """One column of an alignment; the word is empty on the side that has none."""

    mark: str
    reference: str
    hypothesis: str


def align(references: Sequence[str], hypotheses: Sequence[str]) -> list[list[Edit]]:
    """Align each reference with its hypothesis word by word, with as few errors as possible.

    Words are what white space separates. An empty text aligns as nothing but insertions or
    deletions; two empty texts give an empty list.
    """
    if not references:
        return []
    found = jiwer.process_words([tidy(t) for t in references], [tidy(t) for t in hypotheses])
    texts = zip(found.alignments, found.references, found.hypotheses, strict=True)
    return [list(_edits(*utterance)) for utterance in texts]


def tidy(text: str) -> str:
    """The words of a text, one space between them."""
    return " ".join(text.split())


def _edits(
    chunks: list[jiwer.AlignmentChunk], reference: list[str], hypothesis: list[str]
) -> Iterator[Edit]:
    for chunk in chunks:
        ours = reference[chunk.ref_start_idx : chunk.ref_end_idx] or repeat("")
        theirs = hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx] or repeat("")
        # A chunk with both sides has them equally long; the missing side repeats as it must.
        yield from map(Edit, repeat(_MARKS[chunk.type]), ours, theirs)


@dataclass(frozen=True, slots=True)
class Confusions:
    """The most frequent errors, most frequent first, each with how often it occurred."""

    substitutions: tuple[tuple[str, str, int], ...]  # reference word, hypothesis word, count
    deletions: tuple[tuple[str, int], ...]
    insertions: tuple[tuple[str, int], ...]


def confusions(alignments: Iterable[Sequence[Edit]], most: int = 20) -> Confusions:
    """Count the errors of many alignments; equally frequent ones stand in alphabetical order."""
    counts = Counter(edit for edit in chain.from_iterable(alignments) if edit.mark != "C")
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    by_mark = {mark: [(e, n) for e, n in ranked if e.mark == mark][:most] for mark in "SDI"}
    return Confusions(
        tuple((e.reference, e.hypothesis, n) for e, n in by_mark["S"]),
        tuple((e.reference, n) for e, n in by_mark["D"]),
        tuple((e.hypothesis, n) for e, n in by_mark["I"]),
    )


def alignment_text(edits: Sequence[Edit], width: int = 100) -> str:
    """Three lines, REF, HYP and the marks, words above each other; wrapped at `width` columns.

    A missing word is shown as asterisks. Correct words carry no mark. No edits give "".
    """
    rows: list[tuple[str, str, str]] = []
    used = width  # columns used of the last row: full, so that the first edit opens one
    for edit in edits:
        cells = _cells(edit)
        if used + _columns(cells[0]) + 1 > width:
            rows.append(("REF:", "HYP:", "    "))
            used = 4
        rows[-1] = tuple(f"{row} {cell}" for row, cell in zip(rows[-1], cells, strict=True))
        used += _columns(cells[0]) + 1
    return "\n\n".join("\n".join(line.rstrip() for line in row) for row in rows)


def _cells(edit: Edit) -> tuple[str, str, str]:
    """Reference, hypothesis and mark of one edit, padded to the same width."""
    width = max(_columns(edit.reference), _columns(edit.hypothesis))
    ours, theirs = edit.reference or "*" * width, edit.hypothesis or "*" * width
    mark = "" if edit.mark == "C" else edit.mark
    return _padded(ours, width), _padded(theirs, width), _padded(mark, width)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _columns(text))


def _columns(text: str) -> int:
    """Columns of a terminal that the text takes: wide letters two, combining marks none."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)

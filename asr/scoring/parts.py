"""Error rates of parts of a split, say by source or accent, as a table for people."""

from collections.abc import Mapping, Sequence

from asr.scoring.files import between, percent
from asr.scoring.wer import Score, UtteranceScore, summarize


def by_group(score: Score, group_of: Mapping[str, str]) -> dict[str, Score]:
    """Utterance id -> group: each group scored for itself, with its own interval, by name."""
    groups: dict[str, list[UtteranceScore]] = {}
    for utterance in score.utterances:
        groups.setdefault(group_of[utterance.id], []).append(utterance)
    return {name: summarize(groups[name]) for name in sorted(groups)}


def group_lines(by: str, groups: Mapping[str, Score]) -> list[str]:
    """A head and a line a group: utterances, words, S, D, I, WER and its 95 % interval."""
    rows = [(by, "utt.", "words", "S", "D", "I", "WER", "95 %")]
    rows += [(name or "(none)", *_cells(found)) for name, found in groups.items()]
    return table(rows)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells -> lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(found: Score) -> tuple[str, ...]:
    counts = (found.sentences, found.words, found.substitutions, found.deletions, found.insertions)
    spread = between(found.wer_interval) if found.wer_interval else "-"
    return (*map(str, counts), percent(found.wer), spread)

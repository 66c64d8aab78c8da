"""One evaluation as files: score.json, hypotheses.tsv and alignment.txt in a folder of their own.

score.json      rates (fractions), counts, intervals, speakers, confusions, and facts about the run;
                written last, so where it exists the evaluation is complete
hypotheses.tsv  one utterance a line: id, speaker, texts, counts, and columns of the caller
alignment.txt   the utterances with most errors, reference above hypothesis
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from asr.analysis.statistics import LEVEL, Interval
from asr.analysis.wer import (
    COUNTS,
    Confusions,
    Counts,
    Score,
    UtteranceScore,
    align,
    alignment_text,
    between,
    confusions,
    percent,
    summarize,
)
from asr.errors import UserError
from asr.io import read_small_file, write_files

_TEXTS = ("id", "speaker", "reference", "hypothesis")
_COLUMNS = (*_TEXTS, *COUNTS)


@dataclass(frozen=True, slots=True)
class SavedEvaluation:
    """A stored evaluation. `columns` are text, one entry an utterance, as in the file."""

    score: Score
    about: Mapping[str, Any]
    columns: Mapping[str, tuple[str, ...]]


def write_evaluation(
    folder: Path,
    score: Score,
    about: Mapping[str, Any] | None = None,
    columns: Mapping[str, Sequence[object]] | None = None,
    worst: int = 50,
) -> None:
    """Write the three files; after a crash each is the old or the new one.

    about     JSON values, say the checkpoint and the decode settings
    columns   more columns of hypotheses.tsv, say health figures: one value an utterance
    worst     utterances in alignment.txt
    Raises UserError where a column's length is wrong or a TSV file cannot hold a name or value.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wrong = [utterance for utterance in score.utterances if utterance.errors]
    wrong.sort(key=lambda utterance: (-utterance.errors, -utterance.wer, utterance.id))
    alignments = align([u.reference for u in wrong], [u.hypothesis for u in wrong])
    confused = confusions(alignments)
    shown = [
        f"{_headline(utterance)}\n{alignment_text(edits)}\n"
        for utterance, edits in zip(wrong[:worst], alignments, strict=False)
    ]
    contents = {
        "hypotheses.tsv": _table(score, columns or {}),
        "alignment.txt": "\n".join([_summary(score, len(shown)), *shown]),
        "score.json": json.dumps(_rates(score, confused, about or {}), indent=1) + "\n",
    }
    write_files(folder, contents)


def read_evaluation(folder: Path) -> SavedEvaluation:
    """Read the evaluation in a folder.

    Raises UserError where a file is missing, damaged, or of another evaluation than the other file.
    """
    try:
        rates = json.loads(read_small_file(folder / "score.json"))
        lines = (folder / "hypotheses.tsv").read_text(encoding="utf-8").split("\n")
        utterances, columns = _utterances(lines)
        # The stored intervals: resampling again would give others.
        score = replace(
            summarize(utterances, draws=1),
            wer_interval=_parse_interval(rates["wer_interval"]),
            cer_interval=_parse_interval(rates["cer_interval"]),
            interval_over=rates["interval_over"],
        )
        same = all(rates[name] == getattr(score, name) for name in COUNTS)
        about = rates["about"]
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: not there; run python -m asr.evaluate first") from None
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{folder}: damaged evaluation ({error}); evaluate again") from None
    if not same:
        raise UserError(f"{folder}: score.json and hypotheses.tsv do not agree; evaluate again")
    return SavedEvaluation(score, about, columns)


def evaluation_name(split: str) -> str:
    """The name of a split's folder in RUN/evaluate: the split's, or its manifest's."""
    return Path(split).name.removesuffix(".tsv")


def _rates(score: Score, confused: Confusions, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_counted(score),
        "wer_interval": score.wer_interval,
        "cer_interval": score.cer_interval,
        "interval_over": score.interval_over,
        "interval_level": LEVEL,
        "speakers": [{"speaker": s.speaker, **_counted(s)} for s in score.speakers],
        "confusions": asdict(confused),
        "about": dict(about),
    }


def _counted(counts: Counts) -> dict[str, float]:
    rates = ("wer", "cer", "sentence_error_rate", "errors")
    return {name: getattr(counts, name) for name in (*rates, *COUNTS)}


def _table(score: Score, columns: Mapping[str, Sequence[object]]) -> str:
    for name, values in columns.items():
        if name in _COLUMNS:
            raise UserError(f"hypotheses.tsv has a column {name!r} already: choose another name")
        if len(values) != len(score.utterances):
            raise UserError(
                f"column {name!r} has {len(values)} values for {len(score.utterances)} utterances"
            )
    ours = map(attrgetter(*_COLUMNS), score.utterances)
    rows = [(*row, *added) for row, *added in zip(ours, *columns.values(), strict=True)]
    return "\n".join(map(_row, [(*_COLUMNS, *columns), *rows])) + "\n"


def _row(values: Sequence[object]) -> str:
    cells = [str(value) for value in values]
    for cell in cells:
        if set(cell) & set("\t\n\r"):
            raise UserError(f"{cell!r} has a tab or a line break: a TSV file cannot hold it")
    return "\t".join(cells)


def _utterances(lines: list[str]) -> tuple[list[UtteranceScore], dict[str, tuple[str, ...]]]:
    names = lines[0].split("\t")
    if tuple(names[: len(_COLUMNS)]) != _COLUMNS:
        raise ValueError("hypotheses.tsv: unknown header")
    utterances, added = [], []
    for number, line in enumerate(lines[1:-1], 2):
        cells = line.split("\t")
        if len(cells) != len(names):
            raise ValueError(f"hypotheses.tsv:{number}: {len(cells)} of {len(names)} columns")
        row = dict(zip(names, cells, strict=True))
        counts = {name: int(row.pop(name)) for name in COUNTS}
        texts = {name: row.pop(name) for name in _TEXTS}
        utterances.append(UtteranceScore(**counts, **texts))
        added.append(row)
    columns = {name: tuple(row[name] for row in added) for name in names[len(_COLUMNS) :]}
    return utterances, columns


def _parse_interval(value: Any) -> Interval | None:
    if value is None:
        return None
    low, high = value
    return float(low), float(high)


def _summary(score: Score, shown: int) -> str:
    interval = ""
    if score.wer_interval:
        interval = f" ({between(score.wer_interval)}, 95 % over {score.interval_over})"
    return (
        f"WER {percent(score.wer)}{interval}, CER {percent(score.cer)}\n"
        f"{score.sentences} utterances, {score.words} words. The {shown} with most errors:\n"
    )


def _headline(utterance: UtteranceScore) -> str:
    marks = f"{utterance.substitutions} S, {utterance.deletions} D, {utterance.insertions} I"
    return (
        f"{utterance.id}  {utterance.speaker}  {utterance.errors} errors of {utterance.words} "
        f"words, {percent(utterance.wer)}: {marks}"
    )

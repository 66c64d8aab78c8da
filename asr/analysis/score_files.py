"""One evaluation as files: score.json, hypotheses.tsv and alignment.txt in one folder.

score.json      rates (fractions), counts, intervals, speakers, confusions, and metadata of the run;
                written last, so if it exists the evaluation is complete
hypotheses.tsv  one utterance per line: id, speaker, texts, counts, and columns of the caller
alignment.txt   the utterances with the most errors, reference above hypothesis
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

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
from asr.io import open_file, read_json, write_files

MAX_BYTES = 1 << 30  # of hypotheses.tsv
MAX_LINE = 1 << 19  # bytes: texts of ten hours; the memory of an alignment is quadratic in it
MAX_NAME = 200  # bytes of the name of an evaluation's folder
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TEXTS = ("id", "speaker", "reference", "hypothesis")
_COLUMNS = (*_TEXTS, *COUNTS)


@dataclass(frozen=True, slots=True)
class SavedEvaluation:
    """A stored evaluation, without the caller's columns."""

    score: Score
    metadata: Mapping[str, Any]


def write_evaluation(
    folder: Path,
    score: Score,
    metadata: Mapping[str, Any] | None = None,
    columns: Mapping[str, Sequence[object]] | None = None,
    worst: int = 50,
) -> None:
    """Write the three files; after a crash each is the old or the new one.

    metadata  JSON values, such as the checkpoint and the decode settings
    columns   more columns of hypotheses.tsv, such as health figures: one value per utterance,
              without tabs and line breaks
    worst     number of utterances in alignment.txt
    """
    folder.mkdir(parents=True, exist_ok=True)
    wrong = [utterance for utterance in score.utterances if utterance.errors]
    wrong.sort(key=lambda utterance: (-utterance.errors, -utterance.wer, utterance.id))
    alignments = align([u.reference for u in wrong], [u.hypothesis for u in wrong])
    confused = confusions(alignments)
    shown = [
        f"{_headline(u)}\n{alignment_text(u.reference, u.hypothesis)}\n" for u in wrong[:worst]
    ]
    contents = {
        "hypotheses.tsv": _table(score, columns or {}),
        "alignment.txt": "\n".join([_summary(score, len(shown)), *shown]),
        "score.json": json.dumps(_rates(score, confused, metadata or {}), indent=1) + "\n",
    }
    write_files(folder, contents)


def read_evaluation(folder: Path) -> SavedEvaluation:
    """Read the evaluation in a folder.

    Raises UserError if a file is missing or damaged or the files are of different evaluations.
    """
    try:
        rates = read_json(folder / "score.json")
        with open_file(folder / "hypotheses.tsv", MAX_BYTES) as file:
            utterances = _utterances(_lines(file))
        # The stored intervals, since resampling again would give others.
        score = replace(
            summarize(utterances, draws=1),
            wer_interval=_parse_interval(rates["wer_interval"]),
            cer_interval=_parse_interval(rates["cer_interval"]),
        )
        same = all(rates[name] == getattr(score, name) for name in COUNTS)
        metadata = rates["about"]
        if not isinstance(metadata, dict):
            raise TypeError("score.json: unknown values")
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: missing; run python -m asr.evaluate first") from None
    except (ValueError, KeyError, TypeError, UserError) as error:
        reason = str(error)[:200]
        raise UserError(f"{folder}: damaged evaluation ({reason}); evaluate again") from None
    if not same:
        raise UserError(f"{folder}: score.json and hypotheses.tsv do not agree; evaluate again")
    return SavedEvaluation(score, metadata)


def evaluation_name(split: str) -> str:
    """The name of a split's folder in RUN/evaluate: that of the split or of its manifest.

    Raises UserError unless it is a plain file name: ".." would be the run folder itself.
    """
    name = Path(split).name.removesuffix(".tsv")
    if name in ("", ".", "..") or _CONTROL.search(name) or len(os.fsencode(name)) > MAX_NAME:
        shown = repr(name if len(name) < 60 else f"{name[:57]}...")
        raise UserError(
            f"--split {shown}: cannot name the folder of an evaluation; copy the manifest to "
            "another name, or choose another key in data.test"
        )
    return name


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return type(value) in (int, float) and abs(value) < math.inf


def _rates(score: Score, confused: Confusions, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_counted(score),
        "wer_interval": score.wer_interval,
        "cer_interval": score.cer_interval,
        "interval_over": "utterances",
        "interval_level": LEVEL,
        "speakers": [{"speaker": s.speaker, **_counted(s)} for s in score.speakers],
        "confusions": asdict(confused),
        "about": dict(metadata),
    }


def _counted(counts: Counts) -> dict[str, float]:
    rates = ("wer", "cer", "sentence_error_rate", "errors")
    return {name: getattr(counts, name) for name in (*rates, *COUNTS)}


def _table(score: Score, columns: Mapping[str, Sequence[object]]) -> str:
    ours = map(attrgetter(*_COLUMNS), score.utterances)
    rows = [(*row, *added) for row, *added in zip(ours, *columns.values(), strict=True)]
    return "".join("\t".join(map(str, row)) + "\n" for row in [(*_COLUMNS, *columns), *rows])


def _lines(file: IO[bytes]) -> Iterator[list[str]]:
    """The cells of each line. Raises ValueError for a line that is too long or cut off."""
    while line := file.readline(MAX_LINE):
        if not line.endswith(b"\n"):
            raise ValueError(f"hypotheses.tsv: a line is cut off or longer than {MAX_LINE} bytes")
        yield line[:-1].decode().split("\t")


def _utterances(rows: Iterator[list[str]]) -> list[UtteranceScore]:
    names = next(rows, [])
    if tuple(names[: len(_COLUMNS)]) != _COLUMNS or len(set(names)) < len(names):
        raise ValueError("hypotheses.tsv: unknown header")
    utterances: list[UtteranceScore] = []
    for number, cells in enumerate(rows, 2):
        if len(cells) != len(names):
            raise ValueError(f"hypotheses.tsv:{number}: {len(cells)} of {len(names)} columns")
        texts = dict(zip(_TEXTS, cells, strict=False))
        counts = dict(zip(COUNTS, map(_count, cells[len(_TEXTS) :]), strict=False))
        utterances.append(UtteranceScore(**counts, **texts))
    if len({utterance.id for utterance in utterances}) < len(utterances):
        raise ValueError("hypotheses.tsv: an id is not unique")
    return utterances


def _count(cell: str) -> int:
    count = int(cell)
    if not 0 <= count <= MAX_LINE:
        raise ValueError(f"hypotheses.tsv: {count} is not a count")
    return count


def _parse_interval(value: Any) -> Interval | None:
    if value is None:
        return None
    low, high = value
    if not (is_number(low) and is_number(high)):
        raise ValueError("score.json: an interval is not two numbers")
    return float(low), float(high)


def _summary(score: Score, shown: int) -> str:
    interval = ""
    if score.wer_interval:
        interval = f" ({between(score.wer_interval)}, 95 % over utterances)"
    return (
        f"WER {percent(score.wer)}{interval}, CER {percent(score.cer)}\n"
        f"{score.sentences} utterances, {score.words} words. The {shown} with most errors:\n"
    )


def _headline(utterance: UtteranceScore) -> str:
    marks = f"{utterance.substitutions} S, {utterance.deletions} D, {utterance.insertions} I"
    names = dict.fromkeys([utterance.id, utterance.speaker])  # equal where none is known
    return (
        f"{'  '.join(names)}  {utterance.errors} errors of {utterance.words} words, "
        f"{percent(utterance.wer)}: {marks}"
    )

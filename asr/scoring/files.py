"""One evaluation as files: score.json, hypotheses.tsv and alignment.txt in a folder of their own.

score.json      rates (fractions), counts, intervals, speakers, confusions, and what the caller says
                about the run; written last, so where it lies the evaluation is whole
hypotheses.tsv  one utterance a line: id, speaker, texts, counts, and columns that the caller adds
alignment.txt   the utterances with most errors, word under word, for people
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asr.errors import UserError, writing
from asr.scoring.alignment import Confusions, align, alignment_text, confusions
from asr.scoring.bootstrap import LEVEL
from asr.scoring.wer import COUNTS, Counts, Score, UtteranceScore, summarize

_TEXTS = ("id", "speaker", "reference", "hypothesis")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What write_evaluation wrote. `columns` are text, one entry an utterance, as in the file."""

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
    """Write the three files; each is whole or, after a crash, the old one.

    about     values that JSON knows, say the checkpoint and the decode settings
    columns   more columns of hypotheses.tsv, say health figures: one value an utterance
    worst     how many utterances alignment.txt shows
    Raises UserError where a column's length is wrong or a name or value cannot stand in a TSV file.
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
    replace_files(folder, contents)


def read_evaluation(folder: Path) -> Evaluation:
    """Read what write_evaluation wrote into the folder.

    Raises UserError where a file is missing, damaged, or not of the same evaluation as the other.
    """
    try:
        rates = json.loads((folder / "score.json").read_text(encoding="utf-8"))
        lines = (folder / "hypotheses.tsv").read_text(encoding="utf-8").split("\n")
        utterances, columns = _utterances(lines)
        # The intervals are the ones drawn then; drawing anew would give others.
        score = replace(
            summarize(utterances, draws=1),
            wer_interval=_interval(rates["wer_interval"]),
            cer_interval=_interval(rates["cer_interval"]),
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
    return Evaluation(score, about, columns)


def evaluation_name(split: str) -> str:
    """The folder, under RUN/evaluate, of a split: its name, or that of its manifest."""
    return Path(split).name.removesuffix(".tsv")


def percent(fraction: float) -> str:
    """A rate as people read it: 12.34 %."""
    return f"{100 * fraction:.2f} %"


def between(interval: tuple[float, float], form: str = "{:.2%}") -> str:
    """An interval as people read it: 1.20 % to 3.45 %."""
    low, high = map(form.format, interval)
    return f"{low} to {high}".replace("%", " %")


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
    names = (*_TEXTS, *COUNTS)
    for name, values in columns.items():
        if name in names:
            raise UserError(f"hypotheses.tsv has a column {name!r} already: choose another name")
        if len(values) != len(score.utterances):
            raise UserError(
                f"column {name!r} has {len(values)} values for {len(score.utterances)} utterances"
            )
    ours = [[getattr(utterance, name) for utterance in score.utterances] for name in names]
    rows = zip(*ours, *columns.values(), strict=True)
    return "\n".join(map(_row, [(*names, *columns), *rows])) + "\n"


def _row(values: Sequence[object]) -> str:
    cells = [str(value) for value in values]
    bad = next((cell for cell in cells if set(cell) & set("\t\n\r")), None)
    if bad is not None:
        raise UserError(f"{bad!r} has a tab or a line break: a TSV file cannot hold it")
    return "\t".join(cells)


def _utterances(lines: list[str]) -> tuple[list[UtteranceScore], dict[str, tuple[str, ...]]]:
    names = lines[0].split("\t")
    if names[: len(_TEXTS) + len(COUNTS)] != [*_TEXTS, *COUNTS]:
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
    more = names[len(_TEXTS) + len(COUNTS) :]
    return utterances, {name: tuple(row[name] for row in added) for name in more}


def _interval(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    low, high = value
    return float(low), float(high)


def _summary(score: Score, shown: int) -> str:
    spread = ""
    if score.wer_interval:
        low, high = score.wer_interval
        spread = f" ({percent(low)} to {percent(high)}, 95 % over {score.interval_over})"
    return (
        f"WER {percent(score.wer)}{spread}, CER {percent(score.cer)}\n"
        f"{score.sentences} utterances, {score.words} words. The {shown} with most errors:\n"
    )


def _headline(utterance: UtteranceScore) -> str:
    marks = f"{utterance.substitutions} S, {utterance.deletions} D, {utterance.insertions} I"
    return (
        f"{utterance.id}  {utterance.speaker}  {utterance.errors} errors of {utterance.words} "
        f"words, {percent(utterance.wer)}: {marks}"
    )


def replace_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Write all files beside their places, then put each in place, in the order given."""
    written = {folder / f".{name}.{os.getpid()}": folder / name for name in contents}
    try:
        with writing(folder):
            for path, text in zip(written, contents.values(), strict=True):
                path.write_text(text, encoding="utf-8", newline="\n")
            for path, place in written.items():
                path.replace(place)
    finally:
        for path in written:
            path.unlink(missing_ok=True)

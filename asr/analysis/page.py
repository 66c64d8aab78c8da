"""One evaluation as a self-contained HTML page: no server, no network.

Only audio is in separate files, linked by paths relative to the page. Texts (transcripts, file
names) are untrusted: Python escapes the markup, the script's data is JSON without "<", the script
writes only text nodes, and a content security policy allows no other script and no network.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from asr.analysis.report import plain_text, policy_hash, template
from asr.analysis.statistics import LEVEL, Interval
from asr.analysis.wer import Confusions, Counts, Edit, Score, align, confusions, percent, untrained
from asr.io import write_files
from asr.words import without_loose_spaces

FLAGS = {
    "empty": "no text: silence, or dropped by decode.no_speech_log_prob",
    "cut off": "the length limit ended the hypothesis",
    "low coverage": "attention skipped more than half of the audio",
    "not decoded": "the audio cannot be read; scored as empty",
    "repetition": "most of the hypothesis repeats itself",
}


def write_page(
    path: Path,
    score: Score,
    *,
    title: str = "Evaluation",
    facts: Mapping[str, object] | None = None,
    audio: Mapping[str, Path] | None = None,
    pictures: Mapping[str, str] | None = None,
    groups: Mapping[str, Mapping[str, Counts]] | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write the page of one evaluation.

    facts     under the title, such as run, split and checkpoint
    audio     utterance id -> audio file
    pictures  utterance id -> attention picture: a "data:image/png;base64," URI
    groups    column of the manifest, such as "source" -> group -> its counts
    flags     utterance id -> keys of FLAGS
    Not every utterance needs audio, a picture or a flag.
    """
    utterances, audio, pictures, flags = score.utterances, audio or {}, pictures or {}, flags or {}
    alignments = align([u.reference for u in utterances], [u.hypothesis for u in utterances])
    kinds = sorted({flag for names in flags.values() for flag in names})
    parts = {
        "title": escape(title),
        "facts": "".join(
            f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
            for name, value in (facts or {}).items()
        ),
        "groups": "".join(_group_table(*item) for item in (groups or {}).items()),
        "figures": _figures(score),
        "note": _note(score),
        "speakers": _speakers(score),
        "confusions": _confusions(confusions(alignments, most=50)),
        "flag_options": "".join(
            f'<option value="flag:{escape(flag)}">flagged: {escape(flag)}</option>'
            for flag in kinds
        ),
        "flag_legend": _flag_legend(kinds),
        "data": _data(path.parent, score, alignments, audio, pictures, flags),
    }
    for kind, file in (("style", "page.css"), ("script", "page.js")):
        parts |= {kind: template(file), f"{kind}_hash": policy_hash(template(file))}
    # One pass: inserted text is never searched for placeholders.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template("page.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_files(path.parent, {path.name: plain_text(page)})


def _data(
    folder: Path,
    score: Score,
    alignments: Iterable[Iterable[Edit]],
    audio: Mapping[str, Path],
    pictures: Mapping[str, Path | str],
    flags: Mapping[str, Sequence[str]],
) -> str:
    """The utterances as JSON for a script element."""
    rows: list[dict[str, Any]] = []
    for utterance, edits in zip(score.utterances, alignments, strict=True):
        speaker = utterance.speaker if score.speakers else ""
        row = {"id": utterance.id, "speaker": speaker, "words": utterance.words}
        row |= {"S": utterance.substitutions, "D": utterance.deletions, "I": utterance.insertions}
        row["edits"] = _joined(edits)
        if utterance.id in audio:
            # A URL relative to the folder, quoted so that it has no scheme, query or fragment.
            path = Path(os.path.relpath(audio[utterance.id], folder.resolve())).as_posix()
            row["audio"] = quote(os.fsencode(path), safe="/")
        if utterance.id in pictures:
            row["picture"] = pictures[utterance.id]
        row["flags"] = list(flags.get(utterance.id, ()))
        rows.append(row)
    text = json.dumps(rows, separators=(",", ":"))  # ASCII, so that U+2028 is escaped too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _flag_legend(kinds: Sequence[str]) -> str:
    """The meanings of these flags."""
    items = (
        f'<span><span class="flag">{escape(flag)}</span> {escape(FLAGS.get(flag, ""))}</span>'
        for flag in kinds
    )
    return f'<p class="legend">{" ".join(items)}</p>' if kinds else ""


def _joined(edits: Iterable[Edit]) -> list[list[str]]:
    """Edits as lists, consecutive correct words merged, which makes most pages smaller."""
    joined = []
    for correct, run in groupby(edits, key=lambda edit: edit.mark == "C"):
        if correct:
            text = without_loose_spaces(" ".join(edit.reference for edit in run))
            joined.append(["C", text, text])
        else:
            joined += [list(edit) for edit in run]
    return joined


def _figures(score: Score) -> str:
    words = max(score.words, 1)
    share = percent(score.sentence_error_rate)
    figures = [
        ("Word error rate", percent(score.wer), _interval(score.wer_interval)),
        ("Character error rate", percent(score.cer), _interval(score.cer_interval)),
        ("Substitutions", f"{score.substitutions:,}", percent(score.substitutions / words)),
        ("Deletions", f"{score.deletions:,}", percent(score.deletions / words)),
        ("Insertions", f"{score.insertions:,}", percent(score.insertions / words)),
        ("Utterances with errors", f"{score.sentence_errors:,}", share),
    ]
    return "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{small}</small></dd></div>"
        for name, value, small in figures
    )


def _note(score: Score) -> str:
    note = f"{score.sentences:,} utterances, {score.words:,} words, "
    note += f"{score.characters:,} characters."
    if score.wer_interval is not None:
        note += f" Ranges are {100 * LEVEL:g} % bootstrap intervals over utterances."
    remark = untrained(score.wer)
    return f"<strong>WER {percent(score.wer)}, {remark}.</strong> {note}" if remark else note


def _interval(interval: Interval | None) -> str:
    return "no interval" if interval is None else " – ".join(map(percent, interval))


def _group_table(name: str, groups: Mapping[str, Counts]) -> str:
    rows = [(escape(group) or "(no name)", counts) for group, counts in groups.items()]
    return (
        f"<details open><summary>By {escape(name)}</summary>"
        f'<div class="scroll">{_counts_table("Group", rows)}</div></details>'
    )


def _speakers(score: Score) -> str:
    if not score.speakers:
        return '<p class="empty">The manifest names none.</p>'
    rows = []
    for speaker in sorted(score.speakers, key=lambda s: (-s.wer, s.speaker)):
        name = escape(speaker.speaker)
        button = f'<button type="button" data-speaker="{name}">{name or "(no name)"}</button>'
        rows.append((button, speaker))
    return _counts_table("Speaker", rows)


def _counts_table(first: str, rows: Iterable[tuple[str, Counts]]) -> str:
    """A table; rows: markup of the first column, and the counts."""
    head = "".join(
        f"<th>{name}</th>" for name in (first, "Utt.", "Words", "S", "D", "I", "WER", "CER")
    )
    body = "".join(
        f"<tr><td>{name}</td><td>{c.sentences}</td><td>{c.words}</td><td>{c.substitutions}</td>"
        f"<td>{c.deletions}</td><td>{c.insertions}</td><td>{percent(c.wer)}</td>"
        f"<td>{percent(c.cer)}</td></tr>"
        for name, c in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _confusions(errors: Confusions) -> str:
    tables = [
        ("reference → hypothesis", [("S", *row) for row in errors.substitutions]),
        ("deleted", [("D", word, "", count) for word, count in errors.deletions]),
        ("inserted", [("I", "", word, count) for word, count in errors.insertions]),
    ]
    markup = [
        f"<table><caption>{name}</caption><tbody>{''.join(_confusion(*r) for r in rows)}"
        "</tbody></table>"
        for name, rows in tables
        if rows
    ]
    return "".join(markup) or '<p class="empty">No errors.</p>'


def _confusion(mark: str, reference: str, hypothesis: str, count: int) -> str:
    ours, theirs = escape(reference), escape(hypothesis)
    arrow = " → " if ours and theirs else ""
    return (
        f'<tr><td><button type="button" data-mark="{mark}" data-reference="{ours}" '
        f'data-hypothesis="{theirs}">{ours}{arrow}{theirs}</button></td><td>{count}</td></tr>'
    )

"""One evaluation as one HTML page that opens from the disk: no server, no network, no second file.

Only audio and pictures stay where they are, linked relative to the page. Texts come from outside
(transcripts, file names), so nothing is trusted: Python escapes what it writes into the markup, the
data for the script is JSON without a single "<", the script writes text nodes only, and a content
security policy runs no script but the page's own and loads nothing from the network.
"""

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from hashlib import sha256
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from asr.errors import UserError
from asr.scoring.alignment import Confusions, Edit, align, confusions
from asr.scoring.bootstrap import LEVEL
from asr.scoring.files import percent, replace_files
from asr.scoring.wer import Counts, Interval, Score

_TEMPLATE = Path(__file__).parent / "template"
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


def write_page(
    path: Path,
    score: Score,
    *,
    title: str = "Evaluation",
    about: Mapping[str, object] | None = None,
    audio: Mapping[str, Path] | None = None,
    pictures: Mapping[str, Path | str] | None = None,
    groups: Mapping[str, Mapping[str, Counts]] | None = None,
) -> None:
    """Write the page of one evaluation.

    about     short facts under the title, say run, split and checkpoint
    audio     utterance id -> audio file
    pictures  utterance id -> attention picture: a PNG file, or a "data:image/png;base64," URI
    groups    what the utterances were grouped by, say "source" -> group -> its counts
    Not every utterance needs audio or a picture.

    Raises UserError where audio or pictures name an utterance that is not in the score.
    """
    _check_links(score, audio=audio or {}, pictures=pictures or {})
    parts = {
        "title": escape(title),
        "about": "".join(_fact(*item) for item in (about or {}).items()),
        "groups": "".join(_group_table(*item) for item in (groups or {}).items()),
        **_scored(score),
        "data": _data(path.parent, score, audio or {}, pictures or {}),
    }
    style, script = _part("page.css"), _part("page.js")
    parts |= {"style": style, "style_hash": _digest(style)}
    parts |= {"script": script, "script_hash": _digest(script)}
    # One pass: what is filled in is never searched for more places to fill.
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_files(path.parent, {path.name: page})


def _scored(score: Score) -> dict[str, str]:
    return {
        "figures": _figures(score),
        "note": _note(score),
        "speakers": _speakers(score),
        "confusions": _confusions(confusions(_alignments(score), most=50)),
    }


def _alignments(score: Score) -> list[list[Edit]]:
    references = [utterance.reference for utterance in score.utterances]
    return align(references, [utterance.hypothesis for utterance in score.utterances])


def _check_links(score: Score, **links: Mapping[str, object]) -> None:
    for name, places in links.items():
        unknown = set(places) - {utterance.id for utterance in score.utterances}
        if unknown:
            raise UserError(f"{name} for utterance {min(unknown)!r}, which was not scored")


def _part(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a content security policy names an inline script or style that may be used."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _data(
    folder: Path,
    score: Score,
    audio: Mapping[str, Path],
    pictures: Mapping[str, Path | str],
) -> str:
    """The utterances as JSON that can stand inside a script element."""
    rows: list[dict[str, Any]] = []
    for utterance, edits in zip(score.utterances, _alignments(score), strict=True):
        row = {"id": utterance.id, "speaker": utterance.speaker, "words": utterance.words}
        row |= {"S": utterance.substitutions, "D": utterance.deletions, "I": utterance.insertions}
        row["edits"] = _joined(edits)
        if utterance.id in audio:
            row["audio"] = _link(audio[utterance.id], folder)
        if utterance.id in pictures:
            row["picture"] = _picture(pictures[utterance.id], folder)
        rows.append(row)
    text = json.dumps(rows, separators=(",", ":"))  # ASCII, so U+2028 and the like are escaped too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _joined(edits: Iterable[Edit]) -> list[list[str]]:
    """Edits as lists, correct words that follow each other in one: most of a page is correct."""
    joined = []
    for correct, run in groupby(edits, key=lambda edit: edit.mark == "C"):
        if correct:
            text = " ".join(edit.reference for edit in run)
            joined.append(["C", text, text])
        else:
            joined += [list(edit) for edit in run]
    return joined


def _link(path: Path, folder: Path) -> str:
    """A URL relative to the page's folder; the quotes leave no scheme, query or fragment in it."""
    return quote(os.fsencode(Path(os.path.relpath(path, folder)).as_posix()), safe="/")


def _picture(picture: Path | str, folder: Path) -> str:
    if isinstance(picture, str) and _PNG.fullmatch(picture):
        return picture
    return _link(Path(picture), folder)


def _fact(name: str, value: object) -> str:
    return f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"


def _figures(score: Score) -> str:
    words = max(score.words, 1)
    share = percent(score.sentence_error_rate)
    figures = [
        ("Word error rate", percent(score.wer), _spread(score.wer_interval)),
        ("Character error rate", percent(score.cer), _spread(score.cer_interval)),
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
    size = (
        f"{score.sentences:,} utterances, {score.words:,} words, {score.characters:,} characters."
    )
    if score.wer_interval is None:
        return size
    return f"{size} Ranges are {100 * LEVEL:g} % bootstrap intervals over {score.interval_over}."


def _spread(interval: Interval | None) -> str:
    return "no interval" if interval is None else " – ".join(map(percent, interval))


def _group_table(name: str, groups: Mapping[str, Counts]) -> str:
    rows = [(escape(group) or "(no name)", counts) for group, counts in groups.items()]
    return (
        f"<details open><summary>By {escape(name)}</summary>"
        f'<div class="scroll">{_counts_table("Group", rows)}</div></details>'
    )


def _speakers(score: Score) -> str:
    rows = [
        (
            f'<button type="button" data-speaker="{escape(s.speaker)}">'
            f"{escape(s.speaker) or '(no name)'}</button>",
            s,
        )
        for s in sorted(score.speakers, key=lambda s: (-s.wer, s.speaker))
    ]
    return _counts_table("Speaker", rows)


def _counts_table(first: str, rows: Iterable[tuple[str, Counts]]) -> str:
    """Rows of markup for the first column and the counts behind it."""
    head = "".join(f"<th>{name}</th>" for name in (first, "Utt.", "Words", "S", "D", "I", "WER"))
    body = "".join(
        f"<tr><td>{name}</td><td>{c.sentences}</td><td>{c.words}</td><td>{c.substitutions}</td>"
        f"<td>{c.deletions}</td><td>{c.insertions}</td><td>{percent(c.wer)}</td></tr>"
        for name, c in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _confusions(found: Confusions) -> str:
    tables = [
        ("said → heard", [("S", *row) for row in found.substitutions]),
        ("deleted", [("D", word, "", count) for word, count in found.deletions]),
        ("inserted", [("I", "", word, count) for word, count in found.insertions]),
    ]
    shown = [
        f"<table><caption>{name}</caption><tbody>{''.join(_confusion(*r) for r in rows)}"
        "</tbody></table>"
        for name, rows in tables
        if rows
    ]
    return "".join(shown) or '<p class="empty">No errors.</p>'


def _confusion(mark: str, reference: str, hypothesis: str, count: int) -> str:
    said, heard = escape(reference), escape(hypothesis)
    arrow = " → " if said and heard else ""
    return (
        f'<tr><td><button type="button" data-mark="{mark}" data-reference="{said}" '
        f'data-hypothesis="{heard}">{said}{arrow}{heard}</button></td><td>{count}</td></tr>'
    )

"""A report of paragraphs, tables and pictures, as Markdown and as one HTML page of its own.

Texts come from recipes, folders and transcripts, so nothing is trusted: both writers escape every
text, and the page's content security policy lets no script run and nothing be loaded.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path

from asr.scoring.files import replace_files

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.5rem 4rem; background: #fbfbfa;
  color: #1d1f21; font: 1rem/1.5 system-ui, "Segoe UI", "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; letter-spacing: -0.01em; }
h2 { margin: 2.5rem 0 0.5rem; font-size: 1.125rem; }
p { margin: 0.5rem 0; max-width: 48rem; color: #5a6066; font-size: 0.9375rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9375rem; }
th, td { padding: 0.3rem 1.5rem 0.3rem 0; border-bottom: 1px solid #dcdfe2; text-align: right;
  vertical-align: top; white-space: nowrap; }
th { color: #5a6066; font-size: 0.8125rem; font-weight: 400; }
.text { text-align: left; }
td.text { white-space: normal; overflow-wrap: break-word; min-width: 5rem; }
img { display: block; max-width: 100%; margin-top: 1rem; }
"""
_NUMBER = re.compile(r"[-+<>−–±≤%\d.,()\[\]/e ]*(to [-+−\d.,() %]*)?")


@dataclass(frozen=True)
class Table:
    """Cells are text; a column without letters is set as numbers, to the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """An SVG file beside the report; the page holds it within itself."""

    title: str
    file: str  # name in the report's folder
    svg: str
    note: str = ""


def write_report(
    folder: Path, name: str, title: str, facts: Sequence[str], parts: Sequence[Table | Picture]
) -> None:
    """Write folder/NAME.md and folder/NAME.html: a title, paragraphs of facts, then the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{name}.md": markdown(title, facts, parts), f"{name}.html": html(title, facts, parts)}
    replace_files(folder, pages)


def markdown(title: str, facts: Sequence[str], parts: Sequence[Table | Picture]) -> str:
    """The report as GitHub's Markdown."""
    blocks = [f"# {_plain(title)}", *map(_plain, facts)]
    for part in parts:
        blocks += [f"## {_plain(part.title)}"]
        if isinstance(part, Picture):
            blocks += [f"![{_plain(part.title)}]({part.file})"]
        else:
            align = ["---" if text else "---:" for text in _texts(part)]
            rows = [list(map(_plain, row)) for row in (part.head, *part.rows)]
            lines = [f"| {' | '.join(row)} |" for row in (rows[0], align, *rows[1:])]
            blocks += ["\n".join(lines)]
        blocks += [_plain(part.note)] if part.note else []
    return "\n\n".join(blocks) + "\n"


def html(title: str, facts: Sequence[str], parts: Sequence[Table | Picture]) -> str:
    """The report as one page that needs no other file."""
    digest = b64encode(sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:"
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(fact)}</p>" for fact in facts)]
    for part in parts:
        body += [f"<h2>{escape(part.title)}</h2>"]
        body += [_image(part) if isinstance(part, Picture) else _table(part)]
        body += [f"<p>{escape(part.note)}</p>"] if part.note else []
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line, in a table too."""
    line = " ".join(text.split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore within a word is no emphasis: file names stay readable.
    return re.sub(r"([\\`*\[\]|#~]|(?<!\w)_|_(?!\w))", r"\\\1", line)


def _image(picture: Picture) -> str:
    data = b64encode(picture.svg.encode()).decode()
    return f'<img alt="{escape(picture.title)}" src="data:image/svg+xml;base64,{data}">'


def _table(table: Table) -> str:
    kinds = [' class="text"' if text else "" for text in _texts(table)]
    rows = [
        "<tr>"
        + "".join(map(_cell, ["th" if place == 0 else "td"] * len(row), row, kinds))
        + "</tr>"
        for place, row in enumerate((table.head, *table.rows))
    ]
    return (
        f'<div class="scroll"><table>\n<thead>{rows[0]}</thead>\n<tbody>\n'
        + "\n".join(rows[1:])
        + "\n</tbody></table></div>"
    )


def _cell(tag: str, text: str, kind: str) -> str:
    return f"<{tag}{kind}>{escape(text)}</{tag}>"


def _texts(table: Table) -> list[bool]:
    """Which columns hold words."""
    columns = zip(*table.rows, strict=True) if table.rows else [()] * len(table.head)
    return [not all(map(_NUMBER.fullmatch, column)) for column in columns]

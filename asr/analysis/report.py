"""A report of lists, tables and pictures, as Markdown and as one self-contained HTML page.

Texts come from recipes, folders and transcripts and are untrusted: both writers escape every text
and its control characters; the page's content security policy forbids scripts and all loading.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path

from asr.errors import printable

DASH = "–"  # in a table cell without a value
_NUMBER = re.compile(r"[-+<>−–±≤%\d.,()\[\]/e ]*(to [-+−\d.,() %]*)?")


@dataclass(frozen=True)
class Table:
    """Cells are text; a column of numbers is aligned right. folded: the page shows its title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False

    def text(self) -> list[str]:
        """The lines for a console; none without rows."""
        rows = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return [self.title, *lines] if self.rows else []


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    title: str
    lines: Sequence[str]
    folded: bool = False

    def text(self) -> list[str]:
        """The lines for a console; none without sentences."""
        return [self.title, *(f"- {line}" for line in self.lines)] if self.lines else []


@dataclass(frozen=True)
class Picture:
    """An SVG file beside the report; the page embeds it."""

    title: str
    file: str  # name in the report's folder
    svg: str


Part = Points | Table | Picture


def plain_text(text: str) -> str:
    """The text with escapes for control characters and for surrogates, which UTF-8 lacks."""
    return printable(text.encode(errors="backslashreplace").decode())


def template(name: str) -> str:
    """A file of the template folder."""
    return (Path(__file__).parent / "template" / name).read_text(encoding="utf-8")


def policy_hash(text: str) -> str:
    """The hash with which a content security policy allows an inline script or style."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def markdown(title: str, facts: Sequence[str], parts: Sequence[Part]) -> str:
    """The report as GitHub's Markdown.

    A fact is a paragraph, or a line to stress and a paragraph on it.
    """
    blocks = [f"# {markdown_text(title)}"]
    for fact in facts:
        first, _, rest = map(markdown_text, fact.partition("\n"))
        blocks += [f"**{first}**", rest] if rest else [first]
    for part in parts:
        blocks += [f"## {markdown_text(part.title)}"]
        if isinstance(part, Picture):
            blocks += [f"![{markdown_text(part.title)}]({part.file})"]
        elif isinstance(part, Points):
            blocks += ["\n".join(f"- {markdown_text(line)}" for line in part.lines)]
        else:
            align = ["---" if text else "---:" for text in _texts(part)]
            rows = [list(map(markdown_text, row)) for row in (part.head, *part.rows)]
            lines = [f"| {' | '.join(row)} |" for row in (rows[0], align, *rows[1:])]
            blocks += ["\n".join(lines)]
    return "\n\n".join(blocks) + "\n"


def html(title: str, facts: Sequence[str], parts: Sequence[Part]) -> str:
    """The report as one self-contained page."""
    style = "\n" + template("report.css")
    policy = f"default-src 'none'; style-src '{policy_hash(style)}'; img-src data:"
    body = [f"<h1>{escape(title)}</h1>"]
    for fact in facts:
        first, _, rest = map(escape, fact.partition("\n"))
        body += [f"<p><strong>{first}</strong><br>{rest}</p>" if rest else f"<p>{first}</p>"]
    body += ["<main>", *map(_section, parts), "</main>"]
    return plain_text(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _section(part: Part) -> str:
    title = escape(part.title)
    if isinstance(part, Picture):
        data = b64encode(part.svg.encode()).decode()
        image = f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
        return (
            f'<section class="picture"><h2>{title}</h2><div class="scroll">{image}</div></section>'
        )
    if isinstance(part, Points):
        content = f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in part.lines)}</ul>"
    else:
        content = _table(part)
    if part.folded:
        return f"<details><summary>{title}</summary>{content}</details>"
    return f"<section><h2>{title}</h2>{content}</section>"


def markdown_text(text: str) -> str:
    """The text on one line, escaped for Markdown and its tables."""
    line = plain_text(" ".join(text.split()))
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore within a word needs no escape; so file names stay readable.
    return re.sub(r"([\\`*\[\]|#~]|(?<!\w)_|_(?!\w))", r"\\\1", line)


def _table(table: Table) -> str:
    kinds = [' class="text"' if text else "" for text in _texts(table)]

    def line(tag: str, row: Sequence[str]) -> str:
        cells = zip(row, kinds, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{escape(text)}</{tag}>' for text, kind in cells)}</tr>"

    return (
        f'<div class="scroll"><table>\n<thead>{line("th", table.head)}</thead>\n<tbody>\n'
        + "\n".join(line("td", row) for row in table.rows)
        + "\n</tbody></table></div>"
    )


def _texts(table: Table) -> list[bool]:
    """Whether each column is text rather than numbers."""
    columns = range(len(table.head))
    return [not all(_NUMBER.fullmatch(row[column]) for row in table.rows) for column in columns]

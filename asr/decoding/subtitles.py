"""Timed words as subtitles: SubRip (.srt) and WebVTT (.vtt)."""

import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import accumulate, chain, pairwise, zip_longest
from typing import NamedTuple

from asr.decoding.alignment import TimedWord

LINE, LINES = 42, 2  # columns per line and lines per cue, as usual in broadcasting
LONGEST = 7.0  # seconds of a cue
GAP = 1.0  # seconds of pause that end a cue
SHORTEST = 0.01  # seconds of a cue: in WebVTT the end is after the start, in whole milliseconds


class Cue(NamedTuple):
    """Text that is shown from start to end, in seconds; newlines separate its lines."""

    start: float
    end: float
    text: str


def make_cues(words: Sequence[TimedWord]) -> list[Cue]:
    """Words in order -> cues, which end at pauses and where the lines or LONGEST are full.

    A word that is longer than a line, as all text is in a script without spaces, is cut between
    characters; its time is divided by the width of its parts.
    """
    groups: list[list[TimedWord]] = []
    for part in chain.from_iterable(map(_parts, words)):
        if groups and _fits(groups[-1], part):
            groups[-1].append(part)
        else:
            groups.append([part])
    cues = []
    for group, after in zip_longest(groups, groups[1:]):
        start = group[0].start
        end = group[-1].end if after is None else min(group[-1].end, after[0].start)
        end = min(max(end, start + SHORTEST), start + LONGEST)
        cues.append(Cue(start, end, "\n".join(_lines(group))))
    return cues


def _parts(word: TimedWord) -> list[TimedWord]:
    """The word after a space, in parts that each fit into a line and a cue if it does not."""
    total, seconds = _width(word.text), word.end - word.start
    if total <= LINE:
        return [replace(word, text=f" {word.text}")]
    most = min(LINE, total * LONGEST / max(seconds, LONGEST))
    texts = [""]
    for character in _characters(word.text):
        if texts[-1] and _width(texts[-1] + character) > most:
            texts.append("")
        texts[-1] += character
    ends = accumulate(map(_width, texts), initial=0)
    times = list(pairwise(word.start + seconds * end / total for end in ends))
    texts[0] = f" {texts[0]}"
    return [TimedWord(t, *time, word.confidence) for t, time in zip(texts, times, strict=True)]


def _characters(text: str) -> list[str]:
    """Characters with the marks that follow them, such as vowels of Devanagari."""
    characters: list[str] = []
    for letter in text:
        if characters and unicodedata.category(letter) in ("Mn", "Mc", "Me", "Cf"):
            characters[-1] += letter
        else:
            characters.append(letter)
    return characters


def _width(text: str) -> int:
    """Columns of a line: two for a character of East Asian width."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _fits(group: list[TimedWord], part: TimedWord) -> bool:
    return (
        part.start - group[-1].end <= GAP
        and part.end - group[0].start <= LONGEST
        and len(_lines([*group, part])) <= LINES
    )


def _lines(group: list[TimedWord]) -> list[str]:
    lines: list[str] = []
    for part in group:
        if lines and _width(lines[-1] + part.text) <= LINE:
            lines[-1] += part.text
        else:
            lines.append(part.text.strip())
    return lines


def srt(cues: Sequence[Cue]) -> str:
    """SubRip: numbered cues, a comma before the milliseconds."""
    blocks = [
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{cue.text}\n"
        for number, cue in enumerate(cues, start=1)
    ]
    return "\n".join(blocks)


def webvtt(cues: Sequence[Cue]) -> str:
    """WebVTT (W3C): a header, a point before the milliseconds, markup escaped."""
    blocks = [
        f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{escape(cue.text, quote=False)}\n"
        for cue in cues
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def _clock(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(max(0.0, seconds) * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    full_seconds, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02d}:{minutes:02d}:{full_seconds:02d}{point}{milliseconds:03d}"

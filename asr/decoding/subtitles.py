"""Timed words as subtitles: SubRip (.srt) and WebVTT (.vtt)."""

from collections.abc import Sequence
from html import escape
from itertools import zip_longest
from typing import NamedTuple

from asr.decoding.alignment import TimedWord
from asr.words import columns

LINE, LINES = 42, 2  # columns per line and lines per cue, as usual in broadcasting
LONGEST = 7.0  # seconds of a cue
GAP = 1.0  # seconds of pause that end a cue
READABLE = 1.0  # seconds that a cue is shown at least, if the next one does not begin
SHORTEST = 0.01  # seconds of a cue: in WebVTT the end is after the start, in whole milliseconds


class Cue(NamedTuple):
    """Text that is shown from start to end, in seconds; newlines separate its lines."""

    start: float
    end: float
    text: str


def make_cues(words: Sequence[TimedWord]) -> list[Cue]:
    """Words in order -> cues, which end at pauses and where the lines or LONGEST are full.

    A word that is longer than a line has a line of its own.
    """
    groups: list[list[TimedWord]] = []
    for word in words:
        if groups and _fits(groups[-1], word):
            groups[-1].append(word)
        else:
            groups.append([word])
    cues = []
    for group, after in zip_longest(groups, groups[1:]):
        start = group[0].start
        end = max(group[-1].end, start + READABLE)
        end = end if after is None else min(end, after[0].start)
        end = min(max(end, start + SHORTEST), start + LONGEST)
        cues.append(Cue(start, end, "\n".join(_lines(group))))
    return cues


def _fits(group: list[TimedWord], word: TimedWord) -> bool:
    return (
        word.start - group[-1].end <= GAP
        and word.end - group[0].start <= LONGEST
        and len(_lines([*group, word])) <= LINES
    )


def _lines(group: list[TimedWord]) -> list[str]:
    lines: list[str] = []
    for word in group:
        longer = lines[-1] + " " * word.spaced + word.text if lines else ""
        if lines and columns(longer) <= LINE:
            lines[-1] = longer
        else:
            lines.append(word.text)
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

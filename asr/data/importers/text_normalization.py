"""Transcripts in the form that a recipe trains on: --text keep, lower or upper-az.

    keep      as they are
    lower     lower case
    upper-az  the letters A to Z, the apostrophe and single spaces, as LibriSpeech. Accents are
              removed; other characters are dropped: a full stop without a gap, all else with one.

What is dropped or changed is counted. Letters, digits and signs such as % are spoken: texts that
lose some no longer match their audio.
"""

import re
import unicodedata
from collections import Counter

CHOICES = ("keep", "lower", "upper-az")
SPELLED = {"Æ": "AE", "Œ": "OE", "Ø": "O", "Ł": "L", "Đ": "D", "Ð": "D", "Þ": "TH"}
APOSTROPHES = "\u2018\u2019\u02bc\u0060\u00b4"
NO_GAP = ".\u00ad\u200b\u200c\u200d\ufeff"  # full stop, soft hyphen, characters of no width
SPOKEN = re.compile(r"[LN].|S[cmo]")  # categories of Unicode: letters, numbers, symbols
SPOKEN_MARKS = "%&@#"
SHOWN = 12  # characters in the report
_OTHER = re.compile(r"[^A-Za-z' ]")


class TextNormalizer:
    """`normalizer(text)` is the transcript in the chosen form; `report()` what was lost."""

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.dropped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()  # "É to E" -> how often
        self.damaged = 0  # texts that have lost something spoken
        self._table = _UpperTable()

    def __call__(self, text: str) -> str:
        text = " ".join(text.split())
        if self.choice == "keep":
            return text
        if self.choice == "lower":
            return text.lower()
        if others := _OTHER.findall(unicodedata.normalize("NFC", text)):
            return self._without(text, others)
        return text.upper()

    def _without(self, text: str, others: list[str]) -> str:
        text = unicodedata.normalize("NFC", text).translate(self._table)
        damaged = False
        for character in others:
            to = self._table[ord(character)]
            if to.strip():
                self.changed[f"{character} to {to}"] += 1
            else:
                self.dropped[character] += 1
                damaged |= _is_spoken(character)
        self.damaged += damaged
        return " ".join(text.split())

    def report(self) -> list[str]:
        """Lines on the characters dropped and changed, with counts; none if all were kept."""
        lines = []
        for what, count in (("dropped", self.dropped), ("changed", self.changed)):
            if count:
                shown = ", ".join(f"{c!r} {n:,}" for c, n in count.most_common(SHOWN))
                more = f" and {len(count) - SHOWN} others" if len(count) > SHOWN else ""
                lines.append(f"--text {self.choice}: {count.total():,} {what}: {shown}{more}")
        if self.damaged:
            remedy = "write them as words, or choose --text keep or lower"
            lines.append(
                f"warning: {self.damaged:,} transcripts lost letters, digits or signs that are "
                f"spoken; {remedy}"
            )
        return lines


def _is_spoken(character: str) -> bool:
    mark = SPOKEN.fullmatch(unicodedata.category(character)) and character not in APOSTROPHES
    return bool(mark) or character in SPOKEN_MARKS


class _UpperTable(dict[int, str]):
    """Code point -> its upper-az text, for str.translate; each is computed once."""

    def __missing__(self, code: int) -> str:
        self[code] = _upper_az(chr(code))
        return self[code]


def _upper_az(character: str) -> str:
    if character in APOSTROPHES:
        return "'"
    upper = unicodedata.normalize("NFKD", character).upper()
    spelled = "".join(SPELLED.get(c, c) for c in upper)
    letters = "".join(c for c in spelled if "A" <= c <= "Z" or c == "'")
    if letters:
        return letters
    is_mark = unicodedata.category(character).startswith("M")
    return "" if character in NO_GAP or is_mark else " "

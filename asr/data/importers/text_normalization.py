"""Transcripts in the form that a recipe trains on: --text keep, lower, lower-tr or upper-az.

    keep      as they are
    lower     lower case
    lower-tr  lower case of Turkish and Azerbaijani: I to ı, İ to i
    upper-az  the letters A to Z, the apostrophe and single spaces, as LibriSpeech. Accents are
              removed; other characters are dropped: a full stop without a gap, all else with one.

Before that, and for every form, characters without width are removed, the text is put into
Unicode's composed form (NFC), the quoting of CSV is undone, and tags (asr/data/tags.py) are dropped
(--tags drop) or left as they are, as words (keep). [laughter-WORD] is in both cases the word,
spoken with laughter. What is dropped or changed is counted. Letters, digits and signs such as % are
spoken: texts that lose some no longer match their audio.

--punctuation drop removes, in any language, what Unicode calls punctuation, except the apostrophes,
hyphens and alike within a word, points and commas within a number, and signs that are spoken.
"""

import re
import unicodedata
from collections import Counter
from functools import cache

from asr.data.tags import TAG
from asr.words import is_unspaced

CHOICES = ("keep", "lower", "lower-tr", "upper-az")
TAGS = ("drop", "keep")
PUNCTUATION = ("keep", "drop")
SPELLED = {"Æ": "AE", "Œ": "OE", "Ø": "O", "Ł": "L", "Đ": "D", "Ð": "D", "Þ": "TH", "ẞ": "SS"}
APOSTROPHES = "\u2018\u2019\u02bc\u0060\u00b4"
NO_GAP = ".\u200c\u200d"  # full stop and joiners
SPOKEN = re.compile(r"[LN].|S[cmo]")  # categories of Unicode: letters, numbers, symbols
SPOKEN_MARKS = "%&@#‰§٪％＆＠＃"
WRITTEN_WORDS = "၌၍၎၏"  # of Burmese, which Unicode calls punctuation
HYPHENS = "\u2010\u2011"
# Kept within a word: hyphens, Catalan's point, marks of Hebrew, Tibetan and Armenian, and the colon
# of Finnish and Swedish (EU:n).
IN_WORDS = "'-:\u00b7\u0f0b\u055a\u05be\u05f3\u05f4"
INTONATION = "\u055b\u055c\u055e"  # Armenian: above the vowel of a word, dropped without a gap
IN_NUMBERS = ".,:٫٬．，："
LAUGHED = "[laughter-WORD]"  # in reports
SHOWN = 12  # characters or tags in the report
TURKISH_SHARE = 0.1  # of the texts of a corpus with ı or İ; those of others have a name with one
TURKISH = str.maketrans({"I": "ı", "İ": "i"})
_OTHER = re.compile(r"[^A-Za-z' ]")
_NO_LETTER = re.compile(r"[^\w\s]|[_\u02bc]")
# Full stops that leave a gap: wait...what, left.She; unlike those of U.S. and Ph.D.
_BETWEEN_WORDS = re.compile(r"\.{2,}|(?<=[^\W\d_]{2})\.(?=[^\W\d_]{2})")
_DIGIT_OR_SIGN = re.compile(rf"\d|[{SPOKEN_MARKS}$€£+=<>°]")
# Soft hyphens, spaces without width, marks of direction and byte-order marks. Joiners are kept
# after Arabic and Indic letters, whose spelling needs them.
_NO_WIDTH = re.compile(
    r"[\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]"
    r"|(?<![\u0600-\u1cff])[\u200c\u200d]|[\u200c\u200d](?=\s|$)"
)
_QUOTES = re.compile('"+')
_TAG = re.compile(rf" ?(?P<tag>{TAG.pattern})(?=(?P<stop>[.,;:!?])?)", re.IGNORECASE)
_LAUGHED = re.compile(r"\[laughter-(.+)\]", re.IGNORECASE)
_UNWRITTEN = re.compile(r"\W*(unk|inaudible|unintelligible)\W*", re.IGNORECASE)


class TextNormalizer:
    """`normalizer(text)` is the transcript in the chosen form; `report()` what was changed."""

    def __init__(self, choice: str, tags: str = "drop", punctuation: str = "keep") -> None:
        self.choice, self.keeps_tags = choice, tags == "keep"
        self.keeps_punctuation = punctuation == "keep"
        self.punctuation: Counter[str] = Counter()  # dropped or, if it is kept, found
        self.signs: Counter[str] = Counter()  # digits and signs
        self.capitals = self.small = 0  # texts with a letter of that case
        self.dropped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()  # "É to E" -> how often
        self.no_width: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.composed = self.unquoted = 0  # texts
        self.damaged = 0  # texts that have lost something spoken
        self.unwritten = 0  # tags that stand for speech
        self.turkish = 0  # texts with a letter of Turkish
        self.texts = 0
        self._table = _UpperTable()

    def __call__(self, text: str) -> str:
        self.texts += 1
        text = text if text.isascii() else self._composed(text)
        text = self._unquoted(" ".join(text.split()))
        if not any(bracket in text for bracket in "<[{("):
            return self._in_form(text)
        if not self.keeps_tags:
            return self._in_form(_TAG.sub(self._without_tag, text))
        parts, end = [], 0
        for match in _TAG.finditer(text):
            word = _LAUGHED.fullmatch(match["tag"])
            self.tags[LAUGHED if word else match["tag"]] += 1
            tag = self._in_form(word[1]) if word else match["tag"]
            parts += [self._in_form(text[end : match.start()]), tag]
            end = match.end()
        parts.append(self._in_form(text[end:]))
        return " ".join(filter(None, parts))

    def _composed(self, text: str) -> str:
        """In form NFC, without characters of no width."""
        if found := _NO_WIDTH.findall(text):
            self.no_width.update(found)
            text = _NO_WIDTH.sub("", text)
        if unicodedata.is_normalized("NFC", text):
            return text
        self.composed += 1
        return unicodedata.normalize("NFC", text)

    def _unquoted(self, text: str) -> str:
        """Without the quoting of CSV, which doubles quotes and encloses the field in two more."""
        if '""' not in text:
            return text
        inner = text[1:-1] if text[0] == text[-1] == '"' else text
        for plain in (inner, text):
            if (runs := _QUOTES.findall(plain)) and not any(len(run) % 2 for run in runs):
                self.unquoted += 1
                return plain.replace('""', '"')
        return text

    def _without_tag(self, match: re.Match[str]) -> str:
        tag = match["tag"]
        if word := _LAUGHED.fullmatch(tag):
            self.tags[LAUGHED] += 1
            return f" {word[1]}" if match["stop"] else f" {word[1]} "
        self.tags[tag] += 1
        self.unwritten += bool(_UNWRITTEN.fullmatch(tag))
        return "" if match["stop"] else _gap(match.string, match.start(), match.end())

    def _in_form(self, text: str) -> str:
        text = " ".join(text.split())
        if self.choice == "upper-az":
            return self._upper_az(text)
        text = self._without_punctuation(text)
        if self.choice == "keep":
            self.capitals += text != text.lower()
            self.small += text != text.upper()
            self.turkish += "İ" in text or "ı" in text
            return text
        if self.choice == "lower-tr":
            text = text.translate(TURKISH)
        elif not text.isascii():
            self.turkish += "İ" in text or "ı" in text
        # Python's lower case of İ is i with a combining dot, a letter of no alphabet.
        return text.lower().replace("i\u0307", "i")

    def _upper_az(self, text: str) -> str:
        if not self.keeps_punctuation:  # else apostrophes also enclose quotations
            text = " ".join(_NO_LETTER.sub(self._mark, text).split())
        others = _OTHER.findall(text)
        text = self._without(text, others) if others else text.upper()
        words = text.split()
        if loose := sum(not word.strip("'") for word in words):
            self.dropped["'"] += loose
            words = [word for word in words if word.strip("'")]
        return " ".join(words)

    def _without_punctuation(self, text: str) -> str:
        """The text without punctuation, or with it counted."""
        self.signs.update(_DIGIT_OR_SIGN.findall(text))
        without = _NO_LETTER.sub(self._mark, text)
        return text if self.keeps_punctuation else " ".join(without.split())

    def _mark(self, match: re.Match[str]) -> str:
        """What replaces a character that is no letter, digit or space."""
        mark, text, at = match[0], match.string, match.start()
        if not _is_punctuation(mark):
            return mark
        before, after = text[at - 1 : at], text[at + 1 : at + 2]
        plain = "'" if mark in APOSTROPHES else "-" if mark in HYPHENS else mark
        if mark == '"' and "\u05d0" <= before <= "\u05ea":
            plain = "\u05f4"  # the mark of Hebrew's abbreviations, which keyboards lack
        if plain in IN_WORDS and _in_word(before) and _in_word(after):
            return plain
        if mark in IN_NUMBERS and before.isdigit() and after.isdigit():
            return mark
        self.punctuation[mark] += 1
        is_end = mark == "." and not _BETWEEN_WORDS.match(text, at)
        return "" if is_end or mark in INTONATION else _gap(text, at, at + 1)

    def _without(self, text: str, others: list[str]) -> str:
        text = _BETWEEN_WORDS.sub(" ", text).translate(self._table)
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
        """Lines on what was removed and changed, with counts; none if all was kept."""
        lines = []
        if self.composed:
            lines.append(f"{self.composed:,} transcripts changed to Unicode's composed form (NFC)")
        if self.no_width:
            lines.append(f"{_listed('characters without width removed', self.no_width)}")
        if self.unquoted:
            lines.append(f"{self.unquoted:,} transcripts were quoted as in CSV; quotes undone")
        lines += self._tag_report()
        if self._is_turkish() and self.choice == "lower":
            lines.append(
                f"{self.turkish:,} transcripts have ı or İ: for Turkish and Azerbaijani choose "
                "--text lower-tr, which changes I to ı"
            )
        for what, count in (("dropped", self.dropped), ("changed", self.changed)):
            if count:
                lines.append(f"--text {self.choice}: {_listed(what, count)}")
        lines += self._punctuation_report()
        if self.damaged:
            remedy = "write them as words, or choose --text keep or lower"
            lines.append(
                f"warning: {self.damaged:,} transcripts lost letters, digits or signs that are "
                f"spoken; {remedy}"
            )
        return lines

    def _is_turkish(self) -> bool:
        """Not where only names are: lower-tr changes every I."""
        return self.turkish > TURKISH_SHARE * self.texts

    def _punctuation_report(self) -> list[str]:
        what = "digits and signs kept, which are better written as words"
        signs = [_listed(what, self.signs)] if self.signs else []
        if not self.keeps_punctuation:
            dropped = _listed("dropped", self.punctuation) if self.punctuation else None
            return [f"--punctuation drop: {dropped}", *signs] if dropped else signs
        found = [_listed("punctuation marks", self.punctuation)] if self.punctuation else []
        if self.capitals and self.small:
            found.append(f"{self.capitals:,} transcripts with capital letters")
        if not found:
            return signs
        lower = "--text lower-tr" if self._is_turkish() else "--text lower"
        options = [lower] if self.capitals and self.small else []
        options += ["--punctuation drop"] if self.punctuation else []
        line = f"error rates count {' and '.join(found)}; {' '.join(options)} removes them"
        if "--text lower" in options:
            line += " (the models of pretrained/ know English in --text upper-az)"
        return [line, *signs]

    def _tag_report(self) -> list[str]:
        if not self.tags:
            return []
        if self.keeps_tags:
            return [f"--tags keep: {_listed('tags kept, each as one token', self.tags)}"]
        lines = [f"{_listed('tags dropped', self.tags)}; --tags keep makes each one token"]
        if self.unwritten:
            lines.append(
                f"warning: {self.unwritten:,} of these tags stand for words that are spoken but "
                "not written; such transcripts do not match their audio"
            )
        return lines


def _listed(what: str, count: Counter[str]) -> str:
    shown = ", ".join(f"{c!r} {n:,}" for c, n in count.most_common(SHOWN))
    more = f" and {len(count) - SHOWN} others" if len(count) > SHOWN else ""
    return f"{count.total():,} {what}: {shown}{more}"


def _is_spoken(character: str) -> bool:
    mark = SPOKEN.fullmatch(unicodedata.category(character)) and character not in APOSTROPHES
    return bool(mark) or character in SPOKEN_MARKS


def _gap(text: str, start: int, end: int) -> str:
    """What replaces text[start:end]: a space, except beside a letter of a script without spaces."""
    return "" if is_unspaced(text[max(start - 1, 0) : start] + text[end : end + 1]) else " "


@cache
def _is_punctuation(character: str) -> bool:
    """Whether it is punctuation or an accent without a letter, and not spoken."""
    category = unicodedata.category(character)
    is_mark = category.startswith("P") or category == "Sk" or character in APOSTROPHES
    return is_mark and character not in SPOKEN_MARKS + WRITTEN_WORDS


def _in_word(character: str) -> bool:
    """Whether it is a letter, a digit or a combining mark."""
    return bool(character) and unicodedata.category(character)[0] in "LNM"


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

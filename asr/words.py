"""What a word is: white space separates words; a letter of a script without spaces is one.

Such letters are scored and timed one by one, as is usual where a language has no spaces (AISHELL;
SEAME's mixed error rate; Whisper's timestamps). Punctuation and marks belong to the word before,
opening brackets and quotes to the word after.
"""

import re
import unicodedata

# Thai, Lao, Tibetan, Burmese, Khmer, kana, bopomofo, Han.
_RANGES = (
    r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3021-\u3029\u3041-\u312f"
    r"\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    r"\U00020000-\U0003ffff"
)
UNSPACED = rf"(?:(?=[{_RANGES}])\w)"  # a letter of a script without spaces
SPACED = rf"(?:(?![{_RANGES}])\w)"  # of another
_OPENING = r"[(\[{‘“〈《「『【〔（［｛｢]"
_AFTER = rf"(?:(?!{_OPENING})[^\w\s])*"  # punctuation and marks
WORD = re.compile(rf"{_OPENING}*{UNSPACED}{_AFTER}|(?:(?!{_OPENING}*{UNSPACED})\S)+")
_UNSPACED_FIRST = re.compile(rf"\s*[^\w\s]*{SPACED}*{UNSPACED}")
_SPACE_BETWEEN = re.compile(rf"{UNSPACED}[^\w\s]*\s+[^\w\s]*{UNSPACED}")
_SPACE_BESIDE = re.compile(rf"({UNSPACED}[^\w\s]*)\s+|\s+(?=[^\w\s]*{UNSPACED})")
_UNSPACED = re.compile(UNSPACED)


def split_words(text: str) -> list[str]:
    """The words of a text; those of text.split() where no letter is of a script without spaces."""
    return WORD.findall(text) if is_unspaced(text) else text.split()


def is_unspaced(text: str) -> bool:
    """Whether some letter is of a script without spaces."""
    return not text.isascii() and bool(_UNSPACED.search(text))


def without_loose_spaces(text: str) -> str:
    """The text without spaces beside letters of a script without spaces."""
    return _SPACE_BESIDE.sub(r"\1", text) if is_unspaced(text) else text


def begins_after_space(text: str) -> bool:
    """Whether a space separates the text from text before it, as its own words are separated."""
    return not _UNSPACED_FIRST.match(text) or bool(_SPACE_BETWEEN.search(text))


def columns(text: str) -> int:
    """Columns of the text in a fixed-width font: two for a wide letter, none for a mark."""
    return sum(
        2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
        if unicodedata.category(letter) not in ("Mn", "Me", "Cf")
    )

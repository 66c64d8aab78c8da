"""What a word is: white space separates words; a letter of a script without spaces is one.

Such letters are scored and timed one by one, as is usual where a language has no spaces (AISHELL;
SEAME's mixed error rate; Whisper's timestamps). Punctuation and marks belong to the word before.
"""

import re

# Thai and Lao, Burmese, Khmer, kana, Han.
UNSPACED = (
    r"(?:(?=[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff"
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])\w)"
)
WORD = re.compile(rf"{UNSPACED}[^\w\s]*|(?:(?!{UNSPACED})\S)+")
_BEGINS_UNSPACED = re.compile(rf"\s*{UNSPACED}")
_SPACE_BETWEEN = re.compile(rf"{UNSPACED}\s+{UNSPACED}")


def split_words(text: str) -> list[str]:
    """The words of a text; those of text.split() where no letter is of a script without spaces."""
    return text.split() if text.isascii() else WORD.findall(text)


def begins_after_space(text: str) -> bool:
    """Whether a space separates the text from text before it, as its own words are separated."""
    return not _BEGINS_UNSPACED.match(text) or bool(_SPACE_BETWEEN.search(text))

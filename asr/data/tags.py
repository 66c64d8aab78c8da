"""What is a tag in a transcript: a note of the transcriber in brackets.

    <...>         anywhere: <COMMA>, <SIL> (GigaSpeech), <unk> (TED-LIUM, Kaldi), <b_aside>
    [...]  {...}  with no letter beside it, so not th[at]-: [laughter] (Switchboard), {BREATH}
    (...)         of a name in NON_SPEECH alone, since other texts in parentheses are spoken

asr.prepare drops tags or keeps them (importers/text_normalization.py). Each tag in the training
texts is one token of their vocabulary (tokenizer.py).
"""

import re
from collections import Counter
from collections.abc import Iterable

from asr.words import SPACED

NON_SPEECH = (
    "applause|breath|breathing|breaths|cheering|cheers|clapping|cough|coughing|coughs|crosstalk|"
    "inaudible|laugh|laughing|laughs|laughter|music|noise|pause|sigh|sighs|silence|unintelligible"
)
TAG = re.compile(
    r"<[^<>\s][^<>]{0,40}>"
    rf"|(?<!{SPACED})(?:\[{{1,2}}[^][]{{1,40}}\]{{1,2}}|\{{[^{{}}]{{1,40}}\}})(?!{SPACED}|-)"
    rf"|(?<!{SPACED})\((?:{NON_SPEECH})\)(?!{SPACED})",
    re.IGNORECASE,
)
MAX_TAGS = 100  # tokens; of more, such as times in brackets, each one is rare


def frequent_tags(texts: Iterable[str]) -> list[str]:
    """The MAX_TAGS most frequent tags of the texts, sorted."""
    counts = Counter(tag for text in texts for tag in TAG.findall(text))
    return sorted(sorted(counts, key=lambda tag: (-counts[tag], tag))[:MAX_TAGS])

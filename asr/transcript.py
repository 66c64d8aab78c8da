"""What was heard: text and timed words; and how the pieces of long audio become one.

Shapes: T memory frames, U tokens, V vocabulary; one utterance at a time.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from asr.data.text import Tokenizer
from asr.decoding.long import Piece, join_words
from asr.decoding.search import Hypothesis
from asr.decoding.times import Word, ctc_log_probs, group_words, token_spans


@dataclass(frozen=True)
class Transcript:
    """What was heard. All times are seconds from the start of the audio.

    Audio that was cut into overlapping pieces has in `tokens` what each piece said, hence some
    twice; `text` and `words` say everything once.
    """

    text: str
    score: float  # log-probability of the hypothesis, of all pieces together
    tokens: tuple[int, ...]
    times: tuple[float, ...] = ()  # at which each token begins
    words: tuple[Word, ...] = ()
    seconds: float = 0.0  # of audio


NOTHING = Transcript("", 0.0, ())


def timed(
    hypothesis: Hypothesis,
    tokenizer: Tokenizer,
    frame_seconds: float,
    ctc: Tensor | None,
    attention: Tensor | None,
) -> Transcript:
    """A hypothesis with its words in time, by CTC (T, V) or attention (U + 1, T).

    frame_seconds: from one frame of memory to the next.
    """
    tokens = hypothesis.tokens
    spans = token_spans(tokens, ctc, attention)
    pieces = token_texts(tokenizer, tokens)
    log_probs = hypothesis.log_probs
    if not log_probs and ctc is not None:  # a search of the CTC head alone has none
        log_probs = ctc_log_probs(tokens, spans, ctc)
    words = group_words(pieces, spans, log_probs, frame_seconds)
    times = tuple(start * frame_seconds for start, _ in spans)
    text = tokenizer.decode(tokens)
    return Transcript(text, hypothesis.score, tokens, times, tuple(words))


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The stretch of text that each token adds: together they are the decoded text.

    A subword alone does not show whether it begins a word; the text up to it does.
    """
    texts = [tokenizer.decode(tokens[:end]) for end in range(len(tokens) + 1)]
    return [longer[len(text) :] for text, longer in pairwise(texts)]


def joined(
    pieces: Sequence[Piece], transcripts: Sequence[Transcript], sample_rate: int
) -> Transcript:
    """The transcripts of a recording's pieces, each timed from its own start -> the whole."""
    seconds = pieces[-1].end / sample_rate if pieces else 0.0
    if len(pieces) == 1:
        return replace(transcripts[0], seconds=seconds)
    words = join_words(pieces, [transcript.words for transcript in transcripts], sample_rate)
    moved = (
        [piece.start / sample_rate + time for time in transcript.times]
        for piece, transcript in zip(pieces, transcripts, strict=True)
    )
    return Transcript(
        " ".join(word.text for word in words),
        sum(transcript.score for transcript in transcripts),
        tuple(chain.from_iterable(transcript.tokens for transcript in transcripts)),
        tuple(chain.from_iterable(moved)),
        tuple(words),
        seconds,
    )


def as_plain(path: Path, transcript: Transcript) -> dict[str, Any]:
    """What JSON takes: times in milliseconds' precision, confidence in three digits."""
    plain = {"audio": str(path), **asdict(transcript)}
    plain["seconds"] = round(transcript.seconds, 3)
    plain["times"] = [round(time, 3) for time in transcript.times]
    plain["words"] = [
        {name: value if name == "text" else round(value, 3) for name, value in word.items()}
        for word in plain["words"]
    ]
    return plain

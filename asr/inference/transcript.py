"""The result of recognition: text and timed words; segments of long audio merged into one.

Shapes: T memory frames, U tokens, V vocabulary; one utterance at a time.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from asr.data.tokenizer import Tokenizer
from asr.decoding.alignment import (
    TimedWord,
    ctc_log_probs,
    group_words,
    join_words,
    token_spans,
)
from asr.decoding.scorer import Hypothesis
from asr.decoding.segmentation import LOWEST, QUIET, SILENT, Segment, merge_words


@dataclass(frozen=True, repr=False)
class Transcript:
    """Recognised text. All times are seconds from the start of the audio.

    Of audio that was split into overlapping segments, `tokens` has those of every segment, hence
    some twice; `text` and `words` have everything once.
    """

    text: str
    score: float  # log-probability by the decoder (search=ctc: by CTC), of all segments together
    tokens: tuple[int, ...]
    times: tuple[float, ...] = ()  # at which each token begins
    words: tuple[TimedWord, ...] = ()
    seconds: float = 0.0  # of audio
    level: float = LOWEST  # of its loudest 10 ms in dB of full scale, their mean removed

    def __repr__(self) -> str:
        return f"Transcript({self.text!r}, {self.seconds:.2f} s, score {self.score:.2f})"


EMPTY_TRANSCRIPT = Transcript("", 0.0, ())


def timed_transcript(
    hypothesis: Hypothesis,
    tokenizer: Tokenizer,
    frame_seconds: float,
    ctc: Tensor | None,
    attention: Tensor | None,
) -> Transcript:
    """A hypothesis with timed words, by CTC (T, V) or attention (U + 1, T).

    frame_seconds: seconds per frame of memory.
    """
    tokens = hypothesis.tokens
    spans = token_spans(tokens, ctc, attention)
    log_probs = hypothesis.log_probs
    if not log_probs and ctc is not None:  # a search of the CTC head alone has none
        log_probs = ctc_log_probs(tokens, spans, ctc)
    words = group_words(token_texts(tokenizer, tokens), spans, log_probs, frame_seconds)
    times = tuple(start * frame_seconds for start, _ in spans)
    text = tokenizer.decode(tokens)
    score = sum(hypothesis.log_probs) if hypothesis.log_probs else hypothesis.score
    return Transcript(text, score, tokens, times, tuple(words))


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; joined they are the decoded text.

    A subword alone does not show whether it begins a word; the text up to it does.
    """
    texts = [tokenizer.decode(tokens[:end]) for end in range(len(tokens) + 1)]
    return [longer[len(text) :] for text, longer in pairwise(texts)]


def merge_segments(
    segments: Sequence[Segment], transcripts: Sequence[Transcript | None], sample_rate: int
) -> Transcript:
    """The transcripts of a recording's segments, each timed from its start -> one of all.

    None: without speech.
    """
    transcripts = [transcript or EMPTY_TRANSCRIPT for transcript in transcripts]
    seconds = segments[-1].end / sample_rate if segments else 0.0
    if len(segments) == 1:
        return replace(transcripts[0], seconds=seconds)
    words = merge_words(segments, [transcript.words for transcript in transcripts], sample_rate)
    shifted = (
        [segment.start / sample_rate + time for time in transcript.times]
        for segment, transcript in zip(segments, transcripts, strict=True)
    )
    return Transcript(
        join_words(words),
        sum(transcript.score for transcript in transcripts),
        tuple(chain.from_iterable(transcript.tokens for transcript in transcripts)),
        tuple(chain.from_iterable(shifted)),
        tuple(words),
        seconds,
    )


def json_row(path: Path, transcript: Transcript) -> dict[str, Any]:
    """A transcript as a JSON object; times and confidence have three decimals."""
    row = {"audio": str(path), **asdict(transcript)}
    row["seconds"], row["level"] = round(transcript.seconds, 3), round(transcript.level, 1)
    row["times"] = [round(time, 3) for time in transcript.times]
    row["words"] = [
        {"text": word.text}
        | {name: round(getattr(word, name), 3) for name in ("start", "end", "confidence")}
        for word in transcript.words
    ]
    return row


def level_warning(level: float) -> str | None:
    """Why a transcript of audio of this level may be wrong; None for loud audio."""
    if level > QUIET:
        return None
    if level <= SILENT:
        return "silent, or its channels cancel each other; its transcript is empty"
    return f"too quiet, {level:.0f} dB of full scale at most; its transcript may be wrong"


ON_ONE_LINE = str.maketrans("\t\n\r", "   ")  # for str.translate; a vocabulary may have any
# Control characters that JSON allows as they are and a terminal would obey.
_CONTROL = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


def json_line(row: dict[str, Any]) -> str:
    """One line of JSON, without control characters."""
    text = json.dumps(row, ensure_ascii=False).translate(_CONTROL)
    # A name's bytes that are not text become \udcXX, which JSON reads as Python wrote them.
    return text.encode(errors="backslashreplace").decode() + "\n"

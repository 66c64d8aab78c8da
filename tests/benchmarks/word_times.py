"""Errors in seconds of a trained demo run's word starts against those of the speech engine.

    .venv/bin/python tests/benchmarks/word_times.py runs/demo [decode.beam=8 ...]

The voices of the spoken-number corpus' test split speak new phrases, and eSpeak NG reports the
start of each word. Correctly recognised words (by alignment with the text) are compared. Prints
figures for the transcript's times (CTC alignment where the letters fit, otherwise attention) and
for attention alone.
"""

import ctypes
import random
import statistics
import sys
from itertools import islice

import numpy as np

from asr.analysis.wer import align
from asr.data.importers.spoken_numbers import ACCENTS, VARIANTS, Engine, phrases
from asr.inference.recognition import Recognizer
from asr.inference.transcript import Transcript

PHRASES = 60
WORD = 1  # espeakEVENT_WORD; 0 ends the list


class Event(ctypes.Structure):
    """espeak_EVENT of speak_lib.h."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),  # characters, from 1
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),  # ms
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    ]


class TimedEngine(Engine):
    """An engine that records the start of each word."""

    def __init__(self) -> None:
        self.words: dict[int, float] = {}  # position in the text -> seconds
        super().__init__()

    def _receive(self, samples: object, count: int, events: int | None) -> int:
        event_at = events
        while event_at and (event := Event.from_address(event_at)).type:
            if event.type == WORD:
                self.words.setdefault(event.text_position, event.audio_position / 1000)
            event_at += ctypes.sizeof(Event)
        return super()._receive(samples, count, events)


def main() -> None:
    run, *settings = sys.argv[1:]
    recognizer = Recognizer.load(run, settings)
    engine = TimedEngine()
    draw = random.Random(7)
    voices = [f"{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS["test"]]
    phrases_spoken = [
        tuple(spoken(engine, text, draw.choice(voices))) for text in islice(phrases(draw), PHRASES)
    ]
    for name in ("transcript", "attention alone"):
        if name == "attention alone":
            recognizer = Recognizer.load(run, [*settings, "decode.ctc_weight=0"])
            recognizer.model.ctc = lambda memory: None
        late = [
            seconds
            for text, starts, samples in phrases_spoken
            for seconds in errors(text, starts, recognizer(samples, engine.sample_rate))
        ]
        size = [abs(seconds) for seconds in late]
        print(
            f"{name:16} {len(late)} words: median error {1000 * statistics.median(size):.0f} ms, "
            f"90 % within {1000 * np.quantile(size, 0.9):.0f} ms, "
            f"median lateness {1000 * statistics.median(late):+.0f} ms"
        )


def spoken(engine: TimedEngine, text: str, voice: str) -> tuple[str, list[float], np.ndarray]:
    """A text, the start of each of its words in seconds, and the samples."""
    engine.words.clear()
    samples = engine.synthesise(text.lower(), voice, 160, 50).astype(np.float32) / 32768
    places, at = [], 1
    for word in text.split():
        places.append(at)
        at += len(word) + 1
    return text, [engine.words.get(place, float("nan")) for place in places], samples


def errors(text: str, starts: list[float], transcript: Transcript) -> list[float]:
    """Start of each correctly recognised word minus its true start, in seconds."""
    late, place, recognised = [], 0, 0
    for edit in align([text], [transcript.text])[0]:
        if edit.mark == "C" and starts[place] == starts[place]:
            late.append(transcript.words[recognised].start - starts[place])
        place += edit.mark != "I"
        recognised += edit.mark != "D"
    return late


if __name__ == "__main__":
    main()

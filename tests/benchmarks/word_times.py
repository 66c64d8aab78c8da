"""Word starts of a trained demo run against those that the speech engine itself reports.

    .venv/bin/python tests/benchmarks/word_times.py runs/demo [decode.beam=8 ...]

New phrases of the spoken-number corpus are said by the voices of its test split, and eSpeak NG
tells when each word begins. Words that were recognised (by alignment with the text) are compared.
Printed for the transcript's times (CTC's alignment where the letters fit, else attention) and for
attention alone.
"""

import ctypes
import random
import statistics
import sys
from itertools import islice

import numpy as np

from asr.data.corpora.espeak import Engine
from asr.data.corpora.spoken_numbers import ACCENTS, VARIANTS, phrases
from asr.recognizer import Recognizer
from asr.scoring.alignment import align
from asr.transcript import Transcript

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
    """An engine that keeps when each word began."""

    def __init__(self) -> None:
        self.words: dict[int, float] = {}  # place in the text -> seconds
        super().__init__()

    def _hear(self, samples: object, count: int, events: int | None) -> int:
        place = events
        while place and (event := Event.from_address(place)).type:
            if event.type == WORD:
                self.words.setdefault(event.text_position, event.audio_position / 1000)
            place += ctypes.sizeof(Event)
        return super()._hear(samples, count, events)


def main() -> None:
    run, *settings = sys.argv[1:]
    recognizer = Recognizer.load(run, settings)
    engine = TimedEngine()
    draw = random.Random(7)
    voices = [f"{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS["test"]]
    said = [
        tuple(spoken(engine, text, draw.choice(voices))) for text in islice(phrases(draw), PHRASES)
    ]
    for name in ("transcript", "attention alone"):
        if name == "attention alone":
            recognizer.model.ctc = lambda memory: None
        late = [
            seconds
            for text, starts, samples in said
            for seconds in errors(text, starts, recognizer.transcribe(samples, engine.sample_rate))
        ]
        size = [abs(seconds) for seconds in late]
        print(
            f"{name:16} {len(late)} words: median error {1000 * statistics.median(size):.0f} ms, "
            f"90 % within {1000 * np.quantile(size, 0.9):.0f} ms, "
            f"median lateness {1000 * statistics.median(late):+.0f} ms"
        )


def spoken(engine: TimedEngine, text: str, voice: str) -> tuple[str, list[float], np.ndarray]:
    """A text, when each of its words begins, and the samples."""
    engine.words.clear()
    samples = engine.say(text.lower(), voice, 160, 50).astype(np.float32) / 32768
    places, at = [], 1
    for word in text.split():
        places.append(at)
        at += len(word) + 1
    return text, [engine.words.get(place, float("nan")) for place in places], samples


def errors(text: str, starts: list[float], told: Transcript) -> list[float]:
    """Seconds by which each rightly heard word begins too late."""
    found, place, heard = [], 0, 0
    for edit in align([text], [told.text])[0]:
        if edit.mark == "C" and starts[place] == starts[place]:
            found.append(told.words[heard].start - starts[place])
        place += edit.mark != "I"
        heard += edit.mark != "D"
    return found


if __name__ == "__main__":
    main()

"""The built-in corpus: number phrases, synthesised in many voices. Made once, then kept.

"SEVEN OH TWO FIVE", "FOUR HUNDRED AND SEVEN", "NINETEEN EIGHTY FOUR", "TWELVE POINT OH FIVE", each
with a little noise, silence and gain. No phrase and no speaker occurs in two splits. A speaker is
an accent, which splits share, with a voice variant (throat and pitch), which they do not. One
training utterance for SPEECH_PER_NOISE others has no speech and no text: a model that has never
been trained on noise gives a text for it.

The engine is eSpeak NG from the wheel `espeakng-loader` (extra `demo`), called through ctypes; its
C interface is espeak-ng's speak_lib.h. Its output varies slightly, so two corpora of one seed have
equal manifests but for a few milliseconds, and slightly different audio. S samples.
"""

import atexit
import ctypes
import functools
import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import numpy as np
import soundfile
import torch
from torchaudio.transforms import Resample

from asr.data.corpus import Utterance, write_manifest
from asr.errors import UserError, missing_package, print_line, writing
from asr.io import new_folder, read_json, usable_cores

# From speak_lib.h: espeak_Synth returns at the end; a failure is returned, not exit().
SYNCHRONOUS, DONT_EXIT = 2, 0x8000
RATE, VOLUME, PITCH = 1, 2, 3
CHARS_UTF8, POS_CHARACTER = 1, 1
LONGEST_DATA_PATH = 150  # the library holds the path in 160 bytes and fails on a longer one

_Samples = ctypes.POINTER(ctypes.c_short)
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, _Samples, ctypes.c_int, ctypes.c_void_p)


class Engine:
    """`synthesise` gives the samples of a text at `sample_rate` Hz. Not for threads.

    A process can have one: the library keeps one global voice and one callback. Raises UserError if
    the extra is not installed or the library does not start.
    """

    def __init__(self) -> None:
        loader = _loader()
        self._library = ctypes.CDLL(str(loader.get_library_path()))
        data = _short(Path(loader.get_data_path()))
        start = self._library.espeak_Initialize
        self.sample_rate = start(SYNCHRONOUS, 0, str(data).encode(), DONT_EXIT)
        if self.sample_rate <= 0:
            raise UserError(f"the speech engine eSpeak NG does not start with its data in {data}")
        self._voice: str | None = None
        self._blocks: list[np.ndarray] = []
        self._callback = _Callback(self._receive)  # kept: C calls it later
        self._library.espeak_SetSynthCallback(self._callback)

    def synthesise(self, text: str, voice: str, words_per_minute: int, pitch: int) -> np.ndarray:
        """(S,) int16. Pitch 0 to 99. Raises ValueError for an unknown voice."""
        if voice != self._voice and self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"eSpeak NG has no voice {voice!r}")
        self._voice = voice
        # Half the volume: at the default several voices run into the limits of int16.
        for parameter, value in ((RATE, words_per_minute), (PITCH, pitch), (VOLUME, 50)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._blocks.clear()
        content = text.encode()
        self._library.espeak_Synth(
            content, ctypes.c_size_t(len(content) + 1), 0, POS_CHARACTER, 0, CHARS_UTF8, None, None
        )
        return np.concatenate([np.zeros(0, np.int16), *self._blocks])

    def _receive(self, samples: "ctypes._Pointer", count: int, events: int | None) -> int:
        if samples and count > 0:
            self._blocks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0  # continue


def _loader() -> ModuleType:
    """The wheel's module. Raises UserError if the extra `demo` is not installed."""
    try:
        import espeakng_loader
    except ImportError:
        reason = missing_package("espeakng-loader", "demo")
        raise UserError(f"spoken numbers need a speech engine: {reason}") from None
    return espeakng_loader


def _short(data: Path) -> Path:
    """The folder by a name that the library can hold: a link until the process ends."""
    if len(str(data)) <= LONGEST_DATA_PATH:
        return data
    folder = Path(tempfile.mkdtemp(prefix="espeak-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    link = folder / data.name
    link.symlink_to(data)
    return link


SAMPLE_RATE = 16000
VERSION = 2  # raised whenever the same settings would give another corpus
STAMP = "corpus.json"
REPORT_EVERY = 10.0  # seconds
SPEECH_PER_NOISE = 40  # training utterances with speech for one without

# fmt: off
ACCENTS = ("en-us", "en-us-nyc", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan",
           "en-gb-x-gbcwmd", "en-029")
# Without whispering, croaking, robot and badly clipping variants.
VARIANTS = {
    "train": ("m1", "m2", "m4", "m6", "m8", "f1", "f3", "f5", "Alex", "Andrea", "Andy", "Denis",
              "Gene", "Henrique", "Lee", "Mario", "Michael", "Reed", "adam", "aunty", "belinda",
              "edward", "max", "norbert", "sandro", "steph", "travis"),
    "valid": ("m7", "f4", "Annie", "robert"),
    "test": ("m3", "m5", "f2", "linda", "rob", "boris", "quincy"),
}
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
        "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
        "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on


@dataclass(frozen=True, slots=True)
class Script:
    """The plan of one utterance; `seed` draws its noise, gain and silence."""

    id: str
    voice: str
    text: str
    words_per_minute: int
    pitch: int
    seed: int


def prepare(
    folder: str | Path, *, train: int = 1800, valid: int = 150, test: int = 600, seed: int = 1
) -> None:
    """Make folder/{train,valid,test}.tsv and their audio, and example.flac, a test utterance.

    Returns at once if the folder holds this corpus. It is built beside its place and renamed when
    complete, so neither an interruption nor a second caller leaves a part of it. Raises UserError
    without the extra `demo`, and if the folder holds something else.
    """
    folder = Path(folder)
    counts = {"train": train, "valid": valid, "test": test}
    stamp = {"corpus": "spoken_numbers", "version": VERSION, "seed": seed, **counts}
    if _is_made(folder, stamp):
        return
    _loader()
    with new_folder(folder) as part, writing(folder):
        _build(part, counts, seed)
        (part / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
        try:
            part.rename(folder)
        except OSError:  # another process has made the folder in the meantime
            if not _is_made(folder, stamp):
                raise


def _is_made(folder: Path, stamp: dict[str, object]) -> bool:
    try:
        other = read_json(folder / STAMP)
    except FileNotFoundError:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder}: not empty, and not the spoken numbers") from None
        return False
    except ValueError:
        other = None
    if other != stamp:
        remedy = "delete the folder or choose another"
        raise UserError(f"{folder}: spoken numbers of other settings; {remedy}")
    return True


def _build(folder: Path, counts: dict[str, int], seed: int) -> None:
    draw = random.Random(seed)
    texts = phrases(draw)
    # One stream of phrases without repeats for all splits, so that none is shared.
    scripts = {split: assign(split, count, texts, draw) for split, count in counts.items()}
    scripts["train"] += [  # without speech, of a speaker "noise"
        Script(f"train-noise-{number:05d}", "noise", "", 0, 0, draw.getrandbits(32))
        for number in range(counts["train"] // SPEECH_PER_NOISE)
    ]
    jobs = [(script, folder / split) for split in counts for script in scripts[split]]
    for split in counts:
        (folder / split).mkdir()
    # Sorted by voice: changing it costs the engine more than a phrase.
    jobs.sort(key=lambda job: (job[0].voice, job[0].id))
    cores, made, reported = usable_cores(), {}, time.monotonic()
    # Started anew, not forked: the engine and torch keep threads and locks.
    try:
        # Ctrl-C is for this process: in the engine's callback it would be ignored with a traceback.
        ignore = signal.signal, (signal.SIGINT, signal.SIG_IGN)
        with ProcessPoolExecutor(cores, get_context("spawn"), *ignore) as pool:
            for each in pool.map(_record, jobs, chunksize=len(jobs) // (64 * cores) + 1):
                made[each.id] = each
                if time.monotonic() - reported > REPORT_EVERY:
                    reported = time.monotonic()
                    print_line(f"{len(made)} of {len(jobs)} utterances are made")
    except BrokenProcessPool:
        reason = "was killed, or imports a script without `if __name__ == '__main__':`"
        raise UserError(f"{folder}: a process that synthesises {reason}") from None
    for split in counts:
        write_manifest(folder / f"{split}.tsv", [made[script.id] for script in scripts[split]])
    if scripts["test"]:
        shutil.copyfile(made[scripts["test"][0].id].audio, folder / "example.flac")


def assign(split: str, count: int, texts: Iterator[str], draw: random.Random) -> list[Script]:
    """Assign the next `count` phrases to the speakers of a split, evenly."""
    voices = [f"{accent}+{variant}" for variant, accent in product(VARIANTS[split], ACCENTS)]
    draw.shuffle(voices)
    return [
        Script(
            id=f"{split}-{number:05d}",
            voice=voices[number % len(voices)],
            text=next(texts),
            words_per_minute=draw.randint(140, 195),
            pitch=draw.randint(30, 70),
            seed=draw.getrandbits(32),
        )
        for number in range(count)
    ]


def phrases(draw: random.Random) -> Iterator[str]:
    """An endless stream of number phrases in capitals, without repeats."""
    kinds: tuple[Callable[[random.Random], str], ...] = (_digits, _cardinal, _year, _decimal)
    used: set[str] = set()
    while True:
        phrase = draw.choice(kinds)(draw).upper()
        if phrase not in used:
            used.add(phrase)
            yield phrase


def _digits(draw: random.Random) -> str:
    names = (draw.choice(("zero", "oh")), *ONES[1:10])
    return " ".join(draw.choices(names, k=draw.randint(3, 6)))


def _cardinal(draw: random.Random) -> str:
    # By length first: drawn evenly, nearly all numbers would be long.
    return cardinal(draw.randrange(10 ** draw.randint(2, 6)))


def _year(draw: random.Random) -> str:
    century, rest = draw.randint(11, 20), draw.randrange(100)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def _decimal(draw: random.Random) -> str:
    decimals = " ".join(draw.choices(ONES[:10], k=draw.randint(1, 3)))
    return f"{cardinal(draw.randrange(1000))} point {decimals}"


def cardinal(number: int) -> str:
    """0 to 999,999 in British words: 4007 is "four thousand and seven"."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    words = f"{cardinal(count)} {name}"
    if not rest:
        return words
    return f"{words} {'and ' if rest < 100 else ''}{cardinal(rest)}"


@functools.cache
def _engine() -> tuple[Engine, Resample]:
    """The engine of this process, which can be started once, and the resampler to SAMPLE_RATE."""
    torch.set_num_threads(1)
    engine = Engine()
    return engine, Resample(engine.sample_rate, SAMPLE_RATE)


def _record(job: tuple[Script, Path]) -> Utterance:
    script, folder = job
    engine, resample = _engine()
    draw = np.random.default_rng(script.seed)
    if script.text:
        text, rate = script.text.lower(), script.words_per_minute
        spoken = engine.synthesise(text, script.voice, rate, script.pitch)
        speech = resample(torch.from_numpy(spoken / np.float32(32768))).numpy()
        samples = add_silence_and_noise(speech, draw)
    else:
        samples = sound_without_speech(draw)
    path = folder / f"{script.id}.flac"
    content = BytesIO()  # written by Python, whose errors name their cause, as a full disk
    soundfile.write(content, samples, SAMPLE_RATE, subtype="PCM_16", format="FLAC")
    with writing(path):
        path.write_bytes(content.getbuffer())
    return Utterance(script.id, script.voice, path, len(samples) / SAMPLE_RATE, script.text)


def add_silence_and_noise(speech: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Silence around the speech (S,), noise 15 to 40 dB below it, and a gain."""
    loud = np.flatnonzero(np.abs(speech) > 0.01 * np.abs(speech).max())
    speech = speech[loud[0] : loud[-1] + 1]
    before, after = draw.integers(SAMPLE_RATE // 20, SAMPLE_RATE // 4, size=2)
    quiet = np.pad(speech, (before, after))
    noise = draw.standard_normal(len(quiet)) * speech.std() * 10 ** (-draw.uniform(15, 40) / 20)
    mixed = quiet + noise
    peak = 10 ** (draw.uniform(-20, -1) / 20)
    return (mixed * peak / np.abs(mixed).max()).astype(np.float32)


def sound_without_speech(draw: np.random.Generator) -> np.ndarray:
    """(S,) 1 to 6 s of coloured noise, a hum or tones, or both, steady or switched on and off."""
    t = np.arange(draw.integers(SAMPLE_RATE, 6 * SAMPLE_RATE)) / SAMPLE_RATE
    spectrum = np.fft.rfft(draw.standard_normal(len(t)))
    spectrum /= np.arange(1, len(spectrum) + 1) ** draw.uniform(0, 1)  # white to brown
    noise = np.fft.irfft(spectrum, len(t))
    tones = np.zeros(len(t))
    for hertz in np.exp(draw.uniform(np.log(40), np.log(2000), size=draw.integers(1, 4))):
        for harmonic in range(1, draw.integers(2, 7)):
            tones += np.sin(2 * np.pi * hertz * harmonic * t + draw.uniform(0, 7)) / harmonic
    share = draw.choice([0.0, 1.0, draw.uniform()])
    mixed = share * noise / noise.std() + (1 - share) * tones / tones.std()
    if draw.random() < 0.5:  # bursts, 1 to 8 a second
        phase = np.mod(t * draw.uniform(1, 8), 1)
        mixed *= np.exp(-phase * draw.uniform(0, 10)) * (phase < draw.uniform(0.1, 1))
    peak = 10 ** (draw.uniform(-40, -1) / 20)
    return (mixed * peak / np.abs(mixed).max()).astype(np.float32)

"""The built-in corpus: number phrases, synthesised in many voices. Made once, then kept.

"SEVEN OH TWO FIVE", "FOUR HUNDRED AND SEVEN", "NINETEEN EIGHTY FOUR", "TWELVE POINT OH FIVE", each
with a little noise, silence and gain. It is split twice over: no phrase and no speaker of one split
is heard in another. A speaker is an accent with a voice variant, and the variants (which carry the
throat and the pitch) are parted; the accents are shared.

eSpeak NG does not repeat itself to the sample, so two corpora of one seed have equal manifests but
for a few milliseconds, and the audio differs slightly.
"""

import functools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import soundfile
import torch
from torchaudio.transforms import Resample

from asr.data.corpora import espeak
from asr.data.corpus import Utterance, write_manifest
from asr.errors import UserError

SAMPLE_RATE = 16000
VERSION = 1  # raised whenever the same settings would give another corpus
STAMP = "corpus.json"

# fmt: off
ACCENTS = ("en-us", "en-us-nyc", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan",
           "en-gb-x-gbcwmd", "en-029")
# Whispering, croaking, robot and badly clipping variants are left out.
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
    """What one utterance shall be: `seed` draws its noise, gain and silence."""

    id: str
    voice: str
    text: str
    words_per_minute: int
    pitch: int
    seed: int


def prepare(
    folder: str | Path,
    *,
    train: int = 1800,
    valid: int = 150,
    test: int = 600,
    seed: int = 1,
    workers: int | None = None,
) -> None:
    """Makes folder/{train,valid,test}.tsv and their audio, and example.flac, a test utterance.

    Returns at once where the folder holds this corpus already. It is built beside its place and
    renamed when whole, so neither a break nor a second caller leaves half a corpus. `workers`
    processes, by default one per core.
    Raises UserError without the extra `demo`, and where the folder holds something else.
    """
    folder = Path(folder)
    counts = {"train": train, "valid": valid, "test": test}
    stamp = {"corpus": "spoken_numbers", "version": VERSION, "seed": seed, **counts}
    if _made(folder, stamp):
        return
    espeak.require()
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _build(part, counts, seed, workers or _cores())
        (part / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
        part.chmod(0o755)
        try:
            part.rename(folder)
        except OSError:  # the folder came into being meanwhile
            if not _made(folder, stamp):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _made(folder: Path, stamp: dict[str, object]) -> bool:
    try:
        found = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder}: not empty, and not the spoken numbers") from None
        return False
    except ValueError:
        found = None
    if found != stamp:
        raise UserError(
            f"{folder}: spoken numbers of other settings; delete the folder or name another"
        )
    return True


def _build(folder: Path, counts: dict[str, int], seed: int, workers: int) -> None:
    draw = random.Random(seed)
    texts = phrases(draw)
    # One stream of phrases without repeats feeds all splits, so that none is shared.
    scripts = {split: cast(split, count, texts, draw) for split, count in counts.items()}
    jobs = [(script, folder / split) for split in counts for script in scripts[split]]
    for split in counts:
        (folder / split).mkdir()
    # Sorted by voice: changing it costs the engine more than speaking.
    jobs.sort(key=lambda job: (job[0].voice, job[0].id))
    # Started anew, not forked: the engine and torch keep threads and locks.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        made = {u.id: u for u in pool.map(_record, jobs, chunksize=len(jobs) // (4 * workers) + 1)}
    for split in counts:
        write_manifest(folder / f"{split}.tsv", [made[script.id] for script in scripts[split]])
    if scripts["test"]:
        shutil.copyfile(made[scripts["test"][0].id].audio, folder / "example.flac")


def _cores() -> int:
    # What this process may use, where the system tells; a container often gives fewer than stand.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cast(split: str, count: int, texts: Iterator[str], draw: random.Random) -> list[Script]:
    """Gives the next `count` phrases to the speakers of a split, evenly."""
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
    """Number phrases without end and without repeats, in capitals."""
    kinds: tuple[Callable[[random.Random], str], ...] = (_digits, _cardinal, _year, _decimal)
    said: set[str] = set()
    while True:
        phrase = draw.choice(kinds)(draw).upper()
        if phrase not in said:
            said.add(phrase)
            yield phrase


def _digits(draw: random.Random) -> str:
    zero = draw.choice(("zero", "oh"))
    return " ".join(
        zero if d == 0 else ONES[d] for d in draw.choices(range(10), k=draw.randint(3, 6))
    )


def _cardinal(draw: random.Random) -> str:
    # By length first: drawn evenly, nearly all numbers would be long.
    return cardinal(draw.randrange(10 ** draw.randint(2, 6)))


def _year(draw: random.Random) -> str:
    century, rest = draw.randint(11, 20), draw.randrange(100)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def _decimal(draw: random.Random) -> str:
    behind = " ".join(ONES[d] for d in draw.choices(range(10), k=draw.randint(1, 3)))
    return f"{cardinal(draw.randrange(1000))} point {behind}"


def cardinal(number: int) -> str:
    """0 to 999,999 in British words: 4007 is "four thousand and seven"."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    whole, rest = divmod(number, size)
    words = f"{cardinal(whole)} {name}"
    if not rest:
        return words
    return f"{words} {'and ' if rest < 100 else ''}{cardinal(rest)}"


@functools.cache
def _studio() -> tuple[espeak.Engine, Resample]:
    """The engine of this process, which can be started once, and what brings it to our rate."""
    torch.set_num_threads(1)
    engine = espeak.Engine()
    return engine, Resample(engine.sample_rate, SAMPLE_RATE)


def _record(job: tuple[Script, Path]) -> Utterance:
    script, folder = job
    engine, resample = _studio()
    spoken = engine.say(script.text.lower(), script.voice, script.words_per_minute, script.pitch)
    speech = resample(torch.from_numpy(spoken / np.float32(32768))).numpy()
    samples = in_a_room(speech, np.random.default_rng(script.seed))
    path = folder / f"{script.id}.flac"
    soundfile.write(path, samples, SAMPLE_RATE, subtype="PCM_16")
    return Utterance(script.id, script.voice, path, len(samples) / SAMPLE_RATE, script.text)


def in_a_room(speech: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Silence around the speech (S,), noise 15 to 40 dB below it, and a gain."""
    loud = np.flatnonzero(np.abs(speech) > 0.01 * np.abs(speech).max())
    speech = speech[loud[0] : loud[-1] + 1]
    before, after = draw.integers(SAMPLE_RATE // 20, SAMPLE_RATE // 4, size=2)
    quiet = np.pad(speech, (before, after))
    noise = draw.standard_normal(len(quiet)) * speech.std() * 10 ** (-draw.uniform(15, 40) / 20)
    mixed = quiet + noise
    peak = 10 ** (draw.uniform(-20, -1) / 20)
    return (mixed * peak / np.abs(mixed).max()).astype(np.float32)

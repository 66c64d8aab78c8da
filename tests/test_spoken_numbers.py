"""The built-in corpus: its phrases, splits and audio, and interrupted creation."""

import builtins
import errno
import os
import pickle
import random
import re
import threading
from itertools import combinations, islice, product
from pathlib import Path

import numpy as np
import pytest
import soundfile
from full_disk import full_disk

from asr.data.corpus import read_manifest
from asr.data.importers import spoken_numbers
from asr.data.importers.spoken_numbers import (
    ACCENTS,
    VARIANTS,
    add_silence_and_noise,
    cardinal,
    phrases,
    prepare,
    sound_without_speech,
)
from asr.errors import UserError

SPLITS = {"train": 40, "valid": 3, "test": 5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    pytest.importorskip("espeakng_loader", reason="the speech engine is the extra `demo`")
    folder = tmp_path_factory.mktemp("data") / "spoken_numbers"
    prepare(folder, **SPLITS)
    return folder


# fmt: off
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
         "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
         "nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
# fmt: on


def value(words: str) -> int:
    """The number from its words, by addition; shares no code with `cardinal`."""
    units = {word: i for i, word in enumerate(WORDS[:20])}
    units |= {word: 10 * i for i, word in enumerate(WORDS[20:], start=2)}
    total = group = 0
    for word in words.split():
        if word == "thousand":
            total, group = 1000 * group, 0
        elif word == "hundred":
            group *= 100
        elif word != "and":
            group += units[word]
    return total + group


def test_every_cardinal_has_its_value():
    numbers = [*range(1200), *random.Random(3).sample(range(1200, 1_000_000), 2000)]
    assert [value(cardinal(n)) for n in numbers] == numbers


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (84, "eighty four"),
        (407, "four hundred and seven"),
        (4007, "four thousand and seven"),
        (4700, "four thousand seven hundred"),
        (100_000, "one hundred thousand"),
        (999_999, "nine hundred and ninety nine thousand nine hundred and ninety nine"),
    ],
)
def test_cardinals_in_british_words(number, words):
    assert cardinal(number) == words


def test_phrases_are_capital_words_without_repeats():
    spoken = list(islice(phrases(random.Random(5)), 3000))
    assert len(set(spoken)) == 3000
    assert all(re.fullmatch(r"[A-Z]+( [A-Z]+)*", phrase) for phrase in spoken)
    words = {word for phrase in spoken for word in phrase.split()}
    assert len(words) == 33 and {"ZERO", "OH", "POINT", "HUNDRED", "AND", "THOUSAND"} < words
    assert spoken == list(islice(phrases(random.Random(5)), 3000))


def test_no_voice_is_in_two_splits():
    for one, other in combinations(VARIANTS.values(), 2):
        assert not set(one) & set(other)


def test_splits_share_neither_phrase_nor_speaker(corpus):
    made = {split: read_manifest(corpus / f"{split}.tsv") for split in SPLITS}
    assert {split: len(c) for split, c in made.items()} == SPLITS | {"train": 41}
    for one, other in combinations(made.values(), 2):
        assert not set(one.texts) & set(other.texts)
        assert not set(one.speakers) & set(other.speakers)
        assert not set(one.ids) & set(other.ids)


def test_the_audio_matches_the_manifest(corpus):
    for split in SPLITS:
        for utterance in read_manifest(corpus / f"{split}.tsv"):
            samples, rate = soundfile.read(utterance.audio)
            assert rate == 16000 and samples.ndim == 1 and utterance.audio.suffix == ".flac"
            assert len(samples) / rate == pytest.approx(utterance.seconds, abs=1e-3)
            if not utterance.text:
                continue
            # There is speech, with a plausible duration for the text, and no clipping.
            assert 0.05 < np.abs(samples).max() < 0.95
            assert 0.02 < utterance.seconds / len(utterance.text) < 0.3
            assert samples.std() > 10 * np.sort(np.abs(samples))[len(samples) // 20]


def test_one_training_utterance_in_forty_one_has_no_speech(corpus):
    silent = [u for split in SPLITS for u in read_manifest(corpus / f"{split}.tsv") if not u.text]
    assert [(u.id, u.speaker) for u in silent] == [("train-noise-00000", "noise")]
    for seed in range(20):
        samples = sound_without_speech(np.random.default_rng(seed))
        assert 16_000 <= len(samples) < 96_000 and 0.005 < np.abs(samples).max() < 0.95


def test_the_example_is_a_test_utterance(corpus):
    first = read_manifest(corpus / "test.tsv")[0]
    assert (corpus / "example.flac").read_bytes() == first.audio.read_bytes()


def test_a_second_call_makes_nothing(corpus, monkeypatch):
    monkeypatch.setattr(spoken_numbers, "_build", None)  # calling it would raise
    prepare(corpus, **SPLITS)


def test_another_corpus_in_the_folder_is_refused(corpus, tmp_path):
    with pytest.raises(UserError, match="of other settings; delete the folder"):
        prepare(corpus, train=8)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty, and not the spoken numbers"):
        prepare(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    def build(folder, *_):
        (folder / "train.tsv").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(spoken_numbers, "_build", build)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []


def test_concurrent_callers_leave_one_complete_corpus(tmp_path, monkeypatch):
    meet = threading.Barrier(3)

    def build(folder, *_):
        (folder / "train.tsv").write_text(folder.name)
        meet.wait(10)  # all have built before the first renames its folder

    monkeypatch.setattr(spoken_numbers, "_build", build)
    folder, errors = tmp_path / "corpus", []

    def call():
        try:
            prepare(folder)
        except Exception as error:
            errors.append(error)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert errors == []
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]
    assert sorted(p.name for p in folder.iterdir()) == ["corpus.json", "train.tsv"]


def test_a_missing_extra_is_named_with_its_remedy(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "espeakng_loader":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"in the checkout pip install '\.\[demo\]'"):
        prepare(tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def engine():
    pytest.importorskip("espeakng_loader", reason="the speech engine is the extra `demo`")
    return spoken_numbers.Engine()


def test_every_voice_exists_and_makes_sound(engine):
    variants = [v for split in VARIANTS.values() for v in split]
    # The engine ignores an unknown variant.
    known = Path(pytest.importorskip("espeakng_loader").get_data_path()) / "voices" / "!v"
    assert [v for v in variants if not (known / v).is_file()] == []
    for accent, variant in product(ACCENTS, variants):
        spoken = engine.synthesise("seven", f"{accent}+{variant}", 160, 50)
        assert 0.2 < len(spoken) / engine.sample_rate < 1.5
        assert 1000 < np.abs(spoken.astype(int)).max() < 32767
    with pytest.raises(ValueError, match="no voice 'en-moon'"):
        engine.synthesise("seven", "en-moon", 160, 50)


def test_rate_and_pitch_change_the_audio(engine):
    slow, fast = (engine.synthesise("seven hundred", "en-us", rate, 50) for rate in (120, 240))
    assert len(slow) > 1.4 * len(fast)
    low, high = (engine.synthesise("nine", "en-us", 160, pitch).astype(float) for pitch in (10, 90))
    assert _pitch(high, engine.sample_rate) > 1.3 * _pitch(low, engine.sample_rate)


def _pitch(samples: np.ndarray, rate: int) -> float:
    """The fundamental frequency in Hz, by the autocorrelation peak of 0.1 s of the voice."""
    middle = samples[len(samples) // 3 :][: rate // 10]
    echo = np.correlate(middle - middle.mean(), middle - middle.mean(), "full")[len(middle) - 1 :]
    shortest, longest = rate // 220, rate // 50
    return rate / (shortest + int(echo[shortest:longest].argmax()))


def test_room_noise_and_gain_are_within_their_limits():
    speech = np.sin(np.arange(16000) / 5).astype(np.float32)
    silent = np.zeros(4000, np.float32)
    for seed in range(20):
        recording = add_silence_and_noise(
            np.concatenate([silent, speech, silent]), np.random.default_rng(seed)
        )
        before_and_after = len(recording) - 16000
        assert 2 * 800 - 10 <= before_and_after < 2 * 4000
        assert 0.09 < np.abs(recording).max() < 0.9
        noise = recording[:800].std()
        ratio = 20 * np.log10(recording[4000:14000].std() / noise)
        assert 13 < ratio < 42


class FullDisk:
    """Stands for the pool of processes: runs in this one, where no file may exceed the limit."""

    limit = 0

    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, function, jobs, chunksize):
        with full_disk(self.limit):
            return list(map(function, jobs))


class Tone:
    sample_rate = 16_000

    def synthesise(self, text, voice, rate, pitch):
        return (9000 * np.sin(np.arange(9000) / 9)).astype(np.int16)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(spoken_numbers, "_loader", lambda: None)
    monkeypatch.setattr(spoken_numbers, "_engine", lambda: (Tone(), lambda samples: samples))
    monkeypatch.setattr(spoken_numbers, "ProcessPoolExecutor", FullDisk)
    with pytest.raises(OSError, match="File too large") as caught:
        prepare(tmp_path / "corpus", **SPLITS)
    assert caught.value.filename.endswith(".flac")
    copy = pickle.loads(pickle.dumps(caught.value))  # as from a process of the pool
    assert (copy.filename, copy.errno) == (caught.value.filename, caught.value.errno)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["shutil.copyfile", "write_manifest", "json.dumps"])
def test_a_full_disk_at_the_end_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, place):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FullDisk, "limit", 10**9)
    monkeypatch.setattr(spoken_numbers, "_loader", lambda: None)
    monkeypatch.setattr(spoken_numbers, "_engine", lambda: (Tone(), lambda samples: samples))
    monkeypatch.setattr(spoken_numbers, "ProcessPoolExecutor", FullDisk)
    monkeypatch.setattr(f"asr.data.importers.spoken_numbers.{place}", fail)
    with pytest.raises(OSError, match="No space") as caught:
        prepare(tmp_path / "corpus", **SPLITS)
    assert caught.value.filename == str(tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_is_one_line(tmp_path, monkeypatch):
    def fail(self, *arguments, **options):
        raise spoken_numbers.BrokenProcessPool("A process was terminated abruptly")

    monkeypatch.setattr(FullDisk, "map", fail)
    monkeypatch.setattr(spoken_numbers, "_loader", lambda: None)
    monkeypatch.setattr(spoken_numbers, "ProcessPoolExecutor", FullDisk)
    with pytest.raises(UserError, match="a process that synthesises was killed, or imports"):
        prepare(tmp_path / "corpus", **SPLITS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["fifo", "nested"])
def test_a_stamp_that_is_none_is_refused(tmp_path, kind):
    stamp = tmp_path / spoken_numbers.STAMP
    os.mkfifo(stamp) if kind == "fifo" else stamp.write_text("[" * 200_000)
    with pytest.raises(UserError, match=r"not a regular file|of other settings"):
        prepare(tmp_path)

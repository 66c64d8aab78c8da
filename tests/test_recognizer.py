"""From audio to timed words, judged by a model that hears tones without a mistake."""

import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import RATE
from tone_model import LETTER, spoken, tone_recognizer

from asr.data.text import Characters, SentencePieces
from asr.recognizer import Recognizer
from asr.transcript import token_texts
from features.samples import AudioError

WORDS = ["abc", "cab", "bca", "ac", "b", "c", "a", "bab", "cb", "abcabc", "bc", "ca", "cbc"]
FRAME = 0.04  # of memory


@pytest.mark.parametrize("with_ctc", [True, False], ids=["ctc", "attention"])
@pytest.mark.parametrize("pause", [0.3, 0.12])
def test_words_start_when_they_are_said(pause, with_ctc):
    samples, starts = spoken(WORDS, pause)
    told = tone_recognizer(with_ctc=with_ctc).transcribe(samples)
    assert told.text.split() == WORDS == [word.text for word in told.words]
    found = [word.start for word in told.words]
    errors = np.abs(np.array(found) - starts)
    assert np.median(errors) <= 0.08 and errors.max() <= 0.12
    assert all(word.start < word.end for word in told.words)
    assert len(told.times) == len(told.tokens) and sorted(told.times) == list(told.times)


def test_ctc_times_are_exact_to_a_frame():
    samples, starts = spoken(WORDS, 0.3)
    told = tone_recognizer().transcribe(samples)
    for word, start in zip(told.words, starts, strict=True):
        assert abs(word.start - start) <= FRAME
        assert abs(word.end - (start + LETTER * (len(word.text) - 1))) <= 2 * FRAME
        assert 0.95 < word.confidence <= 1


@pytest.mark.parametrize("beam", [1, 4])
def test_ctc_alone_times_and_trusts_its_words_too(beam):
    samples, _ = spoken(WORDS, 0.3)
    joint = tone_recognizer().transcribe(samples)
    alone = tone_recognizer(search="ctc", beam=beam).transcribe(samples)
    assert [w.text for w in alone.words] == WORDS
    assert [w.start for w in alone.words] == [w.start for w in joint.words]
    sure = 1.0001 / 1.0008  # a label among the eight of the tone model's CTC head
    assert [word.confidence for word in alone.words] == pytest.approx([sure] * 13, abs=1e-5)


def test_a_frame_of_memory_lasts_as_long_as_the_reduction_says():
    assert tone_recognizer().frame_seconds == pytest.approx(FRAME)


@pytest.mark.parametrize("longest", [2.0, 5.0, 7.3])
@pytest.mark.parametrize("pause", [0.3, 0.12], ids=["pauses", "none"])
def test_long_audio_says_every_word_once_at_its_time(longest, pause):
    words = [WORDS[i % 13] for i in range(61)]
    samples, starts = spoken(words, pause)
    told = tone_recognizer(longest, overlap=min(2.0, longest / 4)).transcribe(samples)
    if pause < 0.2 and longest < 3:
        # Nobody pauses and half a second is shared: a word may be broken, but not many are.
        assert abs(len(told.words) - 61) <= 8
        return
    assert told.text.split() == words
    errors = np.abs(np.array([word.start for word in told.words]) - starts)
    assert np.median(errors) <= 0.08 and errors.max() <= 0.12
    assert told.words[-1].end <= len(samples) / RATE


def test_batch_mates_change_nothing(tmp_path):
    paths, alone = [], []
    for number, count in enumerate((3, 13, 1, 7, 11)):
        samples, _ = spoken(WORDS[:count], 0.3, seed=number)
        paths.append(tmp_path / f"{number}.wav")
        soundfile.write(paths[-1], samples, RATE, subtype="FLOAT")
        alone.append(tone_recognizer(4.0).transcribe(paths[-1]))
    for seconds in (0.5, 9.0, 240.0):
        together = tone_recognizer(4.0, batch_seconds=seconds).transcribe_files(paths)
        for (path, told), before, expected in zip(together, alone, paths, strict=True):
            assert path == expected
            assert (told.text, told.tokens, told.words) == (before.text, before.tokens, told.words)
            assert told.score == pytest.approx(before.score, abs=1e-4)


@pytest.mark.parametrize(
    "samples",
    [np.zeros(0), np.zeros(3), np.zeros(RATE), np.zeros(50 * RATE), np.full(RATE, 1e-4)],
    ids=["none", "less than a frame", "a second", "long", "a hum far below hearing"],
)
def test_where_nothing_is_said_nothing_is_heard(samples, tmp_path):
    told = tone_recognizer(5.0).transcribe(samples)
    assert (told.text, told.tokens, told.times, told.words) == ("", (), (), ())
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    assert tone_recognizer(5.0).transcribe(tmp_path / "a.wav") == told


def test_samples_come_with_their_rate_and_shape():
    samples, _ = spoken(["abc"], 0.3)
    hear = tone_recognizer().transcribe
    stereo = np.stack([samples, samples], axis=1)
    assert hear(samples, float(RATE)).text == hear(stereo).text == "abc"
    for wrong, rate in ((stereo.T, RATE), (samples, 0)):
        with pytest.raises(AudioError, match="the waveform: "):
            hear(wrong, rate)


def test_a_silent_piece_is_left_to_rest():
    samples, starts = spoken(["abc", "cab"], 0.3)
    silence = np.zeros(30 * RATE)
    told = tone_recognizer(4.0).transcribe(np.concatenate([samples, silence, samples]))
    assert told.text == "abc cab abc cab"
    shift = (len(samples) + len(silence)) / RATE
    assert told.words[2].start == pytest.approx(starts[0] + shift, abs=0.08)


def test_files_that_cannot_be_read_are_noted_or_raised(tmp_path):
    samples, _ = spoken(["abc"], 0.3)
    good, bad = tmp_path / "good.wav", tmp_path / "bad.wav"
    soundfile.write(good, samples, RATE)
    bad.write_bytes(b"no audio")
    faults = {}
    told = dict(tone_recognizer().transcribe_files([bad, good], faults))
    assert list(told) == [good] and told[good].text == "abc"
    assert list(faults) == [bad] and "not readable as audio" in faults[bad]
    with pytest.raises(AudioError, match="not readable"):
        list(tone_recognizer().transcribe_files([bad, good]))


def test_the_longest_piece_is_what_was_trained_on(tiny_run):
    assert Recognizer.load(tiny_run).longest == 35.0
    assert Recognizer.load(tiny_run, ["data.max_seconds=7"]).longest == 7.0
    assert Recognizer.load(tiny_run, ["data.max_seconds=0.5"]).longest == 1.0
    assert Recognizer.load(tiny_run, ["decode.longest=3", "data.max_seconds=7"]).longest == 3.0


def test_token_texts_add_up_to_the_text():
    lines = ["the cat sat on a mat", "a cat and a rat", "that hat", "on the mat the cat sat"]
    draw = torch.Generator().manual_seed(3)
    for tokenizer in (Characters.train(lines), SentencePieces.train(lines, 40, "bpe")):
        for line in lines:
            ids = tokenizer.encode(line)
            assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids) == line
        for _ in range(50):  # what a model may say, special tokens too
            ids = torch.randint(tokenizer.size, (17,), generator=draw).tolist()
            assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids)

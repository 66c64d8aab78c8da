"""From audio to timed words, with a model that recognises tones without errors."""

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import RATE
from tone_model import LETTER, ToneModel, spoken, tone_recognizer

from asr.data.tokenizer import Characters, SentencePieces
from asr.errors import UserError
from asr.features import AudioError
from asr.inference.recognition import Recognizer
from asr.inference.transcript import token_texts

WORDS = ["abc", "cab", "bca", "ac", "b", "c", "a", "bab", "cb", "abcabc", "bc", "ca", "cbc"]
FRAME = 0.04  # of memory


@pytest.mark.parametrize("with_ctc", [True, False], ids=["ctc", "attention"])
@pytest.mark.parametrize("pause", [0.3, 0.12])
def test_words_start_at_their_times(pause, with_ctc):
    samples, starts = spoken(WORDS, pause)
    result = tone_recognizer(with_ctc=with_ctc)(samples, RATE)
    assert result.text.split() == WORDS == [word.text for word in result.words]
    results = [word.start for word in result.words]
    errors = np.abs(np.array(results) - starts)
    assert np.median(errors) <= 0.08 and errors.max() <= 0.12
    assert all(word.start < word.end for word in result.words)
    assert len(result.times) == len(result.tokens) and sorted(result.times) == list(result.times)


def test_ctc_times_are_exact_to_a_frame():
    samples, starts = spoken(WORDS, 0.3)
    result = tone_recognizer()(samples, RATE)
    for word, start in zip(result.words, starts, strict=True):
        assert abs(word.start - start) <= FRAME
        assert abs(word.end - (start + LETTER * (len(word.text) - 1))) <= 2 * FRAME
        assert 0.95 < word.confidence <= 1


def test_the_default_size_of_a_batch_depends_on_the_device():
    recognizer = tone_recognizer()
    assert recognizer.batch_seconds == 240.0
    recognizer.model.to("meta")
    assert recognizer.batch_seconds == 1920.0
    assert tone_recognizer(batch_seconds=7.0).batch_seconds == 7.0


@pytest.mark.parametrize("beam", [1, 4])
def test_ctc_alone_gives_times_and_confidences_too(beam):
    samples, _ = spoken(WORDS, 0.3)
    joint = tone_recognizer()(samples, RATE)
    alone = tone_recognizer(search="ctc", beam=beam)(samples, RATE)
    assert [w.text for w in alone.words] == WORDS
    assert [w.start for w in alone.words] == [w.start for w in joint.words]
    sure = 1.0001 / 1.0008  # a label among the eight of the tone model's CTC head
    assert [word.confidence for word in alone.words] == pytest.approx([sure] * 13, abs=1e-5)


@pytest.mark.parametrize("seconds", [2.0, 5.0, 7.3])
@pytest.mark.parametrize("pause", [0.3, 0.12], ids=["pauses", "none"])
def test_long_audio_has_every_word_once_at_its_time(seconds, pause):
    words = [WORDS[i % 13] for i in range(61)]
    samples, starts = spoken(words, pause)
    result = tone_recognizer(seconds, overlap=min(2.0, seconds / 4))(samples, RATE)
    if pause < 0.2 and seconds < 3:
        # No pauses and half a second of overlap: a few words are cut.
        assert abs(len(result.words) - 61) <= 8
        return
    assert result.text.split() == words
    errors = np.abs(np.array([word.start for word in result.words]) - starts)
    assert np.median(errors) <= 0.08 and errors.max() <= 0.12
    assert result.words[-1].end <= len(samples) / RATE


def test_batch_mates_change_nothing(tmp_path):
    paths, alone = [], []
    for number, count in enumerate((3, 13, 1, 7, 11)):
        samples, _ = spoken(WORDS[:count], 0.3, seed=number)
        paths.append(tmp_path / f"{number}.wav")
        soundfile.write(paths[-1], samples, RATE, subtype="FLOAT")
        alone.append(tone_recognizer(4.0)(paths[-1]))
    for seconds in (0.5, 9.0, 240.0):
        together = tone_recognizer(4.0, batch_seconds=seconds).transcribe_files(paths)
        for (path, result), before, expected in zip(together, alone, paths, strict=True):
            assert path == expected
            assert (result.text, result.tokens) == (before.text, before.tokens)
            assert result.times == before.times
            words, others = (
                [replace(word, confidence=0.0) for word in each.words] for each in (result, before)
            )
            assert words == others
            assert result.score == pytest.approx(before.score, abs=1e-4)


@pytest.mark.parametrize(
    "samples",
    [np.zeros(0), np.zeros(3), np.zeros(RATE), np.zeros(50 * RATE), np.full(RATE, 0.1)],
    ids=["none", "less than a frame", "a second", "long", "a constant"],
)
def test_silence_gives_an_empty_transcript(samples, tmp_path):
    result = tone_recognizer(5.0)(samples, RATE)
    assert (result.text, result.tokens, result.times, result.words) == ("", (), (), ())
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    assert tone_recognizer(5.0)(tmp_path / "a.wav") == result


def test_samples_need_their_rate_and_shape(tmp_path):
    samples, _ = spoken(["abc"], 0.3)
    recognizer = tone_recognizer()
    stereo = np.stack([samples, samples], axis=1)
    of_hugging_face = {"array": samples, "sampling_rate": RATE}
    for same in (samples, stereo, stereo.T, torch.tensor(samples)[None], of_hugging_face):
        rate = None if same is of_hugging_face else float(RATE)
        assert recognizer(same, rate) == recognizer(samples, RATE)
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    with (tmp_path / "a.wav").open("rb") as file:
        assert recognizer(file) == recognizer((tmp_path / "a.wav").read_bytes())
    assert recognizer(tmp_path / "a.wav") == recognizer((tmp_path / "a.wav").read_bytes())
    assert recognizer(str(tmp_path / "a.wav")) == recognizer(samples.astype(np.float32), RATE)
    with pytest.raises(AudioError, match=r"^the audio: not readable as audio"):
        recognizer(b"no audio")
    for wrong, rate in ((samples[None, None], RATE), (samples, 0), (samples > 0, RATE)):
        with pytest.raises(AudioError, match="the waveform: "):
            recognizer(wrong, rate)
    for wrong in (7, {"array": samples}, [0.0, 0.1], {"path": "a.wav", "bytes": None}):
        with pytest.raises(UserError, match=r"audio of type \w+: give a path"):
            recognizer(wrong, RATE)
    with pytest.raises(UserError, match="sample_rate=16000, but"):
        recognizer({"array": samples, "sampling_rate": 44100}, 16000)
    # At 44.1 kHz, say, but taken for the model's rate, they would give a wrong text.
    with pytest.raises(AudioError, match=f"sample_rate={RATE}"):
        recognizer(samples)


def test_long_silences_are_not_decoded(monkeypatch):
    """Features of the parts with sound alone; times and length are those of the recording."""
    samples, starts = spoken(WORDS[:4], 0.3)
    gap, end = np.full(3 * RATE, 1e-5), np.full(5 * RATE, 1e-5)
    recognizer, lengths = tone_recognizer(30.0), []
    encode = recognizer.model.encode
    monkeypatch.setattr(
        recognizer.model, "encode", lambda x, n: lengths.extend(n.tolist()) or encode(x, n)
    )
    result = recognizer(np.concatenate([gap, samples, gap, samples, end]), RATE)
    assert [word.text for word in result.words] == 2 * WORDS[:4]
    second = 6 + len(samples) / RATE
    times = [start + shift for shift in (3, second) for start in starts]
    assert np.abs(np.array([word.start for word in result.words]) - times).max() <= 0.12
    assert result.seconds == pytest.approx(11 + 2 * len(samples) / RATE)
    assert sum(lengths) / 100 < 2 * len(samples) / RATE + 1.1


class UnsureModel(ToneModel):
    """Hallucinates: its decoder is unsure, and its CTC head finds `blanks` for its tokens."""

    def __init__(self, unsure, blanks):
        super().__init__()
        self.unsure, self.blanks = unsure, blanks

    def step(self, state, tokens):
        log_probs, state = super().step(state, tokens)
        return (log_probs * (0.2 if self.unsure else 1.0)).log_softmax(-1), state

    def ctc(self, memory):
        log_probs = super().ctc(memory)
        return (log_probs * (0.1 if self.blanks else 1.0) + self.blanks * BLANK_FIRST).log_softmax(
            -1
        )


BLANK_FIRST = torch.tensor([6.0] + [0.0] * 7)


@pytest.mark.parametrize("search", [{"beam": 1}, {"beam": 3, "ctc_weight": 0.1}])
@pytest.mark.parametrize(
    ("unsure", "blanks", "threshold", "kept"),
    [
        (True, True, -0.5, False),
        (True, True, None, True),
        (True, False, -0.5, True),
        (False, True, -0.5, True),  # of a CTC head that is not trained yet
    ],
)
def test_a_text_that_neither_decoder_nor_ctc_believes_is_dropped(
    unsure, blanks, threshold, kept, search
):
    recognizer = tone_recognizer(4.0, no_speech_log_prob=threshold, **search)
    recognizer.model = UnsureModel(unsure, blanks)
    samples, _ = spoken(WORDS, 0.3)
    result = recognizer(samples, RATE)
    assert (result.text.split(), len(result.words)) == ((WORDS, 13) if kept else ([], 0))


def test_the_level_is_that_of_the_loudest_part(tmp_path):
    samples, _ = spoken(WORDS, 0.3)
    loud = tone_recognizer(4.0)(samples, RATE)
    quiet = tone_recognizer(4.0)(0.1 + samples * 1e-3, RATE)
    assert quiet.level == pytest.approx(loud.level - 60, abs=0.1) and -20 < loud.level < 0
    assert tone_recognizer()(np.zeros(RATE), RATE).level == -180


def test_unreadable_files_are_recorded_or_raised(tmp_path):
    samples, _ = spoken(["abc"], 0.3)
    good, bad = tmp_path / "good.wav", tmp_path / "bad.wav"
    soundfile.write(good, samples, RATE)
    bad.write_bytes(b"no audio")
    faults = {}
    result = dict(tone_recognizer().transcribe_files([bad, good], faults))
    assert list(result) == [good] and result[good].text == "abc"
    assert list(faults) == [bad] and "not readable as audio" in faults[bad]
    with pytest.raises(AudioError, match="not readable"):
        list(tone_recognizer().transcribe_files([bad, good]))
    with pytest.raises(UserError, match=r"must be a list, \['.*good.wav'\]"):
        list(tone_recognizer().transcribe_files(good))


def resident_megabytes():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_hours_of_silence_are_not_held(tmp_path, monkeypatch):
    """A FLAC of 4 MB may have them; a good file before and after it is transcribed."""
    soundfile.write(tmp_path / "a.wav", spoken(["abc"], 0.3)[0], RATE)
    recognizer, most = tone_recognizer(batch_seconds=20.0), 0.0
    stream = recognizer.front_end.stream

    def silence(path):
        nonlocal most
        if path.stem != "silence":
            yield from stream(path)
            return
        for _ in range(100):  # 400 MB
            yield torch.zeros(2**20)
            most = max(most, resident_megabytes())

    monkeypatch.setattr(recognizer.front_end, "stream", silence)
    paths = [tmp_path / "a.wav", tmp_path / "silence", tmp_path / "a.wav"]
    before = resident_megabytes()
    results = list(recognizer.transcribe_files(paths))
    assert [(path, result.text) for path, result in results] == [
        (path, text) for path, text in zip(paths, ("abc", "", "abc"), strict=True)
    ]
    assert results[1][1].seconds == 100 * 2**20 / RATE
    assert most - before < 100


@pytest.mark.parametrize("pause", [0.3, 0.12], ids=["pauses", "none"])
def test_long_audio_is_decoded_while_it_is_read(monkeypatch, pause):
    samples, _ = spoken(WORDS * 4, pause)
    wave = torch.from_numpy(samples).float()
    recognizer = tone_recognizer(3.0, overlap=0.75, batch_seconds=10.0)
    whole = recognizer(samples, RATE)
    read, decoded, encode = 0, 0.0, recognizer.model.encode

    def blocks(path):
        nonlocal read
        for block in wave.split(RATE):
            read += len(block) / RATE
            yield block
            assert read - decoded <= 2 * 10 + 2 * 3 + 1

    def counted(features, lengths):
        nonlocal decoded
        decoded += int(lengths.sum()) / 100 * 0.9  # of a segment, frames leave its end unused
        return encode(features, lengths)

    monkeypatch.setattr(recognizer.front_end, "stream", blocks)
    monkeypatch.setattr(recognizer.model, "encode", counted)
    assert recognizer("any") == whole and read == pytest.approx(len(wave) / RATE)


def test_damage_after_minutes_is_a_fault_of_that_file_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("asr.features.audio.BLOCK_VALUES", RATE)
    paths = [tmp_path / f"{name}.flac" for name in ("one", "broken", "two")]
    for path in paths:
        soundfile.write(path, spoken(WORDS * (5 if path.stem == "broken" else 1), 0.3)[0], RATE)
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[: len(content) // 2])
    faults = {}
    recognizer = tone_recognizer(3.0, batch_seconds=6.0)
    results = dict(recognizer.transcribe_files(paths, faults))
    assert {path: result.text.split() for path, result in results.items()} == {
        paths[0]: WORDS,
        paths[2]: WORDS,
    }
    assert list(faults) == [paths[1]]
    assert faults[paths[1]].startswith(f"{paths[1]}: broken, or shorter than")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out of memory; lower decode.max_segment_seconds or decode.beam"),
        (RuntimeError("CUDA error:\nmisaligned"), "cannot be decoded (CUDA error: misaligned)"),
    ],
)
def test_only_the_file_that_cannot_be_decoded_fails(tmp_path, monkeypatch, error, reason):
    """Three frames more than the others, of which some are decoded with it at first."""
    paths = [tmp_path / f"{number}.wav" for number in range(5)]
    for number, path in enumerate(paths):
        soundfile.write(path, spoken(["abcabc" if number == 2 else "abc"], 0.3)[0], RATE)
    recognizer = tone_recognizer()
    encode = recognizer.model.encode

    def fails(features, lengths):
        if features.shape[1] > 100:
            raise error
        return encode(features, lengths)

    monkeypatch.setattr(recognizer.model, "encode", fails)
    faults = {}
    results = [(path, t.text) for path, t in recognizer.transcribe_files(paths, faults)]
    assert results == [(path, "abc") for path in paths if path != paths[2]]
    assert faults == {paths[2]: f"{paths[2]}: {reason}"}
    with pytest.raises(type(error)):
        recognizer(paths[2])


def test_segments_have_the_length_of_the_training_data(tiny_run):
    assert Recognizer.load(tiny_run).max_segment_seconds == 35.0
    assert Recognizer.load(tiny_run, ["data.max_seconds=7"]).max_segment_seconds == 7.0
    assert Recognizer.load(tiny_run, ["data.max_seconds=0.5"]).max_segment_seconds == 1.0
    overrides = ["decode.max_segment_seconds=3", "data.max_seconds=7"]
    assert Recognizer.load(tiny_run, overrides).max_segment_seconds == 3.0


def test_token_texts_add_up_to_the_text():
    lines = ["the cat sat on a mat", "a cat and a rat", "that hat", "on the mat the cat sat"]
    draw = torch.Generator().manual_seed(3)
    for tokenizer in (Characters.train(lines), SentencePieces.train(lines, 40, "bpe")):
        for line in lines:
            ids = tokenizer.encode(line)
            assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids) == line
        for _ in range(50):  # any model output, including special tokens
            ids = torch.randint(tokenizer.size, (17,), generator=draw).tolist()
            assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids)


def test_all_models_move_to_a_device():
    recognizer = tone_recognizer()
    member, recognizer.lm = ToneModel(), torch.nn.Linear(1, 1)
    recognizer.ensemble = (member,)
    assert recognizer.to("meta") is recognizer
    weights = recognizer.model.unused, member.unused, recognizer.lm.weight
    assert {weight.device.type for weight in weights} == {"meta"}
    recognizer.lm = object()  # n-grams are on no device
    recognizer.to("meta")


def test_a_list_is_transcribed_as_each_alone(tmp_path):
    samples, _ = spoken(["ab", "c"], 0.3)
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    recognizer = tone_recognizer()
    several = recognizer.transcribe([samples, tmp_path / "a.wav", np.zeros(RATE)], RATE)
    assert [one.text for one in several] == [recognizer(samples, RATE).text] * 2 + [""]
    assert recognizer.transcribe([]) == []


@pytest.mark.parametrize("audio", ["a.wav", np.zeros(RATE), io.BytesIO(b"RIFF")])
def test_one_recording_is_no_list(audio):
    with pytest.raises(UserError, match="takes a list"):
        tone_recognizer().transcribe(audio, RATE)

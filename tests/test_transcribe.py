"""asr.transcribe's formats, read back by independent libraries, and its errors."""

import json
import os
import tarfile

import numpy as np
import pytest
import soundfile
import srt
import webvtt
from tiny_speech import RATE
from tone_model import spoken, tone_recognizer

from asr import transcribe
from asr.inference import recognition


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    """Two recordings of known words; the command decodes with an error-free model."""
    load = staticmethod(lambda run, overrides=(): tone_recognizer())
    monkeypatch.setattr(recognition.Recognizer, "load", load)
    paths = {}
    for name, words in (("one", ["abc", "cab"]), ("two", ["bca", "ac", "b"])):
        samples, _ = spoken(words, 0.3)
        paths[name] = tmp_path / f"{name}.wav"
        soundfile.write(paths[name], samples, RATE)
    return paths


def test_srt_and_vtt_are_read_by_libraries(recordings, commands, tmp_path):
    for kind in ("srt", "vtt"):
        arguments = ["run", *recordings.values(), "--format", kind, "--out", tmp_path / "out"]
        code, out, _ = commands(transcribe, *arguments)
        assert code == 0 and str(tmp_path / "out" / f"two.{kind}") in out
    (cue,) = srt.parse((tmp_path / "out" / "two.srt").read_text())
    assert cue.content == "bca ac b" and abs(cue.start.total_seconds() - 0.3) <= 0.08
    (caption,) = webvtt.read(str(tmp_path / "out" / "one.vtt"))
    assert caption.text == "abc cab"


def test_json_has_words_with_times_and_confidence(recordings, commands, tmp_path):
    code, out, _ = commands(transcribe, "run", recordings["one"], "--format", "json")
    result = json.loads(out)
    assert code == 0 and [word["text"] for word in result["words"]] == ["abc", "cab"]
    for word in result["words"]:
        assert 0 <= word["start"] < word["end"] and 0 < word["confidence"] <= 1
    commands(transcribe, "run", recordings["one"], "--format", "json", "--out", tmp_path)
    assert json.loads((tmp_path / "one.json").read_text()) == result


def test_a_name_that_is_not_utf8_is_read_back_from_json(recordings, commands, tmp_path):
    name = recordings["one"].rename(os.fsdecode(bytes(tmp_path / "one") + b"\xff.wav"))
    for number in range(2):  # to a file, then to stdout
        folder = ["--out", tmp_path / "out"] if number == 0 else []
        code, result, _ = commands(transcribe, "run", name, "--json", *folder)
        assert code == 0
    for text in (next((tmp_path / "out").iterdir()).read_text(), result):
        assert json.loads(text)["audio"] == str(name)


def test_subtitles_of_several_recordings_need_a_folder(recordings, commands):
    line = commands.refused(transcribe, "run", *recordings.values(), "--format", "srt")
    assert line == "--format srt makes a file of each recording: add --out FOLDER"


def test_two_recordings_of_one_name_are_refused(recordings, commands, tmp_path):
    files = [recordings["one"], tmp_path / "other" / "one.wav"]
    line = commands.refused(transcribe, "run", *files, "--out", tmp_path / "out")
    assert "would share a file in --out" in line and not (tmp_path / "out").exists()


def test_settings_are_not_taken_as_files(commands, tiny_run, tiny):
    assert "no audio file" in commands.refused(transcribe, tiny_run, "decode.beam=2")
    file = tiny.parent / "test-0.flac"
    line = commands.refused(transcribe, tiny_run, file, "decode.beam=0")
    assert line.startswith("command line: decode.beam = 0: should be greater than or equal to 1")


def test_ctc_weight_needs_a_ctc_head(commands, tiny_run, tiny):
    more = ["decode.ctc_weight=0.3", "model.ctc_weight=0"]
    line = commands.refused(transcribe, tiny_run, tiny.parent / "test-0.flac", *more)
    assert "decode.ctc_weight=0.3 needs a CTC head" in line


def test_silence_and_empty_audio_give_empty_transcripts(commands, tiny_run, tmp_path):
    for name, count in (("silent", 4000), ("empty", 0)):
        soundfile.write(tmp_path / f"{name}.wav", np.zeros(count), RATE)
        code, out, _ = commands(transcribe, tiny_run, tmp_path / f"{name}.wav")
        assert (code, out) == (0, f"{tmp_path / name}.wav: \n")


def test_a_folder_name_may_contain_an_equals_sign(commands, tiny_run, tmp_path):
    """As the runs of a sweep do; also for members of a tar, which are not files."""
    folder = tmp_path / "norm=ba"
    folder.mkdir()
    wave = spoken(["ac"], 0.3)[0]
    soundfile.write(folder / "a.flac", wave, RATE)
    with tarfile.open(folder / "x.tar", "w") as tar:
        tar.add(folder / "a.flac", "a.flac")
    with tarfile.open(folder / "x.tar") as tar:
        (member,) = tar.getmembers()
    packed = folder / "x.tar" / f"a.flac@{member.offset_data}+{member.size}"
    code, out, _ = commands(transcribe, tiny_run, packed, folder / "a.flac")
    result = [line.rpartition(": ")[2] for line in out.splitlines()]
    assert code == 0 and len(result) == 2 and result[0] == result[1]
    code, _, err = commands(transcribe, tiny_run, folder / "away.flac")
    assert code == 2 and err == f"error: {folder / 'away.flac'}: no such file\n"

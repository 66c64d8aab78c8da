"""asr.transcribe's formats, read back by independent libraries, and its errors."""

import io
import json
import os
import shutil
import subprocess
import tarfile

import numpy as np
import pytest
import soundfile
import srt
import torch
import webvtt
from full_disk import full_disk
from tiny_speech import RATE, tones
from tone_model import spoken, tone_recognizer

from asr import transcribe
from asr.features import AudioError
from asr.features.audio import read_audio
from asr.features.containers import container_of, stream_container
from asr.inference import recognition
from asr.inference.sources import open_sources


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
    keys = {"audio", "text", "score", "tokens", "times", "words", "seconds", "level"}
    assert result.keys() == keys and result["score"] <= 0
    assert len(result["times"]) == len(result["tokens"])
    assert result["times"][0] == result["words"][0]["start"]
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


def test_every_recording_is_one_line_of_text_and_once(recordings, commands, tmp_path, monkeypatch):
    name = recordings["two"].rename(tmp_path / "two\nthree: x.wav")
    monkeypatch.chdir(tmp_path)
    files = ["one.wav", "./one.wav", name.name]
    code, out, _ = commands(transcribe, "run", *files)
    assert code == 0
    assert out.splitlines() == ["one.wav: abc cab", f"{name.name!r}: bca ac b"]
    code, out, _ = commands(transcribe, "run", *files, "--out", "out")
    assert code == 0 and len(out.splitlines()) == 2
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == ["one", name.stem]


def test_what_is_no_recording_is_one_line_and_the_others_are_transcribed(
    recordings, commands, tmp_path
):
    os.mkfifo(tmp_path / "pipe.wav")  # opening one would block
    os.mkfifo(tmp_path / "x.tar")
    (tmp_path / "loop.wav").symlink_to("loop.wav")
    (tmp_path / "zero.wav").symlink_to("/dev/zero")
    (tmp_path / "text.wav").write_text("RIFF no audio")
    bad = [
        "pipe.wav",
        "x.tar/a.wav@512+9",
        "loop.wav",
        "zero.wav",
        "text.wav",
        "x" * 300,
        "a\n.wav",
    ]
    bad = [tmp_path / name for name in bad]
    code, out, err = commands(
        transcribe, "run", recordings["one"], *bad, recordings["two"], "--json"
    )
    assert code == 2
    texts = {row["audio"]: row["text"] for row in map(json.loads, out.splitlines())}
    assert texts == {str(recordings["one"]): "abc cab", str(recordings["two"]): "bca ac b"}
    assert len(err.splitlines()) == len(bad)
    for line, path in zip(err.splitlines(), bad, strict=True):
        assert line.startswith("error: ") and ascii(str(path))[1:-1] in line


def test_subtitles_of_several_recordings_need_a_folder(recordings, commands):
    line = commands.refused(transcribe, "run", *recordings.values(), "--format", "srt")
    assert line == "--format srt makes a file of each recording: add --out FOLDER"


def test_recordings_of_one_name_keep_their_folders(recordings, commands, tmp_path):
    """Those of a named folder its own; where two would share a name, all, and their suffixes."""
    folder = tmp_path / "in"
    for name in ("a/one.wav", "b/deep/one.wav", "b/deep/.hidden.wav", ".git/one.wav", "two.WAV"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(recordings["one"], folder / name)
    (folder / "notes.txt").write_text("no audio")
    (folder / "again").symlink_to(folder)
    code, out, _ = commands(transcribe, "run", folder, "--out", tmp_path / "out")
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*")}
    assert code == 0 and written == {"a/one.txt", "b/deep/one.txt", "two.txt"}
    assert [line.split(": ")[0] for line in out.splitlines()] == [
        str(folder / name) for name in ("two.WAV", "a/one.wav", "b/deep/one.wav")
    ]
    shutil.copy(recordings["two"], folder / "a" / "one.flac")
    assert commands(transcribe, "run", folder, "--out", tmp_path / "all")[0] == 0
    written = {str(path.relative_to(tmp_path / "all")) for path in tmp_path.glob("all/**/*.*")}
    assert written == {
        "a/one.flac.txt", "a/one.wav.txt", "b/deep/one.wav.txt", "two.WAV.txt",
    }  # fmt: skip
    (tmp_path / "link").symlink_to(folder / "b" / "deep")
    named = [folder / "a" / "one.wav", folder / "a" / "one.flac", tmp_path / "link/../deep/one.wav"]
    code, _, _ = commands(transcribe, "run", *named, recordings["two"], "--out", tmp_path / "two")
    texts = {
        str(p.relative_to(tmp_path / "two")): p.read_text() for p in tmp_path.glob("two/**/*.*")
    }
    assert texts == {
        "in/a/one.wav.txt": "abc cab\n",
        "in/a/one.flac.txt": "bca ac b\n",
        "in/b/deep/one.wav.txt": "abc cab\n",
        "two.wav.txt": "bca ac b\n",
    }


def test_a_folder_of_transcripts_is_not_left_through_a_link(recordings, commands, tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    recordings["one"].rename(tmp_path / "in" / "a" / "one.wav")
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "elsewhere")
    line = commands.refused(transcribe, "run", tmp_path / "in", "--out", tmp_path / "out")
    assert "symbolic link" in line and not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_without_audio_is_one_line(recordings, commands, tmp_path):
    (tmp_path / "empty").mkdir()
    code, out, err = commands(transcribe, "run", tmp_path / "empty", recordings["one"])
    assert code == 2 and out == f"{recordings['one']}: abc cab\n"
    assert err == f"error: {tmp_path / 'empty'}: no audio file in this folder\n"


def test_standard_input(recordings, commands, tmp_path, monkeypatch):
    for content, code, words in (
        (recordings["one"].read_bytes(), 0, "-: abc cab\n"),
        (b"", 2, "error: -: the file is empty (0 bytes)\n"),
        (b"RIFF no audio", 2, "error: -: not readable as audio ("),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        result = commands(transcribe, "run", "-")
        assert result[0] == code and result[1 if code == 0 else 2].startswith(words)
    content = recordings["two"].read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert commands(transcribe, "run", "-", "--json", "--out", tmp_path / "out")[0] == 0
    result = json.loads((tmp_path / "out" / "stdin.json").read_text())
    assert (result["audio"], result["text"]) == ("-", "bca ac b")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    with full_disk(1000):
        line = commands.refused(transcribe, "run", "-")
    assert "/stdin-" in line and line.endswith(": File too large")


def test_audio_of_a_few_frames_has_no_text(recordings, commands, tmp_path):
    """A model gives a letter for it."""
    samples = tones("a", 0)
    soundfile.write(tmp_path / "long.wav", samples[:920], RATE)  # 10 frames
    soundfile.write(tmp_path / "short.wav", samples[:919], RATE)
    code, out, err = commands(transcribe, "run", tmp_path / "long.wav", tmp_path / "short.wav")
    assert code == 0 and out == f"{tmp_path}/long.wav: a\n{tmp_path}/short.wav: \n"
    assert err.startswith(
        f"warning: {tmp_path}/short.wav: 0.115 seconds of audio, fewer than 0.115"
    )
    assert err.endswith("its transcript is empty\n") and len(err.splitlines()) == 1


FFMPEG = shutil.which("ffmpeg")


def test_other_kinds_of_recordings_in_a_folder_are_named(tmp_path):
    names = {"a.wav": 1, "b.mov": 1, "c.avi": 0, "d.txt": 0, "e.WMA": 0}
    for name in names:
        (tmp_path / name).write_bytes(b"")
    faults = {}
    with open_sources([tmp_path], faults) as sources:
        assert [source.path.name for source in sources] == [n for n, read in names.items() if read]
    assert [path.name for path in faults] == ["c.avi", "e.WMA"]
    assert "convert it to FLAC: ffmpeg -i FILE FILE.flac" in faults[tmp_path / "c.avi"]


def test_a_folder_that_cannot_be_written_is_refused_before_decoding(commands, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "a.wav").write_bytes(b"")
    line = commands.refused(transcribe, "run", tmp_path / "a.wav", "--out", tmp_path / "file")
    assert f"{tmp_path}/file: {tmp_path}/file cannot be written into; choose another --out" in line


CODECS = {"m4a": "aac", "mp4": "aac", "webm": "libopus"}


@pytest.mark.skipif(FFMPEG is None, reason="ffmpeg is not installed")
@pytest.mark.parametrize("kind", CODECS)
def test_ffmpeg_decodes_what_libsndfile_cannot(kind, recordings, commands, tmp_path):
    file = tmp_path / f"one.{kind}"
    line = [FFMPEG, "-v", "error", "-i", recordings["one"], "-ar", "48000", "-ac", "2"]
    subprocess.run([*line, "-c:a", CODECS[kind], file], check=True)
    code, out, err = commands(transcribe, "run", file, "--json")
    result = json.loads(out)
    assert code == 0 and result["text"] == "abc cab"
    assert result["seconds"] == pytest.approx(soundfile.info(recordings["one"]).duration, abs=0.1)
    content = file.read_bytes()
    (blocks, same) = (stream_container(x, container_of(x), RATE) for x in (file, content))
    assert torch.equal(torch.cat(list(blocks)), torch.cat(list(same)))
    with pytest.raises(AudioError, match=r"^the audio: "):
        list(stream_container(content[:12] + bytes(700), container_of(content), RATE))
    file.write_bytes(file.read_bytes()[:12] + bytes(700))
    code, out, err = commands(transcribe, "run", file)
    assert code == 2 and err.startswith(f"error: {file}: ") and len(err.splitlines()) == 1


@pytest.mark.skipif(FFMPEG is None, reason="ffmpeg is not installed")
@pytest.mark.parametrize("channels", [1, 2])
def test_loud_channels_are_averaged_as_by_libsndfile(channels, tmp_path):
    sine = 0.9 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    soundfile.write(tmp_path / "in.wav", np.stack([sine] * channels, axis=1), RATE)
    path = tmp_path / "in.mkv"
    line = [FFMPEG, "-v", "error", "-i", tmp_path / "in.wav", "-c:a", "flac", path]
    subprocess.run(line, check=True)
    waveform = torch.cat(list(stream_container(path, container_of(path), RATE)))
    expected = read_audio(tmp_path / "in.wav", RATE)
    torch.testing.assert_close(waveform, expected, atol=1e-4, rtol=0)


GAP = "asetpts='if(gt(T,1),PTS+3*SR,PTS)'"  # three seconds without audio from second 1 on


@pytest.mark.skipif(FFMPEG is None, reason="ffmpeg is not installed")
@pytest.mark.parametrize(
    ("kind", "codec"), [("m4a", "aac"), ("mp4", "aac"), ("mkv", "flac"), ("webm", "libopus")]
)
def test_times_are_those_of_the_container(kind, codec, tmp_path):
    """The judge is where a burst of noise, at 1.5 s of 2, is found."""
    samples, rate = np.zeros((96_000, 1), np.float32), 48_000
    samples[72_000:76_800, 0] = np.random.default_rng(0).uniform(-0.5, 0.5, 4_800)
    soundfile.write(tmp_path / "in.wav", samples, rate)
    video = ["-f", "lavfi", "-i", "testsrc=s=32x32:r=5:d=6", "-map", "0:v", "-map", "1:a"]
    video += ["-c:v", "libvpx" if kind == "webm" else "mpeg4"]
    cases = {
        "plain": ([], [], 1.5),
        "late": (["-itsoffset", "4"], [] if kind == "m4a" else video, 5.5),
        "gap": ([], ["-af", GAP], 4.5),
    }
    for name, (before, after, expected) in cases.items():
        path = tmp_path / f"{name}.{kind}"
        line = [FFMPEG, "-v", "error", *after[:4], *before, "-i", tmp_path / "in.wav", *after[4:]]
        if name == "gap":
            line = [FFMPEG, "-v", "error", "-i", tmp_path / "in.wav", *after]
        subprocess.run([*line, "-c:a", codec, path], check=True)
        waveform = torch.cat(list(stream_container(path, container_of(path), 16_000)))
        found = int((waveform.abs() > 0.1).nonzero()[0]) / 16_000
        assert found == pytest.approx(expected, abs=0.03), name


@pytest.mark.skipif(FFMPEG is None, reason="ffmpeg is not installed")
@pytest.mark.parametrize("hours", [2, 13, 26])  # ffmpeg's number of samples overflows at 12
def test_a_gap_that_ffmpeg_cannot_fill_is_reported(hours, recordings, commands, tmp_path):
    line = [FFMPEG, "-v", "error", "-itsoffset", str(3600 * hours), "-i", recordings["one"]]
    subprocess.run([*line, "-ar", "48000", "-c:a", "flac", tmp_path / "late.mka"], check=True)
    line = commands.refused(transcribe, "run", tmp_path / "late.mka")
    gap = f"late.mka: no audio from 0.000 s to {3600 * hours}.000 s, too long to fill with silence;"
    assert gap in line


def test_without_ffmpeg_a_line_names_it(recordings, commands, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "one.m4a").write_bytes(b"\0\0\0\x20ftypM4A \0\0\0\0")
    line = commands.refused(transcribe, "run", tmp_path / "one.m4a")
    assert line.startswith(
        f"{tmp_path}/one.m4a: M4A, MP4 and WebM need the program ffmpeg; install"
    )


def test_settings_are_not_taken_as_files(commands, tiny_run, tiny):
    assert "no audio: name files" in commands.refused(transcribe, tiny_run, "decode.beam=2")
    line = commands.refused(transcribe, tiny_run, tiny.parent / "test-0.flac", "--attempt", 2)
    assert "--shard-files and --attempt are for --list" in line
    file = tiny.parent / "test-0.flac"
    line = commands.refused(transcribe, tiny_run, file, "decode.beam=0")
    assert line.startswith("command line: decode.beam = 0: should be greater than or equal to 1")


def test_quiet_and_silent_files_are_named_with_their_level(commands, tiny_run, tmp_path):
    wave = spoken(["ac"], 0.3)[0]
    sounds = {"loud": wave, "quiet": wave * 1e-3, "silent": np.full(len(wave), 0.1)}
    for name, sound in sounds.items():
        soundfile.write(tmp_path / f"{name}.wav", sound, RATE)
    files = [tmp_path / f"{name}.wav" for name in sounds]
    code, out, err = commands(transcribe, tiny_run, *files, "--json")
    loud, quiet, silent = map(json.loads, out.splitlines())
    assert code == 0 and silent["text"] == "" and silent["level"] < -110
    assert quiet["level"] == pytest.approx(loud["level"] - 60, abs=0.5)
    assert err.splitlines() == [
        f"warning: {tmp_path}/quiet.wav: too quiet, {quiet['level']:.0f} dB of full scale at most; "
        "its transcript may be wrong",
        f"warning: {tmp_path}/silent.wav: silent, or its channels cancel each other; "
        "its transcript is empty",
    ]


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

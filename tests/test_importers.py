"""Corpora in the forms of other tools: rows, samples, faults, splits, and what auto recognises."""

import csv
import gzip
import importlib.util
import io
import shutil
import subprocess
import sys
import unicodedata
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile
from scipy.signal import resample_poly
from tiny_speech import json_lines

from asr import prepare
from asr.data.corpus import read_manifest
from asr.data.importers import convert as convert_module
from asr.data.importers.convert import Options, convert
from asr.data.importers.formats import FORMATS, GENERAL
from asr.data.importers.hold_out import hold_out
from asr.data.importers.rows import Split
from asr.data.importers.text_normalization import TextNormalizer
from asr.decoding.subtitles import Cue, srt, webvtt
from asr.errors import UserError
from asr.features.audio import read_audio
from asr.features.containers import container_as_flac

RATE = 22_050  # of the recordings, which the recogniser resamples


FFMPEG = shutil.which("ffmpeg")


def noise(path, seconds=1.0, channels=1, rate=RATE, **options):
    """Write white noise -> the samples (S, C) as the file gives them, int16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(len(str(path.name)) + round(1000 * seconds))
    samples = draw.uniform(-0.5, 0.5, (round(seconds * rate), channels))
    soundfile.write(path, samples, rate, **options)
    return soundfile.read(path, dtype="int16", always_2d=True)[0]


def samples_of(utterance):
    """(S, C) int16 of an utterance, read by soundfile alone; and the rate."""
    text = str(utterance.audio)
    if "@" not in text:
        return soundfile.read(text, dtype="int16", always_2d=True)
    tar, _, rest = text.partition(".tar/")
    offset, size = map(int, rest.rpartition("@")[2].split("+"))
    with Path(f"{tar}.tar").open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    return soundfile.read(io.BytesIO(content), dtype="int16", always_2d=True)


def check_audio(utterance, expected, rate=RATE):
    """The utterance's samples are `expected` (S, C), and read_audio gives them at 16 kHz."""
    actual, actual_rate = samples_of(utterance)
    assert actual_rate == rate
    np.testing.assert_array_equal(actual, expected)
    assert utterance.seconds == pytest.approx(len(expected) / rate, abs=1e-3)
    resampled = resample_poly(expected.mean(axis=1), 320, rate // 50)
    at_16k = read_audio(utterance.audio, 16_000).numpy()
    assert len(at_16k) == len(resampled)
    assert np.corrcoef(at_16k, resampled)[0, 1] > 0.98


def part(samples, start, end, rate=RATE):
    first, count = (int(np.floor(t * rate + 0.5 + 1e-6)) for t in (start, end - start))
    return samples[first : first + count]


def kaldi(folder, audio, segments=True):
    """A data directory of a stereo and a mono recording."""
    folder.mkdir(parents=True)
    stereo, mono = noise(audio / "call.wav", 3.1, 2), noise(audio / "mono.flac", 1.7)
    (folder / "wav.scp").write_text(f"call {audio}/call.wav\nmono {audio}/mono.flac\n")
    names = ("call", "mono")
    if segments:
        names = ("b-1", "a-2", "a-3", "m-4")
        (folder / "segments").write_text(
            "b-1 call 0.31 1.73 B\na-2 call 1.5 3.1 A\na-3 call 0 2.9\nm-4 mono 0.2 -1\n"
        )
    (folder / "text").write_text("".join(f"{n} words of  {n}\n" for n in names))
    (folder / "utt2spk").write_text("".join(f"{n} {n[0]}\n" for n in names))
    return stereo, mono


def test_kaldi_segments_are_the_samples_of_their_recordings(tmp_path, asr_prepare):
    stereo, mono = kaldi(tmp_path / "data" / "train", tmp_path / "audio")
    call = ("auto", tmp_path / "data" / "train", "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call)
    assert code == 2 and f"--audio {tmp_path}/audio accepts its audio" in err[-1]
    code, out, err = asr_prepare(*call, "--audio", tmp_path / "audio")
    assert code == 0 and err == [] and "train: read as kaldi\n" in out
    corpus = read_manifest(tmp_path / "to" / "train.tsv")
    assert corpus.ids == ["b-1", "a-2", "a-3", "m-4"] and corpus.speakers == ["b", "a", "a", "m"]
    assert corpus.texts == [f"words of {name}" for name in corpus.ids]
    check_audio(corpus[0], part(stereo, 0.31, 1.73)[:, 1:])
    check_audio(corpus[1], part(stereo, 1.5, 3.1)[:, :1])
    check_audio(corpus[2], part(stereo, 0, 2.9))
    check_audio(corpus[3], part(mono, 0.2, 1.7))


def test_many_letters_are_tokens_themselves_in_the_next_command(tmp_path, asr_prepare):
    for split, texts in (
        ("train", ["".join(map(chr, range(0x4E00, 0x4E00 + 97)))]),
        ("dev", ["一"]),
    ):
        noise(tmp_path / "data" / f"{split}.wav", 0.9)
        lines = ["audio,text", *(f"{split}.wav,{text}" for text in texts)]
        (tmp_path / "data" / f"{split}.csv").write_text("\n".join(lines) + "\n")
    code, out, _ = asr_prepare("table", tmp_path / "data", "--to", tmp_path / "to")
    assert code == 0
    assert "asr.train small_corpus_las_whisper text.kind=characters data.train=" in out


def test_audio_of_two_splits_in_two_folders_needs_their_common_one(tmp_path, asr_prepare):
    for split in ("train", "dev"):
        kaldi(tmp_path / "data" / split, tmp_path / "audio" / split, segments=False)
    call = ("auto", tmp_path / "data", "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call)
    assert code == 2 and f"--audio {tmp_path}/audio accepts its audio" in err[-1]
    assert asr_prepare(*call, "--audio", tmp_path / "audio")[0] == 0


def test_kaldi_recordings_stay_where_they_are(tmp_path, asr_prepare):
    for split in ("train", "dev"):
        stereo, _ = kaldi(tmp_path / "data" / split, tmp_path / "audio", segments=False)
    call = ("kaldi", tmp_path / "data", "--to", tmp_path / "to", "--audio", tmp_path / "audio")
    code, out, _ = asr_prepare(*call, "--text", "upper-az")
    assert code == 0
    train, dev = (tmp_path / "to" / f"{name}.tsv" for name in ("train", "dev"))
    assert out.endswith(
        f"next: python -m asr.train fine_tune data.train={train} data.valid={dev}\n"
    )
    corpus = read_manifest(train)
    assert corpus.texts == ["WORDS OF CALL", "WORDS OF MONO"]
    check_audio(corpus[0], stereo)
    assert corpus[1].audio.resolve() == tmp_path / "audio" / "mono.flac"
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == [
        "dev.audio",
        "dev.tsv",
        "train.audio",
        "train.tsv",
    ]


KALDI_FAULTS = [
    ("wav.scp", "p sph2pipe -f wav p.sph |", "wav.scp:3: is a command, which prepare does not run"),
    ("wav.scp", "p a/raw.ark:1234", "wav.scp:3: is inside a Kaldi archive"),
    ("segments", "s other 0 1", "segments:5: recording 'other' has no file in wav.scp"),
    ("segments", "s mono 1 1", "segments:5: the segment from 1 to 1 s has no length"),
    ("segments", "s mono 1", "segments:5: not a line 'UTTERANCE RECORDING START END'"),
    ("segments", "s mono nan 2", "segments:5: the segment from nan to 2 s has no length"),
    ("segments", "s mono 0 1 C", "segments:5: channel is 'C'"),
    ("segments", "s mono 0 1", "segments:5: the utterance has no line in text"),
    ("segments", "m-4 mono 0 1", "segments:5: id 'm-4' is already in line 4"),
    ("text", "t no audio", "text:5: utterance 't' is not in segments"),
    ("text", "m-4 again", "text:5: 'm-4' is already in line 4"),
]


@pytest.mark.parametrize(("name", "line", "words"), KALDI_FAULTS)
def test_each_fault_of_a_kaldi_directory(tmp_path, asr_prepare, name, line, words):
    folder = tmp_path / "train"
    kaldi(folder, folder / "audio")
    with (folder / name).open("a") as file:
        file.write(f"{line}\n")
    code, _, err = asr_prepare("kaldi", folder, "--to", tmp_path / "to")
    assert code == 2 and len(err) == 2 and err[0].startswith(f"{folder}/{words}")
    assert not (tmp_path / "to").exists()
    code, out, err = asr_prepare("kaldi", folder, "--to", tmp_path / "to", "--skip-bad")
    assert code == 0 and "4 utterances" in out and err[0].startswith(f"skipped: {folder}/{words}")


def test_segments_of_a_command_do_not_hide_its_fault(tmp_path, asr_prepare):
    folder = tmp_path / "train"
    kaldi(folder, folder / "audio")
    command = f"touch {tmp_path}/made; sph2pipe -f wav {folder}/call.sph |"
    (folder / "wav.scp").write_text(f"call {command}\nmono {folder}/audio/mono.flac\n")
    code, _, err = asr_prepare("kaldi", folder, "--to", tmp_path / "to")
    assert code == 2 and len(err) == 2
    assert (
        err[0].startswith(f"{folder}/wav.scp:1: is a command")
        and "done < wav.scp > new.scp" in err[0]
    )
    code, out, err = asr_prepare("kaldi", folder, "--to", tmp_path / "to", "--skip-bad")
    assert code == 0 and "1 utterances" in out and len(err) == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        ("s mono 0.5 2.3", "the part from 0.500 s lasts 1.800 s, but the file ends at 1.700 s"),
        ("s mono 2 3", "the part from 2.000 s is not in the file of 1.700 s"),
        ("s mono 0.1 9999", "the part from 0.100 s is longer than 3600 seconds"),
        ("s mono 0 1 B", "no channel 1, counted from 0: has 1"),
    ],
)
def test_a_segment_that_its_recording_lacks(tmp_path, asr_prepare, segment, words):
    folder = tmp_path / "train"
    kaldi(folder, folder / "audio")
    for name, line in (("segments", segment), ("text", "s a"), ("utt2spk", "s s")):
        with (folder / name).open("a") as file:
            file.write(f"{line}\n")
    code, _, err = asr_prepare("kaldi", folder, "--to", tmp_path / "to")
    assert code == 2 and f"{folder}/segments:5: {folder}/audio/mono.flac: {words}" in err[0]
    assert not (tmp_path / "to").exists()


def common_voice(folder):
    header = "client_id\tpath\tsentence_id\tsentence\tup_votes\tage\n"
    judge = {}
    for split in ("train", "dev", "test", "validated"):
        rows = []
        for number in range(3):
            name = f"common_voice_en_{split}{number}"
            judge[name] = noise(folder / "clips" / f"{name}.mp3", 0.7 + number / 10, rate=32_000)
            ending = ".mp3" if number else ""
            rows.append(f"c{number}\t{name}{ending}\tx\tSay “Ça, {number}”.\t2\t\n")
        (folder / f"{split}.tsv").write_text(header + "".join(rows))
    return judge


def test_common_voice_has_its_splits(tmp_path, asr_prepare):
    judge = common_voice(tmp_path / "en")
    code, out, err = asr_prepare(
        "auto", tmp_path / "en", "--to", tmp_path / "to", "--text", "upper-az"
    )
    assert code == 0 and err == [] and "en: read as table\n" in out
    assert f"{tmp_path}/en: not read: validated.tsv; SOURCE can be one of them\n" in out
    assert sorted(path.name for path in (tmp_path / "to").glob("*.tsv")) == [
        "dev.tsv",
        "test.tsv",
        "train.tsv",
    ]
    corpus = read_manifest(tmp_path / "to" / "train.tsv")
    assert corpus.speakers == ["c0", "c1", "c2"] and set(corpus.texts) == {"SAY CA"}
    for utterance in corpus:
        check_audio(utterance, judge[utterance.id], 32_000)
    lines = [line for line in out.splitlines() if not line.startswith(str(tmp_path))]
    assert lines[0].startswith("--text upper-az: 45 dropped: '“' 9, ',' 9, '”' 9, '.' 9, '0' 3")
    assert lines[1] == "--text upper-az: 9 changed: 'Ç to C' 9"
    assert lines[2].startswith("warning: 9 transcripts lost letters, digits or signs")
    for line, (split, column) in zip(
        lines[3:7], product(("dev", "test"), ("text", "speaker")), strict=True
    ):
        assert line.startswith("warning: 3 of 3 utterances of ")
        assert f"{split}.tsv have a {column} that" in line
    assert "hours are few to train a model from nothing" in lines[7]
    assert lines[8].startswith("next: python -m asr.train fine_tune data.train=")


@pytest.mark.parametrize(
    ("text", "advice", "recipe"),
    [
        ("LE CAFE", "the next command fine-tunes a trained one, which knows English", "fine_tune"),
        ("Hello", "English, prepared with --text upper-az, can be", "small_corpus_conformer"),
        ("LE CAFÉ", "the next command uses a multilingual encoder", "small_corpus_las_whisper"),
    ],
)
def test_a_few_hours_begin_with_what_knows_their_letters(
    text, advice, recipe, tmp_path, asr_prepare
):
    for split in ("train", "valid"):
        noise(tmp_path / "set" / split / "a.wav")
        (tmp_path / "set" / split / "a.txt").write_text(text)
    code, out, _ = asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "to")
    few, command = out.splitlines()[-2:]
    assert code == 0 and f"from nothing: {advice}" in few
    assert command.startswith(f"next: python -m asr.train {recipe} data.train=")


def test_a_table_of_common_voice_alone(tmp_path, asr_prepare):
    common_voice(tmp_path / "en")
    table = tmp_path / "en" / "validated.tsv"
    table.write_text(table.read_text() + "c1\t\tx\tText\t2\t\nc1\tnone\tx\t\t2\t\n")
    code, _, err = asr_prepare("auto", table, "--to", tmp_path / "to")
    assert code == 2 and err[0] == f"{table}:5: no audio file is given"
    assert err[1] == f"{table}:6: the text is empty"
    assert asr_prepare("auto", table, "--to", tmp_path / "to", "--skip-bad")[0] == 0
    assert len(read_manifest(tmp_path / "to" / "validated.tsv")) == 3


def test_ljspeech_to_a_held_out_split(tmp_path, asr_prepare):
    folder = tmp_path / "LJSpeech-1.1"
    judge = {f"LJ001-{n:04d}": noise(folder / "wavs" / f"LJ001-{n:04d}.wav") for n in range(7)}
    rows = [f'{name}|In 18{n}, "so".|In eighteen {n}, "so".' for n, name in enumerate(judge)]
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")
    code, out, _ = asr_prepare("auto", folder, "--to", tmp_path / "to")
    assert code == 0 and "hold out a part: --valid 0.05" in out
    call = ("auto", folder, "--to", tmp_path / "to", "--valid", 0.3)
    code, out, _ = asr_prepare(*call)
    train, valid = (tmp_path / "to" / f"{folder.name}{end}.tsv" for end in ("", "-valid"))
    assert code == 0 and f"data.train={train} data.valid={valid}\n" in out
    parts = [read_manifest(path) for path in (train, valid)]
    assert [len(corpus) for corpus in parts] == [5, 2]
    assert sorted(parts[0].ids + parts[1].ids) == sorted(judge)
    for utterance in (*parts[0], *parts[1]):
        assert utterance.text == f'In eighteen {int(utterance.id[-4:])}, "so".'
        assert utterance.speaker == folder.name
        check_audio(utterance, judge[utterance.id])
    ids = parts[1].ids
    assert asr_prepare(*call)[0] == 0 and read_manifest(valid).ids == ids
    with (folder / "metadata.csv").open("a") as file:
        file.write("LJ001-9999|a|b|c\nLJ001-9998|a|b\n")
    code, _, err = asr_prepare(*call)
    assert code == 2 and err[0].startswith(f"{folder}/metadata.csv:8: 4 fields between |")
    assert err[1].startswith(f"{folder}/metadata.csv:9: ") and "no such file" in err[1]


def test_a_table_in_ljspeech_s_layout_but_with_a_header(tmp_path, asr_prepare):
    """As Coqui's: audio_file|text|speaker_name."""
    noise(tmp_path / "set" / "wavs" / "a.wav")
    rows = "audio_file|text|speaker_name\nwavs/a.wav|some words|ann\n"
    (tmp_path / "set" / "metadata.csv").write_text(rows)
    code, out, _ = asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "to")
    assert code == 0 and "read as table\n" in out
    (manifest,) = (tmp_path / "to").glob("*.tsv")
    assert [(u.text, u.speaker) for u in read_manifest(manifest)] == [("some words", "ann")]
    code, _, (line,) = asr_prepare("ljspeech", tmp_path / "set", "--to", tmp_path / "to")
    assert code == 2 and "metadata.csv: its first line names columns" in line


@pytest.mark.parametrize("large", [0, 11])
def test_a_speaker_of_half_the_corpus_is_not_held_out(tmp_path, large):
    names = [f"s{n}" for n in range(12) for _ in range(29 if n == large else 2)]
    rows = "".join(f"u{n}\t{name}\ta.wav\t1.0\ttext\n" for n, name in enumerate(names))
    manifest = tmp_path / "all.tsv"
    manifest.write_text("id\tspeaker\taudio\tseconds\ttext\n" + rows)
    held_out, _ = hold_out(manifest, 0.05)
    train, valid = (path.read_text().splitlines()[1:] for path in (manifest, held_out))
    assert len(train) + len(valid) == len(names) and 1 <= len(valid) <= 4


def test_speakers_are_held_out_whole(tmp_path, asr_prepare):
    noise(tmp_path / "own" / "a.wav")
    rows = "".join(f"u{n}\ta.wav\ttext\ts{n % 13}\n" for n in range(65))
    (tmp_path / "own" / "all.tsv").write_text("id\taudio\ttext\tspeaker\n" + rows)
    call = ("table", tmp_path / "own" / "all.tsv", "--to", tmp_path)
    code, out, _ = asr_prepare(*call, "--valid", 0.2)
    assert code == 0
    train, valid = (read_manifest(tmp_path / f"all{end}.tsv") for end in ("", "-valid"))
    assert len(train) + len(valid) == 65 and len(valid) in (10, 15)
    assert not set(train.speakers) & set(valid.speakers)
    place = tmp_path / "all-valid.tsv"
    assert f"{place}: {len(set(valid.speakers))} of 13 speakers are held out\n" in out


def test_speakers_whose_names_are_also_ids_are_held_out_whole(tmp_path):
    rows = "".join(f"{n}\t{n % 13}\ta.wav\t1.0\ttext\n" for n in range(65))
    (tmp_path / "all.tsv").write_text("id\tspeaker\taudio\tseconds\ttext\n" + rows)
    valid, line = hold_out(tmp_path / "all.tsv", 0.2)
    voices = [
        {row.split("\t")[1] for row in path.read_text().splitlines()[1:]}
        for path in (valid, tmp_path / "all.tsv")
    ]
    assert f"{len(voices[0])} of 13 speakers" in line and not voices[0] & voices[1]


def test_texts_that_are_held_out_and_trained_on_are_counted(tmp_path, asr_prepare):
    noise(tmp_path / "own" / "a.wav")
    rows = [f"u{n}\ta.wav\tprompt {n % 3 if n < 60 else n}\ts{n % 13}\n" for n in range(65)]
    table = tmp_path / "own" / "all.tsv"
    table.write_text("id\taudio\ttext\tspeaker\n" + "".join(rows))
    call = ("table", table, "--to", tmp_path, "--valid", 0.2)
    code, out, _ = asr_prepare(*call)
    train, valid = (tmp_path / f"all{end}.tsv" for end in ("", "-valid"))
    texts = [read_manifest(path).texts for path in (train, valid)]
    shared = sum(text in texts[0] for text in texts[1])
    assert code == 0 and shared > 5
    assert f"warning: {shared} of {len(texts[1])} utterances of {valid} have a text" in out
    assert "have a speaker that" not in out
    table.write_text("id\taudio\ttext\n" + "".join(f"u{n}\ta.wav\t{n}\n" for n in range(9)))
    code, out, _ = asr_prepare(*call)
    assert code == 0 and "have a text that" not in out


def test_speakers_of_both_splits_are_counted(tmp_path, asr_prepare):
    noise(tmp_path / "own" / "a.wav")
    rows = [f"u{n}\ta.wav\ttext {n}\t{'train' if n < 7 else 'valid'}" for n in range(12)]
    table, valid = tmp_path / "own" / "all.tsv", tmp_path / "valid.tsv"
    header, call = "id\taudio\ttext\tsplit", ("table", table, "--to", tmp_path)
    table.write_text("\n".join([header, *rows]))  # without speakers, the ids stand in their place
    code, out, _ = asr_prepare(*call)
    assert code == 0 and "have a speaker that" not in out
    table.write_text("audio\ttext\tsplit\n" + "a.wav\tone\ttrain\na.wav\ttwo\tvalid\n")
    code, out, _ = asr_prepare(*call)  # the same id, which is no speaker
    assert code == 0 and "have a speaker that" not in out
    speakers = ["a", "b", "a", "b", "a", "b", "a", "b", "c", "c", "b", "d"]
    table.write_text(
        "\n".join([f"{header}\tspeaker", *map("\t".join, zip(rows, speakers, strict=True))])
    )
    code, out, _ = asr_prepare(*call)
    assert code == 0 and f"warning: 2 of 5 utterances of {valid} have a speaker that" in out
    table.write_text(table.read_text().replace("valid", "test"))
    code, out, _ = asr_prepare(*call[:-1], tmp_path / "other")
    assert f"warning: 2 of 5 utterances of {tmp_path}/other/test.tsv have a speaker that" in out


def test_utterances_of_few_speakers_are_held_out(tmp_path):
    rows = "".join(f"u{n}\ts{n % 9}\ta.wav\t1.0\ttext\n" for n in range(40))
    (tmp_path / "all.tsv").write_text("id\tspeaker\taudio\tseconds\ttext\n" + rows)
    valid, line = hold_out(tmp_path / "all.tsv", 0.1)
    count = len(valid.read_text().splitlines()) - 1
    assert count == 4 and "4 utterances are held out" in line and "fewer than 10 speakers" in line


def test_nemo_offsets_are_cut(tmp_path, asr_prepare):
    stereo = noise(tmp_path / "set" / "wav" / "long.wav", 4.3, 2)
    mono = noise(tmp_path / "set" / "a.ogg", 1.1)
    rows = [
        {"audio_filepath": "wav/long.wav", "offset": 0.37, "duration": 1.9, "text": "one"},
        {"audio_filepath": "wav/long.wav", "duration": 2.2, "text": "two", "speaker": 7},
        {"audio_filepath": "a.ogg", "duration": 1.14, "text": "whole", "offset": 0.0},
        {"audio_filepath": f"{tmp_path}/set/a.ogg", "duration": None, "text": "no duration"},
    ]
    manifest = json_lines(tmp_path / "set" / "train_manifest.json", rows)
    code, out, err = asr_prepare("auto", manifest, "--to", tmp_path / "to")
    assert code == 0 and err == [] and "read as table" in out
    corpus = read_manifest(tmp_path / "to" / "train_manifest.tsv")
    assert corpus.texts == ["one", "two", "whole", "no duration"] and corpus.speakers[1] == "7"
    check_audio(corpus[0], part(stereo, 0.37, 2.27))
    check_audio(corpus[1], part(stereo, 0, 2.2))
    for row in (2, 3):
        check_audio(corpus[row], mono)
        assert corpus[row].audio.resolve() == tmp_path / "set" / "a.ogg"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ({"text": "a"}, "no audio file is given"),
        ({"audio_filepath": "a.wav", "text": None}, "the text is empty"),
        ({"audio_filepath": "../b.wav", "text": "a"}, "audio '../b.wav' is outside"),
        ({"audio_filepath": "/none/a.wav", "text": "a"}, "no such file: '/none/a.wav'"),
        ({"audio_filepath": "a\0.wav", "text": "a"}, "no audio file is given"),
        ({"audio_filepath": "a.wav", "text": "a", "offset": "x"}, "offset is 'x', not a number"),
        ({"audio_filepath": "a.wav", "text": "a", "offset": -1}, "offset is -1; it must be 0"),
        ({"audio_filepath": "a.wav", "text": "a", "duration": 1e999}, "duration is inf; it must"),
        (
            {"audio_filepath": "a.wav", "text": "a", "duration": 1.2},
            "duration is 1.2, but the file",
        ),
        ({"audio_filepath": "a.wav", "text": "a", "duration": 1, "offset": 0.7}, "lasts 1.000 s"),
        ({"audio_filepath": "a.wav", "text": "a", "id": "a\tb"}, "has a control character"),
    ],
)
def test_each_fault_of_a_nemo_manifest(tmp_path, asr_prepare, row, words):
    noise(tmp_path / "set" / "a.wav", 1.0)
    noise(tmp_path / "b.wav", 1.0)
    manifest = tmp_path / "set" / "train.json"
    json_lines(manifest, [{"audio_filepath": "a.wav", "text": "good"}, row])
    code, _, err = asr_prepare("table", manifest, "--to", tmp_path / "to")
    assert code == 2 and err[0].startswith(f"{manifest}:2: ") and words in err[0]
    assert len(err) == 2 and not (tmp_path / "to").exists()


def test_wenet_lists(tmp_path, asr_prepare):
    samples = noise(tmp_path / "data" / "wav" / "long.wav", 2.9)
    for split in ("train", "dev"):
        rows = [
            {"key": "u1", "wav": f"{tmp_path}/data/wav/long.wav", "txt": "whole"},
            {"key": "u2", "wav": "wav/long.wav", "txt": "part", "start": 0.41, "end": 1.83},
        ]
        json_lines(tmp_path / "data" / split / "data.list", rows)
    call = ("auto", tmp_path / "data", "--to", tmp_path / "to", "--audio", tmp_path / "data")
    code, out, err = asr_prepare(*call)
    assert code == 0 and "read as table" in out and err == []
    corpus = read_manifest(tmp_path / "to" / "valid.tsv")
    assert corpus.ids == ["u1", "u2"] and corpus.texts == ["whole", "part"]
    check_audio(corpus[0], samples)
    check_audio(corpus[1], part(samples, 0.41, 1.83))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_audiofolder_with_splits_in_its_paths(tmp_path, asr_prepare, kind):
    folder, judge, rows = tmp_path / "set", {}, []
    for split in ("train", "validation"):
        for number in range(2):
            name = f"{split}/{number}.flac"
            judge[name] = noise(folder / name, 1 + number / 7, channels=2)
            rows.append({"file_name": name, "transcription": f'one,\n"two" {name}', "speaker": "s"})
    if kind == "csv":
        with (folder / "metadata.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        json_lines(folder / "metadata.jsonl", rows)
    code, out, err = asr_prepare("auto", folder, "--to", tmp_path / "to")
    assert code == 0 and err == [] and "read as table" in out and "data.valid=" in out
    for split, name in (("train", "train"), ("validation", "valid")):
        corpus = read_manifest(tmp_path / "to" / f"{name}.tsv")
        assert corpus.ids == [f"{split}/{number}" for number in range(2)]
        for utterance in corpus:
            assert utterance.text == f'one, "two" {utterance.id}.flac'
            check_audio(utterance, judge[f"{utterance.id}.flac"])


def test_the_text_column_of_an_audiofolder(tmp_path, asr_prepare):
    noise(tmp_path / "set" / "a.wav")
    table = tmp_path / "set" / "metadata.csv"
    table.write_text("file_name,spoken\na.wav,said\na.wav\n")
    call = ("table", tmp_path / "set", "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call)
    assert code == 2 and "it has file_name, spoken. --text-column NAME chooses one" in err[0]
    code, _, err = asr_prepare(*call, "--text-column", "Spoken")
    assert code == 2 and err[0] == f"{table}:3: 1 fields where the header has 2"
    assert asr_prepare(*call, "--text-column", "spoken", "--skip-bad")[0] == 0
    assert read_manifest(tmp_path / "to" / "set.tsv").texts == ["said"]
    table.write_text('file_name,text\na.wav,"open\n')
    code, _, err = asr_prepare(*call)
    assert code == 2 and err[0].startswith(f"error: {table}:2: not CSV")


HEADERS = {
    "a.csv": ("path,sentence", "{0},{1}"),
    "b.csv": ("File Name;Transcript;Speaker ID", '{0};"{1}";ann'),
    "c.tsv": ("\ufeffAUDIO_FILE\tText\tspk", "{0}\t{1}\tann"),
    "d.csv": ('"wav_filename","wav_filesize","transcript"', '"{0}","3","{1}"'),
    "e.csv": ("audio_file|text|speaker_name", "{0}|{1}|ann"),
    "f.txt": ("text\tpath", "{1}\t{0}"),
    "g.jsonl": ('{{"wav": "{0}", "txt": "{1}", "speaker": "ann"}}',),
    "h.json": ('[{{"file": "{0}", "text": "{1}"}},', ' {{"file": "{2}", "text": "{3}"}}]'),
}


@pytest.mark.parametrize("name", HEADERS)
def test_tables_under_usual_names(tmp_path, asr_prepare, name):
    """Paths from the table, from its wavs/, and with the backslashes of Windows."""
    judge = {
        n: noise(tmp_path / "set" / "wavs" / n, 1 + len(n) / 50) for n in ("a.wav", "x/b.flac")
    }
    header, *row = HEADERS[name]
    lines = [header, *row * 2] if row and "[" not in header else [header, *(row or [header])]
    for paths in (("wavs/a.wav", "wavs/x/b.flac"), ("a.wav", "x/b.flac"), ("a.wav", "x\\\\b.flac")):
        paths = [p.replace("\\\\", "\\") if "json" not in name else p for p in paths]
        texts = ("Hello, you", "Ça va?") if name != "a.csv" else ("Hello you", "Ça va?")
        if "[" in header:
            text = "\n".join(lines).format(paths[0], texts[0], paths[1], texts[1])
        else:
            pairs = zip(paths, texts, strict=True)
            text = "\n".join([*([header] if row else []), *(lines[-1].format(*p) for p in pairs)])
        (tmp_path / "set" / name).write_text(text + "\n\n", encoding="utf-8")
        source = tmp_path / "set" / name
        code, out, err = asr_prepare("auto", source, "--to", tmp_path / "to")
        assert code == 0 and err == [] and "read as table\n" in out
        corpus = read_manifest(tmp_path / "to" / f"{name[0]}.tsv")
        assert corpus.texts == list(texts)
        ids = [p.replace("\\\\", "/").replace("\\", "/").rpartition(".")[0] for p in paths]
        assert corpus.ids == ids
        has_speaker = any(word in text for word in ("ann",))
        assert corpus.speakers == (["ann"] * 2 if has_speaker else ids)
        for utterance, samples in zip(corpus, judge.values(), strict=True):
            check_audio(utterance, samples)


@pytest.mark.parametrize(
    ("paths", "cwd", "remedy"),
    [
        ("wavs/a.wav", "", False),
        ("set/wavs/a.wav", "", False),  # from the folder above the table
        ("set/wavs/a.wav", ".", False),  # from the working directory
        ("{tmp}/set/wavs/a.wav", "", False),
        ("a", "", False),  # without a suffix
        ("else/b.wav", "", True),
        ("{tmp}/else/b.wav", "", True),
        ("../else/b.wav", "", True),
    ],
)
def test_paths_of_a_table_are_found(tmp_path, asr_prepare, monkeypatch, paths, cwd, remedy):
    samples = noise(tmp_path / "set" / "wavs" / "a.wav")
    if remedy:
        samples = noise(tmp_path / "else" / "b.wav")
    if cwd:
        monkeypatch.chdir(tmp_path)
    table = tmp_path / "set" / "all.csv"
    table.write_text(f"path,text\n{paths.format(tmp=tmp_path)},words\n")
    call = ("auto", tmp_path / "set", "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call)
    assert code == (2 if remedy else 0)
    if remedy:
        assert err[-1].startswith(f"error: {table}: --audio {tmp_path}/else accepts its audio")
        assert asr_prepare(*call, "--audio", tmp_path / "else")[0] == 0
    check_audio(read_manifest(tmp_path / "to" / "all.tsv")[0], samples)


def test_common_voice_of_spontaneous_speech(tmp_path, asr_prepare):
    samples = [noise(tmp_path / "set" / "audios" / f"{name}.wav") for name in "abc"]
    splits = {"a": "train", "b": "dev", "c": "test"}
    rows = [f"{n}\t{n}.wav\t1000\tWhat?\t{n} said\t{split}" for n, split in splits.items()]
    header = "client_id\taudio_file\tduration_ms\tprompt\ttranscription\tsplit"
    (tmp_path / "set" / "ss-corpus-cy.tsv").write_text("\n".join([header, *rows, ""]))
    code, _, err = asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "to")
    assert code == 0 and err == []
    for name, split, expected in zip("abc", ("train", "valid", "test"), samples, strict=True):
        corpus = read_manifest(tmp_path / "to" / f"{split}.tsv")
        assert corpus.texts == [f"{name} said"] and corpus.speakers == [name]
        check_audio(corpus[0], expected)


def test_equal_paths_of_two_tables_are_files_of_two_folders(tmp_path, asr_prepare):
    """As of SPGISpeech, whose val.csv names files of val/."""
    judge = {}
    for name, seconds in (("train", 1.1), ("val", 1.3)):
        judge[name] = noise(tmp_path / "set" / name / "call" / "1.wav", seconds)
        table = f"wav_filename|wav_filesize|transcript\ncall/1.wav|5|words of {name}\n"
        (tmp_path / "set" / f"{name}.csv").write_text(table)
    code, _, err = asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "to")
    assert code == 0, err
    for name, samples in judge.items():
        check_audio(read_manifest(tmp_path / "to" / f"{name}.tsv")[0], samples)


def test_a_packed_table_of_windows(tmp_path, asr_prepare):
    samples = noise(tmp_path / "set" / "a.wav")
    table = tmp_path / "set" / "dev.csv.gz"
    table.write_bytes(gzip.compress(b'path,text\r\na.wav,"one\r\ntwo"\r\n\r\n'))
    assert asr_prepare("auto", table, "--to", tmp_path / "to")[0] == 0
    corpus = read_manifest(tmp_path / "to" / "dev.tsv")
    assert corpus.texts == ["one two"]
    check_audio(corpus[0], samples)


def test_parts_and_further_columns_of_a_table(tmp_path, asr_prepare):
    samples = noise(tmp_path / "set" / "a.wav", 3.0)
    rows = "a.wav;0,5;1,25;one;kitchen\na.wav;1.25;3;two;\n"
    (tmp_path / "set" / "all.csv").write_text(f"path;Start;End;text;Room\n{rows}")
    assert asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "to")[0] == 0
    corpus = read_manifest(tmp_path / "to" / "all.tsv")
    assert corpus.ids == ["a-0000500", "a-0001250"] and corpus.texts == ["one", "two"]
    check_audio(corpus[0], part(samples, 0.5, 1.25))
    check_audio(corpus[1], part(samples, 1.25, 3))
    lines = (tmp_path / "to" / "all.tsv").read_text().splitlines()
    assert [line.split("\t")[5:] for line in lines] == [["Room"], ["kitchen"], [""]]


def test_splits_of_tables(tmp_path, asr_prepare):
    """One table for each, and one table with a column `split`, give the same manifests."""
    for name in ("a", "b", "c"):
        noise(tmp_path / "set" / f"{name}.wav")
    rows = {"train": "a", "validation": "b", "test": "c"}
    for split, name in rows.items():
        (tmp_path / "set" / f"{split}.csv").write_text(f"file,text\n{name}.wav,{name}\n")
    code, out, _ = asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "1")
    assert code == 0 and "data.train=" in out and "data.valid=" in out
    table = "".join(f"{name}.wav,{name},{split.upper()}\n" for split, name in rows.items())
    for split in rows:
        (tmp_path / "set" / f"{split}.csv").unlink()
    (tmp_path / "set" / "all.csv").write_text(f"file,text,split\n{table}")
    assert asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "2")[0] == 0
    for folder, valid in (("1", "validation"), ("2", "valid")):
        names = ("train", valid, "test")
        found = [read_manifest(tmp_path / folder / f"{name}.tsv").texts for name in names]
        assert found == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", "path,text\na.wav,one, two\n", "a text with ',' needs double quotes around it"),
        ("t.csv", "path,text\nC:\\x\\a.wav,one\n", "'C:\\\\x\\\\a.wav' is a path of Windows"),
        ("t.csv", "path,text\na.wav,\n", "t.csv:2: the text is empty"),
        ("t.csv", "path,text\n,one\n", "t.csv:2: no audio file is given"),
        ("t.csv", "path,text\n/old/a.wav,one\n", "t.csv:2: no such file: '/old/a.wav'"),
        ("t.csv", "path,text,end\na.wav,one,0\n", "the part from 0 to 0 s has no length"),
        ("t.csv", "path,text,Text\na.wav,one,two\n", "t.csv: column text appears twice"),
        ("t.csv", "path,words spoken\na.wav,one\n", "--text-column NAME chooses one"),
        (
            "t.csv",
            "name,text\na.wav,one\n",
            "no column of audio files; the first line has name, text",
        ),
        ("t.csv", "a.wav,one\nb.wav,two\n", "must name the columns: audio, path, file"),
        (
            "t.csv",
            b"path,text\na.wav,caf\xe9\n",
            "not UTF-8 text (invalid continuation byte); save",
        ),
        ("t.xlsx", b"PK\3\4", "t.xlsx: a spreadsheet, which is not read; save it as CSV"),
        ("t.zip", b"PK\3\4", "t.zip: an archive; unpack it, and name the folder"),
        ("t.wav", b"RIFF", "t.wav: a recording; name its folder"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line(tmp_path, asr_prepare, name, content, words):
    noise(tmp_path / "set" / "a.wav")
    content = content.encode() if isinstance(content, str) else content
    (tmp_path / "set" / name).write_bytes(content)
    code, _, err = asr_prepare("auto", tmp_path / "set" / name, "--to", tmp_path / "to")
    assert code == 2 and words in "\n".join(err) and len(err) <= 2
    assert not (tmp_path / "to").exists()


def sidecars(folder, names, **texts):
    """Recordings with texts beside them -> the samples by id."""
    judge = {}
    for name in names:
        path = folder / name
        key = name.rpartition(".")[0]
        judge[key] = noise(path, 1 + len(name) / 40)
        path.with_suffix(".txt").write_text(texts.get(path.stem, f"words of {key}\n"))
    return judge


def test_recordings_with_texts_beside_them(tmp_path, asr_prepare):
    folder = tmp_path / "set"
    names = ["ann/1.wav", "ann/day 2/1.flac", "bob/1.WAV", "bob/2.ogg", "3.mp3", "eve/4.wav"]
    judge = sidecars(folder, names, **{"2": "\ufefftwo\r\nlines\r\n\r\n"})
    (folder / "3.txt").rename(folder / "3.lab")
    (folder / "eve" / "4.txt").unlink()
    (folder / "eve" / "4.json").write_text('{"Transcript": "from JSON", "speaker": "eva"}')
    (folder / "README.txt").write_text("no transcript")
    (folder / ".hidden.wav").write_text("no audio")
    code, out, err = asr_prepare("auto", folder, "--to", tmp_path / "to")
    assert code == 0 and err == [] and "read as folder\n" in out
    corpus = {u.id: u for u in read_manifest(tmp_path / "to" / "set.tsv")}
    assert corpus.keys() == judge.keys()
    speakers = {"ann/1": "ann", "ann/day 2/1": "ann", "3": "3", "eve/4": "eva"}
    assert speakers.items() <= {name: u.speaker for name, u in corpus.items()}.items()
    texts = {"bob/2": "two lines", "3": "words of 3", "eve/4": "from JSON"}
    assert texts.items() <= {name: u.text for name, u in corpus.items()}.items()
    for name, samples in judge.items():
        if name != "3":  # MP3 has no exact length
            check_audio(corpus[name], samples)


@pytest.mark.parametrize("form", ["srt", "vtt", "audacity"])
def test_parts_of_recordings_with_subtitles_or_labels(tmp_path, asr_prepare, form):
    folder = tmp_path / "set"
    cues = [Cue(0.13, 1.07, "Salt &\npepper."), Cue(1.3, 2.9, "Two > one.")]
    judge = {name: noise(folder / f"{name}.wav", s) for name, s in (("ann", 3.1), ("bob", 3.7))}
    for name in judge:
        if form == "srt":
            text = srt(cues).replace("Salt", "<i>Salt</i>").replace("\n", "\r\n")
            (folder / f"{name}.srt").write_text(text, encoding="utf-8-sig", newline="")
        elif form == "vtt":
            text = webvtt(cues).replace("07\n", "07 align:start\n").replace("Two", "<v Bo>Two")
            (folder / f"{name}.vtt").write_text(text)
        else:
            lines = [f"{cue.start:f}\t{cue.end:f}\t{' '.join(cue.text.split())}" for cue in cues]
            (folder / f"{name}.txt").write_text("\n".join(lines))
    code, out, err = asr_prepare("auto", folder, "--to", tmp_path / "to")
    assert code == 0 and not err and "read as folder" in out
    corpus = read_manifest(tmp_path / "to" / "set.tsv")
    assert corpus.ids == ["ann-0000130", "ann-0001300", "bob-0000130", "bob-0001300"]
    assert [u.speaker for u in corpus] == ["ann", "ann", "bob", "bob"]
    assert corpus.texts == ["Salt & pepper.", "Two > one."] * 2
    for utterance, cue in zip(corpus, cues * 2, strict=True):
        check_audio(utterance, part(judge[utterance.speaker], cue.start, cue.end))


@pytest.mark.parametrize(("end", "expected"), [(31.0, ["one", "two"]), (3.0, ["all of it"])])
def test_subtitles_are_taken_before_the_text_of_a_long_recording(
    tmp_path, asr_prepare, end, expected
):
    """A .flac made of an .m4a takes its place."""
    folder = tmp_path / "set"
    noise(folder / "a.flac", end + 1)
    (folder / "a.m4a").write_bytes(b"\0\0\0\x18ftypM4A ")
    (folder / "a.txt").write_text("all of it")
    (folder / "a.srt").write_text(srt([Cue(0.5, 1.5, "one"), Cue(2.0, end, "two")]))
    code, _, err = asr_prepare("folder", folder, "--to", tmp_path / "to")
    assert code == 0 and not err
    assert read_manifest(tmp_path / "to" / "set.tsv").texts == expected


@pytest.mark.skipif(FFMPEG is None, reason="ffmpeg is not installed")
def test_recordings_of_a_phone_are_stored_as_flac(tmp_path, asr_prepare, monkeypatch):
    """M4A of 44.1 kHz, by a name without suffix, whole and in parts; empty rows are none."""
    folder = tmp_path / "set"
    judge = noise(folder / "a.wav", 3.0, rate=44_100)
    line = [FFMPEG, "-v", "error", "-i", folder / "a.wav", "-c:a"]
    subprocess.run([*line, "alac", folder / "a.m4a"], check=True)  # without loss
    (folder / "a.wav").unlink()
    decoded = []
    monkeypatch.setattr(
        convert_module,
        "container_as_flac",
        lambda *arguments: decoded.append(1) or container_as_flac(*arguments),
    )
    table = "audio,start,end,text\na,,,one\na,0.5,1.25,two\n,,,\n , ,,\na,1.5,2,three\n"
    (folder / "t.csv").write_text(table)
    code, out, err = asr_prepare("table", folder / "t.csv", "--to", tmp_path / "to")
    assert code == 0 and err == [] and "t.tsv: 3 utterances" in out
    whole, half, _ = read_manifest(tmp_path / "to" / "t.tsv")
    assert len(decoded) == 2  # whole, and once for all parts
    check_audio(whole, judge, 44_100)
    check_audio(half, part(judge, 0.5, 1.25, 44_100), 44_100)
    (folder / "t.csv").write_text("audio,channel,text\na.m4a,1,one\n")
    code, _, err = asr_prepare("table", folder / "t.csv", "--to", tmp_path / "other")
    assert code == 2 and "a channel of M4A, MP4 or WebM; convert the file to FLAC" in err[0]


def test_splits_of_a_folder_and_texts_in_another_tree(tmp_path, asr_prepare):
    for split in ("train", "dev"):
        folder = tmp_path / "set" / split
        sidecars(folder / "wav48", ["p1/a.wav", "p2/a.wav"])
        for text in (folder / "wav48").rglob("*.txt"):
            other = folder / "txt" / text.parent.name / text.name
            other.parent.mkdir(parents=True, exist_ok=True)
            text.rename(other)
    (tmp_path / "set" / "more").mkdir()
    code, out, err = asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "to")
    assert code == 0 and err == [] and "data.train=" in out and "data.valid=" in out
    assert "not read: the folders more\n" in out
    corpus = read_manifest(tmp_path / "to" / "valid.tsv")
    assert corpus.ids == ["p1/a", "p2/a"] and corpus.speakers == ["p1", "p2"]


def test_folders_of_libritts_are_splits(tmp_path, asr_prepare):
    names = ("train-clean-100", "train-clean-360", "dev-clean", "test-clean")
    for name in names:
        sidecars(tmp_path / "set" / name, ["19/198/19_198_0.wav", "26/495/26_495_1.wav"])
    code, out, err = asr_prepare("auto", tmp_path / "set", "--to", tmp_path / "to")
    assert code == 0 and err == [] and "read as folder\n" in out
    to = tmp_path / "to"
    assert f"data.train={to}/train-clean-100.tsv data.valid={to}/dev-clean.tsv" in out
    for name in names:
        assert read_manifest(to / f"{name}.tsv").speakers == ["19", "26"]
    (tmp_path / "one").mkdir()
    (tmp_path / "set" / names[0]).rename(tmp_path / "one" / names[0])
    assert asr_prepare("auto", tmp_path / "one", "--to", to / "one")[0] == 0
    assert read_manifest(to / "one" / f"{names[0]}.tsv").speakers == ["19", "26"]


def test_folders_of_one_kind_of_file_below_a_speaker(tmp_path, asr_prepare):
    """As L2-ARCTIC; a folder with a split's name is a speaker where no folders are below it."""
    for speaker in ("ABA", "dev_b"):
        sidecars(tmp_path / "set" / speaker / "wav", ["a_1.wav"])
        (tmp_path / "set" / speaker / "transcript").mkdir()
        text = tmp_path / "set" / speaker / "wav" / "a_1.txt"
        text.rename(tmp_path / "set" / speaker / "transcript" / "a_1.txt")
    assert asr_prepare("folder", tmp_path / "set", "--to", tmp_path / "to")[0] == 0
    corpus = read_manifest(tmp_path / "to" / "set.tsv")
    assert corpus.ids == ["ABA/a_1", "dev_b/a_1"] and corpus.speakers == ["ABA", "dev_b"]
    (tmp_path / "set" / "dev_b").rename(tmp_path / "dev_b")
    (tmp_path / "one").mkdir()
    (tmp_path / "dev_b").rename(tmp_path / "one" / "dev_b")
    assert asr_prepare("folder", tmp_path / "one", "--to", tmp_path / "to")[0] == 0
    assert read_manifest(tmp_path / "to" / "one.tsv").speakers == ["dev_b"]


def test_timit_s_texts_have_no_sample_numbers_and_its_dialects_are_no_speakers(
    tmp_path, asr_prepare
):
    names = ["DR1/FCJF0/SA1", "DR1/MCPM0/SX7", "DR8/FBCG1/SX7"]
    for split, name in product(("TRAIN", "TEST"), names):
        path = tmp_path / "TIMIT" / split / f"{name}.WAV"
        samples = noise(path, 1.3, rate=16_000, format="NIST", subtype="PCM_16")
        path.with_suffix(".TXT").write_text(f"0 {len(samples)} Don't ask {name[-3:]} to. \n")
        path.with_suffix(".WRD").write_text("3050 5723 don't\n5723 10337 ask\n")
    code, _, err = asr_prepare("auto", tmp_path / "TIMIT", "--to", tmp_path / "to")
    assert code == 0 and err == []
    for split in ("train", "test"):
        corpus = read_manifest(tmp_path / "to" / f"{split}.tsv")
        assert corpus.speakers == ["FBCG1", "FCJF0", "MCPM0"]
        assert corpus.texts == ["Don't ask SX7 to.", "Don't ask SA1 to.", "Don't ask SX7 to."]


def as_m4a(path):
    path.rename(path.with_suffix(".m4a")).write_bytes(b"\0\0\0\x18ftypM4A \0\0\0\0" * 9)


def subtitles(folder, name, texts):
    """Cues of 0.2 s in place of the text of a recording."""
    (folder / name).with_suffix(".txt").unlink()
    cues = [Cue(0.2 * n, 0.2 * n + 0.2, text) for n, text in enumerate(texts)]
    (folder / name).write_text(srt(cues))


FOLDER_FAULTS = [
    (lambda f: (f / "1.txt").unlink(), "1.wav: has no text: no .txt, .lab, .json, .srt or .vtt"),
    (lambda f: (f / "1.wav").unlink(), "1.txt: has no audio: no audio file of the same name"),
    (lambda f: (f / "1.txt").write_text(" \n"), "1.txt: the text is empty"),
    (lambda f: (f / "1.txt").write_bytes(b"caf\xe9"), "1.txt: not UTF-8 text"),
    (lambda f: (f / "1.txt").write_text("0 7 a\n7 9 b\n"), "1.txt: has times as of HTK"),
    (lambda f: (f / "1.txt").write_text("0.5\t0.5\ta b\n"), "1.txt:1: the part from 0.5 to 0.5 s"),
    (lambda f: (f / "1.txt").rename(f / "1.vtt"), "1.vtt: has no cue"),
    (lambda f: subtitles(f, "1.srt", ["A", "A\nB", "B\nC", "C\nD"]), "1.srt: its cues begin with"),
    (lambda f: (f / "1.txt").rename(f / "1.json"), "1.json: not a JSON object"),
    (lambda f: noise(f / "2.flac"), "2.wav: has the same name as "),
    (lambda f: as_m4a(f / "1.wav"), "1.m4a: "),
]


@pytest.mark.parametrize(("spoil", "words"), FOLDER_FAULTS)
def test_each_fault_of_a_folder(tmp_path, asr_prepare, spoil, words):
    folder = tmp_path / "set"
    sidecars(folder, ["1.wav", "2.wav", "3.wav"])
    spoil(folder)
    call = ("folder", folder, "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call)
    assert code == 2 and len(err) == 2 and words in err[0] and not (tmp_path / "to").exists()
    assert "faulty, nothing is written" in err[1]
    code, _, err = asr_prepare(*call, "--skip-bad")
    assert code == 0 and len(err) == 1 and err[0].startswith(f"skipped: {folder}/")
    assert {"2", "3"} <= set(read_manifest(tmp_path / "to" / "set.tsv").ids)


def test_auto_says_what_it_found_and_what_is_missing(tmp_path, asr_prepare):
    folder = tmp_path / "set"
    call = ("auto", folder, "--to", tmp_path / "to")

    def refused():
        code, _, (line,) = asr_prepare(*call)
        assert code == 2 and line.startswith(f"error: {folder}: no format is recognised; its files")
        return line

    folder.mkdir()
    assert "its files are none" in refused() and "no audio file in it" in refused()
    noise(folder / "a.wav")
    (folder / "b.txt").write_text("words")
    line = refused()
    assert "its files are 1 .wav, 1 .txt" in line or "its files are 1 .txt, 1 .wav" in line
    kinds = "(.txt, .lab, .json, .srt or .vtt)"
    assert f"none of 1 audio files has a text {kinds} of the same name, such as {folder}/a" in line
    (folder / "t.csv").write_text("name,text\na,words\n")
    assert "format table" in refused() and "the first line has name, text" in refused()
    (folder / "t.csv").rename(folder / "t.xlsx")
    assert "t.xlsx: a spreadsheet" in refused()
    (folder / "LJ" / "wavs").mkdir(parents=True)
    (folder / "LJ" / "metadata.csv").write_text("a|words\n")
    assert f"{folder}/LJ is read as ljspeech: name that folder" in refused()
    call = ("auto", folder / "LJ" / "wavs", "--to", tmp_path / "to")
    code, _, (line,) = asr_prepare(*call)
    assert code == 2 and f"the table is in the folder above: name {folder}/LJ" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It’s “fine”, e.g. well-known — 3.5 % of ‘us’", "It's fine eg well-known 3.5 % of us"),
        ("Qué tal? ¡Sí! l·l", "Qué tal Sí l·l"),
        ("नमस्ते, दुनिया।", "नमस्ते दुनिया"),
        ("الْعَرَبِيَّةُ، نعم؟", "الْعَرَبِيَّةُ نعم"),
        ("об\u02bcєкт — 1,000 й", "об'єкт 1,000 й"),
        ("你好,世界。", "你好世界"),
        ("增长了50％，３．１４", "增长了50％ ３．１４"),
        ("١٢٫٥٪، نعم", "١٢٫٥٪ نعم"),
        ("re- x_y /z -- 'tis", "re x y z tis"),
        ('צה"ל, "שלום" אמר', "צה״ל שלום אמר"),
        ("Ինչո՞ւ։ Ա՛յո, ի՜նչ", "Ինչու Այո ինչ"),
        ("EU:n ja 3:n, klo 10:30: kto\u2011to", "EU:n ja 3:n klo 10:30 kto-to"),
        ("ဦးဘ၏ အိမ်၌ ရှိ၍ ၎င်းသည်။", "ဦးဘ၏ အိမ်၌ ရှိ၍ ၎င်းသည်"),
        ("wait...what. he left.She, Ph.D. U.S.A. 3.5...", "wait what he left She PhD USA 3.5"),
    ],
)
def test_punctuation_is_dropped_in_any_language(text, expected):
    normalize = TextNormalizer("keep", punctuation="drop")
    assert normalize(text) == expected and normalize(expected) == expected
    assert all(line.startswith(("--punctuation drop: ", "")) for line in normalize.report())


@pytest.mark.parametrize(
    ("names", "channels"),
    [("A B", (0, 1)), ("Right LEFT", (1, 0)), ("1 2", (0, 1)), ("1 0", (1, 0))],
)
def test_the_channel_of_a_table_is_cut_out(tmp_path, asr_prepare, names, channels):
    """Two speakers of one call, at the same time; times of day or seconds."""
    samples = noise(tmp_path / "call.wav", 5.0, channels=2)
    first, second = names.split()
    (tmp_path / "calls.csv").write_text(
        "path,start,end,channel,text\n"
        f"call.wav,0:01.5,00:00:03,{first},one\ncall.wav,1.5,0:04,{second},two\n"
    )
    assert asr_prepare("table", tmp_path / "calls.csv", "--to", tmp_path / "to")[0] == 0
    corpus = read_manifest(tmp_path / "to" / "calls.tsv")
    assert [u.id for u in corpus] == [f"call-0001500-{first}", f"call-0001500-{second}"]
    for utterance, channel, end in zip(corpus, channels, (3, 4), strict=True):
        check_audio(utterance, samples[round(1.5 * RATE) : end * RATE, [channel]])


def test_a_speaker_may_have_the_name_of_a_split(tmp_path, asr_prepare):
    for name in ("Dev", "Anil", "Priya"):
        noise(tmp_path / "in" / name / "a.wav")
        (tmp_path / "in" / name / "a.txt").write_text(name)
    assert asr_prepare("folder", tmp_path / "in", "--to", tmp_path / "to")[0] == 0
    assert read_manifest(tmp_path / "to" / "in.tsv").speakers == ["Anil", "Dev", "Priya"]


def test_names_of_files_are_equal_in_either_form_of_unicode(tmp_path, asr_prepare):
    """macOS and its archives decompose letters, tables and keyboards do not."""
    name = "größe"
    noise(tmp_path / "in" / f"{unicodedata.normalize('NFD', name)}.wav")
    (tmp_path / "in" / f"{name}.txt").write_text("one")
    assert asr_prepare("folder", tmp_path / "in", "--to", tmp_path / "to")[0] == 0
    for form in ("NFC", "NFD"):
        table = tmp_path / "in" / f"{form}.csv"
        table.write_text(unicodedata.normalize(form, f"path,text\n{name}.wav,one\n{name},two\n"))
        assert asr_prepare("table", table, "--to", tmp_path / "to", "--skip-bad")[0] == 0
        assert len(read_manifest(tmp_path / "to" / f"{form}.tsv")) == 1


def test_a_column_of_broadcasters_names_no_channel(tmp_path, asr_prepare):
    noise(tmp_path / "a.wav", channels=2)
    (tmp_path / "t.csv").write_text("path,channel,text\na.wav,NHK,x\n")
    assert asr_prepare("table", tmp_path / "t.csv", "--to", tmp_path / "to")[0] == 0
    assert "NHK" in (tmp_path / "to" / "t.tsv").read_text()


def test_what_error_rates_count_is_reported():
    normalize = TextNormalizer("keep")
    assert normalize("Hello, you.") == "Hello, you." and normalize("don't") == "don't"
    assert normalize.report() == [
        "error rates count 2 punctuation marks: ',' 1, '.' 1 and 1 transcripts with capital "
        "letters; --text lower --punctuation drop removes them (the models of pretrained/ know "
        "English in --text upper-az)"
    ]
    normalize = TextNormalizer("lower", punctuation="drop")
    assert normalize("Room 7, 5 %!") == "room 7 5 %"
    assert normalize.report() == [
        "--punctuation drop: 2 dropped: ',' 1, '!' 1",
        "3 digits and signs kept, which are better written as words: '7' 1, '5' 1, '%' 1",
    ]
    for text in ("HELLO YOU", "hello you"):
        normalize = TextNormalizer("keep")
        assert normalize(text) == text and normalize.report() == []


DATASETS = importlib.util.find_spec("datasets")
NO_DATASETS = "datasets and pyarrow are 200 MB: pip install '.[datasets]'"


@pytest.mark.skipif(DATASETS is None, reason=NO_DATASETS)
@pytest.mark.filterwarnings("ignore")
def test_data_sets_saved_by_the_library(tmp_path, asr_prepare):
    from datasets import Audio, Dataset, DatasetDict

    judge = [noise(tmp_path / "audio" / f"{n}.wav", 1 + n / 5, channels=2) for n in range(3)]
    paths = [str(tmp_path / "audio" / f"{n}.wav") for n in range(3)]
    table = {"audio": paths, "sentence": ["a", "b", ""], "speaker_id": [3, 5, 7], "other": [0] * 3}
    data = Dataset.from_dict(table).cast_column("audio", Audio())
    splits = {"train": data.select([0, 1]), "validation": data.select([1])}
    DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    code, out, _ = asr_prepare("auto", tmp_path / "saved", "--to", tmp_path / "to")
    assert code == 0 and "read as datasets" in out and "data.valid=" in out
    train, valid = (read_manifest(tmp_path / "to" / f"{name}.tsv") for name in ("train", "valid"))
    assert train.ids == ["0", "1"] and train.texts == ["a", "b"] and train.speakers == ["3", "5"]
    for corpus, rows in ((train, (0, 1)), (valid, (1,))):
        for utterance, row in zip(corpus, rows, strict=True):
            check_audio(utterance, judge[row])
    data.save_to_disk(str(tmp_path / "all"))
    code, _, err = asr_prepare("datasets", tmp_path / "all", "--to", tmp_path / "to")
    assert code == 2 and f"{tmp_path}/all:3: the text is empty" in err
    (tmp_path / "all" / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    code, _, err = asr_prepare("datasets", tmp_path / "all", "--to", tmp_path / "to")
    assert code == 2 and "the datasets library cannot read it" in err[-1]


@pytest.mark.skipif(DATASETS is None, reason=NO_DATASETS)
@pytest.mark.filterwarnings("ignore")
def test_columns_that_are_no_text_are_left_out(tmp_path, asr_prepare):
    from datasets import Audio, Dataset

    path = str(tmp_path / "0.wav")
    judge = noise(tmp_path / "0.wav")
    table = {"audio": [path], "noisy": [path], "text": ["a"], "speaker": [{"id": 3, "age": 5}]}
    data = Dataset.from_dict(table).cast_column("audio", Audio())
    data.cast_column("noisy", Audio()).save_to_disk(str(tmp_path / "saved"))
    call = ("datasets", tmp_path / "saved", "--to", tmp_path / "to")
    assert asr_prepare(*call)[0] == 0
    corpus = read_manifest(tmp_path / "to" / "saved.tsv")
    assert corpus.texts == ["a"]
    check_audio(corpus[0], judge)
    code, _, err = asr_prepare(*call, "--text-column", "speaker")
    assert code == 2 and "speaker" in err[-1] and "text" in err[-1]


def test_without_the_library_its_extra_is_named(tmp_path, asr_prepare, monkeypatch):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, _, err = asr_prepare("auto", tmp_path / "saved", "--to", tmp_path / "to")
    assert code == 2 and len(err) == 1 and "pip install datasets" in err[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cuts.jsonl.gz", "cuts.jsonl"])
def test_cut_sets_written_by_lhotse(tmp_path, asr_prepare, name):
    lhotse = pytest.importorskip("lhotse", reason="pip install '.[test]' has it")
    stereo = noise(tmp_path / "call.wav", 3.1, 2)
    mono = noise(tmp_path / "mono.flac", 1.9)
    recordings = [lhotse.Recording.from_file(tmp_path / n) for n in ("call.wav", "mono.flac")]
    said = [
        lhotse.SupervisionSegment("s1", "call", 0.51, 1.13, 1, text="one", speaker="a"),
        lhotse.SupervisionSegment("s2", "call", 1.37, 1.73, 0, text="two", speaker="b"),
        lhotse.SupervisionSegment("s3", "mono", 0, recordings[1].duration, text="three"),
        lhotse.SupervisionSegment("s4", "call", 0.2, 0.7, [0, 1], text="both", speaker="c"),
    ]
    cuts = lhotse.CutSet.from_manifests(
        lhotse.RecordingSet.from_recordings(recordings),
        lhotse.SupervisionSet.from_segments(said),
    )
    cuts.to_file(tmp_path / name)
    # Trimmed cuts give the same, from supervisions relative to each.
    cuts.trim_to_supervisions(keep_overlapping=False).to_file(tmp_path / "trimmed.jsonl")
    for file in (name, "trimmed.jsonl"):
        code, out, err = asr_prepare("auto", tmp_path / file, "--to", tmp_path / "to")
        assert code == 0 and err == [] and "read as lhotse" in out
        corpus = read_manifest(tmp_path / "to" / f"{file.partition('.')[0]}.tsv")
        found = {u.id: u for u in corpus}
        assert {u.id: u.text for u in corpus} == {s.id: s.text for s in said}
        assert [found[n].speaker for n in ("s1", "s2", "s3")] == ["a", "b", "s3"]
        check_audio(found["s1"], part(stereo, 0.51, 1.64)[:, 1:])
        check_audio(found["s2"], part(stereo, 1.37, 3.1)[:, :1])
        check_audio(found["s3"], mono)
        check_audio(found["s4"], part(stereo, 0.2, 0.9))
        assert found["s3"].audio.resolve() == tmp_path / "mono.flac"
    # The judge: what Lhotse itself loads of the trimmed cuts.
    for cut in cuts.trim_to_supervisions(keep_overlapping=False):
        loaded = np.round(cut.load_audio() * 32768).astype(np.int16).T
        actual = samples_of(found[cut.supervisions[0].id])[0]
        np.testing.assert_array_equal(actual, loaded)


@pytest.mark.filterwarnings("ignore")
def test_cuts_that_are_computed_are_refused(tmp_path, asr_prepare):
    lhotse = pytest.importorskip("lhotse", reason="pip install '.[test]' has it")
    noise(tmp_path / "a.wav", 1.3)
    recording = lhotse.Recording.from_file(tmp_path / "a.wav")
    said = lhotse.SupervisionSegment("s", "a", 0, 1.3, text="one")
    cut = lhotse.MonoCut("c", 0, 1.3, 0, [said], recording=recording)
    odd = [cut.perturb_speed(0.9), cut.pad(duration=2.0), lhotse.MonoCut("d", 0, 1.3, 0)]
    command = lhotse.Recording("r", [], 16_000, 160, 0.01)
    command.sources = [lhotse.audio.AudioSource("command", [0], f"touch {tmp_path}/made")]
    said = lhotse.SupervisionSegment("t", "r", 0, 0.01, text="one")
    odd.append(lhotse.MonoCut("e", 0, 0.01, 0, [said], recording=command))
    lhotse.CutSet.from_cuts(odd).to_file(tmp_path / "cuts.jsonl")
    code, _, err = asr_prepare("lhotse", tmp_path / "cuts.jsonl", "--to", tmp_path / "to")
    words = [
        "recording is transformed",
        "is a PaddingCut or Mixed",
        "has no recording",
        "a command",
    ]
    words[1] = "is a MixedCut, which is computed"
    assert code == 2 and len(err) == 5
    for line, (message, word) in enumerate(zip(err, words, strict=False), start=1):
        assert message.startswith(f"{tmp_path}/cuts.jsonl:{line}: ") and word in message
    assert not (tmp_path / "made").exists()


@pytest.fixture
def spoken(tmp_path):
    """A CutSet of one recording with two supervisions."""
    lhotse = pytest.importorskip("lhotse", reason="pip install '.[test]' has it")
    samples = noise(tmp_path / "a.wav", 4.0)
    said = [
        lhotse.SupervisionSegment(f"s{n}", "a", start, length, text=f"text {n}")
        for n, (start, length) in enumerate([(0.2, 1.5), (1.6, 2.2)])
    ]
    recording = lhotse.Recording.from_file(tmp_path / "a.wav")
    cut = lhotse.MonoCut("c", 0, 4.0, 0, said, recording=recording)
    return lhotse.CutSet.from_cuts([cut]), samples


PARTIAL = {
    "truncate": (lambda cuts: cuts.truncate(max_duration=2.0, offset_type="start"), ["s0"]),
    "windows": (lambda cuts: cuts.cut_into_windows(2.0), ["s0"]),
    "overlapping": (lambda cuts: cuts.trim_to_supervisions(), ["s0", "s1"]),
    "rounded": (lambda cuts: cuts.truncate(max_duration=3.79, offset_type="start"), ["s0", "s1"]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("change", "whole"), PARTIAL.values(), ids=PARTIAL)
def test_a_part_of_a_supervision_has_not_its_text(tmp_path, asr_prepare, spoken, change, whole):
    cuts, samples = spoken
    change(cuts).to_file(tmp_path / "cuts.jsonl")
    call = ("lhotse", tmp_path / "cuts.jsonl", "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call, "--skip-bad")
    assert code == 0
    corpus = read_manifest(tmp_path / "to" / "cuts.tsv")
    assert corpus.ids == whole and corpus.texts == [f"text {name[1]}" for name in whole]
    check_audio(corpus[0], part(samples, 0.2, 1.7))
    partial = [line for line in err if "hence a part of its text; import the CutSet from" in line]
    if change is PARTIAL["rounded"][0]:
        assert err == []
        return
    assert partial == err and asr_prepare(*call)[0] == 2
    if change is PARTIAL["truncate"][0]:
        assert " has 0.4 of the 2.2 s of supervision 's1'" in err[0]


@pytest.mark.filterwarnings("ignore")
def test_a_recording_shorter_than_lhotse_says(tmp_path, asr_prepare, spoken):
    cuts, _ = spoken
    (cut,) = cuts
    cut.supervisions = [cut.supervisions[0].with_alignment("word", [])]
    cut.supervisions[0].start, cut.supervisions[0].duration = 0, 4.0
    cuts.to_file(tmp_path / "cuts.jsonl")
    noise(tmp_path / "a.wav", 3.0)
    code, _, err = asr_prepare("lhotse", tmp_path / "cuts.jsonl", "--to", tmp_path / "to")
    assert code == 2 and "duration is 4, but the file has 3.000" in err[0]


def test_durations_of_codecs_that_pad(tmp_path, asr_prepare):
    """Up to 0.5 s with one count, whatever the offset; more, or without a codec, it is a fault."""
    noise(tmp_path / "set" / "a.mp3", 2.0, rate=8000)
    noise(tmp_path / "set" / "b.wav", 2.0, rate=8000)
    length = len(soundfile.read(tmp_path / "set" / "a.mp3")[0]) / 8000
    rows = [("a.mp3", length + more, None) for more in (0.09, 0.4, -0.4, 0.6)]
    rows += [("a.mp3", length - 0.7 + 0.4, 0.7), ("a.mp3", length - 0.7 + 0.6, 0.7)]
    rows += [("b.wav", 2.4, None), ("b.wav", 1.6, None), ("b.wav", 2.09, None)]
    about = [
        {"audio_filepath": name, "duration": duration, "offset": offset, "text": "a"}
        for name, duration, offset in rows
    ]
    manifest = json_lines(tmp_path / "set" / "train.json", about)
    code, out, err = asr_prepare("table", manifest, "--to", tmp_path / "to", "--skip-bad")
    assert code == 0 and [line.split(":")[2] for line in err] == ["4", "6", "7"]
    assert f"{manifest}: 3 durations differ by 0.1 to 0.5 s from the audio" in out
    corpus = read_manifest(tmp_path / "to" / "train.tsv")
    expected = [length, length, length, length - 0.7, 1.6, 2.0]
    np.testing.assert_allclose(corpus.seconds, expected, atol=2e-3)
    assert corpus[2].audio.resolve() == tmp_path / "set" / "a.mp3"


def test_repeated_names_in_a_data_set_are_numbered(tmp_path):
    from asr.data.importers import datasets

    names = ["SA1.WAV", "SA2.WAV", "SA1.WAV", "SA1-2.WAV", "SA1.WAV", "", "x/SA2.WAV"]
    about = [{"audio.path": name, "text": "a"} for name in names]
    rows = datasets._rows(about, [], "audio.path", "text", tmp_path / "set")
    ids = ["SA1", "SA2", "SA1-2", "SA1-2-2", "SA1-3", "set-6", "SA2-2"]
    assert [row.id for row in rows] == ids


def test_hours_are_of_each_split_and_cut_no_more(tmp_path, asr_prepare):
    rows = [
        {"audio_filepath": "a.wav", "offset": n / 10, "duration": 0.9, "text": "a"}
        for n in range(40)
    ]
    noise(tmp_path / "set" / "a.wav", 5.0)
    for split, count in (("train", 40), ("dev", 2)):
        json_lines(tmp_path / "set" / f"{split}.json", rows[:count])
    call = ("table", tmp_path / "set", "--to", tmp_path / "to", "--hours", 4.6 / 3600)
    assert asr_prepare(*call)[0] == 0
    train, dev = (read_manifest(tmp_path / "to" / f"{name}.tsv") for name in ("train", "dev"))
    assert len(train) == 5 and len(dev) == 2
    numbers = [int(name.rpartition("-")[2]) for name in train.ids]
    assert numbers == sorted(numbers)
    assert (tmp_path / "to" / "train-00000.tar").stat().st_size < 8 * 0.9 * 2 * RATE


def test_a_part_is_held_out_of_the_training_split(tmp_path, asr_prepare):
    noise(tmp_path / "set" / "a.wav")
    for split in ("test", "train"):
        json_lines(
            tmp_path / "set" / f"{split}.json", [{"audio_filepath": "a.wav", "text": "a"}] * 9
        )
    call = ("table", tmp_path / "set", "--to", tmp_path / "to", "--valid", 0.3)
    code, out, _ = asr_prepare(*call)
    assert code == 0
    sizes = {path.stem: len(read_manifest(path)) for path in (tmp_path / "to").glob("*.tsv")}
    assert sizes == {"test": 9, "train": 6, "train-valid": 3}
    assert f"data.train={tmp_path}/to/train.tsv data.valid={tmp_path}/to/train-valid.tsv" in out
    assert "train-valid.tsv: 3 utterances are held out, since the corpus names no speakers" in out
    assert out.count("train.tsv: 6 utterances") == 1
    (tmp_path / "set" / "test.json").rename(tmp_path / "set" / "dev.json")
    code, out, _ = asr_prepare(*call)
    assert code == 0 and "--valid 0.3 holds nothing out: dev is the validation split\n" in out
    assert len(read_manifest(tmp_path / "to" / "train.tsv")) == 9


@pytest.mark.parametrize(
    ("train", "test"), [("metadata_train", "metadata_eval"), ("my-train", "my-test")]
)
def test_no_part_is_held_out_of_a_test_split(tmp_path, asr_prepare, train, test):
    noise(tmp_path / "set" / "a.wav")
    for name, count in ((train, 9), (test, 8)):
        rows = [{"audio_filepath": "a.wav", "text": "a"}] * count
        json_lines(tmp_path / "set" / f"{name}.json", rows)
    call = ("table", tmp_path / "set", "--to", tmp_path / "to", "--valid", 0.3)
    code, out, _ = asr_prepare(*call)
    assert (
        code == 0
        and f"data.train={tmp_path}/to/{train}.tsv data.valid={tmp_path}/to/{train}-v" in out
    )
    assert len(read_manifest(tmp_path / "to" / f"{test}.tsv")) == 8
    (tmp_path / "set" / f"{train}.json").unlink()
    code, out, _ = asr_prepare(*call[:2], "--to", tmp_path / "1")
    assert code == 0 and "next: prepare a training split" in out
    code, out, _ = asr_prepare(*call[:2], "--to", tmp_path / "2", "--valid", 0.3)
    assert (
        code == 0 and f"data.train={tmp_path}/2/{test}.tsv data.valid={tmp_path}/2/{test}-v" in out
    )


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [("dev", 1), ("x-valid", 1), ("val_manifest", 1), ("validated", 0), ("interval", 0)],
)
def test_the_names_of_validation_splits(name, is_valid):
    assert bool(prepare.VALID.search(name)) == bool(is_valid)


def test_nothing_is_left_of_a_faulty_corpus(tmp_path, asr_prepare):
    noise(tmp_path / "set" / "a.wav", 3.0)
    row = {"audio_filepath": "a.wav", "offset": 1, "duration": 1, "text": "a"}
    json_lines(tmp_path / "set" / "dev.json", [row])
    json_lines(tmp_path / "set" / "train.json", [row, {**row, "text": ""}])
    call = ("table", tmp_path / "set", "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call)
    assert code == 2 and "1 of 3 rows are faulty" in err[-1] and not (tmp_path / "to").exists()
    assert asr_prepare(*call, "--skip-bad")[0] == 0
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == [
        "dev-00000.tar",
        "dev.tsv",
        "train-00000.tar",
        "train.tsv",
    ]


@pytest.mark.parametrize("name", ["../out", "/out", "..", ".hidden", "", "a\nb"])
def test_the_name_of_a_split_cannot_lead_elsewhere(tmp_path, name):
    split = Split(name, tmp_path, tmp_path, lambda: iter(()))
    with pytest.raises(UserError, match="cannot be the name of a manifest"):
        convert([split], tmp_path / "to", Options(), TextNormalizer("keep"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "rate"), [("mp3", 32_000), ("ogg", 44_100), ("wav", 48_000)])
def test_parts_of_lossy_and_fine_audio(tmp_path, asr_prepare, kind, rate):
    """A part of a file is what decoding all of it gives there; 24 bits stay 24 bits."""
    options = {"subtype": "PCM_24"} if kind == "wav" else {}
    noise(tmp_path / "set" / f"a.{kind}", 4.1, rate=rate, **options)
    whole, _ = soundfile.read(tmp_path / "set" / f"a.{kind}", dtype="float64", always_2d=True)
    row = {"audio_filepath": f"a.{kind}", "offset": 1.23, "duration": 1.7, "text": "a"}
    json_lines(tmp_path / "set" / "dev.json", [row])
    assert asr_prepare("table", tmp_path / "set" / "dev.json", "--to", tmp_path)[0] == 0
    (utterance,) = read_manifest(tmp_path / "dev.tsv")
    actual = read_audio(utterance.audio, rate)
    step = 2**-23 if kind == "wav" else 2**-15
    np.testing.assert_allclose(actual, part(whole, 1.23, 2.93, rate)[:, 0], atol=2 * step)


@pytest.mark.parametrize("name", list(FORMATS | GENERAL))
def test_a_source_of_another_form_is_one_line(tmp_path, asr_prepare, name):
    (tmp_path / "set").mkdir()
    noise(tmp_path / "b.wav")
    for source in (tmp_path / "set", tmp_path / "none", tmp_path / "b.wav"):
        code, _, err = asr_prepare(
            name if name != "librispeech" else "auto", source, "--to", tmp_path / "to"
        )
        assert code == 2 and len(err) == 1 and str(source) in err[0]


@pytest.mark.parametrize(
    ("text", "expected", "report"),
    [
        ("It’s “fine”, e.g. well-known", "IT'S FINE EG WELL KNOWN", ["6 dropped", "1 changed"]),
        ("Ÿ ﬁ Œuvre ß ø", "Y FI OEUVRE SS O", ["5 changed: 'Ÿ to Y' 1, 'ﬁ to FI' 1"]),
        ("e\u0301te\u0301", "ETE", ["1 transcripts changed to Unicode", "2 changed: 'é to E' 2"]),
        ("5 % да", "", ["4 dropped: '5' 1, '%' 1, 'д' 1, 'а' 1", "warning: 1 transcripts lost"]),
        ("A\u00a0B\tC", "A B C", []),
        ("wait...what left.She Ph.D", "WAIT WHAT LEFT SHE PHD", ["5 dropped: '.' 5"]),
        ("the boys' ' tis", "THE BOYS' TIS", ["1 dropped"]),
    ],
)
def test_upper_az(text, expected, report):
    normalize = TextNormalizer("upper-az")
    assert normalize(text) == expected
    lines = normalize.report()
    assert len(lines) == len(report)
    assert all(words in line for words, line in zip(report, lines, strict=True))


@pytest.mark.parametrize(
    ("choice", "text", "expected", "report"),
    [
        ("upper-az", "hello<COMMA> you <UNK>", "HELLO YOU", ["2 tags dropped", "1 of these tags"]),
        ("keep", "A [laughter]. {NOISE} (Applause) b", "A. b", ["3 tags dropped: '[laughter]' 1"]),
        ("keep", "[laughter-yeah] [[skip]] <b_aside> so", "yeah so", ["3 tags dropped"]),
        (
            "keep",
            "th[at]- (is spoken) 5 < 6 > 3",
            "th[at]- (is spoken) 5 < 6 > 3",
            ["5 digits"],
        ),
        ("keep", "嗯[LAUGHTER]我知道<noise>了 {x}好", "嗯我知道了好", ["3 tags dropped"]),
        ("lower", "e\u0301 \u00e9 zero\u200b\ufeffwidth", "é é zerowidth", ["1 transcr", "2 char"]),
        ("keep", "می\u200cخواهم a\u200cb", "می\u200cخواهم ab", ["1 characters without width"]),
        ("lower", "İstanbul I\u0307", "istanbul i", ["1 transcripts changed", "--text lower-tr"]),
        ("lower-tr", "İstanbul Irmak", "istanbul ırmak", []),
        ("keep", '"""Good-bye,"" said he."', '"Good-bye," said he.', ["1 transcripts were quoted"]),
        ("keep", '"Hello."', '"Hello."', []),
        ("keep", '"A," he said, "b."', '"A," he said, "b."', []),
        ("keep", '""A,"" he said', '"A," he said', ["1 transcripts were quoted"]),
    ],
)
def test_what_is_no_text_is_removed_and_counted(choice, text, expected, report):
    normalize = TextNormalizer(choice)
    assert normalize(text) == expected
    lines = [line for line in normalize.report() if not line.startswith("error rates count")]
    assert len(lines) == len(report)
    assert all(words in line for words, line in zip(report, lines, strict=True))


def test_upper_az_without_the_apostrophes_of_quotations():
    normalize = TextNormalizer("upper-az", punctuation="drop")
    assert normalize("‘Well’, she said, 'it’s O'Neil—no?'") == "WELL SHE SAID IT'S O'NEIL NO"


def test_turkish_is_advised_its_own_lower_case():
    normalize = TextNormalizer("keep")
    assert [normalize(text) for text in ("Isparta ılık", "iyi")] == ["Isparta ılık", "iyi"]
    (line,) = normalize.report()
    assert line.endswith("--text lower-tr removes them")


def test_a_name_with_a_letter_of_turkish_makes_no_turkish():
    normalize = TextNormalizer("keep")
    for text in [*["Ich bin im Institut."] * 19, "Er kam nach Diyarbakır."]:
        normalize(text)
    (line,) = normalize.report()
    assert "--text lower --punctuation drop removes them" in line


def test_the_quoting_of_csv_is_undone_as_csv_does():
    normalize = TextNormalizer("keep")
    for text in ('"Good-bye," said he.', 'say "x"', '"x"', '"', 'a "b" "c"', '"a" b "c"', "plain"):
        file = io.StringIO()
        csv.writer(file, delimiter="\t").writerow([text])
        assert normalize(file.getvalue()) == text


@pytest.mark.parametrize("choice", ["keep", "lower", "upper-az"])
def test_tags_are_kept_on_request(choice):
    normalize = TextNormalizer(choice, "keep")
    expected = {"keep": "Yes <COMMA> no so [noise]", "lower": "yes <COMMA> no so [noise]"}
    expected = expected.get(choice, "YES <COMMA> NO SO [noise]")
    assert normalize("Yes<COMMA> no [laughter-so] [noise]") == expected
    line, *_ = normalize.report()
    tags = "'<COMMA>' 1, '[laughter-WORD]' 1, '[noise]' 1"
    assert line == f"--tags keep: 3 tags kept, each as one token: {tags}"


def test_a_transcript_of_tags_alone_is_a_fault(tmp_path, asr_prepare):
    noise(tmp_path / "set" / "a.wav")
    rows = [{"audio_filepath": "a.wav", "text": text} for text in ("a <COMMA> b", "<SIL>")]
    manifest = json_lines(tmp_path / "set" / "train.json", rows)
    call = ("table", manifest, "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call)
    assert code == 2 and err[0] == f"{manifest}:2: no text is left of '<SIL>'"
    code, out, _ = asr_prepare(*call, "--skip-bad")
    assert code == 0 and "2 tags dropped: '<COMMA>' 1, '<SIL>' 1; --tags keep" in out
    code, out, _ = asr_prepare(*call, "--tags", "keep")
    retold = f"warning: {manifest}: 1 rows name a whole file that an earlier row"
    assert code == 0 and retold in out
    json_lines(manifest, [row | {"duration": 1.0} for row in rows])  # of the whole file
    assert retold in asr_prepare(*call, "--tags", "keep")[1]
    assert read_manifest(tmp_path / "to" / "train.tsv").texts == ["a <COMMA> b", "<SIL>"]


@pytest.mark.parametrize("form", ["kaldi", "nemo", "table", "audiofolder"])
def test_byte_order_marks_of_joined_tables_are_no_content(tmp_path, asr_prepare, form):
    mark, folder = "\ufeff", tmp_path / "set"
    for name in "ab":
        noise(folder / f"{name}.wav")
    source = folder
    if form == "kaldi":
        (folder / "wav.scp").write_text(f"{mark}a a.wav\n{mark}b b.wav\n")
        (folder / "text").write_text(f"{mark}a one\n{mark}b {mark}two\n")
    elif form == "nemo":
        rows = (
            '{"audio_filepath": "a.wav", "text": "one"}\n{"audio_filepath": "b.wav", "text": "two"}'
        )
        source = folder / "train.json"
        source.write_text(mark + rows.replace("\n", f"\n{mark}"))
    elif form == "table":
        source = folder / "all.tsv"
        source.write_text(f"{mark}id\taudio\ttext\n{mark}a\ta.wav\tone\n{mark}b\tb.wav\ttwo\n")
    else:
        (folder / "metadata.csv").write_text(f"{mark}file_name,text\na.wav,one\n{mark}b.wav,two\n")
    code, _, err = asr_prepare("auto", source, "--to", tmp_path / "to")
    assert code == 0 and err == []
    (manifest,) = (tmp_path / "to").glob("*.tsv")
    corpus = read_manifest(manifest)
    assert corpus.texts == ["one", "two"] and not any(mark in name for name in corpus.ids)


def test_a_damaged_gzip_is_one_line(tmp_path, asr_prepare):
    (tmp_path / "cuts.jsonl.gz").write_bytes(b"\x1f\x8b\x08\0 no gzip")
    code, _, err = asr_prepare("lhotse", tmp_path / "cuts.jsonl.gz", "--to", tmp_path / "to")
    assert code == 2 and len(err) == 1

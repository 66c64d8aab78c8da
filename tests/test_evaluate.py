"""asr.evaluate beyond scoring: tuning, error rates of groups, and comparison with another run."""

import csv
import errno
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from test_fusion import save_language_run
from tiny_speech import RATE
from tone_model import spoken, tone_recognizer

from asr import evaluate, export, prune, transcribe
from asr.analysis.score_files import write_evaluation
from asr.analysis.wer import score
from asr.config.loader import read_recipe
from asr.data.corpus import Utterance, read_manifest, write_manifest
from asr.data.splits import check_result_name
from asr.errors import UserError
from asr.features.augment import change_speed
from asr.inference import evaluation
from asr.inference.evaluation import decode_split, for_split, read_batches
from asr.inference.load import load_run_recipe
from asr.inference.recognition import Recognizer
from asr.models import build
from asr.tasks.speech import speech_task
from asr.training.checkpoint import list_checkpoints

KEEP = "decode.no_speech_log_prob=null"  # the tiny model is sure of nothing
SPEEDS = "decode.speeds=[0.9,1.0,1.1]"


def hypothesis_rows(folder):
    with (folder / "hypotheses.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def errors(commands, run, split, out, *more):
    assert commands(evaluate, run, "--split", split, "--out", out, "--pictures", "0", *more)[0] == 0
    return json.loads((out / "score.json").read_text())["errors"]


@pytest.mark.parametrize("more", [(), (SPEEDS,)], ids=["once", "at three speeds"])
def test_tuning_writes_settings_that_are_no_worse(more, tiny, tiny_run, run, commands, tmp_path):
    before = errors(commands, run, "valid", tmp_path / "before", *more)
    code, out, _ = commands(evaluate, run, "--split", "valid", "--tune", *more)
    assert code == 0
    reported = dict(re.findall(r"decode\.(\w+)=(\S+)", out))
    decode = read_recipe(run / "recipe.yaml").decode
    assert {"beam", "ctc_weight", "length_penalty"} <= reported.keys()
    assert (
        [f"decode.speeds={reported.pop('speeds')}"] == list(more)
        if more
        else "speeds" not in reported
    )
    assert all(float(value) == getattr(decode, key) for key, value in reported.items())
    assert errors(commands, run, "valid", tmp_path / "after", *more) <= before
    changed = read_recipe(run / "recipe.yaml").model_copy(update={"decode": None})
    assert changed == read_recipe(tiny_run / "recipe.yaml").model_copy(update={"decode": None})


def test_groups_are_scored_as_if_alone(tiny, tiny_run, commands, tmp_path):
    code, out, _ = commands(
        evaluate, tiny_run, "--split", "test", "--by", "speaker", "--out", tmp_path
    )
    rows = hypothesis_rows(tmp_path)
    speakers = sorted({row["speaker"] for row in rows})
    assert code == 0 and speakers == ["s0", "s1"]
    for speaker in speakers:
        mine = [row for row in rows if row["speaker"] == speaker]
        rate = jiwer.wer([r["reference"] for r in mine], [r["hypothesis"] for r in mine])
        line = next(line for line in out.splitlines() if line.startswith(speaker))
        assert f"{100 * rate:.2f} %" in line and f" {len(mine)} " in line


def test_a_speaker_s_statistics_are_those_of_the_split(tiny):
    """However often it is read, and even if the training corpus had a speaker of that name."""
    recipe = read_recipe(tiny, ["features.mvn=speaker"])
    recognizer, corpus = tone_recognizer(), read_manifest(tiny.parent / "test.tsv")
    recognizer.front_end = front_end = build.build_front_end(recipe.features)
    front_end.norm.add(torch.randn(997, front_end.size), "s0")
    raw = {u.id: front_end.extract(front_end.load(u.audio)) for u in corpus}
    for _ in range(2):
        for batch in read_batches(for_split(recognizer, corpus, recipe), corpus, recipe):
            for row, name in enumerate(batch.ids):
                speaker = next(u.speaker for u in corpus if u.id == name)
                frames = torch.cat([raw[u.id] for u in corpus if u.speaker == speaker])
                expected = (raw[name] - frames.mean(0)) / frames.std(0, correction=0)
                actual = batch.features[row, : batch.lengths[row]]
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_validation_normalises_speakers_as_evaluation_does(tiny, tmp_path):
    task = speech_task(read_recipe(tiny, ["features.mvn=speaker"]), tmp_path, resume=False)
    other = speech_task(read_recipe(tiny), tmp_path, resume=False)
    tokenizer, front_end = task.validation.tokenizer, task.epochs.utterances.front_end
    recognizer = Recognizer(task.objective.model, tokenizer, front_end, task.recipe.decode, 30.0)
    corpus = task.validation.corpus
    judge = read_batches(for_split(recognizer, corpus, task.recipe), corpus, task.recipe)
    for ours, expected, by_itself in zip(
        task.validation_batches(), judge, other.validation_batches(), strict=True
    ):
        assert torch.equal(ours.features, expected.features) and ours.ids == by_itself.ids
        assert not torch.allclose(ours.features, by_itself.features, atol=0.1)


def test_the_page_has_the_attention_of_the_worst_utterances(drawn, tiny_run, commands, tmp_path):
    given = ["--split", "test", "--out", tmp_path, "--pictures", 2, KEEP]
    assert commands(evaluate, tiny_run, *given)[0] == 0
    pictures = re.findall(r"data:image/png;base64,([\w+/=]+)", (tmp_path / "page.html").read_text())
    assert len(pictures) == 2 and min(map(len, pictures)) > 1000


def test_silence_and_a_few_frames_are_not_decoded(tiny_run, commands, tmp_path):
    """As in asr.transcribe; no model computes them."""
    speech = read_recipe(tiny_run / "recipe.yaml").data.test["test"].parent / "test-0.flac"
    late = np.concatenate([np.zeros(3 * RATE), soundfile.read(speech)[0]])
    sounds = {"silent": np.zeros(RATE), "short": np.sin(np.arange(RATE // 20)), "late": late}
    rows = [f"{name}\tx\t{name}.wav\t{len(sound) / RATE}\t" for name, sound in sounds.items()]
    for name, sound in sounds.items():
        soundfile.write(tmp_path / f"{name}.wav", sound, RATE)
    (tmp_path / "speech.flac").symlink_to(speech)
    rows.append("speech\tx\tspeech.flac\t1.0\tbc")
    table = "\n".join(["id\tspeaker\taudio\tseconds\ttext", *rows]) + "\n"
    (tmp_path / "x.tsv").write_text(table)
    call = ("--split", tmp_path / "x.tsv", "--out", tmp_path / "out", "decode.beam=2")
    code, *_ = commands(evaluate, tiny_run, *call)
    texts = {row["id"]: row["hypothesis"] for row in hypothesis_rows(tmp_path / "out")}
    assert code == 0 and texts["silent"] == texts["short"] == ""
    model = Recognizer.load(tiny_run, ["decode.beam=2"])
    assert texts["speech"] == model(speech).text
    assert (
        texts["late"]
        == model(late, RATE).text
        == model(late[-len(late) + 11 * RATE // 4 :], RATE).text
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["features.sample_rate=4000"], "features.sample_rate = 4000: its .* trained with 8000, "),
        (["features.mel_bins=12"], "features.mel_bins = 12: its model was trained with 11, and"),
        (["features.mvn=none"], "features.mvn = none: its model was trained with utterance, and"),
        (["features.mvn=global"], "features.mvn = global: its model was trained with utterance"),
        (["features.mvn_variance=false"], "features.mvn_variance = False: its model was trained"),
        (["features={mel_bins: 13}"], "features.mel_bins = 13: its model was trained with 11"),
        (["text.kind=bpe", "text.size=9"], "text.kind = bpe: .* another run"),
        (["train.steps=3"], "train.steps = 3: has an effect in training only"),
        (["model.listener.dropout=0.3"], "model.listener.dropout = 0.3: has an effect in training"),
        (["seed=7"], "seed = 7: has an effect in training only"),
        (["model.listener.norm=none"], "model.listener.norm = none: its model was trained with ba"),
        (["model.kind=transformer"], "model.kind = transformer: its model was trained with las"),
    ],
)
def test_what_a_model_was_trained_with_stays(more, message, tiny_run, commands, tmp_path):
    to = ["--to", tmp_path / "to"]
    lines = (
        [evaluate, tiny_run, "--split", "test", "--out", tmp_path / "out"],
        [transcribe, tiny_run, tmp_path / "a.wav"],
        [export, tiny_run, *to],
        [prune, tiny_run, "--encoder", 1, *to],
    )
    (tmp_path / "a.wav").touch()
    for command, *line in lines:
        assert re.match(f"{tiny_run}: {message}", commands.refused(command, *line, *more))
    with pytest.raises(UserError, match=message):
        Recognizer.load(tiny_run, more)
    assert [path.name for path in tmp_path.iterdir()] == ["a.wav"]


def test_what_may_differ_from_training(tiny_run):
    same = "features.sample_rate=8000", "features.mel_bins=11", "model.kind=las"
    later = (
        "train.threads=1",
        "features.mvn=speaker",
        "model.speller.backend=python",
        "features.dither=1",
    )
    recognizer = Recognizer.load(tiny_run, [*same, *later, "data.max_seconds=3"])
    assert recognizer.front_end.norm.kind == "speaker" and recognizer.max_segment_seconds == 3.0


@pytest.mark.parametrize("mvn", ["utterance", "speaker"])
def test_a_split_is_read_at_every_speed(mvn, tiny):
    """A speaker has separate statistics at each speed."""
    recipe = read_recipe(tiny, [f"features.mvn={mvn}", SPEEDS])
    recognizer, corpus = tone_recognizer(), read_manifest(tiny.parent / "test.tsv")
    recognizer.front_end = front_end = build.build_front_end(recipe.features)
    waves = {u.id: front_end.load(u.audio) for u in corpus}
    (batch,) = read_batches(for_split(recognizer, corpus, recipe), corpus, recipe)
    for speed, (features, lengths) in zip((0.9, 1.1), batch.other_speeds, strict=True):
        raw = {name: front_end.extract(change_speed(wave, speed)) for name, wave in waves.items()}
        for row, name in enumerate(batch.ids):
            speaker = next(u.speaker for u in corpus if u.id == name)
            mates = [u.id for u in corpus if u.speaker == speaker and mvn == "speaker"] or [name]
            frames = torch.cat([raw[mate] for mate in mates])
            expected = (raw[name] - frames.mean(0)) / frames.std(0, correction=0)
            actual = features[row, : lengths[row]]
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_at_several_speeds_files_match_the_split(tiny, tiny_run, commands, tmp_path):
    settings = (SPEEDS, "decode.beam=3", "decode.ctc_weight=0.3")
    assert commands(evaluate, tiny_run, "--split", "test", *settings, "--out", tmp_path)[0] == 0
    recognizer = Recognizer.load(tiny_run, settings)
    corpus = read_manifest(tiny.parent / "test.tsv")
    reported = dict(recognizer.transcribe_files([u.audio for u in corpus]))
    assert [reported[u.audio].text for u in corpus] == [
        row["hypothesis"] for row in hypothesis_rows(tmp_path)
    ]
    once = Recognizer.load(tiny_run, settings[1:])
    assert any(once(u.audio).score != reported[u.audio].score for u in corpus)
    assert "speeds" in (tmp_path / "page.html").read_text()


@pytest.fixture
def with_long(tiny, tmp_path):
    """A split of two utterances and a long one: all utterances concatenated, twice."""
    corpus = read_manifest(tiny.parent / "test.tsv")
    waves = [soundfile.read(u.audio) for u in corpus]
    rate = waves[0][1]
    audio = [*(wave for wave, _ in waves[:2]), np.concatenate([wave for wave, _ in 2 * waves])]
    texts = [*corpus.texts[:2], " ".join(2 * corpus.texts)]
    made = []
    for number, (wave, text) in enumerate(zip(audio, texts, strict=True)):
        place = tmp_path / "long" / f"{number}.flac"
        place.parent.mkdir(exist_ok=True)
        soundfile.write(place, wave, rate)
        made.append(Utterance(f"u{number}", "s0", place, len(wave) / rate, text))
    write_manifest(tmp_path / "long" / "long.tsv", made)
    return tmp_path / "long" / "long.tsv"


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (SPEEDS, "decode.beam=2")], ids=["once", "at three speeds"])
def test_long_utterances_are_decoded_as_by_transcribe(
    more, with_long, tiny_run, commands, tmp_path
):
    settings = ("decode.max_segment_seconds=1", KEEP, *more)
    corpus, out = read_manifest(with_long), tmp_path / "out"
    assert corpus.seconds[2] > 2 > 1 > corpus.seconds[1]
    code, output, _ = commands(evaluate, tiny_run, "--split", with_long, "--out", out, *settings)
    assert (
        code == 0
        and "1 utterances exceed decode.max_segment_seconds and are decoded in segments" in output
    )
    recognizer = Recognizer.load(tiny_run, settings)
    reported = [recognizer(u.audio) for u in corpus]
    rows = hypothesis_rows(out)
    assert [row["hypothesis"] for row in rows] == [transcript.text for transcript in reported]
    assert 0 < float(rows[2]["coverage"]) <= 1 and rows[2]["finished"] in ("yes", "no")
    full = Recognizer.load(tiny_run, more)(corpus[2].audio)
    assert full.tokens != reported[2].tokens  # otherwise the test could not fail
    assert json.loads((out / "score.json").read_text())["about"]["in_segments"] == 1


@pytest.mark.parametrize("find", ["beam", "ctc"])
def test_overlaps_are_not_transcribed_twice(find, tiny, tmp_path):
    """By the search and by CTC alone, with an error-free model and audio without pauses."""
    words = ["abc", "cab", "bca", "a", "acb", "bac"] * 8
    wave, _ = spoken(words, 0.12)  # which is too short for a cut
    soundfile.write(tmp_path / "a.wav", wave, RATE)
    utterance = Utterance("u", "s", tmp_path / "a.wav", len(wave) / RATE, " ".join(words))
    write_manifest(tmp_path / "a.tsv", [utterance])
    recognizer = tone_recognizer(max_segment_seconds=4.0, overlap=1.0, search=find)
    assert len(wave) / RATE > 5 * 4.0
    recipe = read_recipe(tiny).model_copy(update={"decode": recognizer.decode})
    decoded, _ = decode_split(recognizer, read_manifest(tmp_path / "a.tsv"), recipe)
    actual = decoded["u"]
    assert actual.text == actual.ctc.text == utterance.text and actual.finished


def test_tuning_skips_long_utterances(with_long, run, commands):
    line = (evaluate, run, "--split", with_long, "--tune")
    code, out, _ = commands(*line, "decode.max_segment_seconds=1")
    assert (
        code == 0
        and "skipped: 1 utterances longer than decode.max_segment_seconds" in out
        and "2 utterances to decode" in out
    )
    rows = with_long.read_text().splitlines()
    with_long.write_text("\n".join([rows[0], rows[3]]) + "\n")
    assert "all are longer than decode.max_segment_seconds = 1" in commands.refused(
        *line, "decode.max_segment_seconds=1"
    )


def test_a_long_recording_that_cannot_be_read_is_scored_as_empty(
    with_long, tiny_run, commands, tmp_path
):
    (with_long.parent / "2.flac").write_bytes(b"no audio")
    line = (
        evaluate,
        tiny_run,
        "--split",
        with_long,
        "--out",
        tmp_path / "out",
        "decode.max_segment_seconds=1",
    )
    code, out, _ = commands(*line)
    assert code == 2 and "not decoded, scored as empty: u2: " in out


def test_a_file_longer_than_its_manifest_says_is_not_read_whole(
    with_long, tiny_run, commands, tmp_path
):
    rows = [line.split("\t") for line in with_long.read_text().splitlines()]
    rows[3][rows[0].index("seconds")] = "0.5"
    with_long.write_text("".join("\t".join(row) + "\n" for row in rows))
    line = (evaluate, tiny_run, "--split", with_long, "--out", tmp_path / "out")
    code, out, _ = commands(*line, "decode.max_segment_seconds=1")
    assert code == 2 and "not decoded, scored as empty: u2: " in out
    assert "2.flac: longer than the limit of 2 seconds" in out


def test_a_batch_that_exceeds_the_memory_is_decoded_apart(tiny, tiny_run, monkeypatch):
    corpus, recipe = read_manifest(tiny.parent / "test.tsv"), read_recipe(tiny)
    recognizer = Recognizer.load(tiny_run)
    together, _ = decode_split(recognizer, corpus, recipe)
    encode, front_end = recognizer.model.encode, recognizer.front_end
    frames = {u.id: len(front_end.extract(front_end.load(u.audio))) for u in corpus}
    longest = [name for name in corpus.ids if frames[name] == max(frames.values())]

    def fails(features, lengths):
        if len(features) > 1 or features.shape[1] == max(frames.values()):
            raise MemoryError
        return encode(features, lengths)

    monkeypatch.setattr(recognizer.model, "encode", fails)
    decoded, reasons = decode_split(recognizer, corpus, recipe)
    assert list(reasons) == longest and len(longest) < len(corpus)
    assert all(".flac: out of memory; lower decode" in reason for reason in reasons.values())
    assert {name: one.tokens for name, one in together.items() if name not in reasons} == {
        name: one.tokens for name, one in decoded.items()
    }


def test_a_speaker_s_statistics_include_long_recordings(with_long, tiny):
    recipe = read_recipe(tiny, ["features.mvn=speaker", "decode.max_segment_seconds=1"])
    recognizer, corpus = tone_recognizer(1.0), read_manifest(with_long)
    recognizer.front_end = build.build_front_end(recipe.features)
    raw = [recognizer.front_end.extract(recognizer.front_end.load(u.audio)) for u in corpus]
    frames = torch.cat(raw)
    (batch,) = read_batches(for_split(recognizer, corpus, recipe), corpus, recipe)
    row = batch.ids.index("u0")
    expected = (raw[0] - frames.mean(0)) / frames.std(0, correction=0)
    actual = batch.features[row, : batch.lengths[row]]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_missing_column_is_one_line(tiny, tiny_run, commands, tmp_path):
    line = commands.refused(
        evaluate, tiny_run, "--split", "test", "--by", "accent", "--out", tmp_path / "no"
    )
    assert "accent" in line and not (tmp_path / "no").exists()


def test_against_another_run_the_differences_are_those_of_jiwer(tiny, tiny_run, commands, tmp_path):
    assert commands(evaluate, tiny_run, "--split", "test", "--out", tmp_path / "ours")[0] == 0
    rows = hypothesis_rows(tmp_path / "ours")
    other = [rows[0]["reference"], f"a b c {rows[1]['reference']}", "c c", rows[3]["reference"]]
    texts, ids, speakers = ([row[key] for row in rows] for key in ("reference", "id", "speaker"))
    write_evaluation(tmp_path / "run/evaluate/test", score(texts, other, ids, speakers))
    out = commands(
        evaluate, tiny_run, "--split", "test", "--against", tmp_path / "run", "--out", tmp_path
    )[1]
    ours = [row["hypothesis"] for row in rows]
    rates = jiwer.wer(texts, ours), jiwer.wer(texts, other)
    reported = "{:.2f} % against {:.2f} %: {:+.2f} points"
    assert reported.format(100 * rates[0], 100 * rates[1], 100 * (rates[0] - rates[1])) in out
    assert "matched pairs over phrases" in out
    for units in ("utterances", "speakers"):  # four
        assert f"over {units}: not tested, there are fewer than 20" in out


def test_what_else_causes_a_difference_is_named(tiny, tiny_run, run, commands, tmp_path):
    assert commands(evaluate, run, "--split", "test", "decode.beam=3")[0] == 0
    file = run / "evaluate" / "test" / "score.json"
    about = json.loads(file.read_text())
    about["about"]["not_decoded"] = 2
    file.write_text(json.dumps(about))
    given = "--split", "test", "--against", run, "--out", tmp_path / "e", "decode.beam=2"
    out = commands(evaluate, tiny_run, *given)[1]
    assert "not decoded alike, which may cause a difference: beam 2 instead of 3\n" in out
    assert "2 utterances not decoded, scored as empty" in out


def test_against_a_run_that_was_not_evaluated(tiny, tiny_run, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = commands.refused(
        evaluate, tiny_run, "--split", "test", "--against", tmp_path, "--out", tmp_path / "e"
    )
    assert line == f"{tmp_path}: no recipe.yaml in it, so it is no run folder"
    # What it names makes what was missing, also where the split has another name, and leaves the
    # results of the run itself alone.
    other = shutil.copytree(tiny_run, tmp_path / "an other")
    given = evaluate, tiny_run, "--split", "x", f"data.test={{x: {tiny.parent / 'test.tsv'}}}"
    given += "--against", other, "--out", tmp_path / "e"
    line, found, command = commands.refused(*given).partition("; first run python -m asr.evaluate ")
    assert line.startswith(f"--against {other}: not evaluated on this split") and found
    command, found, folder = command.partition(", then compare --against ")
    assert found and commands(evaluate, *shlex.split(command), "--pictures", "0")[0] == 0
    (folder,) = shlex.split(folder)
    code, out, err = commands(*(folder if part == other else part for part in given))
    assert code == 0 and f"{tiny_run} against {folder}, WER" in out and "+0.00 points" in out, err
    assert not (other / "evaluate" / "x").exists()
    given = tuple(tmp_path / "none" if part == other else part for part in given)
    assert "there is no such run" in commands.refused(*given)


@pytest.mark.parametrize("what", ["utterances", "texts"])
def test_comparison_with_other_data_stops_before_decoding(
    what, tiny, tiny_run, commands, tmp_path, monkeypatch
):
    """Another manifest of that name, or a corrected one, is reported before the search."""
    original = read_manifest(tiny.parent / "test.tsv")
    texts = [f"{text} a" for text in original.texts]
    other, out = tmp_path / "other", tmp_path / "e"
    ids = original.ids if what == "texts" else None
    write_evaluation(other / "evaluate" / "test", score(texts, texts, ids))
    monkeypatch.setattr(evaluation, "decode_split", lambda *_: pytest.fail("decoded in vain"))
    line = commands.refused(evaluate, tiny_run, "--split", "test", "--against", other, "--out", out)
    assert f"its evaluation test is of other {what}; first run" in line and not out.exists()


def test_the_result_names_its_checkpoints_and_settings(tiny, tiny_run, commands, tmp_path):
    """Fewer checkpoints than requested, and a setting other than the run's."""
    settings = ["decode.average=7", "decode.checkpoint=last", "features.mvn=speaker"]
    given = ["--split", "test", "--out", tmp_path, "--pictures", "0", *settings]
    code, out, _ = commands(evaluate, tiny_run, *given)
    steps = [checkpoint.step for checkpoint in list_checkpoints(tiny_run)][::-1]
    about = json.loads((tmp_path / "score.json").read_text())["about"]
    assert code == 0 and about["steps"] == steps and about["overrides"] == settings
    assert f"mean of {len(steps)} checkpoints" in out and "decode.average = 7" in out
    assert f"last, of step {' '.join(map(str, steps))}" in (tmp_path / "page.html").read_text()


def test_a_folder_that_cannot_be_made_is_refused_before_decoding(
    tiny, tiny_run, commands, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(evaluation, "decode_split", lambda *_: pytest.fail("decoded in vain"))
    line = commands.refused(evaluate, tiny_run, "--split", "test", "--out", tmp_path / "file" / "e")
    assert f"{tmp_path / 'file'} cannot be written into; choose another --out" in line


def test_a_full_disk_at_the_end_still_prints_the_rates(
    tiny, tiny_run, commands, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(evaluation, "write", full)
    code, out, err = commands(evaluate, tiny_run, "--split", "test", "--out", tmp_path)
    assert code == 2 and "tiny: test: WER" in out and "No space left" in err


@pytest.mark.slow
def test_the_files_are_written_before_the_output_pipe_closes(tiny_run, tmp_path):
    """`asr.evaluate ... | head -1` closes the pipe after its first line."""
    line = [sys.executable, "-m", "asr.evaluate", tiny_run, "--split", "test", "--out", tmp_path]
    with subprocess.Popen([*map(str, line), "--pictures", "0"], stdout=subprocess.PIPE) as process:
        process.stdout.close()
    assert (tmp_path / "score.json").exists()


@pytest.mark.parametrize("count", ["-1", "2.5", "some"])
def test_pictures_are_counted_from_0(count, tiny_run, commands):
    """As a slice, -1 would select all utterances but one."""
    code, _, err = commands(evaluate, tiny_run, "--split", "test", "--pictures", count)
    assert code == 2 and f"--pictures: '{count}' is not a whole number from 0 up;" in err


def test_another_manifest_does_not_replace_the_results_of_a_split(
    tiny, tiny_run, commands, tmp_path
):
    (tmp_path / "test.tsv").write_text((tiny.parent / "valid.tsv").read_text())
    line = commands.refused(evaluate, tiny_run, "--split", tmp_path / "test.tsv")
    assert f"--split {tmp_path}/test.tsv: its results would replace" in line and "--out" in line
    own = load_run_recipe(tiny_run).data
    for split, name in ((str(own.test["test"]), "test"), ("x.tsv", "x"), ("test", "test")):
        check_result_name(own, split, name)
    # An exported run's recipe has no manifest, whose results could be replaced.
    exported = own.model_copy(update={"valid": None})
    check_result_name(exported, "data/valid.tsv", "valid")


def test_the_page_names_the_language_model(tiny_run, commands, tmp_path):
    save_language_run(tmp_path / "lm", Recognizer.load(tiny_run).tokenizer)
    named = [f"decode.lm={tmp_path / 'lm'}", "decode.beam=2"]
    for weight, original in (("0.25", True), ("0", False)):
        out = tmp_path / weight
        given = ["--split", "test", "--out", out, *named, f"decode.lm_weight={weight}"]
        assert commands(evaluate, tiny_run, *given)[0] == 0
        page = (out / "page.html").read_text()
        assert (f"{tmp_path / 'lm'}, weight {weight}" in page) is original


def test_progress_is_reported(tiny_run, commands, tmp_path, monkeypatch):
    monkeypatch.setattr("asr.data.progress.SECONDS", 0.0)
    options = "--split", "test", "--out", tmp_path / "e", "--pictures", "0"
    _, out, _ = commands(evaluate, tiny_run, *options)
    assert re.search(r"decoded 100 %, \d+ times real time, 0 min left", out)


def test_an_empty_text_is_flagged_only_where_there_are_words(tiny, tiny_run, commands, tmp_path):
    samples, _ = soundfile.read(read_manifest(tiny.parent / "test.tsv")[0].audio)
    rows = []
    for name, text, gain in (("spoken", "bc", 1.0), ("silent", "", 0.0)):
        soundfile.write(tmp_path / f"{name}.wav", gain * samples, RATE)
        rows.append(Utterance(name, "s", tmp_path / f"{name}.wav", len(samples) / RATE, text))
    write_manifest(tmp_path / "both.tsv", rows)
    given = "--split", tmp_path / "both.tsv", "--out", tmp_path / "out"
    code, out, _ = commands(evaluate, tiny_run, *given, "decode.no_speech_log_prob=0")
    assert code == 0 and "\n1 flagged (1 empty): spoken\n" in out


def test_a_summary_names_the_setting_that_hides_a_model(tiny_run):
    """A decoder that fails where CTC does not, and texts that the rule for silence dropped."""
    opened = evaluation.open_split(tiny_run, "test", ["decode.no_speech_log_prob=-1e-9"])
    result, _ = opened.evaluate()
    lines = "\n".join(evaluation.summary(result))
    assert "empty)" in lines and "low coverage" not in lines
    assert "decode.no_speech_log_prob=null shows what was decoded for the empty ones" in lines
    failed = replace(result.score, insertions=result.score.words)
    for ctc, remark in (
        (0.321, "CTC alone has 32.10 %: try decode.beam=4"),
        (1.0, "untrained"),
    ):
        metadata = result.metadata | {"ctc_wer": ctc}
        lines = list(evaluation.summary(replace(result, score=failed, metadata=metadata)))
        assert any("WER 200.00 %" in line and remark in line for line in lines)

"""Runs on the features of pretrained encoders: stored, learned, trained, passed on."""

import json
import os
import pickle
import shutil
import time
from contextlib import nullcontext

import pytest
import soundfile
import torch

pytest.importorskip("transformers", reason="needs the extra encoders")

from tiny_encoders import make_encoder
from tiny_speech import make_corpus, make_recipe

from asr import evaluate, export, prepare, train, transcribe
from asr.config.schema import FeaturesConfig
from asr.data import compute_features
from asr.data.batching import Item
from asr.data.compute_features import make_cache
from asr.data.corpus import read_manifest
from asr.data.feature_cache import FRAMES, INDEX, open_cache
from asr.data.loader import UtteranceDataset
from asr.data.tokenizer import Characters
from asr.errors import UserError
from asr.features.augment import change_speed
from asr.features.encoder import EncoderFeatures, PretrainedEncoder
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm
from asr.inference import encoders
from asr.inference.encoders import find_encoder, load_encoder
from asr.inference.load import STATISTICS
from asr.inference.recognition import Recognizer
from asr.training.checkpoint import WEIGHTS, list_checkpoints

CPU = torch.device("cpu")
SPEEDS = (0.9, 1.0)
KEYS = ["features.kind=encoder", "features.sample_rate=16000", "features.noise=null"]
KEYS += ["train.epochs=1", "model.speller.scheduled_sampling=0"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "wav2vec2"
    make_encoder(folder, "wav2vec2")
    return folder


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    make_corpus(folder)
    make_recipe(folder)
    return folder


def trained(commands, corpus, encoder, run, *keys):
    settings = [*KEYS, f"features.encoder={encoder}", *keys]
    code, out, err = commands(train, corpus / "tiny.yaml", "--run", run, *settings)
    assert code == 0, err
    return out


def stored_weights(run):
    from safetensors.torch import load_file

    return load_file(list_checkpoints(run)[-1].folder / WEIGHTS)


# The cache


@pytest.fixture
def front_end(encoder):
    return FrontEnd(EncoderFeatures(PretrainedEncoder(encoder), 16000), MeanVarianceNorm("none"))


def live(front_end, utterance, speed):
    return front_end.extract(change_speed(front_end.load(utterance.audio), speed))


def check(cache, front_end, corpus):
    for utterance in corpus:
        for speed in SPEEDS:
            assert torch.equal(cache.read(utterance.id, speed), live(front_end, utterance, speed))


def test_stored_features_are_those_computed_from_the_audio(corpus, front_end):
    part = read_manifest(corpus / "valid.tsv")
    cache = make_cache(part, front_end, "key", SPEEDS, 0, CPU)
    check(cache, front_end, part)
    assert cache.read(part[0].id, 1.1) is None
    check(open_cache(part, "key", front_end.size), front_end, part)
    assert open_cache(part, "another", front_end.size) is None
    sent = pickle.dumps(cache)  # to a process that is not forked, without the frames
    assert len(sent) < cache.frames.nbytes / 2
    check(pickle.loads(sent), front_end, part)


def test_evaluation_computes_only_the_speeds_that_are_not_stored(corpus, front_end, monkeypatch):
    part = read_manifest(corpus / "valid.tsv")
    speeds, computed = (0.9, 1.1), []
    cache = make_cache(part, front_end, "key", SPEEDS, 0, CPU)
    tokenizer = Characters.train(part.texts)
    each = [
        UtteranceDataset(part, front_end, tokenizer, 1, other_speeds=speeds, cache=stored)
        for stored in (cache, None)
    ]

    def counted(self, waveform, speed=1.0, raw=FrontEnd.raw):
        computed.append(speed)
        return raw(self, waveform, speed)

    monkeypatch.setattr(FrontEnd, "raw", counted)
    ours, theirs = (dataset[Item(1, 0, 1.0)] for dataset in each)
    assert computed == [1.1, 1.0, *speeds]
    for some, other in zip(
        (ours.features, *ours.other_speeds), (theirs.features, *theirs.other_speeds), strict=True
    ):
        torch.testing.assert_close(some, other, atol=1e-2, rtol=1e-3)  # stored in fp16


@pytest.mark.slow
def test_features_are_prepared_at_the_speeds_that_are_used(commands, corpus, encoder):
    """Those of a stage, and those of decoding."""
    keys = [*KEYS, f"features.encoder={encoder}", "decode.speeds=[1.0, 1.1]"]
    keys += ["features.speed_perturb=[1.0]"]
    keys += ["stages=[{start: 0.5, features: {speed_perturb: [0.9]}}]"]
    assert commands(prepare, "features", corpus / "tiny.yaml", *keys)[0] == 0
    for split, speeds in (("train", {0.9, 1.0}), ("valid", {1.0, 1.1})):
        (index,) = corpus.glob(f"{split}.features/*/{INDEX}")
        lines = filter(None, index.read_text().splitlines())
        assert {float(line.split("\t")[5]) for line in lines} == speeds


def test_a_disk_without_locks_for_the_features_is_reported(corpus, front_end, monkeypatch, capsys):
    part = read_manifest(corpus / "valid.tsv")
    monkeypatch.setattr(compute_features, "lock_file", lambda *arguments: nullcontext(False))
    assert make_cache(part, front_end, "key", SPEEDS, 0, CPU) is None
    assert f"{part.path}: no folder for its features" in capsys.readouterr().out


def test_an_interrupted_computation_is_continued(corpus, front_end, monkeypatch):
    part = read_manifest(corpus / "valid.tsv")
    computed = []

    def counted(self, number, get=compute_features._Missing.__getitem__):
        computed.append(number)
        if len(computed) == 4:
            raise KeyboardInterrupt
        return get(self, number)

    monkeypatch.setattr(compute_features._Missing, "__getitem__", counted)
    with pytest.raises(KeyboardInterrupt):
        make_cache(part, front_end, "key", SPEEDS, 0, CPU)
    folder = corpus / "valid.features" / "key"
    with (folder / FRAMES).open("ab") as frames:  # a torn frame, and a torn line
        frames.write(b"x" * 11)
    with (folder / INDEX).open("a") as index:
        index.write("valid-2\tvalid-2.flac\t12")
    cache = make_cache(part, front_end, "key", SPEEDS, 0, CPU)
    assert len(computed) == 4 + len(part) * len(SPEEDS) - 3
    check(cache, front_end, part)


def test_changed_audio_is_computed_again(corpus, front_end):
    part = read_manifest(corpus / "valid.tsv")
    make_cache(part, front_end, "key", SPEEDS, 0, CPU)
    path, later = part[1].audio, time.time() + 5
    soundfile.write(path, soundfile.read(path)[0] / 2, 8000)
    os.utime(path, (later, later))
    assert open_cache(part, "key", front_end.size).read(part[1].id, 1.0) is None
    cache = make_cache(part, front_end, "key", SPEEDS, 0, CPU)
    check(cache, front_end, part)


def test_copied_audio_is_not_computed_again(corpus, front_end, monkeypatch):
    part = read_manifest(corpus / "valid.tsv")
    make_cache(part, front_end, "key", SPEEDS, 0, CPU)
    for utterance in part:  # the content stays, or changes at the same size
        later = time.time() + 5
        if utterance.id == part[1].id:
            utterance.audio.write_bytes(utterance.audio.read_bytes()[:-2] + b"\0\1")
        os.utime(utterance.audio, (later, later))
    added = []
    monkeypatch.setattr(compute_features, "_add", lambda *args: added.extend(args[2]))
    cache = make_cache(part, front_end, "key", SPEEDS, 0, CPU)
    assert [(u.id, speed) for u, speed in added] == [(part[1].id, speed) for speed in SPEEDS]
    assert [cache.read(u.id, 1.0) is None for u in part] == [u.id == part[1].id for u in part]


def test_audio_too_long_for_the_encoder_is_not_read(corpus, front_end, monkeypatch):
    part = read_manifest(corpus / "valid.tsv")
    longest = max(part, key=lambda utterance: utterance.seconds)
    front_end.extract.max_samples = round(longest.seconds * front_end.sample_rate) - 1
    cache = make_cache(part, front_end, "key", (1.0,), 0, CPU)
    assert [cache.read(u.id, 1.0) is None for u in part] == [u.id == longest.id for u in part]


def test_unreadable_and_short_audio_is_tried_once(corpus, front_end, monkeypatch):
    part = read_manifest(corpus / "valid.tsv")
    part[0].audio.write_bytes(b"no audio")
    soundfile.write(part[1].audio, [0.1] * 5, 8000)
    cache = make_cache(part, front_end, "key", (1.0,), 0, CPU)
    assert [cache.read(u.id, 1.0) is None for u in part] == [True, True, False]
    monkeypatch.setattr(compute_features, "_add", None)
    assert make_cache(part, front_end, "key", (1.0,), 0, CPU).read(part[0].id, 1.0) is None


def test_a_hostile_index_reads_nothing_outside_the_file(corpus, front_end):
    part = read_manifest(corpus / "valid.tsv")
    make_cache(part, front_end, "key", (1.0,), 0, CPU)
    index = corpus / "valid.features" / "key" / INDEX
    lines = [line.split("\t") for line in index.read_text().splitlines() if line]
    bad = [(-5, 3), (0, 10**12), (10**15, 1), (0, -1), ("nan", 1)]
    wrong = ["\t".join([*line[:6], *map(str, span)]) for line in lines for span in bad]
    index.write_text("\n".join(["", "x", "\t\t\t\t\t\t\t", *wrong, ""]))
    cache = open_cache(part, "key", front_end.size)
    assert all(cache.read(u.id, 1.0) is None for u in part)


def test_a_full_disk_is_an_error_before_the_computation(corpus, front_end, monkeypatch):
    part = read_manifest(corpus / "valid.tsv")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(UserError, match="make room"):
        make_cache(part, front_end, "key", (1.0,), 0, CPU)


def test_features_of_another_normalisation_are_not_those_stored(tmp_path):
    """The weights are the same: only preprocessor_config.json differs, and the features."""
    encoder, other = tmp_path / "encoder", tmp_path / "other"
    make_encoder(encoder, "wav2vec2_stable")  # group normalisation would undo the difference
    shutil.copytree(encoder, other)
    (other / "preprocessor_config.json").write_text('{"do_normalize": false}')
    features = [FeaturesConfig(kind="encoder", encoder=str(each)) for each in (encoder, other)]
    sources = [find_encoder(each) for each in features]
    extract = [
        EncoderFeatures(load_encoder(each, source), 16000)
        for each, source in zip(features, sources, strict=True)
    ]
    waveform = 0.1 * torch.randn(4817, generator=torch.Generator().manual_seed(3))
    assert not torch.allclose(extract[0](waveform), extract[1](waveform), atol=0.01)
    assert sources[0].sha256 != sources[1].sha256


def test_features_are_computed_before_training(commands, corpus, encoder):
    keys = [*KEYS, f"features.encoder={encoder}", "features.speed_perturb=[0.9,1.0]"]
    recipe = corpus / "tiny.yaml"
    code, _, err = commands(prepare, "features", recipe, *keys, "--split", "train")
    assert code == 0, err
    again = commands(prepare, "features", recipe, *keys, "--split", "train", "--split", "test")[1]
    assert again.count("computing features of") == 1 and "test.tsv" in again
    line = commands.refused(prepare, "features", recipe, "--split", "train")
    assert "features.kind=encoder" in line


# Training


LEARNED = ("features.layer=weighted", "features.project=5")


@pytest.mark.slow
def test_training_reads_what_is_stored(commands, corpus, encoder, tmp_path, monkeypatch):
    stored, computed = tmp_path / "stored", tmp_path / "computed"
    out = trained(commands, corpus, encoder, stored, *LEARNED)
    assert "computing features of" in out
    again = trained(commands, corpus, encoder, tmp_path / "again", *LEARNED)
    assert "computing features of" not in again
    monkeypatch.setattr("asr.tasks.speech.cache_features", lambda *arguments: None)
    trained(commands, corpus, encoder, computed, *LEARNED)
    first, second = stored_weights(stored), stored_weights(computed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["frontend.layer_weights"].unique().numel() > 1  # they were trained
    assert first["frontend.project.weight"].shape == (5, 24)
    assert not any("encoder.model" in name for name in first)
    # Evaluation with stored features, of `valid`, and without, of `test`; transcription.
    for split in ("valid", "test"):
        assert commands(evaluate, stored, "--split", split)[0] == 0
    audio = corpus / "test-0.flac"
    code, out, _ = commands(transcribe, stored, audio)
    assert code == 0
    # Another folder may have the same weights, but no others.
    moved = shutil.copytree(encoder, tmp_path / "moved")
    assert commands(transcribe, stored, audio, f"features.encoder={moved}")[1] == out
    again = train, tmp_path / "again" / "recipe.yaml", "--resume", f"features.encoder={moved}"
    code, _, err = commands(*again, "--run", tmp_path / "again")
    assert code == 0, err
    make_encoder(moved, "wav2vec2", seed=2)
    assert "not the weights" in commands.refused(*again, "--run", tmp_path / "again")
    line = commands.refused(transcribe, stored, audio, f"features.encoder={moved}")
    assert "not the weights" in line
    assert "no such folder" in commands.refused(transcribe, stored, audio, "features.encoder=x")
    # Passed on with the encoder.
    assert "--with-encoder" in commands.refused(export, stored, "--to", tmp_path / "small")
    assert commands(export, stored, "--to", tmp_path / "small", "--with-encoder")[0] == 0
    assert str(tmp_path) not in (tmp_path / "small" / "recipe.yaml").read_text()
    assert str(encoder) not in (tmp_path / "small" / "encoder.json").read_text()
    assert "licence: mit" in (tmp_path / "small" / "README.md").read_text()
    assert commands(transcribe, tmp_path / "small", audio)[0] == 0
    assert "--onnx" in commands.refused(export, stored, "--onnx", "--to", tmp_path / "onnx")


@pytest.mark.slow
def test_the_top_of_an_encoder_is_trained_with_the_model(commands, corpus, encoder, tmp_path):
    run, mine = tmp_path / "run", shutil.copytree(encoder, tmp_path / "mine")
    keys = ["features.train=2", "features.gradient_checkpointing=true", *LEARNED]
    keys += ["train.optimizer.lr_factors={frontend.encoder.*: 0.5}", "train.epochs=2"]
    trained(commands, corpus, mine, run, *keys)
    shutil.rmtree(mine)
    before, after = PretrainedEncoder(encoder).state_dict(), stored_weights(run)
    changed = {n for n in before if not torch.equal(before[n], after[f"frontend.encoder.{n}"])}
    assert changed and all("layers.1." in name or "layers.2." in name for name in changed)
    audio = corpus / "test-0.flac"
    code, _, err = commands(transcribe, run, audio)
    assert code == 0, err
    # Resumed to its end after another epoch: the encoder is that of the run.
    other = train, run / "recipe.yaml", "--resume", f"features.encoder={encoder}", "--run", run
    assert "its recipe was another: features.encoder" in commands.refused(*other)
    code, _, err = commands(train, run / "recipe.yaml", "--run", run, "--resume", "train.epochs=3")
    assert code == 0, err
    assert commands(export, run, "--to", tmp_path / "small")[0] == 0
    assert commands(transcribe, tmp_path / "small", audio)[0] == 0
    model = Recognizer.load(run).model
    assert not model.training


def test_a_run_asks_the_hub_for_the_commit_of_its_encoder(tmp_path, monkeypatch):
    facts = {"name": f"owner/encoder@{'7' * 40}", "sha256": "0", "licence": "mit"}
    (tmp_path / "encoder.json").write_text(json.dumps(facts))

    def refuse(features):
        raise UserError(features.encoder)

    monkeypatch.setattr(encoders, "find_encoder", refuse)
    for named, found in (("owner/encoder", facts["name"]), ("folder", "folder")):
        features = FeaturesConfig(kind="encoder", encoder=named)
        with pytest.raises(UserError, match=f"^{found}$"):
            encoders.load_run_encoder(tmp_path, features)


@pytest.mark.slow
def test_a_trained_encoder_continues_from_a_frozen_one_with_its_statistics(
    commands, corpus, encoder, tmp_path
):
    frozen, run = tmp_path / "frozen", tmp_path / "run"
    trained(commands, corpus, encoder, frozen, "features.mvn=global")
    # At a rate of almost 0 the weights stay, and losses are those of the frozen encoder.
    keys = ["features.mvn=global", "features.train=all", f"train.init={frozen}"]
    trained(commands, corpus, encoder, run, *keys, "train.optimizer.lr=1e-30")
    first, second = (list_checkpoints(each)[-1].loss for each in (frozen, run))
    assert second == pytest.approx(first, rel=1e-3)  # stored features are float16
    assert commands(evaluate, run, "--split", "valid")[0] == 0
    (run / STATISTICS).unlink()
    assert STATISTICS in commands.refused(evaluate, run, "--split", "valid")
    other = tmp_path / "other"
    make_encoder(other, "wav2vec2", seed=3)
    keys += [*KEYS, f"features.encoder={other}"]
    line = commands.refused(train, corpus / "tiny.yaml", "--run", tmp_path / "new", *keys)
    assert "train.init" in line and str(encoder) in line and str(other) in line


def test_what_an_encoder_cannot_do_is_refused(commands, corpus, tmp_path, encoder):
    whisper = tmp_path / "whisper"
    make_encoder(whisper, "whisper")

    def refused(*keys):
        settings = dict(key.split("=", 1) for key in [*KEYS, *keys])
        settings = [f"{key}={value}" for key, value in settings.items()]
        return commands.refused(train, corpus / "tiny.yaml", "--run", tmp_path / "r", *settings)

    assert "features.encoder" in refused()
    assert "data.max_seconds=2.7" in refused(f"features.encoder={whisper}")
    named = f"features.encoder={encoder}"
    assert "sample_rate=16000" in refused(named, "features.sample_rate=8000")
    assert "features.mvn" in refused(named, "features.train=all", "features.mvn=speaker")
    assert "4" in refused(named, "features.train=4")
    assert "features.dither" in refused(named, "features.dither=1")
    warped = "features.spec_augment={time_warp: 5}", "train.consistency={}"
    assert "time_warp=0" in refused(named, "features.train=2", *warped)
    assert "NAME[@REVISION]" in refused("features.encoder=nowhere")
    assert not (tmp_path / "r").exists()
    line = commands.refused(train, corpus / "tiny.yaml", "features.layer=2")
    assert "features.kind=encoder" in line

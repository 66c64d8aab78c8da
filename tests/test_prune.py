"""Pruning keeps the layers of its rule, and runs stay ordinary."""

import re
from fractions import Fraction
from math import floor

import pytest
import torch
import yaml

from asr import evaluate, export, prune, train, transcribe
from asr.config.loader import read_recipe
from asr.inference.recognition import Recognizer
from asr.prune import every_other
from asr.training import trainer


def test_every_other_is_the_rule():
    for layers in range(1, 25):
        for keep in range((layers + 1) // 2, layers):
            p = 1 - Fraction(keep, layers)
            stay = [d - 1 for d in range(1, layers + 1) if d % floor(1 / p) != 0]
            assert every_other(layers, keep) == stay


SIZES = "d_model: 6, heads: 2, feed_forward: 7, subsampling_channels: 2, ctc_weight: 0.3"
MODEL = f"model={{kind: transformer, encoder_layers: 5, decoder_layers: 3, layer_drop: 0.2, {SIZES}"


def trained(tiny, run, more=""):
    """The tiny corpus with a Transformer, trained for a few steps."""
    overrides = [f"{MODEL}{more}}}", "train.steps=3", "features.mvn=global", "decode.average=2"]
    trainer.train(read_recipe(tiny, overrides), run)
    return run


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    return trained(tiny, tmp_path_factory.mktemp("runs") / "whole")


def layers_of(run):
    model = Recognizer.load(run, ["decode.lm=null"]).model
    return model.encoder.layers, model.decoder.layers


def same(ours, theirs):
    states = ours.state_dict(), theirs.state_dict()
    return all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))


def test_every_other_keeps_the_rule_s_layers_with_their_weights(run, commands, tmp_path):
    code, out, _ = commands(prune, run, "--to", tmp_path / "half", "--encoder", 3)
    assert code == 0
    assert "encoder: kept 1 3 5 of 5 layers\ndecoder: kept 1 2 3 of 3 layers\n" in out
    full, (encoder, decoder) = layers_of(run), layers_of(tmp_path / "half")
    assert len(encoder) == len(decoder) == 3
    for number, old in enumerate((0, 2, 4)):
        assert same(encoder[number], full[0][old])
    assert all(map(same, decoder, full[1]))


def test_a_pruned_run_is_an_ordinary_run(tiny, run, commands, tmp_path):
    half = tmp_path / "half"
    settings = ("decode.average=2", "decode.lm=away", "decode.lm_weight=0.4")  # not needed
    assert commands(prune, run, "--to", half, "--encoder", 4, "--decoder", 2, *settings)[0] == 0
    recipe = yaml.safe_load((half / "recipe.yaml").read_text())
    assert recipe["run"] == "half" and recipe["model"]["encoder_layers"] == 4
    code, out, _ = commands(evaluate, half, "--split", "test", "decode.lm=null")
    assert code == 0 and "WER" in out and (half / "evaluate/test/score.json").is_file()
    assert commands(transcribe, half, tiny.parent / "test-0.flac", "decode.lm=null")[0] == 0
    assert (
        "decode.average" not in out
    )  # the source run averaged two; the pruned run stores their mean
    twice = tmp_path / "twice"
    assert commands(prune, half, "--to", twice, "--encoder", 2)[0] == 0
    assert len(layers_of(twice)[0]) == 2


def test_training_starts_from_a_pruned_run(tiny, run, commands, tmp_path):
    half = tmp_path / "half"
    assert commands(prune, run, "--to", half, "--decoder", 2)[0] == 0
    recipe = half / "recipe.yaml"
    line = commands.refused(train, recipe, "--run", half, "--resume")
    assert line.endswith(f"start another run from its weights with train.init={half}")
    assert commands(train, recipe, f"train.init={half}", "--run", tmp_path / "t")[0] == 0
    assert len(layers_of(tmp_path / "t")[1]) == 2


def test_an_exported_run_is_pruned(tiny, run, commands, tmp_path):
    bare, half = tmp_path / "bare", tmp_path / "half"
    assert commands(export, run, "--to", bare)[0] == 0
    assert commands(prune, bare, "--to", half, "--decoder", 2)[0] == 0
    assert len(layers_of(half)[1]) == 2
    assert commands(transcribe, half, tiny.parent / "test-0.flac")[0] == 0


def test_the_scales_of_deepnet_stay_those_of_the_whole_model(tiny, commands, tmp_path):
    full = trained(tiny, tmp_path / "deep", ", norm_position: post, residual_scale: deepnet")
    assert commands(prune, full, "--to", tmp_path / "half", "--encoder", 3, "--decoder", 2)[0] == 0
    for run in (full, tmp_path / "half"):
        encoder, decoder = (layers[0].around_feed_forward.alpha for layers in layers_of(run))
        assert encoder == pytest.approx(0.81 * (5**4 * 3) ** 0.0625)
        assert decoder == pytest.approx(9**0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to prune: give the layers to keep, --encoder N or --decoder M"),
        (["--encoder", 0], "--encoder: cannot keep 0 of 5 layers: keep half or more; for fewer, p"),
        (["--decoder", -1], "--decoder: cannot keep -1 of 3 layers"),
        (["--encoder", 6], "--encoder: cannot keep 6 of 5 layers"),
        (["--encoder", 2], "--encoder: cannot keep 2 of 5 layers"),
        (["--encoder", 3, "model.heads=3", "model.d_model=9"], ".*: model.d_model = 9: its model"),
    ],
)
def test_runs_that_cannot_be_pruned(arguments, message, run, commands, tmp_path):
    line = commands.refused(prune, run, "--to", tmp_path / "new", *arguments)
    assert re.match(message, line)
    assert not (tmp_path / "new").exists()


def test_missing_and_existing_folders(run, tiny_run, commands, tmp_path):
    line = commands.refused(prune, tmp_path, "--to", tmp_path / "new", "--encoder", 3)
    assert line.startswith(f"{tmp_path}: no recipe.yaml")
    line = commands.refused(prune, run, "--to", run, "--encoder", 3)
    assert line.startswith(f"--to {run}: ")
    line = commands.refused(prune, tiny_run, "--to", tmp_path / "new", "--encoder", 3)
    assert line == f"{tiny_run}: a las model; only a transformer or conformer can be pruned"
    line = commands.refused(prune, run, "--to", tmp_path / ".hidden", "--encoder", 3)
    assert line.startswith(f"--to {tmp_path / '.hidden'}: run = '.hidden'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", ["depth_scaled: true", "intermediate_ctc: {layers: [2]}"])
def test_models_that_count_their_layers(setting, tiny, commands, tmp_path):
    run = trained(tiny, tmp_path / "run", f", {setting}")
    line = commands.refused(prune, run, "--to", tmp_path / "new", "--encoder", 3)
    assert f"model.{setting.partition(':')[0]}" in line

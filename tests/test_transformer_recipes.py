"""The Transformer's recipes; errors in one give one line and exit code 2."""

import re
from pathlib import Path

import pytest
from test_norm import KINDS

from asr import train
from asr.config.loader import read_recipe
from asr.training import optim

RECIPES = Path(__file__).parent.parent / "recipes"
FULL = RECIPES / "librispeech100_transformer.yaml"
MODEL = "model={kind: transformer, d_model: 10, heads: 2, feed_forward: 7"


def difference(ours, theirs, prefix=""):
    """Dotted keys whose values differ."""
    differing = set()
    for key in ours.keys() | theirs.keys():
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            differing |= difference(a, b, f"{prefix}{key}.")
        elif a != b:
            differing.add(prefix + key)
    return differing


def test_post_norm_differs_in_nothing_else():
    post = read_recipe(FULL.with_stem(f"{FULL.stem}_postnorm"))
    assert difference(read_recipe(FULL).model_dump(), post.model_dump()) == {
        "run",
        "model.norm_position",
    }
    assert post.model.norm_position == "post" and post.model.ctc_weight == 0.3


def test_las_and_transformer_use_the_same_data():
    las = read_recipe(RECIPES / "librispeech100.yaml")
    ours = read_recipe(FULL)
    assert (ours.data, ours.features, ours.text) == (las.data, las.features, las.text)


def test_the_rate_peaks_at_the_value_of_the_recipe():
    recipe = read_recipe(FULL)
    rate = optim.make_schedule(recipe.train.schedule, recipe.train.optimizer.lr)
    peak = max(rate(step, 0.0) for step in range(1, 40000, 50))
    assert peak == pytest.approx(2e-3, rel=0.03)
    assert rate(15000, 0.0) == pytest.approx(4 * 256**-0.5 * 15000**-0.5)


@pytest.mark.parametrize(
    ("size", "width", "heads", "hidden", "dropout", "average"),
    [("base", 512, 8, 2048, 0.1, 5), ("big", 1024, 16, 4096, 0.3, 20)],
)
def test_vaswani_s_settings(size, width, heads, hidden, dropout, average):
    """Table 3 and sections 5.3, 5.4 and 6.1 of the paper."""
    recipe = read_recipe(FULL.with_stem(f"{FULL.stem}_vaswani_{size}"))
    model, optimizer, schedule = recipe.model, recipe.train.optimizer, recipe.train.schedule
    assert (model.d_model, model.heads, model.feed_forward) == (width, heads, hidden)
    assert (model.encoder_layers, model.decoder_layers, model.dropout) == (6, 6, dropout)
    assert (model.norm_position, model.tied, recipe.train.label_smoothing) == ("post", True, 0.1)
    assert (optimizer.kind, optimizer.betas, optimizer.eps) == ("adam", (0.9, 0.98), 1e-9)
    assert (schedule.kind, schedule.warmup, schedule.width) == ("noam", 4000, width)
    decode = recipe.decode
    assert (decode.checkpoint, decode.average, decode.beam) == ("last", average, 4)
    assert decode.length_penalty == 0.6 and recipe.train.keep >= average


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("heads: 3", r"model.heads = 3: must divide d_model = 10: choose 1, 2, 5, 10\.$"),
        ("norm: batch", r"model.norm = 'batch': .*model.convolution_norm"),
        ("convolution_norm: x", r"model.convolution_norm = 'x': should be 'layer', .*'batch'"),
        ("norm: none", f"model.norm = 'none': should be {', '.join(map(repr, KINDS[:-1]))} or "),
        ("norm_position: mid", r"model.norm_position = 'mid': should be 'pre', 'post', 'peri', "),
        ("residual_scale: 0", r"model.residual_scale = 0: should be a number above 0, {"),
        ("residual_scale: -1.5", r"model.residual_scale = -1.5: should be a number above 0, {"),
        ("residual_scale: deep", r"model.residual_scale = 'deep': .* or deepnet\.$"),
        ("residual_scale: {encoder: 0}", r"model.residual_scale = {'encoder': 0}: .* above 0"),
        ("dropout: 1.0", r"model.dropout = 1.0: should be less than 1\.$"),
        ("attention_dropout: -0.1", r"model.attention_dropout = -0.1: should be greater than or"),
        ("feed_forward_dropout: 2", r"model.feed_forward_dropout = 2: should be less than 1\.$"),
        ("layer_drop: 1", r"model.layer_drop = 1: should be at least 0 and below 1, or {encoder:"),
        ("layer_drop: {decoder: -1}", r"model.layer_drop = {'decoder': -1}: should be at least 0"),
        ("drop_head: 1.5", r"model.drop_head = 1.5: should be less than 1\.$"),
        (
            "encoder_windows: {offsets: [1, 2, 3], width: 1}",
            r"model.encoder_windows = {.*}: has 3 offsets for 2 heads: give one each\.$",
        ),
        (
            "encoder_windows: {offsets: [1, 2], width: 0}",
            r"model.encoder_windows.width = 0: should be greater than or equal to 0.001\.$",
        ),
        (
            "encoder_windows: {offsets: [1, 2]}",
            r"model.encoder_windows.width is missing",
        ),
        ("encoder_convolution: 4", r"model.encoder_convolution = 4: must be odd: choose 3 or 5\.$"),
        ("encoder_convolution: 0", r"model.encoder_convolution = 0: should be greater than or"),
        ("encoder_layers: 0", r"model.encoder_layers = 0: should be greater than or equal to 1"),
        ("norms: rms", r"model.norms is not a recipe key. Did you mean model.norm\?$"),
    ],
)
def test_an_invalid_setting(setting, message, tiny, commands, tmp_path):
    replaced = MODEL.replace("heads: 2, ", "") if setting.startswith("heads") else MODEL
    run = tmp_path / "run"
    line = commands.refused(train, tiny, "--run", run, f"{replaced}, {setting}}}")
    assert re.match(f"command line: {message}", line)
    assert not run.exists()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("none.yaml", r".*none.yaml: there is no such recipe\. .* \(a base of .*own.yaml\)$"),
        (
            "own.yaml",
            r".*own.yaml: more than 10 recipes are based on one another: remove",
        ),
        ("[a.yaml]", r".*own.yaml: base = \['a.yaml'\]: must be the name of a recipe file\.$"),
    ],
)
def test_an_invalid_base(base, message, commands, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(f"base: {base}\nrun: own\n")
    assert re.match(message, commands.refused(train, path, "--run", tmp_path / "run"))
    assert not (tmp_path / "run").exists()

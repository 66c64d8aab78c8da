"""The Transformer's recipes; errors in one give one line and exit code 2."""

from pathlib import Path

import pytest

from asr.config.loader import read_recipe

RECIPES = Path(__file__).parent.parent / "recipes"
FULL = RECIPES / "librispeech100_transformer.yaml"


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

"""Pruning keeps exactly the named layers; search equals an exhaustive search."""

from fractions import Fraction
from itertools import combinations
from math import floor

import pytest
import torch

from asr.config.schema import TransformerConfig
from asr.models.transformer import Transformer
from asr.prune import every_other, keep_layers, residual_alphas, search_layers


def model(**settings):
    settings = {"encoder_layers": 5, "decoder_layers": 3, "subsampling_channels": 2} | settings
    settings |= {"kind": "transformer", "d_model": 6, "heads": 2, "feed_forward": 13}
    torch.manual_seed(0)
    return Transformer(7, 11, TransformerConfig(**settings)).eval()


def test_every_other_is_the_rule():
    for layers in range(1, 25):
        for keep in range((layers + 1) // 2, layers):
            p = 1 - Fraction(keep, layers)
            stay = [d - 1 for d in range(1, layers + 1) if d % floor(1 / p) != 0]
            assert every_other(layers, keep) == stay


def test_every_other_in_words():
    assert every_other(6, 3) == [0, 2, 4]
    assert every_other(12, 9) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert every_other(12, 8) == [0, 1, 3, 4, 6, 7, 9, 10]
    assert every_other(5, 5) == [0, 1, 2, 3, 4]


def test_bad_counts_give_one_clear_line():
    with pytest.raises(ValueError, match=r"^every-other cannot prune 12 .* to 5, .*: use search$"):
        every_other(12, 5)
    with pytest.raises(ValueError, match=r"^pruning 3 layers to 0 would leave no layer"):
        every_other(3, 0)
    with pytest.raises(ValueError, match=r"^pruning cannot keep 4 layers: the stack has 3$"):
        every_other(3, 4)
    with pytest.raises(ValueError, match=r"would leave no layer"):
        keep_layers(model(), [0], [])
    with pytest.raises(ValueError, match=r"^pruning cannot keep 6 layers: the stack has 5$"):
        search_layers(model(), 6, 3, lambda pruned: 0.0)


def test_prune_keeps_exactly_the_named_layers():
    full = model()
    layers = list(full.encoder.layers), list(full.decoder.layers)
    keep_layers(full, [0, 3], [2])
    assert list(full.encoder.layers) == [layers[0][0], layers[0][3]]
    assert list(full.decoder.layers) == [layers[1][2]]


@pytest.mark.parametrize("scale", [1.0, "deepnet"])
@torch.no_grad()
def test_a_pruned_model_is_an_ordinary_one(scale):
    pruned = model(residual_scale=scale, norm_position="post")
    keep_layers(pruned, [1, 4], [0, 2])
    again = model(
        encoder_layers=2,
        decoder_layers=2,
        residual_scale=residual_alphas(pruned),
        norm_position="post",
    )
    again.load_state_dict(pruned.state_dict())
    features, lengths = torch.randn(2, 29, 7), torch.tensor([29, 17])
    tokens = torch.randint(11, (2, 5))
    expected, out = (m.decode(m.encode(features, lengths), tokens) for m in (pruned, again))
    assert torch.equal(expected, out)


def test_search_finds_the_best_layers_and_leaves_the_model():
    full = model()
    layers = [*full.encoder.layers, *full.decoder.layers]
    worth = dict(zip(layers, [3.0, 11.0, 2.0, 7.0, 5.0, 13.0, 1.0, 17.0], strict=True))
    calls = []

    def score(pruned):
        """With additive values, greedy choice is optimal and equals brute force."""
        calls.append(len(pruned.encoder.layers) + len(pruned.decoder.layers))
        return -sum(worth[layer] for s in (pruned.encoder, pruned.decoder) for layer in s.layers)

    kept = search_layers(full, 3, 1, score)
    best = max(
        ((e, d) for e in combinations(range(5), 3) for d in combinations(range(3), 1)),
        key=lambda kept: sum(worth[layers[i]] for i in (*kept[0], *(5 + j for j in kept[1]))),
    )
    assert kept == tuple(map(list, best))
    assert [*full.encoder.layers, *full.decoder.layers] == layers
    assert calls == [7] * 8 + [6] * 7 + [5] * calls.count(5) + [4] * calls.count(4)


def test_search_restores_the_model_when_scoring_fails():
    full = model()

    def score(pruned):
        raise RuntimeError("no validation set")

    with pytest.raises(RuntimeError, match="no validation set"):
        search_layers(full, 4, 3, score)
    assert (len(full.encoder.layers), len(full.decoder.layers)) == (5, 3)

"""Every norm setting, built from a recipe: it overfits eight utterances and is saved."""

import pytest
import torch

from asr.config.loader import validate
from asr.config.schema import TrainConfig
from asr.data.batching import Batch
from asr.data.tokenizer import SPECIAL
from asr.tasks import speech
from asr.training.checkpoint import load_weights, save_checkpoint
from asr.training.trainer import take_step

F, V, LETTERS, STEPS = 11, 13, (1, 2, 3, 5), 60
LAS = [
    {
        "kind": "las",
        "listener": {"norm": norm, "layers": 2, "hidden": 17, "pyramid": [2], **more},
        "speller": {"norm": norm, "hidden": 19, "embedding": 7, **more},
        "attention_size": 5,
        "ctc_weight": 0.2,
    }
    for norm, more in [
        *((norm, {}) for norm in ("none", "ba", "raw", "thesis", "per_gate", "cell", "joined")),
        *((norm, {"norm_kind": "rms"}) for norm in ("ba", "joined")),
        *(("ba", {"cell_norm": cell_norm}) for cell_norm in ("none", "carried", "state")),
        ("joined", {"cell_norm": "output"}),
        ("joined", {"hidden_norm": True}),
        ("per_gate", {"cell_norm": "state", "hidden_norm": True, "norm_kind": "rms"}),
    ]
]
POSITIONS = ("post", "peri", "reordered", "hybrid", "sub")
CHOICES = [
    *({"norm": norm} for norm in ("layer", "rms", "scale", "bias", "dyt", "derf")),
    *({"norm_position": position} for position in POSITIONS),
    {"norm": "rms", "norm_position": "peri"},
    {"norm": "bias", "norm_position": "post"},
    {"norm": "dyt", "norm_position": "sub"},
    {"norm": "scale", "fixnorm": True, "tied": True},
    {"norm_position": "post", "fixnorm": True, "tied": True},
    {"residual_scale": 1.1},
    {"norm_position": "post", "residual_scale": {"encoder": 1.1, "decoder": 1.4}},
    {"norm_position": "post", "residual_scale": "deepnet"},
    {"depth_scaled": True},
    {"qk_norm": True},
    {"positions": "rope"},
    {"encoder_convolution": 3, "convolution_norm": "batch"},
]
SIZES = {"d_model": 20, "heads": 2, "feed_forward": 41, "subsampling_channels": 3}
SIZES |= {"encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0, "ctc_weight": 0.2}
SIZES |= {"reduction": 2}
CONFORMERS = [
    {},
    {"convolution_norm": "batch"},
    {"norm": "rms", "convolution_norm": "layer", "qk_norm": True},
    {"norm_position": "post"},
    {"norm_position": "peri"},
    {"norm": "dyt"},
]
MODELS = [
    *LAS,
    *({"kind": "transformer", **SIZES, **choice} for choice in CHOICES),
    *({"kind": "conformer", **SIZES, "kernel": 3, **choice} for choice in CONFORMERS),
]


def name(model):
    """las-ba, transformer-norm_position=post-fixnorm=True, ..."""
    if model["kind"] == "las":
        keys = ("norm", "cell_norm", "hidden_norm", "norm_kind")
        return "-".join(["las", *(str(v) for k, v in model["listener"].items() if k in keys)])
    more = {key: value for key, value in model.items() if key not in (*SIZES, "kind", "kernel")}
    return "-".join([model["kind"], *(f"{key}={value}" for key, value in more.items())])


def objective_of(model, seed):
    """The objective that asr.train builds from a recipe."""
    tree = {
        "run": "x",
        "data": {},
        "model": model,
        "train": {"label_smoothing": 0.0, "device": "cpu"},
    }
    recipe = validate(tree, "recipe")
    torch.manual_seed(seed)
    return speech.build_speech_objective(recipe, F, V)


def eight_utterances():
    """Random words; each letter is a fixed vector for four noisy frames."""
    torch.manual_seed(0)
    codes, lengths = torch.randn(V, F), [LETTERS[i % 4] for i in range(8)]
    tokens = torch.zeros(8, max(lengths), dtype=torch.long)
    features = torch.zeros(8, 4 * max(lengths), F)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(len(SPECIAL), V, (length,))
        frames = codes[tokens[row, :length]].repeat_interleave(4, 0)
        features[row, : 4 * length] = frames + 0.1 * torch.randn_like(frames)
    count = torch.tensor(lengths)
    return Batch(tuple("abcdefgh"), features, 4 * count, tokens, count, 1.0)


@torch.no_grad()
def figures(objective, batch):
    """Nats per token and share of right tokens, without dropout."""
    sums = objective.eval()(batch)
    return [float(sums[name].total / sums[name].count) for name in ("nll", "accuracy")]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=name)
def test_each_norm_overfits_eight_utterances_and_is_saved(model, tmp_path):
    objective = objective_of(model, seed=1)
    batch, config = eight_utterances(), TrainConfig(epochs=1)
    optimizer = torch.optim.Adam(objective.parameters(), fused=True)
    nats, _ = figures(objective, batch)
    assert nats > 1.5  # guessing costs about ln 13 = 2.6
    for step in range(STEPS):
        take_step(objective, [batch], optimizer, 0.01 * min(1.0, 2 - 2 * step / STEPS), config)
        if step % 5 == 4:
            nats, accuracy = figures(objective, batch)
            if accuracy == 1.0 and nats < 0.3:
                break
    else:
        pytest.fail(f"{accuracy:.0%} of the tokens are right, {nats:.2f} nats")

    saved = save_checkpoint(tmp_path, objective.model, {}, STEPS, nats, {})
    again = objective_of(model, seed=2)
    load_weights(again.model, [saved], {})
    ours, theirs = objective.model.state_dict(), again.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert figures(again, batch) == [nats, accuracy]

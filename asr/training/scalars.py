"""The scalars that a run writes for TensorBoard: groups, meanings, and charts to start with.

train/         means over the steps since the last point
valid/         over the validation data
speed/         throughput, and the cost so far
valid_health/  internals of the model (train.health), see asr.training.inspection
test/          image tasks only: the finished model
best/          finished runs: the best checkpoint
"""

from collections.abc import Collection

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import custom_scalars

_BOTH = "train/{0}, valid/{0}"
MEANINGS = {
    _BOTH.format("nll"): "cross-entropy in nats per token, without label smoothing; lower is "
    "better. The curve to compare runs by",
    _BOTH.format("objective"): "what training minimises: the sum of smoothed cross-entropy, CTC "
    "and guided attention, weighted",
    _BOTH.format("ctc"): "CTC loss in nats per token",
    "train/intermediate_ctc": "`model.intermediate_ctc`: mean CTC loss of those layers",
    _BOTH.format("accuracy"): "share of tokens predicted correctly after the correct tokens "
    "before them",
    "train/off_diagonal": "guided attention: the share of attention far from the diagonal",
    "train/decoder_symmetric_kl, train/ctc_symmetric_kl": "`train.consistency`: symmetric KL "
    "divergence of the predictions from two augmentations",
    f"{_BOTH.format('perplexity')}, {_BOTH.format('word_perplexity')}": "language models: "
    "exp(nll) per token, and the same per word",
    f"{_BOTH.format('reconstruction')}, {_BOTH.format('divergence')}": "DRAW: the two parts of nll",
    "valid/wer, valid/ctc_wer": "word error rate of decoded validation utterances, by the decoder "
    "and by the CTC head alone. 1 is 100 %, which an empty transcript has: an untrained model is "
    "there or above",
    "valid/diagonality": "0 to 1: how closely attention moves through the audio in step with the "
    "tokens; 0.6 or more is an alignment",
    "train/learning_rate": "the schedule",
    "train/gradient_norm": "largest gradient norm since the last point, before clipping",
    "train/epoch": "passes over the training data, from 1",
    "speed/audio_per_second": "seconds of audio trained on per second, without validation",
    "speed/steps_per_second": "the same of tasks without audio, in steps",
    "speed/audio_hours, speed/train_seconds": "audio trained on, in hours, and the "
    "time for it, in seconds",
    "best/...": "finished runs: figures of the checkpoint that is best by "
    "`train.early_stopping.metric`, else by valid/nll",
    "valid_health/...": "gates, norms and gradients of each layer (`train.health`)",
}
_CHARTS = {
    "Loss: nll, nats per token, lower is better": ("train/nll", "valid/nll"),
    "Word error rate: 1 (100 %) or more is untrained": ("valid/wer", "valid/ctc_wer"),
    "Attention: diagonality, 0.6 or more is aligned": ("valid/diagonality",),
    "Perplexity per token, lower is better": ("train/perplexity", "valid/perplexity"),
    "Share of correct predictions": ("train/accuracy", "valid/accuracy"),
    "Gradient norm before clipping": ("train/gradient_norm",),
    "Learning rate": ("train/learning_rate",),
    "Speed: seconds of audio, or steps, per second": (
        "speed/audio_per_second",
        "speed/steps_per_second",
    ),
}


def explanation() -> str:
    """What each scalar means, as a table in Markdown."""
    names = (", ".join(f"`{name}`" for name in key.split(", ")) for key in MEANINGS)
    rows = (f"| {key} | {text} |" for key, text in zip(names, MEANINGS.values(), strict=True))
    table = "\n".join(["| scalar | meaning |", "|---|---|", *rows])
    return (
        "Charts to start with: the page **Custom Scalars**. Pictures of attention (tokens against "
        "seconds): the page **Images**. Settings that are no defaults or were set on the command "
        f"line: the page **HParams**. All scalars:\n\n{table}\n"
    )


def first_charts(names: Collection[str]) -> Summary:
    """The layout of the page Custom Scalars: the charts of which the run has a scalar."""
    shown = {}
    for title, tags in _CHARTS.items():
        if present := [tag for tag in tags if tag in names]:
            shown[title] = ["Multiline", present]
    return custom_scalars({"Start here": shown})

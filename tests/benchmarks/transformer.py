"""Training speed and peak memory of a small Transformer or Conformer, and of SpeechBrain's.

    uv venv /tmp/peers
    uv pip install --python /tmp/peers/bin/python \
        torch==2.11.0 torchaudio==2.11.0 speechbrain==1.1.2
    .venv/bin/python tests/benchmarks/transformer.py --peer /tmp/peers/bin/python [--conformer]
    .venv/bin/python tests/benchmarks/transformer.py --settings norm=layer norm=dyt [--conformer]

Both train the same shape on one thread: two stride-2 convolutions of 32 channels, 4 encoder and 2
decoder layers, d = 144, 4 heads, feed-forward 576, pre-norm, GELU, dropout 0.1 on sublayer outputs,
attention weights and hidden feed-forward units; batches of 8 utterances of 6 s (600 frames of 80),
30 of 500 tokens; cross-entropy and Adam. With --conformer the encoder is a Conformer with
convolutions of 15 frames: SpeechBrain's has relative positions, ours rotary ones. Two processes
alternate, a few steps each, so that other load affects both. Prints seconds of audio per
CPU-second, and the rise of peak memory above the memory after the imports, in MiB.

`--ours PYTHON` runs ours with another interpreter, e.g. the peer's own, which has the same torch.
`--settings` compares our own models, each with one key of the model section changed; time is given
as a ratio to the first.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interleave import Batch, resident, speechbrain_front, take_turns, train_on_request


@dataclass(frozen=True)
class Sizes(Batch):
    """Of a batch, and of the models."""

    width: int = 144
    heads: int = 4
    feed_forward: int = 576
    encoder: int = 4
    decoder: int = 2
    channels: int = 32


SMALL = Sizes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="python of an environment with SpeechBrain")
    parser.add_argument("--ours", default=sys.executable, help="python that runs ours")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of each in every round")
    parser.add_argument("--conformer", action="store_true", help="a Conformer encoder")
    parser.add_argument("--settings", nargs="+", metavar="KEY=VALUE", help="compare ours")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.conformer, options.steps)
        return
    pythons = {"ours": options.ours} | ({"speechbrain": options.peer} if options.peer else {})
    if options.settings:
        pythons = dict.fromkeys(options.settings, options.ours)
    worker = [__file__, "--steps", str(options.steps)]
    worker += [*(["--conformer"] if options.conformer else []), "--worker"]
    commands = {name: [python, *worker, name] for name, python in pythons.items()}
    rounds = take_turns(commands, options.rounds)
    for name, measured in rounds.items():
        report(name, measured)
    first, *others = rounds
    for name in others:
        ratio = median_speed(rounds[first]) / median_speed(rounds[name])
        print(f"{first} is {ratio:.3f} times as fast as {name}")


def median_speed(rounds: list[dict]) -> float:
    """Audio-seconds per CPU-second."""
    return SMALL.seconds / statistics.median(one["cpu"] for one in rounds)


def report(name: str, rounds: list[dict]) -> None:
    best = SMALL.seconds / min(one["cpu"] for one in rounds)
    last = rounds[-1]
    print(
        f"{name:12} torch {last['torch']:12} {last['parameters'] / 1e6:.2f}M parameters  "
        f"{median_speed(rounds):4.0f} audio-s per CPU-s (best {best:.0f})  "
        f"peak memory +{last['peak'] / 2**20:.0f} MiB"
    )


def work(name: str, conformer: bool, steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == "speechbrain":
        model, forward = speechbrain(SMALL, conformer)
    else:
        model, forward = ours(SMALL, conformer, name)
    held = resident()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    train_on_request(optimizer, forward, SMALL, steps, held)


def ours(sizes: Sizes, conformer: bool = False, setting: str = "") -> tuple[Any, Callable]:
    """The module, and the logits (B, U + 1, V) of features and tokens."""
    import torch
    import yaml

    from asr.config.schema import ConformerConfig, TransformerConfig
    from asr.models.build import build_speech_model

    key, _, value = setting.partition("=")
    more = {key: yaml.safe_load(value)} if value else {}
    kind = "conformer" if conformer else "transformer"
    config = (ConformerConfig if conformer else TransformerConfig)(
        kind=kind,
        d_model=sizes.width,
        heads=sizes.heads,
        feed_forward=sizes.feed_forward,
        encoder_layers=sizes.encoder,
        decoder_layers=sizes.decoder,
        subsampling_channels=sizes.channels,
        dropout=0.1,
        attention_dropout=0.1,
        feed_forward_dropout=0.1,
        activation="swish" if conformer else "gelu",
        ctc_weight=0,
        **more,
    )
    model = build_speech_model(config, sizes.F, sizes.V)
    lengths = torch.full((sizes.B,), sizes.T)
    return model, lambda features, tokens: model.decode(model.encode(features, lengths), tokens)


def speechbrain(sizes: Sizes, conformer: bool = False) -> tuple[Any, Callable]:
    """As ours."""
    import torch
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
    from speechbrain.nnet.activations import Swish

    front = speechbrain_front((sizes.B, sizes.T, sizes.F), sizes.channels)
    model = TransformerASR(
        sizes.V,
        sizes.F // 4 * sizes.channels,
        d_model=sizes.width,
        nhead=sizes.heads,
        num_encoder_layers=sizes.encoder,
        num_decoder_layers=sizes.decoder,
        d_ffn=sizes.feed_forward,
        dropout=0.1,
        activation=Swish if conformer else torch.nn.GELU,
        encoder_module="conformer" if conformer else "transformer",
        attention_type="RelPosMHAXL" if conformer else "regularMHA",
        kernel_size=15,
        normalize_before=True,
        causal=False,
    )
    output = torch.nn.Linear(sizes.width, sizes.V)
    modules = torch.nn.ModuleList([front, model, output])

    def forward(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        lengths = torch.ones(len(features), device=features.device)  # relative lengths
        return output(model(front(features), tokens, lengths, pad_idx=0)[1])

    return modules, forward


if __name__ == "__main__":
    main()

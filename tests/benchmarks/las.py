"""Training speed and peak memory of a small LAS, interleaved with SpeechBrain's.

    .venv/bin/python tests/benchmarks/las.py --peer /tmp/peers/bin/python --json las.json

The peer's environment: see transformer.py. Both train the same shape on one thread: 8
utterances of 6 s (600 frames of 80), two strided convolutions (150 frames of memory), 2 BLSTM
layers of 256 per direction, location attention of 256, an LSTM speller of 256, V = 500, 30 target
tokens; cross-entropy and Adam. Ours has LayerNorm in every cell (--norm none: plain ones);
--precision bf16 runs ours as a recipe's train.precision: bf16 does, under autocast.
Two processes alternate, a few steps each. Prints seconds of audio per CPU-second, and the rise of
peak memory above the memory before the first step, in MiB.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interleave import Batch, resident, speechbrain_front, take_turns, train_on_request


@dataclass(frozen=True)
class Sizes(Batch):
    """Of a batch, and of the models."""

    layers: int = 2
    hidden: int = 256
    attention: int = 256
    embedding: int = 128


SMALL = Sizes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="python of an environment with SpeechBrain")
    parser.add_argument("--norm", default="ba")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), help="of ours")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of each in every round")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--worker", choices=("ours", "speechbrain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    pythons = {"ours": sys.executable} | ({"speechbrain": options.peer} if options.peer else {})
    worker = [__file__, "--steps", str(options.steps), "--norm", options.norm]
    worker += ["--backend", options.backend, "--precision", options.precision, "--worker"]
    commands = {name: [python, *worker, name] for name, python in pythons.items()}
    rounds = take_turns(commands, options.rounds)
    figures = {name: summary(measured) for name, measured in rounds.items()}
    if options.peer:
        pairs = zip(rounds["speechbrain"], rounds["ours"], strict=True)
        figures["times_as_fast"] = statistics.median(a["cpu"] / b["cpu"] for a, b in pairs)
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def summary(rounds: list[dict]) -> dict:
    cpu = statistics.median(one["cpu"] for one in rounds)
    last = dict(rounds[-1])
    peak = {"peak_mib": last.pop("peak") / 2**20}
    return last | peak | {"cpu": cpu, "audio_seconds_per_cpu_second": SMALL.seconds / cpu}


def work(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.worker == "ours":
        model, run = ours(SMALL, options.norm, options.backend)
    else:
        model, run = speechbrain(SMALL)

    def forward(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        bf16 = options.precision == "bf16" and options.worker == "ours"
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return run(features, tokens).float()

    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    train_on_request(optimizer, forward, SMALL, options.steps, resident())


def ours(sizes: Sizes, norm: str, backend: str = "auto") -> tuple[Any, Callable]:
    """The module, and the logits (B, U + 1, V) of features and tokens."""
    import torch

    from asr.config.schema import LasConfig, ListenerConfig, SpellerConfig
    from asr.models.las import LAS

    cells = {"norm": norm, "backend": backend, "hidden": sizes.hidden}
    listener = ListenerConfig(layers=sizes.layers, pyramid=(), convolution=4, **cells)
    parts = {"listener": listener, "speller": SpellerConfig(embedding=sizes.embedding, **cells)}
    config = LasConfig(kind="las", attention_size=sizes.attention, ctc_weight=0.0, **parts)
    model = LAS(sizes.F, sizes.V, config)
    lengths = torch.full((sizes.B,), sizes.T)
    return model, lambda features, tokens: model.decode(model.encode(features, lengths), tokens)


def speechbrain(sizes: Sizes) -> tuple[Any, Callable]:
    """As ours."""
    import torch
    from speechbrain.nnet.RNN import LSTM, AttentionalRNNDecoder

    front = speechbrain_front((sizes.B, sizes.T, sizes.F), 32)
    encoder = LSTM(
        sizes.hidden,
        input_size=sizes.F // 4 * 32,
        num_layers=sizes.layers,
        bidirectional=True,
        dropout=0.1,
    )
    decoder = AttentionalRNNDecoder(
        rnn_type="lstm",
        attn_type="location",
        hidden_size=sizes.hidden,
        attn_dim=sizes.attention,
        num_layers=1,
        enc_dim=2 * sizes.hidden,
        input_size=sizes.embedding,
        channels=10,
        kernel_size=100,
    )
    embedding = torch.nn.Embedding(sizes.V, sizes.embedding)
    output = torch.nn.Linear(sizes.hidden, sizes.V)
    modules = torch.nn.ModuleList([front, encoder, decoder, embedding, output])

    def forward(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        memory, _ = encoder(front(features).flatten(2))
        lengths = torch.ones(sizes.B, device=features.device)  # relative lengths
        return output(decoder(embedding(tokens), memory, lengths)[0])

    return modules, forward


if __name__ == "__main__":
    main()

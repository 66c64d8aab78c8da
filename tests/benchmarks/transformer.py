"""Training speed and peak memory of a small Transformer, interleaved with SpeechBrain's.

    uv venv /tmp/peers
    uv pip install --python /tmp/peers/bin/python \
        torch==2.11.0 torchaudio==2.11.0 speechbrain==1.1.2
    .venv/bin/python tests/benchmarks/transformer.py --peer /tmp/peers/bin/python

Both train the same shape on one thread: two stride-2 convolutions of 32 channels, 4 encoder and 2
decoder layers, d = 144, 4 heads, feed-forward 576, pre-norm, GELU, dropout 0.1 on sublayer outputs,
attention weights and hidden feed-forward units; batches of 8 utterances of 6 s (600 frames of 80),
30 of 500 tokens; cross-entropy and Adam. Two processes take turns, a few steps each, so that a busy
moment of the machine meets both. Printed: seconds of audio trained per CPU-second, and how far peak
memory rises above what the process held after its imports.

`--ours PYTHON` runs ours with another interpreter, e.g. the peer's own, which has the same torch.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

BATCH, FRAMES, MELS, VOCABULARY, TOKENS = 8, 600, 80, 500, 30
SIZE, HEADS, FEED_FORWARD, ENCODER, DECODER, CHANNELS = 144, 4, 576, 4, 2, 32
SECONDS = BATCH * FRAMES / 100  # audio in a batch, frames of 10 ms
SOS, EOS = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="python of an environment with SpeechBrain")
    parser.add_argument("--ours", default=sys.executable, help="python that runs ours")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of each in every round")
    parser.add_argument("--worker", choices=("ours", "speechbrain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.steps)
        return
    pythons = {"ours": options.ours} | ({"speechbrain": options.peer} if options.peer else {})
    workers = {name: started(name, python, options.steps) for name, python in pythons.items()}
    rounds: dict[str, list[dict]] = {name: [] for name in workers}
    for _ in range(options.rounds):
        for name, worker in workers.items():
            rounds[name].append(answer(worker))
    for name, worker in workers.items():
        worker.stdin.close()
        worker.wait()
        report(name, rounds[name])
    if options.peer:
        ratio = median_speed(rounds["ours"]) / median_speed(rounds["speechbrain"])
        print(f"ours is {ratio:.2f} times as fast")


def started(name: str, python: str, steps: int) -> subprocess.Popen:
    """A process that answers every line with the measurement of `steps` training steps."""
    root = Path(__file__).parents[2]
    command = [python, __file__, "--worker", name, "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    worker = subprocess.Popen(command, env=environment, **pipes)
    answer(worker)  # the first steps warm caches and allocator up
    return worker


def answer(worker: subprocess.Popen) -> dict:
    worker.stdin.write("\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def median_speed(rounds: list[dict]) -> float:
    """Audio-seconds per CPU-second."""
    return SECONDS / statistics.median(one["cpu"] for one in rounds)


def report(name: str, rounds: list[dict]) -> None:
    best = SECONDS / min(one["cpu"] for one in rounds)
    last = rounds[-1]
    print(
        f"{name:12} torch {last['torch']:12} {last['parameters'] / 1e6:.2f}M parameters  "
        f"{median_speed(rounds):4.0f} audio-s per CPU-s (best {best:.0f})  "
        f"peak memory +{last['peak'] / 2**20:.0f} MiB"
    )


def work(name: str, steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameters, forward = {"ours": ours, "speechbrain": speechbrain}[name]()
    imported = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    optimizer = torch.optim.Adam(parameters, 1e-4)
    targets = torch.randint(4, VOCABULARY, (BATCH, TOKENS))
    tokens = torch.nn.functional.pad(targets, (1, 0), value=SOS)
    targets = torch.nn.functional.pad(targets, (0, 1), value=EOS).flatten()
    features = torch.randn(BATCH, FRAMES, MELS)
    for _ in sys.stdin:
        begin = time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            logits = forward(features, tokens).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, targets).backward()
            optimizer.step()
        cpu = (time.process_time() - begin) / steps
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - imported
        count = sum(p.numel() for p in parameters)
        measured = {"cpu": cpu, "peak": peak, "parameters": count, "torch": torch.__version__}
        print(json.dumps(measured), flush=True)


def ours() -> tuple[list, Callable]:
    import torch

    from asr.models.transformer import Transformer

    model = Transformer(
        MELS,
        VOCABULARY,
        d_model=SIZE,
        heads=HEADS,
        feed_forward=FEED_FORWARD,
        encoder_layers=ENCODER,
        decoder_layers=DECODER,
        subsampling_channels=CHANNELS,
        dropout=0.1,
        attention_dropout=0.1,
        feed_forward_dropout=0.1,
        activation="gelu",
        ctc=False,
    )
    lengths = torch.full((BATCH,), FRAMES)
    return list(model.parameters()), lambda features, tokens: model.decode(
        model.encode(features, lengths), tokens
    )


def speechbrain() -> tuple[list, Callable]:
    import torch
    from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    front = ConvolutionFrontEnd(
        (BATCH, FRAMES, MELS),
        num_blocks=2,
        num_layers_per_block=1,
        out_channels=(CHANNELS, CHANNELS),
        kernel_sizes=(3, 3),
        strides=(2, 2),
        residuals=(False, False),
    )
    model = TransformerASR(
        VOCABULARY,
        MELS // 4 * CHANNELS,
        d_model=SIZE,
        nhead=HEADS,
        num_encoder_layers=ENCODER,
        num_decoder_layers=DECODER,
        d_ffn=FEED_FORWARD,
        dropout=0.1,
        activation=torch.nn.GELU,
        encoder_module="transformer",
        attention_type="regularMHA",
        normalize_before=True,
        causal=False,
    )
    output = torch.nn.Linear(SIZE, VOCABULARY)
    modules = torch.nn.ModuleList([front, model, output])
    whole = torch.ones(BATCH)  # relative lengths
    return list(modules.parameters()), lambda features, tokens: output(
        model(front(features), tokens, whole, pad_idx=0)[1]
    )


if __name__ == "__main__":
    main()

"""Interleave measurements of two processes, so that other load on the machine affects both.

Each process runs this project or a peer, possibly in another environment: for every line on stdin a
worker prints one measurement as JSON.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOS, EOS = 2, 3


@dataclass(frozen=True)
class Batch:
    """Of random features and tokens, as one training step takes it."""

    B: int = 8  # utterances
    T: int = 600  # frames of 10 ms
    F: int = 80
    U: int = 30  # tokens of each utterance
    V: int = 500

    @property
    def seconds(self) -> float:
        """Of audio."""
        return self.B * self.T / 100


def take_turns(commands: Mapping[str, list[str]], rounds: int) -> dict[str, list[dict]]:
    """Command lines of workers -> the measurements of each, one per round."""
    workers = {name: _started(command) for name, command in commands.items()}
    measured: dict[str, list[dict]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            measured[name].append(_answer(worker))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return measured


def _started(command: list[str]) -> subprocess.Popen:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    worker = subprocess.Popen(command, env=environment, **pipes)
    _answer(worker)  # the first measurement warms up caches and allocator, and may compile a kernel
    return worker


def _answer(worker: subprocess.Popen) -> dict:
    worker.stdin.write("\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def train_on_request(
    optimizer: Any, forward: Callable, batch: Batch, steps: int, held: int
) -> None:
    """A worker: `steps` steps per request on a random batch, cross-entropy.

    Prints CPU-seconds per step, the rise of peak memory above `held` bytes (`resident()`, measured
    after creating the optimizer, which imports much of torch), parameters, torch's version.
    """
    import torch

    targets = torch.randint(4, batch.V, (batch.B, batch.U))
    tokens = torch.nn.functional.pad(targets, (1, 0), value=SOS)
    targets = torch.nn.functional.pad(targets, (0, 1), value=EOS).flatten()
    inputs = torch.randn(batch.B, batch.T, batch.F)
    for _ in sys.stdin:
        begin = time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            logits = forward(inputs, tokens).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, targets).backward()
            optimizer.step()
        cpu = (time.process_time() - begin) / steps
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        measured = {"cpu": cpu, "peak": peak, "parameters": count, "torch": torch.__version__}
        print(json.dumps(measured), flush=True)


def speechbrain_front(features: tuple[int, int, int], channels: int) -> Callable:
    """The peer's two strided convolutions: (batch, frames, mels) -> a quarter of the frames."""
    from speechbrain.lobes.models.convolution import ConvolutionFrontEnd

    return ConvolutionFrontEnd(
        features,
        num_blocks=2,
        num_layers_per_block=1,
        out_channels=(channels, channels),
        kernel_sizes=(3, 3),
        strides=(2, 2),
        residuals=(False, False),
    )

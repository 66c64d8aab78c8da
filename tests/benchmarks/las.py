"""Training step of LAS in the shape of peers' yardstick: audio-seconds per CPU-second, peak memory.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/las.py [--norm ba] [--steps 8]

The shape: 8 utterances of 6 s (600 frames of 80), two strided convolutions (150 frames of memory),
2 BLSTM layers of 256 per direction, location attention 256, an LSTM speller of 256, V = 500,
30 target tokens, cross-entropy only, Adam. LayerNorm is included unless --norm none.
"""

import argparse
import resource
import statistics
import time

import torch

from asr.data.batch import Batch
from asr.models.las import LAS
from asr.models.listener import Listener
from asr.models.speller import Speller
from asr.training.objective import SpeechObjective

B, T, F, U, V = 8, 600, 80, 30, 500
AUDIO_SECONDS = B * T / 100


def yardstick(norm: str, backend: str) -> SpeechObjective:
    """The peers' recurrent shape with our cells."""
    cells = {"norm": norm, "backend": backend}
    listener = Listener(F, layers=2, hidden=256, pyramid=(), convolution=4, **cells)
    speller = Speller(V, listener.size, hidden=256, embedding=128, attention_size=256, **cells)
    return SpeechObjective(LAS(listener, speller, V, ctc=False), 0.0, 0.0)


def random_batch() -> Batch:
    """Every utterance of full length, as in the yardstick."""
    features = torch.randn(B, T, F)
    tokens = torch.randint(4, V, (B, U))
    frames, lengths = torch.full((B,), T), torch.full((B,), U)
    return Batch(tuple("abcdefgh"), features, frames, tokens, lengths, AUDIO_SECONDS)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--norm", default="ba")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    objective, batch = yardstick(args.norm, args.backend), random_batch()
    optimizer = torch.optim.Adam(objective.parameters(), 1e-4)
    walls, cpus = [], []
    for step in range(args.steps + 2):
        wall, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        total, count = objective(batch)["objective"]
        (total / count).backward()
        optimizer.step()
        if step >= 2:  # the first ones warm caches and may compile a kernel
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    wall, cpu = statistics.median(walls), statistics.median(cpus)
    parameters = sum(p.numel() for p in objective.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"LAS {args.norm}, {parameters / 1e6:.2f} M parameters, {torch.get_num_threads()} threads: "
        f"step {1e3 * wall:.0f} ms, {AUDIO_SECONDS / wall:.0f} audio-s/s, "
        f"{AUDIO_SECONDS / cpu:.0f} per CPU-second; peak memory {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()

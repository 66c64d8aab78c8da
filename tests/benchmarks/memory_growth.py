"""Growth of memory during training: 10 hours of audio, 200 steps of the real asr.train.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/memory_growth.py [--family transformer]

The manifest has 3,600 utterances of 5 to 15 s over 240 files of noise; training uses speed
perturbation, SpecAugment, noise and dropout, so that few batches have the same shape, with a
validation with figures and a checkpoint every 50 steps. After every step the memory of the trainer
and its workers is read: their private memory (anonymous and shared memory, each page counted once)
and the trainer's mapped files (torch's libraries), in MB.

The first --warm steps fill caches and the allocator. The first quarter of the remaining steps is
compared with the last: `growth` is that of the median, `growth_of_peak` that of the highest value.
Prints one JSON object for each number of workers; exit code 1 if a growth is above --limit.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile
import yaml

from asr.data.corpus import Utterance, write_manifest

RATE = 8000
FILES, HOURS, SHORTEST, LONGEST = 240, 10.0, 5.0, 15.0  # seconds
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SIZES = {
    "las": {
        "kind": "las",
        "listener": {"layers": 2, "hidden": 24, "pyramid": [1, 2], "dropout": 0.1},
        "speller": {"hidden": 24, "embedding": 8, "scheduled_sampling": 0.1, "dropout": 0.1},
        "attention_size": 16,
    },
    "transformer": {
        "kind": "transformer",
        "d_model": 32,
        "heads": 2,
        "feed_forward": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
    },
}
STEP = re.compile(r"step (\d+)/")


def make_manifests(folder: Path) -> None:
    """train.tsv of HOURS and valid.tsv of two minutes, over the same files."""
    chance = np.random.default_rng(1)
    seconds = chance.uniform(SHORTEST, LONGEST, size=FILES)
    for number, length in enumerate(seconds):
        samples = 0.1 * chance.standard_normal(int(length * RATE))
        soundfile.write(folder / f"{number}.flac", samples, RATE)

    def rows(name: str, hours: float) -> list[Utterance]:
        count = round(hours * 3600 / seconds.mean())
        return [
            Utterance(
                f"{name}{n}",
                f"s{n % 7}",
                folder / f"{n % FILES}.flac",
                float(seconds[n % FILES]),
                " ".join(chance.choice(WORDS, size=int(seconds[n % FILES]))),
            )
            for n in range(count)
        ]

    for name, hours in (("train", HOURS), ("valid", 1 / 30)):
        write_manifest(folder / f"{name}.tsv", rows(name, hours))


def recipe(folder: Path, family: str, steps: int) -> Path:
    """A small model with all random augmentation and dropout."""
    total = {
        "run": "flat",
        "data": {"train": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv")},
        "features": {
            "sample_rate": RATE,
            "mel_bins": 20,
            "speed_perturb": [0.9, 1.0, 1.1],
            "noise": [10, 30],
            "spec_augment": {"freq_width": 5},
        },
        "model": SIZES[family],
        "train": {
            "steps": steps,
            "batch_seconds": 60,
            "validate_every": 50,
            "save_every": 50,
            "samples": 1,
            "log_every": 1,
            "device": "cpu",
            "threads": 1,
        },
    }
    path = folder / "flat.yaml"
    path.write_text(yaml.safe_dump(total))
    return path


def train(path: Path, run: Path, workers: int) -> list[tuple[int, float]]:
    """(step, MB) for every step of a training in a separate process."""
    line = [sys.executable, "-m", "asr.train", str(path), "--run", str(run)]
    process = subprocess.Popen(
        [*line, f"data.workers={workers}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    readings, lines = [], []
    for text in process.stdout:
        lines.append(text)
        if step := STEP.search(text):
            readings.append((int(step[1]), resident(process.pid) / 1e6))
    if process.wait():
        raise SystemExit("".join(lines[-20:]))
    return readings


def resident(pid: int) -> int:
    """Memory of a process and its children in bytes, as described above."""
    total = 0
    for one in (pid, *children(pid)):
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):  # a worker has just ended
            continue
        kilobytes = {name: int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
        total += 1024 * (kilobytes["Pss_Anon"] + kilobytes["Pss_Shmem"])
        if one == pid:
            parts = (kilobytes[name] for name in ("Rss", "Anonymous", "Pss_Shmem"))
            rss, anonymous, shared = parts
            total += 1024 * max(0, rss - anonymous - shared)
    return total


def children(pid: int) -> list[int]:
    """The child processes of a process, from /proc."""
    readings = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            readings.append(int(stat.parent.name))
    return readings


def judge(readings: list[tuple[int, float]], warm: int) -> dict[str, float]:
    """The last quarter of the steps after the warm-up against the first."""
    megabytes = [size for step, size in readings if step > warm]
    quarter = len(megabytes) // 4
    first, last = megabytes[:quarter], megabytes[-quarter:]
    medians = statistics.median(first), statistics.median(last)
    return {
        "steps": len(readings),
        "megabytes_first_quarter": round(medians[0], 1),
        "megabytes_last_quarter": round(medians[1], 1),
        "growth": round(medians[1] / medians[0] - 1, 4),
        "growth_of_peak": round(max(last) / max(first) - 1, 4),
        "peak": round(max(size for _, size in readings), 1),
    }


def main() -> int:
    """Print the figures; exit code 1 if memory grew beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="0,2", help="numbers of loader processes to try")
    parser.add_argument("--family", choices=SIZES, default="las")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=60)
    parser.add_argument("--limit", type=float, default=0.02)
    parser.add_argument("--trace", type=Path, help="write every reading into this file")
    args = parser.parse_args()
    exceeded = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_manifests(folder)
        path = recipe(folder, args.family, args.steps)
        for workers in map(int, args.workers.split(",")):
            begin = time.monotonic()
            readings = train(path, folder / f"run{workers}", workers)
            figures = judge(readings, args.warm)
            seconds = round(time.monotonic() - begin)
            about = {"family": args.family, "workers": workers, "hours": HOURS}
            print(json.dumps({**about, **figures, "seconds": seconds}), flush=True)
            if args.trace:
                with args.trace.open("a") as file:
                    file.write(json.dumps({**about, "readings": readings}) + "\n")
            exceeded |= max(figures["growth"], figures["growth_of_peak"]) > args.limit
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())

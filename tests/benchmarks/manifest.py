"""Seconds and peak memory for a manifest of ten million utterances: write, open, plan, one step.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/manifest.py [--utterances N] [--folder DIR]

Rows are as long as LibriSpeech's; their audio is a few files of tones, so that training can start.
Every stage is a separate process and prints its seconds, without imports except for the training,
and its peak memory in MB, including mapped pages:

    first     checks every row and writes the index
    again     opens the index and reads a thousand utterances, evenly spread
    in memory checks every row and keeps them, as without a writable folder
    plan      the order of an epoch, its batches, and the first batch's utterances
    train     asr.train, from its start until its first step is done
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PLACE = "reader-0000/chapter-000000"
CAP = 120.0  # padded seconds in a batch


def main() -> int:
    """Make the manifest and measure each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--utterances", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--stage", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        stage, path = args.stage
        print(json.dumps(measured(stage, Path(path))))
        return 0
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        path = make(folder, args.utterances)
        for stage in ("first", "again", "in memory", "plan"):
            line = [sys.executable, __file__, "--stage", stage, str(path)]
            output = subprocess.run(line, capture_output=True, text=True, check=True).stdout
            report(stage, **json.loads(output.splitlines()[-1]))
        report("train", **train(folder, path))
    finally:
        shutil.rmtree(folder)
    return 0


def report(stage: str, seconds: float, **figures: float) -> None:
    """Print one line per stage."""
    values = "  ".join(f"{name} {value:,.0f}" for name, value in figures.items())
    print(f"{stage:10} {seconds:9.3f} s  {values}", flush=True)


def make(folder: Path, count: int) -> Path:
    """The manifest of tones, its rows repeated under other ids, lengths and texts."""
    # Imported here because it imports torch, whose memory is not the manifest's.
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tiny_speech import make_corpus, make_recipe

    make_corpus(folder)
    make_recipe(folder)
    (folder / PLACE).mkdir(parents=True)
    clips = sorted(folder.glob("train-*.flac"))
    for clip in clips:
        (folder / PLACE / clip.name).symlink_to(clip)
    random, begin = np.random.default_rng(1), time.perf_counter()
    seconds = random.lognormal(2.4, 0.5, count).clip(4, 34)
    letters = random.choice(list("abc      "), 4000)
    texts = ["".join(letters[at : at + 20 + at % 60]).strip() for at in range(3000)]
    path = folder / "large.tsv"
    with path.open("w") as file:
        file.write("id\tspeaker\taudio\tseconds\ttext\n")
        for n in range(count):
            audio = f"{PLACE}/{clips[n % len(clips)].name}"
            row = f"{n // 900:06d}-{n:09d}\t{n // 900:06d}\t{audio}\t{seconds[n]:.3f}"
            file.write(f"{row}\t{texts[n % 3000]} {texts[n % 2999]}\n")
    passed = time.perf_counter() - begin
    report(
        "made", passed, utterances=count, MB=path.stat().st_size / 1e6, hours=seconds.sum() / 3600
    )
    return path


def measured(stage: str, path: Path) -> dict[str, float]:
    """Run one stage in this process."""
    from asr.data import line_index
    from asr.data.batching import plan_epoch
    from asr.data.corpus import read_manifest

    if stage == "in memory":
        line_index.SMALL = 1 << 60
    begin = time.perf_counter()
    corpus = read_manifest(path)
    figures: dict[str, float] = {}
    if stage == "again":
        figures["opened_ms"] = 1000 * (time.perf_counter() - begin)
        figures["characters"] = sum(map(len, corpus.sample(1000).texts))
    if stage == "plan":
        begin = time.perf_counter()
        plan = plan_epoch(corpus.seconds, CAP, 1, 2, (0.9, 1.0, 1.1), False)
        figures["batches"] = len(plan.batches)
        figures["of_the_first"] = len([corpus[item.index] for item in plan.batches[0]])
    passed = time.perf_counter() - begin
    return {"seconds": passed, "peak_MB": peak("self"), **figures}


def peak(process: int | str) -> float:
    """Peak in MB; ru_maxrss would be the parent's peak if that was higher."""
    status = Path(f"/proc/{process}/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def train(folder: Path, path: Path) -> dict[str, float]:
    """`asr.train` until its first step is done; peak memory is the trainer's."""
    more = [f"data.train={path}", "train.steps=1", f"train.batch_seconds={CAP}", "data.workers=1"]
    line = [
        sys.executable,
        "-m",
        "asr.train",
        str(folder / "tiny.yaml"),
        "--run",
        str(folder / "r"),
    ]
    begin = time.perf_counter()
    with subprocess.Popen([*line, *more], stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout:
            if re.search(r"step +1\b", text):
                figures = {"seconds": time.perf_counter() - begin, "peak_MB": peak(process.pid)}
                process.terminate()
    return figures


if __name__ == "__main__":
    sys.exit(main())

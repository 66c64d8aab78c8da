"""Bulk transcription by two ranks of torchrun that are killed twice: missing or repeated files.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/bulk.py RUN MANIFEST.tsv [--files 2000]

The archive consists of the manifest's recordings, repeated under other names. The first two calls
are killed with SIGKILL, torchrun and both ranks at once, after a random number of shards, in the
middle of the next; the third ends by itself. Measured: seconds of each call, and the number of
wrong files: a file in two shards or two calls, a missing file, or a transcript that differs from
that of a single process.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asr.data.corpus import read_manifest

KILLS = 2
SHARD = 16


def main() -> int:
    """Exit code 0 if no file is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        names = archive(Path(folder), args.manifest, args.files)
        written: dict[str, int] = {}
        for call in range(KILLS + 1):
            killed_after = chance.randint(5, 40) if call < KILLS else None
            seconds, output = transcribe(args.run, Path(folder), killed_after)
            now = shards(Path(folder))
            again = [name for name, when in written.items() if now.get(name) != when]
            ended = "killed" if killed_after else output.splitlines()[-1]
            print(
                f"call {call + 1}: {len(now)} shards, {len(now) - len(written)} of them new, "
                f"{len(again)} done again; {seconds:.1f} s; {ended}",
                flush=True,
            )
            if again:
                return 1
            written = now
        wrong = faults(Path(folder), names, args.run)
        print(f"{args.files} files, {wrong} wrong")
        return int(wrong > 0)


def archive(folder: Path, manifest: Path, count: int) -> list[Path]:
    """Links to the manifest's recordings under other names, and a list of them."""
    audio = [utterance.audio.resolve() for utterance in read_manifest(manifest)]
    (folder / "archive").mkdir()
    names = [folder / "archive" / f"{n:05d}.flac" for n in range(count)]
    for number, name in enumerate(names):
        name.symlink_to(audio[number % len(audio)])
    (folder / "list.txt").write_text("\n".join(map(str, names)))
    return names


def transcribe(run: Path, folder: Path, killed_after: int | None) -> tuple[float, str]:
    """One call of two ranks, killed after that many shards: seconds, output."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line += ["-m", "asr.transcribe", str(run), "--list", str(folder / "list.txt")]
    line += ["--out", str(folder / "out"), "--shard-files", str(SHARD)]
    begin, before = time.perf_counter(), len(shards(folder))
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output)
        if killed_after is not None:
            while len(shards(folder)) < before + killed_after and process.poll() is None:
                time.sleep(0.003)
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(ranks) == 2, ranks
            for pid in (process.pid, *map(int, ranks)):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return time.perf_counter() - begin, output.read()


def shards(folder: Path) -> dict[str, int]:
    """The modification time of each shard."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("out/shards/0*.jsonl")}


def faults(folder: Path, names: list[Path], run: Path) -> int:
    """The numbers of files that are missing, repeated, or differ from the output of one process."""
    lines = (folder / "out" / "transcripts.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    order = sum(a != str(b) for (a, *_), b in zip(rows, names, strict=False))
    texts: dict[Path, set[str]] = {}
    for name, _, text in rows:
        texts.setdefault(Path(name).resolve(), set()).add(text)
    alone = sorted(texts)[:50]
    command = [sys.executable, "-m", "asr.transcribe", str(run), *map(str, alone)]
    transcribed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    single = [line.split(": ", 1)[1] for line in transcribed.splitlines()]
    other = sum(texts[path] != {text} for path, text in zip(alone, single, strict=True))
    unlike = sum(len(versions) > 1 for versions in texts.values())
    return abs(len(rows) - len(names)) + order + other + unlike


if __name__ == "__main__":
    sys.exit(main())

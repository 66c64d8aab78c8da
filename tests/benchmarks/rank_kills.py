"""torchrun's workers killed at random moments and restarted: number of differing values.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/rank_kills.py [--kills N] [--ranks N]

Several ranks train on a small corpus of tones over gloo, with dropout, scheduled sampling,
SpecAugment and noise, first uninterrupted. Then again by `torchrun --max-restarts`: --kills times
SIGKILL ends a random worker at a random moment of its training; torchrun ends the others and
restarts all, which resume from the last checkpoint. Weights, Adam's moments, the position and the
curves of both runs are compared bit for bit.
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

sys.path.insert(0, str(Path(__file__).parent.parent))
from run_state import differences, faults, state
from tiny_speech import make_corpus, make_recipe

LINE = ["train.samples=0", "train.save_every=2", "train.accumulate=1"]


def torchrun(ranks: int, restarts: int, epochs: int, run: Path) -> subprocess.Popen[str]:
    """Start the training, with its output in a file beside the run."""
    line = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    line += [f"--max-restarts={restarts}", "--standalone", "--monitor-interval=0.05"]
    line += ["-m", "--", "asr.train", str(run.parent / "tiny.yaml"), *LINE]
    line += [f"train.epochs={epochs}", "--run", str(run)]
    with run.with_suffix(".txt").open("w") as file:
        return subprocess.Popen(line, stdout=file, stderr=file, text=True)


def workers(agent: int) -> list[int]:
    """The running processes that torchrun has started."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(child) for child in children]


def starts(run: Path) -> int:
    """The number of times that training started."""
    text = run.with_suffix(".txt").read_text()
    return text.count("resuming tiny: ") + text.count("training tiny: ")


def kill_one(training: subprocess.Popen[str], run: Path, before: int, chance: random.Random) -> str:
    """Wait for the next start, then a random time; -> the killed rank, or "" after the end."""
    while starts(run) <= before:
        if training.poll() is not None:
            return ""
        time.sleep(0.05)
    time.sleep(chance.uniform(0.0, 2.5))
    running = workers(training.pid) if training.poll() is None else []
    if not running:
        return ""
    number = chance.randrange(len(running))
    os.kill(running[number], signal.SIGKILL)
    log = (run / "train.log").read_text().splitlines()
    steps = [line.split()[3] for line in log if " step " in line and "/" in line.split()[3]]
    return f"worker {number} at step {steps[-1] if steps else 0}"


def trial(folder: Path, kills: int, ranks: int, chance: random.Random) -> list[str]:
    """Print the kills of a training of FOLDER/tiny.yaml; -> what is wrong at its end."""
    straight, killed, epochs = folder / "straight", folder / "killed", 6 * kills
    assert torchrun(ranks, 0, epochs, straight).wait() == 0, straight.with_suffix(".txt")
    training, done = torchrun(ranks, kills, epochs, killed), 0
    while done < kills and (who := kill_one(training, killed, done, chance)):
        done += 1
        print(f"kill {done}: {who}", flush=True)
    code = training.wait()
    wrong = [f"exit code {code}"] if code else differences(state(killed), state(straight))
    wrong += faults(killed.with_suffix(".txt"))
    if done < kills:
        wrong.append(f"it ended after {done} kills")
    if wrong:
        print(killed.with_suffix(".txt").read_text()[-3000:])
    print(f"{done} of {kills} kills, {ranks} ranks: {len(wrong)} differences {wrong}")
    return [f"torchrun: {what}" for what in wrong]


def main() -> int:
    """Print the kills and the comparison; exit code 1 if anything differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_corpus(Path(name))
        make_recipe(Path(name))
        return bool(trial(Path(name), args.kills, args.ranks, random.Random(args.seed)))


if __name__ == "__main__":
    sys.exit(main())

"""Real trainings that are held in the middle of a step, for tests of locks and signals.

    python tests/signal_trainings.py FOLDER      prints the results as JSON

Every training is forked from this process (benchmarks/forked_commands.py), which saves seconds of
imports for each.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "benchmarks"), str(HERE.parent)]

from forked_commands import Process, fork  # noqa: E402
from tiny_speech import make_corpus, make_recipe  # noqa: E402

from asr import train, transcribe  # noqa: E402
from asr.io import LOCK  # noqa: E402
from asr.training import trainer  # noqa: E402
from asr.training.checkpoint import is_sound, list_checkpoints  # noqa: E402

HELD_STEP = 2
PATIENCE = 60.0  # seconds


class Trainings:
    """Trainings of one tiny recipe below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_corpus(folder)
        self.recipe = make_recipe(folder)

    def start(self, name: str, *more: str) -> Process:
        """`asr.train RECIPE --run FOLDER/NAME ...` with a checkpoint after every step."""
        line = [str(self.recipe), "train.save_every=1", *more]
        line += ["--run", str(self.folder / name)]
        return fork(train, line, self.folder / f"{name}.out", self.folder / f"{name}.err")

    def hold(self, name: str) -> Process:
        """Start a training that waits in step HELD_STEP until the file FOLDER/NAME.on exists."""
        reached, on = (self.folder / f"{name}.{end}" for end in ("reached", "on"))

        def main() -> int:
            take_step, steps = trainer.take_step, []

            def held(*arguments):
                steps.append(1)
                if len(steps) == HELD_STEP:
                    reached.touch()
                    until(on.exists)
                return take_step(*arguments)

            trainer.take_step = held
            return train.main()

        module = SimpleNamespace(__name__="asr.train", main=main)
        line = [str(self.recipe), "train.save_every=1", "--run"]
        line.append(str(self.folder / name))
        process = fork(module, line, self.folder / f"{name}.out", self.folder / f"{name}.err")
        until(reached.exists)
        return process

    def steps(self, name: str) -> list[int]:
        """The steps of the undamaged checkpoints."""
        return [c.step for c in list_checkpoints(self.folder / name) if is_sound(c)]

    def errors(self, name: str) -> list[str]:
        return (self.folder / f"{name}.err").read_text().splitlines()

    def lock(self) -> dict:
        """A second training in the same folder, a transcription, and a resume after a kill."""
        first = self.hold("shared")
        second = [self.start("shared", *more).wait(PATIENCE) for more in ([], ["--resume"])]
        messages = self.errors("shared")
        transcribed = fork(
            transcribe,
            [str(self.folder / "shared"), str(self.folder / "test-0.flac")],
            self.folder / "transcribed",
        ).wait(PATIENCE)
        first.kill()
        resumed = self.start("shared", "--resume").wait(PATIENCE)
        left = (self.folder / "shared" / LOCK).exists()
        refused = self.start("refused", "features.mel_bins=500").wait(PATIENCE)
        return {
            "holder": first.pid,
            "second": second,
            "messages": messages,
            "transcribe": transcribed,
            "resumed": resumed,
            "left": left,
            "refused": [refused, (self.folder / "refused").exists()],
        }

    def one_signal(self, number: signal.Signals) -> list:
        """[still ran after the signal, exit code, checkpoints] where the step may end."""
        process = self.hold(name := f"one-{number.name}")
        for _ in range(1 + (number == signal.SIGHUP)):
            os.kill(process.pid, number)
        alive = process.wait(0.3) is None
        (self.folder / f"{name}.on").touch()
        return [alive, process.wait(PATIENCE), self.steps(name)]

    def two_signals(self, first: signal.Signals, second: signal.Signals) -> list:
        """[still ran after the first signal, exit code after the second, checkpoints, stderr]."""
        process = self.hold(name := f"two-{first.name}-{second.name}")
        os.kill(process.pid, first)
        alive = process.wait(0.3) is None
        os.kill(process.pid, second)
        return [alive, process.wait(PATIENCE), self.steps(name), self.errors(name)]


def until(condition) -> None:
    """Wait for it, up to PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


if __name__ == "__main__":
    trainings = Trainings(Path(sys.argv[1]))
    both = (signal.SIGTERM, signal.SIGINT)
    pairs = [(both[0], both[0]), both, (both[1], both[1])]
    print(
        json.dumps(
            {
                "lock": trainings.lock(),
                **{number.name: trainings.one_signal(number) for number in (*both, signal.SIGHUP)},
                **{f"{a.name} {b.name}": trainings.two_signals(a, b) for a, b in pairs},
            }
        )
    )

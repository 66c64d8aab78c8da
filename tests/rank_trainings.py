"""Trainings by several ranks over gloo, for test_distributed.py.

    python tests/rank_trainings.py FOLDER      for each scenario named on a line of its input
                                               a line of JSON: the results in FOLDER/SCENARIO

Every training is forked from this process (benchmarks/forked_commands.py), which saves seconds of
imports for each.
"""

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "benchmarks"), str(HERE.parent)]

from forked_commands import Process, fork  # noqa: E402
from run_state import differences, state  # noqa: E402
from tiny_speech import make_corpus, make_recipe  # noqa: E402

from asr import train  # noqa: E402
from asr.config.schema import OptimizerConfig  # noqa: E402
from asr.training import distributed, trainer  # noqa: E402
from asr.training.checkpoint import list_checkpoints, read_training  # noqa: E402
from asr.training.distributed import process_group  # noqa: E402
from asr.training.losses import SpeechObjective  # noqa: E402
from asr.training.optim import make_optimizer  # noqa: E402

PLACE = Path(sys.argv[1])
RECIPE = PLACE / "tiny.yaml"
PATIENCE = 60.0  # seconds
# Only masks, speed and noise are random, all derived from (seed, epoch, utterance).
STILL = ["model.listener.dropout=0", "model.listener.recurrent_dropout=0"]
STILL += ["model.speller.dropout=0", "model.speller.scheduled_sampling=0"]
SMALL = "kind: transformer, d_model: 8, heads: 2, feed_forward: 11, decoder_layers: 1"
# Small Adam steps: with large ones rounding errors grow from step to step.
SLOW = ["train.optimizer.lr=1e-3", "train.schedule={kind: constant, warmup: 2}"]
FAMILIES = {
    # With features of mean 0, SpecAugment masks are rows of zeros, where a LayerNorm amplifies
    # rounding errors without bound.
    "las": [*STILL, "features.mvn=none"],
    "transformer": [f"model={{{SMALL}, encoder_layers: 2, dropout: 0}}"],
}
EVENTFUL = ["train.epochs=2", "train.accumulate=1", "train.save_every=2"]
COMMON = ["train.batch_seconds=0.6", "train.save_every=10"]
Patch = Callable[[int], object]  # of a rank, before it trains


def command_line(*more: str) -> list[str]:
    """The recipe, COMMON and `more`, of each key the last override."""
    settings = {text.partition("=")[0]: text for text in (*COMMON, *more)}
    return [str(RECIPE), *settings.values()]


def start(count: int, folder: Path, name: str, *more: str, patch: Patch = id) -> list[Process]:
    """`count` ranks of the tiny recipe -> their processes; output in FOLDER/NAME.RANK."""
    line = [*command_line(*more), "--run", str(folder / name)]

    def main(rank: int) -> int:
        patch(rank)
        return train.main()

    return fork_ranks(count, folder, name, main, line)


def fork_ranks(
    count: int, folder: Path, name: str, work: Callable[[int], int], line: list[str]
) -> list[Process]:
    """Processes that call work(rank), with the environment that torchrun gives to ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def main_of(rank: int) -> Callable[[], int]:
        def main() -> int:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in variables.items()}
            return work(rank)

        return main

    modules = [SimpleNamespace(__name__="asr.train", main=main_of(rank)) for rank in range(count)]
    places = [folder / f"{name}.{rank}" for rank in range(count)]
    return [
        fork(module, line, place.with_suffix(f"{place.suffix}.out"), place)
        for module, place in zip(modules, places, strict=True)
    ]


def wait(ranks: list[Process]) -> list[int | None]:
    """Their exit codes."""
    return [process.wait(PATIENCE) for process in ranks]


def run(count: int, folder: Path, name: str, *more: str, patch: Patch = id) -> list[int | None]:
    """Run `start` to the end -> exit codes."""
    return wait(start(count, folder, name, *more, patch=patch))


def equal(folder: Path, family: str) -> dict:
    """8 steps of 6 batches by 1, 2 and 3 ranks; and of LAS 3 by 2, then 3 by 3."""
    common = [*FAMILIES[family], "train.validate_every=4", "train.steps=8", *SLOW]
    codes = {
        f"{count}": run(count, folder, f"{count}", *common, f"train.accumulate={6 // count}")
        for count in (1, 2, 3)
    }
    if family != "las":  # resuming does not depend on the model
        return codes
    run(2, folder, "changed", *common, "train.accumulate=3", "train.steps=3")
    more = ["train.accumulate=2", "train.steps=6", "--resume", "--force"]
    return codes | {"changed": run(3, folder, "changed", *common, *more)}


def faults(folder: Path) -> dict:
    """A batch of NaN on rank 1; a batch too large for rank 1; unreadable files."""
    plain = [*STILL, "train.steps=6", "train.accumulate=1"]
    forward, original_set_step = SpeechObjective.forward, SpeechObjective.set_step

    def poison(step: int) -> Patch:
        def patch(rank: int) -> None:
            def poisoned(self: SpeechObjective, batch: object) -> object:
                if rank == 1 and self.training and self.step >= step:
                    batch.features[0, 1, 2] = math.nan
                return forward(self, batch)

            def set_step(self: SpeechObjective, number: int) -> None:
                self.step = number
                original_set_step(self, number)

            SpeechObjective.forward, SpeechObjective.set_step = poisoned, set_step

        return patch

    def narrow(rank: int) -> None:
        def full(self: SpeechObjective, batch: object) -> object:
            if rank == 1 and self.training and len(batch) > 1:
                raise MemoryError
            return forward(self, batch)

        SpeechObjective.forward = full

    unreadable = [f"data.train={broken(1)}", f"data.valid={broken(2, 'valid')}"]
    unreadable += ["decode.batch_seconds=0.3"]  # each utterance of validation is a batch
    return {
        "skipped": run(2, folder, "skipped", *plain, "train.bad_steps=3", patch=poison(4)),
        "stopped": run(2, folder, "stopped", *plain, "train.bad_steps=2", patch=poison(2)),
        "narrow": run(2, folder, "narrow", *plain, patch=narrow),
        "wide": run(2, folder, "wide", *plain),
        "few": run(3, folder, "few", *plain, "train.batch_seconds=100"),
        "unreadable": run(2, folder, "unreadable", *plain, *unreadable),
        "too many": run(2, folder, "too many", *plain, f"data.train={broken(9)}"),
    }


def broken(count: int, split: str = "train") -> Path:
    """A split's manifest with that many missing files added."""
    lines = (PLACE / f"{split}.tsv").read_text().splitlines()
    lines += [f"bad{n}\ts0\tmissing{n}.flac\t0.400\tab" for n in range(count)]
    path = PLACE / f"{split}-broken{count}.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def at(step: int, what: Callable[[], object]) -> Patch:
    """Rank 1 calls that in this step."""
    take_step = trainer.take_step

    def patch(rank: int) -> None:
        steps: list[int] = []

        def other(*arguments: object) -> object:
            steps.append(1)
            if rank == 1 and len(steps) == step:
                what()
            return take_step(*arguments)

        trainer.take_step = other

    return patch


def in_validation(what: Callable[[], object]) -> Patch:
    """Rank 1 calls that in its first validation."""
    validate = trainer.validate

    def patch(rank: int) -> None:
        def other(*arguments: object) -> object:
            if rank == 1:
                what()
            return validate(*arguments)

        trainer.validate = other

    return patch


def end(number: signal.Signals) -> Callable[[], None]:
    """Send a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def unlike_straight(folder: Path, name: str) -> list[str]:
    """The differences between the final states of that run and of the uninterrupted one."""
    return differences(state(folder / name), state(folder / "straight"))


def ends(folder: Path) -> dict:
    """A rank that fails, is killed, or gets a signal."""
    common = EVENTFUL

    def fail() -> None:
        raise ValueError("a fault of our own")

    seen: dict = {"straight": run(2, folder, "straight", *common)}
    for name, what in {"failed": fail, "killed": end(signal.SIGKILL)}.items():
        begin = time.monotonic()
        seen[name] = run(2, folder, name, *common, patch=at(5, what))
        seen[f"{name} in"] = time.monotonic() - begin
    seen["signalled"] = run(2, folder, "signalled", *common, patch=at(5, end(signal.SIGTERM)))
    ask = in_validation(end(signal.SIGTERM))
    seen["validating"] = run(2, folder, "validating", *common, patch=ask)
    for name in ("killed", "signalled", "validating"):
        seen[f"{name} resumed"] = run(2, folder, name, *common, "--resume")
        seen[f"{name} differs"] = unlike_straight(folder, name)
    return seen


def averages(folder: Path) -> dict:
    """Batch statistics, which differ between ranks, and averaged weights; stopped and resumed."""
    model = f"model={{{SMALL.replace('transformer', 'conformer')}, encoder_layers: 1, kernel: 3, "
    common = [f"{model}convolution_norm: batch}}", "train.ema=0.7", *EVENTFUL]
    seen: dict = {"straight": run(2, folder, "straight", *common)}
    seen["stopped"] = run(2, folder, "stopped", *common, patch=at(5, end(signal.SIGTERM)))
    seen["resumed"] = run(2, folder, "stopped", *common, "--resume")
    ends = [list_checkpoints(folder / name)[-1] for name in ("stopped", "straight")]
    trained = [read_training(end)["trained"] for end in ends]
    first, second = trained[0]
    means = [name for name in first if name.endswith("running_mean")]
    return seen | {
        "losses": [end.loss for end in ends],
        "differs": unlike_straight(folder, "stopped"),
        "of the second rank": sorted(second),
        "differs between ranks": differences({name: first[name] for name in second}, second),
        "statistics": means,
        "trained differs": [differences(*pair) for pair in zip(*trained, strict=True)],
    }


def drops(folder: Path) -> dict:
    """The layers that LayerDrop keeps on each rank, and whether dropout differs between ranks."""
    kept: list[list[int]] = []

    def patch(rank: int) -> None:
        from asr.nn.dropout import Dropout
        from asr.nn.transformer import Stack

        passing, drop = Stack.passing, Dropout.forward
        first: list[float] = []

        def seen(self: Stack) -> list[tuple[int, object]]:
            layers = list(passing(self))
            if self.training:
                kept.append([number for number, _ in layers])
            return layers

        def dropped(self: Dropout, x: object) -> object:
            y = drop(self, x)
            if self.training:
                first.append(float((y == 0).float().mean()))
                (folder / f"seen.{rank}").write_text(json.dumps({"kept": kept, "drop": first}))
            return y

        Stack.passing, Dropout.forward = seen, dropped

    model = f"model={{{SMALL}, encoder_layers: 5, dropout: 0.2, layer_drop: 0.5}}"
    more = ["train.steps=5", "train.accumulate=2", "train.guided_attention=null"]
    code = run(2, folder, "drops", model, *more, patch=patch)
    return {"code": code, "seen": [json.loads((folder / f"seen.{r}").read_text()) for r in (0, 1)]}


def half(folder: Path) -> dict:
    """bf16, by one process and by two."""
    more = [*STILL, "train.precision=bf16", "train.steps=8"]
    return {
        f"{count}": run(count, folder, f"{count}", *more, f"train.accumulate={2 // count}")
        for count in (1, 2)
    }


def muon(folder: Path) -> dict:
    """Steps of Muon with given gradients by 1 and by 3 ranks; of each the weights and moments."""

    def work(rank: int) -> int:
        torch.manual_seed(0)
        sizes = [(3, 5), (7, 2), (11, 13), (5, 5)]
        module = torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes)
        optimizer = make_optimizer(OptimizerConfig(kind="muon", lr=0.03), module)
        with process_group("cpu"):
            for step in range(4):
                for number, parameter in enumerate(module.parameters()):
                    absent = step == 1 and number % 4 == 0
                    parameter.grad = None if absent else torch.randn_like(parameter)
                optimizer.step()
            count = distributed.world()
        saved = {"weights": module.state_dict(), "state": optimizer.state_dict()["state"]}
        torch.save(saved, folder / f"{count}.{rank}.pt")
        return 0

    return {count: wait(fork_ranks(count, folder, f"{count}", work, [])) for count in (1, 3)}


SCENARIOS = {
    "las": lambda folder: equal(folder, "las"),
    "transformer": lambda folder: equal(folder, "transformer"),
    "faults": faults,
    "ends": ends,
    "drops": drops,
    "half": half,
    "averages": averages,
    "muon": muon,
}


def main() -> None:
    make_corpus(PLACE)
    make_recipe(PLACE)
    for name in map(str.strip, sys.stdin):
        folder = PLACE / name
        folder.mkdir()
        print(json.dumps(SCENARIOS[name](folder)), flush=True)


if __name__ == "__main__":
    main()

"""Train a recipe: python -m asr.train RECIPE.yaml [key.path=value ...] [--run DIR] [--resume]"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from asr import build, command
from asr.errors import UserError
from asr.images import image_task
from asr.language import language_task
from asr.recipe import as_yaml, read_recipe, write_recipe
from asr.settings import Recipe
from asr.speech import speech_task
from asr.training.checkpoint import (
    best_of,
    choose,
    is_sound,
    list_checkpoints,
    load_weights,
    prune,
    read_training,
    save_checkpoint,
)
from asr.training.given import Batch, Between, Epochs
from asr.training.log import Log
from asr.training.loop import fit, planned_steps, validate
from asr.training.objective import Objective, means
from asr.training.position import Position, position_state, random_state, restore_random_state


class Task(Protocol):
    """What is trained on what; asr/speech.py has the first."""

    recipe: Recipe
    objective: Objective
    epochs: Epochs
    about: dict[str, str]  # what a checkpoint says of itself; another one's must agree
    allowed_broken: float  # share of the corpus that may turn out unreadable

    def describe(self) -> str: ...

    def prepare(self, run: Path) -> None: ...

    def valid(self) -> Iterator[Batch]: ...

    def report(self, log: Log, position: Position) -> dict[str, float]: ...

    def finish(self, run: Path, log: Log, position: Position) -> dict[str, float]: ...


# The maker of each task: (recipe, run folder, whether the run is gone on with) -> Task.
TASKS: Mapping[str, Callable[[Any, Path, bool], Task]] = {
    "speech": speech_task,
    "images": image_task,
    "language": language_task,
}


def main() -> None:
    """Read the recipe, open the run folder, train."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.train",
        description="Train the model that a recipe describes.",
        epilog="Every key of a recipe can be overridden: train.optimizer.lr=3e-4 seed=2 ...",
    )
    parser.add_argument("recipe", type=Path, help="a recipe, e.g. recipes/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--run", type=Path, help="run folder (default: runs/ + the recipe's run)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, if there is one"
    )
    args = parser.parse_intermixed_args()
    recipe = read_recipe(args.recipe, args.overrides)
    train(recipe, args.run or Path("runs") / recipe.run, args.resume)


def train(recipe: Recipe, run: Path, resume: bool = False) -> None:
    """Train into the run folder. UserError where it already holds a run and resume is not asked."""
    there = list_checkpoints(run)
    if there and not resume:
        raise UserError(f"{run}: already holds a run; add --resume, or choose another --run")
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    task = TASKS[recipe.task](recipe, run, bool(there))
    if recipe.train.init and not there:
        source = choose(recipe.train.init, "best", 1)
        load_weights(task.objective.model, source, task.about)
    run.mkdir(parents=True, exist_ok=True)
    if not there:
        write_recipe(recipe, run / "recipe.yaml")
        task.prepare(run)
    Training(task, run).go(resume=bool(there))


class Training:
    """One run: what happens between the steps of asr.training.loop.fit."""

    def __init__(self, task: Task, run: Path) -> None:
        self.task, self.run, self.settings = task, run, task.recipe.train
        self.optimizer = build.optimizer(self.settings, task.objective)
        self.position = Position()
        self.limits = build.limits(self.settings, task.allowed_broken)
        self.metrics: dict[str, float] = {}
        self.validated = -1

    def go(self, resume: bool) -> None:
        """Train to the end."""
        if resume:
            self._restore()
        total = planned_steps(self.task.epochs, self.limits)
        with Log(self.run, self.settings.log_every, total, self.position.step) as self.log:
            self._greet(resume)
            schedule = build.schedule(self.settings)
            between = Between(self.log.step, self.after_step, self.after_epoch, self.log.note)
            objective, epochs = self.task.objective, self.task.epochs
            fit(objective, epochs, self.optimizer, schedule, self.position, self.limits, between)
            if self.validated != self.position.step:
                self.check()
            self.metrics |= self.task.finish(self.run, self.log, self.position)
            flat = flatten(self.task.recipe.model_dump(mode="json"))
            self.log.recipe(as_yaml(self.task.recipe), flat, self.metrics)
            self.log.note(f"finished at step {self.position.step}; the run is in {self.run}")

    def after_step(self, position: Position) -> None:
        """Validate and save where it is due."""
        every = self.settings.validate_every
        if every and position.step % every == 0:
            self.check()
        elif position.step % self.settings.save_every == 0:
            self.save(math.inf)

    def after_epoch(self, position: Position) -> None:
        """Validate, unless that goes by steps."""
        if not self.settings.validate_every:
            self.check()

    def check(self) -> None:
        """Validation: loss, word error rates, pictures, a checkpoint, perhaps the alarm."""
        position, log, begin = self.position, self.log, time.perf_counter()
        random = random_state()
        losses = means(validate(self.task.objective, self.task.valid(), self.settings.precision))
        shown = self.task.report(log, position)
        restore_random_state(random)
        self.metrics = {f"valid/{name}": value for name, value in (losses | shown).items()}
        log.scalars("valid", losses | shown, position.step)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in (losses | shown).items())
        log.note(f"step {position.step}  validation: {figures}")
        alarm = self.settings.alarm
        diagonal = shown.get("diagonality", 1.0)
        if alarm.steps and position.step >= alarm.steps and diagonal < alarm.diagonality:
            log.note(
                f"ALARM: attention is not diagonal yet ({diagonal:.2f} < {alarm.diagonality:g}). "
                "Try a higher model.ctc_weight, train.short_first=true, more reduction, a lower lr."
            )
        self.validated = position.step
        self.save(losses["nats"])
        log.pause(time.perf_counter() - begin)

    def save(self, loss: float) -> None:
        """A checkpoint of everything that resuming needs."""
        training = {
            "optimizer": self.optimizer.state_dict(),
            "position": position_state(self.position),
            "random": random_state(),
        }
        model, step = self.task.objective.model, self.position.step
        save_checkpoint(self.run, model, training, step, loss, self.task.about)
        prune(self.run, self.settings.keep, self.settings.keep_best)

    def _restore(self) -> None:
        last = list_checkpoints(self.run)[-1]
        if not is_sound(last):
            raise UserError(
                f"{last.folder}: damaged, its checksums differ; remove it, then --resume again"
            )
        load_weights(self.task.objective.model, [last], self.task.about)
        state: dict[str, Any] = read_training(last)
        self.optimizer.load_state_dict(state["optimizer"])
        self.position = Position(**state["position"])
        restore_random_state(state["random"])
        self.validated = self.position.step if math.isfinite(last.loss) else -1
        best = best_of(list_checkpoints(self.run))
        self.metrics = {"valid/nats": best[0].loss} if best else {}

    def _greet(self, resume: bool) -> None:
        parameters = sum(p.numel() for p in self.task.objective.parameters())
        self.log.note(
            f"{'resuming' if resume else 'training'} {self.task.recipe.run}: "
            f"{parameters / 1e6:.2f} M parameters, {self.task.describe()}"
        )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


if __name__ == "__main__":
    command.run(main)

"""Train a recipe: python -m asr.train RECIPE.yaml [key.path=value ...] [--run DIR] [--resume]"""

import argparse
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from asr import command
from asr.recipe import read_recipe
from asr.runs import launch
from asr.runs.lock import only_training
from asr.runs.resume import Start, find_start
from asr.runs.task import Task
from asr.runs.training_run import STOPPED, Training
from asr.settings import Recipe
from asr.tasks.images import image_task
from asr.tasks.language import language_task
from asr.tasks.speech import speech_task
from asr.training.checkpoint import choose, load_weights
from asr.training.distributed import first_alone, is_first, joined
from asr.training.flat import bound_caches

# The maker of each task: (recipe, run folder, whether the run is gone on with) -> Task.
TASKS: Mapping[str, Callable[[Any, Path, bool], Task]] = {
    "speech": speech_task,
    "images": image_task,
    "language": language_task,
}


def main() -> int:
    """Read the recipe, open the run folder, train."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.train",
        description="Train the model that a recipe describes.",
        epilog="Every key of a recipe can be overridden: train.optimizer.lr=3e-4 seed=2 ... "
        "SIGTERM, Ctrl-C or a closed terminal finish the step, save, and exit with code "
        f"{STOPPED}; a second one ends the run at once. Exit code 2: one line says what is wrong.",
    )
    parser.add_argument("recipe", type=Path, help="a recipe, e.g. recipes/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--run", type=Path, help="run folder (default: runs/ + the recipe's run)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, if there is one"
    )
    parser.add_argument(
        "--force", action="store_true", help="resume although the recipe has changed"
    )
    args = parser.parse_intermixed_args()
    recipe = read_recipe(args.recipe, args.overrides)
    return train(recipe, args.run or Path("runs") / recipe.run, args.resume, args.force)


def train(recipe: Recipe, run: Path, resume: bool = False, force: bool = False) -> int:
    """Train into the run folder -> exit code: 0 at the end, STOPPED where a signal ended it.

    Raises UserError where the folder already holds a run and resume is not asked, where that run
    had another recipe, unless forced, and where another process trains in it.
    """
    bound_caches(rounded=recipe.train.round_seconds > 0.0)
    with joined(recipe.train.device), only_training(run) if is_first() else nullcontext():
        again = launch.started_again(run)
        with first_alone():
            training, start, notes = _open(recipe, run, resume or again, force)
        launch.keep(run)
        return training.go(start, notes)


def _open(
    recipe: Recipe, run: Path, resume: bool, force: bool
) -> tuple[Training, Start | None, list[str]]:
    """Of several ranks the first makes what the run folder needs, the others read it there."""
    start = find_start(run, resume)
    notes = start.notes(recipe, force) if start else []
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    task = TASKS[recipe.task](recipe, run, start is not None or not is_first())
    if recipe.train.init and not start:
        source = choose(recipe.train.init, "best", 1)
        load_weights(task.objective.model, source, task.about)
    training = Training(task, run)
    if start:
        notes += start.content_notes(training.content, force)
        start.set_damaged_aside()
    elif is_first():
        task.prepare(run)
    return training, start, notes


if __name__ == "__main__":
    command.run(main)

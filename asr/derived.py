"""A run folder made from another one: what asr.prune and asr.export share."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from asr.data.text import about
from asr.errors import UserError
from asr.recipe import write_recipe
from asr.recognizer import Recognizer
from asr.settings import Recipe
from asr.training.checkpoint import NotSaved, save_checkpoint

ALONE = ("decode.lm=null", "decode.ensemble=[]")  # overrides: the run as it is made into another


def arguments(
    prog: str, description: str, source: str, target: str, examples: str
) -> argparse.ArgumentParser:
    """RUN key.path=value ... --to FOLDER; source and target are the help of the two folders."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}",
        description=description,
        epilog=f"Keys of the run's recipe can be overridden: {examples} ...",
    )
    parser.add_argument("run", type=Path, help=source)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--to", type=Path, required=True, help=target)
    return parser


def check_new(to: Path) -> None:
    """UserError where something lies in the folder already."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: is there already; name a new folder")


def plain_recipe(recipe: Recipe, to: Path) -> dict[str, Any]:
    """The recipe's keys under the folder's name; its one checkpoint is the average already."""
    tree = recipe.model_dump(mode="json")
    tree["run"] = to.resolve().name
    tree["decode"]["average"] = 1
    return tree


def write_run(
    to: Path,
    recipe: Recipe,
    recognizer: Recognizer,
    training: dict[str, Any] | None,
    step: int,
    loss: float,
    card: str | None = None,
) -> None:
    """An ordinary run folder, with one checkpoint; without `training` it cannot be resumed.

    Raises UserError where it cannot be written, and leaves nothing of it.
    """
    try:
        to.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, to / "recipe.yaml")
        recognizer.save(to)
        save_checkpoint(to, recognizer.model, training, step, loss, about(recognizer.tokenizer))
        if card:
            (to / "README.md").write_text(card, encoding="utf-8")
    except (OSError, NotSaved) as error:
        shutil.rmtree(to, ignore_errors=True)  # it was empty
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--to {to}: cannot be written ({reason}); make room, then do it again"
        ) from None

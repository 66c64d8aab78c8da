"""Derived runs: an ordinary run folder made from another one, by asr.export and asr.prune."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asr.config.loader import write_recipe
from asr.config.schema import Recipe, SpeechRecipe
from asr.data.tokenizer import checkpoint_metadata
from asr.errors import UserError
from asr.inference.load import LanguageModel, load_run_recipe, save_inputs
from asr.inference.recognition import Recognizer
from asr.training.checkpoint import NotSaved, save_checkpoint


def load_alone(run: Path, overrides: Sequence[str], to: Path) -> tuple[SpeechRecipe, Recognizer]:
    """The recipe, and its model on the CPU, without decode.lm and decode.ensemble.

    Raises UserError where the folder `to` is not empty.
    """
    recipe = load_run_recipe(run, overrides)
    check_new(to)
    own = [text for text in overrides if not text.startswith(("decode.lm", "decode.ensemble"))]
    alone = "decode.lm=null", "decode.ensemble=[]", "train.device=cpu"
    return recipe, Recognizer.load(run, [*own, *alone])


def check_new(to: Path) -> None:
    """Raise UserError where the folder `to` is not empty."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: is there already; name a new folder")


def derived_recipe(recipe: Recipe, to: Path) -> dict[str, Any]:
    """The recipe's tree under the new folder's name; its one checkpoint is already an average."""
    tree = recipe.model_dump(mode="json")
    tree["run"] = to.resolve().name
    if "decode" in tree:
        tree["decode"]["average"] = 1
    return tree


def write_run(
    to: Path,
    recipe: Recipe,
    trained: Recognizer | LanguageModel,
    step: int,
    loss: float,
    card: str | None = None,
) -> None:
    """Write a run folder with one checkpoint, without the state of a training: it is not resumed.

    Raises UserError where it cannot be written, and removes the folder.
    """
    metadata = checkpoint_metadata(trained.tokenizer)
    try:
        to.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, to / "recipe.yaml")
        if isinstance(trained, LanguageModel):
            trained.tokenizer.save(to)
        else:
            save_inputs(to, trained.tokenizer, trained.front_end)
        save_checkpoint(to, trained.model, None, step, loss, metadata)
        if card:
            (to / "README.md").write_text(card, encoding="utf-8")
    except (OSError, NotSaved) as error:
        shutil.rmtree(to, ignore_errors=True)  # it was empty
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--to {to}: cannot be written ({reason}); make room, try again") from None

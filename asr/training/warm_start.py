"""Start a training from the weights of another run: train.init."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from asr.config.loader import flat, read_recipe
from asr.config.schema import TRAINING_ONLY, Recipe, unusable_later
from asr.data.tokenizer import Tokenizer, checkpoint_metadata, load_tokenizer
from asr.errors import UserError
from asr.hub import local_run
from asr.io import check_run_folder
from asr.shipped import missing_run
from asr.training.checkpoint import Checkpoint, choose

# Weights of the objective, and whether the encoder trains: the same model with any value.
SAME_MODEL = {
    "features.train", "features.gradient_checkpointing", "model.ctc_weight",
    "model.intermediate_ctc.weight",
}  # fmt: skip


def starting_tokenizer(init: Path, task: str) -> Tokenizer:
    """The vocabulary of train.init, which its weights require.

    Raises UserError where it has none, and for a run of another task.
    """
    run = local_run(init)
    if not run.exists():
        raise missing_run(init, "train.init")
    check_run_folder(run)
    other = _recipe_of(run)
    if other and other.task != task:
        raise UserError(f"train.init = {init}: a run of the task {other.task}; name one of {task}")
    return load_tokenizer(run)


def has_new_vocabulary(recipe: Recipe, metadata: Mapping[str, str]) -> bool:
    """Whether the run, of a vocabulary with this metadata, is to have another than train.init."""
    if not (recipe.train.new_vocabulary and recipe.train.init):
        return False
    return checkpoint_metadata(starting_tokenizer(recipe.train.init, recipe.task)) != metadata


def starting_weights(init: Path, recipe: Recipe) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints of train.init whose mean asr.evaluate takes; and a line for the log where
    they were trained with features or a model that compute something else: shapes may still agree.

    Raises UserError where the run has none.
    """
    run = local_run(init)
    source = _recipe_of(run)
    decode = getattr(source, "decode", None)
    which, average = (decode.checkpoint, decode.average) if decode else ("best", 1)
    before, now = (flat(each) if each else {} for each in (source, recipe))
    changed = [
        f"{key} {before[key]} -> {now[key]}"
        for key in sorted((before.keys() & now.keys()) - SAME_MODEL)
        if key.startswith(("features.", "model."))
        and before[key] != now[key]
        and unusable_later(key, before[key], now[key]) not in (None, TRAINING_ONLY)
    ]
    line = f"train.init = {init}: its weights were trained with others: {', '.join(changed)}"
    return choose(run, which, average), [line] if changed else []


def _recipe_of(run: Path) -> Recipe | None:
    """None for that of an older version, which may be invalid now."""
    with suppress(UserError):
        return read_recipe(run / "recipe.yaml")
    return None

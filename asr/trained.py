"""Models of run folders: the one that is to decode, and those that decode beside it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from asr import build
from asr.data.text import Tokenizer, about, load_tokenizer
from asr.errors import UserError
from asr.recipe import read_recipe
from asr.settings import SpeechRecipe
from asr.settings.data import TRAINING_ONLY
from asr.training.checkpoint import choose, load_weights
from features.front_end import FrontEnd

STATISTICS = "features.safetensors"


def run_recipe(run: Path, overrides: Sequence[str] = ()) -> SpeechRecipe:
    """The resolved recipe of a run. UserError where the folder is no run that recognises speech."""
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run}: no recipe.yaml in it, so it is no run folder")
    recipe = read_recipe(run / "recipe.yaml", overrides)
    if not isinstance(recipe, SpeechRecipe):
        raise UserError(f"{run}: a run of the task {recipe.task}; only speech can be transcribed")
    return recipe


def run_front_end(run: Path, recipe: SpeechRecipe) -> FrontEnd:
    """The way from audio to a run's features, with its statistics where it needs some."""
    front_end = build.front_end(recipe.features)
    if front_end.norm.kind == "global":  # speakers of the training corpus are met no more
        front_end.norm.load(run / STATISTICS)
    return front_end


def run_model(
    run: Path, recipe: SpeechRecipe, features: int, tokenizer: Tokenizer
) -> tuple[nn.Module, list[int]]:
    """The mean of the checkpoints that decode.checkpoint and decode.average choose; their steps.

    On the recipe's device, for `features` values a frame. Raises UserError for a run without a
    checkpoint, or with those of another model or vocabulary.
    """
    model = build.speech_model(recipe.model, features, tokenizer.size)
    chosen = choose(run, recipe.decode.checkpoint, recipe.decode.average)
    load_weights(model, chosen, about(tokenizer))
    steps = [checkpoint.step for checkpoint in chosen]
    return model.to(build.device(recipe.train.device)), steps


def run_ensemble(
    recipe: SpeechRecipe, front_end: FrontEnd, tokenizer: Tokenizer, overrides: Sequence[str] = ()
) -> list[nn.Module]:
    """The models of the runs that decode.ensemble names, to be heard beside the one of `recipe`.

    front_end, tokenizer: of that one, whose settings under `decode:` and device hold for all, as
    `overrides` of the features do. Raises UserError for a run of another vocabulary, of other
    features, or without the CTC head that the first one has.
    """
    of_features = [override for override in overrides if override.startswith("features.")]
    of_first = {"decode": recipe.decode, "train": recipe.train}
    models = []
    for run in recipe.decode.ensemble:
        try:
            own = run_recipe(run, of_features).model_copy(update=of_first)
            if differs := _difference(run, own, recipe, front_end, tokenizer):
                raise UserError(f"{run}: {differs} the first run's; it cannot be heard beside it")
            model, _ = run_model(run, own, front_end.size, tokenizer)
        except UserError as error:
            raise UserError(f"decode.ensemble: {error}") from None
        models.append(model)
    return models


def _difference(
    run: Path, own: SpeechRecipe, first: SpeechRecipe, front_end: FrontEnd, tokenizer: Tokenizer
) -> str | None:
    """What forbids one search over both, None where nothing does."""
    if load_tokenizer(run).fingerprint() != tokenizer.fingerprint():
        return "its vocabulary is not"
    mine, its = (r.features.model_dump(exclude=TRAINING_ONLY) for r in (first, own))
    if changed := [f"features.{key}" for key in mine if mine[key] != its[key]]:
        return f"{', '.join(changed)} of it are not"
    frames = torch.eye(front_end.size)
    if front_end.norm.kind == "global" and not torch.allclose(
        run_front_end(run, own).norm(frames), front_end.norm(frames)
    ):
        return f"the statistics in {STATISTICS} are not"
    if first.model.ctc_weight and not own.model.ctc_weight:
        return "it has no CTC head such as"
    return None

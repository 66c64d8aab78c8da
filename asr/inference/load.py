"""Load what run folders contain: recipe, front end, models of an ensemble, language models."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from asr.config.language import LanguageRecipe
from asr.config.loader import flat, override, read_recipe
from asr.config.schema import (
    TRAINING_ONLY_FEATURES,
    DecodeConfig,
    Recipe,
    SpeechRecipe,
    unusable_later,
)
from asr.data.tokenizer import Tokenizer, checkpoint_metadata, load_tokenizer
from asr.decoding.fusion import load_ngrams
from asr.decoding.scorer import Scorer
from asr.errors import UserError
from asr.features.encoder import EncoderExtractor, EncoderFeatures, EncoderInputs
from asr.features.front_end import FrontEnd
from asr.hub import local_run
from asr.inference.encoders import load_run_encoder, read_description, save_description
from asr.io import check_run_folder
from asr.models.build import (
    build_front_end,
    build_frontend,
    build_language_model,
    build_speech_model,
)
from asr.shipped import missing_run, train_command
from asr.training.checkpoint import Checkpoint, MemoryLimit, choose, load_weights
from asr.training.distributed import choose_device

STATISTICS = "features.safetensors"


def load_run_recipe(run: Path, overrides: Sequence[str] = ()) -> SpeechRecipe:
    """The resolved recipe of a run of speech.

    Raises UserError for a folder that is none, and for overrides of what its model was trained
    with.
    """
    trained = load_any_recipe(run)
    if not isinstance(trained, SpeechRecipe):
        use = f"a speech run decodes with it by decode.lm={run}"
        if trained.task == "images":
            use = f"its results are in {run / 'evaluate' / 'test' / 'score.json'}, for asr.compare"
        raise UserError(f"{run}: a run of the task {trained.task}, without speech to decode; {use}")
    if not overrides:
        return trained
    recipe = override(trained, overrides, str(run / "recipe.yaml"))
    old, new = flat(trained), flat(recipe)
    for key in old | new:
        before, after = old.get(key), new.get(key)
        if before != after and (reason := unusable_later(key, before, after)):
            raise UserError(f"{run}: {key} = {after}: {reason}; remove it, or train another run")
    return recipe


def load_any_recipe(run: Path) -> Recipe:
    """The recipe of a run of any task.

    Raises UserError for a folder that is no run, or that has a link as a member.
    """
    if not run.exists():
        raise missing_run(run)
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run}: no recipe.yaml in it, so it is no run folder")
    check_run_folder(run)
    return read_recipe(run / "recipe.yaml")


def load_run_front_end(run: Path, recipe: SpeechRecipe) -> FrontEnd:
    """Audio to features, with global statistics; those of training speakers are not needed."""
    features = recipe.features
    encoder = load_run_encoder(run, features) if features.kind == "encoder" else None
    front_end = build_front_end(features, encoder=encoder)
    if front_end.corpus_norm.kind == "global":
        front_end.corpus_norm.load(run / STATISTICS)
    return front_end


def save_inputs(run: Path, tokenizer: Tokenizer, front_end: FrontEnd) -> None:
    """Vocabulary and statistics: with recipe and checkpoints all that transcription needs."""
    tokenizer.save(run)
    if isinstance(front_end.extract, EncoderExtractor):
        trained = isinstance(front_end.extract, EncoderInputs)
        save_description(run, front_end.extract.encoder, trained)
    if front_end.corpus_norm.needs_statistics:
        front_end.corpus_norm.save(run / STATISTICS)


def load_run_model(
    run: Path, recipe: SpeechRecipe, front_end: FrontEnd, tokenizer: Tokenizer
) -> tuple[nn.Module, list[int]]:
    """The mean of the checkpoints that the recipe's decode chooses, for evaluation; their steps.

    Raises UserError for a run without checkpoints, or with those of another model or vocabulary.
    """
    chosen = choose(run, recipe.decode.checkpoint, recipe.decode.average)
    with MemoryLimit(chosen[0]):
        frontend = build_frontend(recipe.features, front_end)
        model = build_speech_model(recipe.model, front_end.size, tokenizer.size, frontend)
    load_weights(model, chosen, checkpoint_metadata(tokenizer))
    steps = [checkpoint.step for checkpoint in chosen]
    return model.to(choose_device(recipe.train.device)).eval(), steps


def load_ensemble(
    recipe: SpeechRecipe, front_end: FrontEnd, tokenizer: Tokenizer, overrides: Sequence[str] = ()
) -> list[nn.Module]:
    """The models of the runs in decode.ensemble, for a search together with that of `recipe`.

    The first run's decode section, device, front end and tokenizer and the overrides of features
    apply to all. Raises UserError for a run of another vocabulary or other features, or without a
    CTC head where decode.ctc_weight needs one.
    """
    of_features = [override for override in overrides if override.startswith("features.")]
    of_first = {"decode": recipe.decode, "train": recipe.train}
    models = []
    for named in recipe.decode.ensemble:
        try:
            run = local_run(named)
            member = load_run_recipe(run, of_features).model_copy(update=of_first)
            if reason := _incompatibility(run, member, recipe, front_end, tokenizer):
                raise UserError(f"{run}: {reason}")
            trained = member.features.train != "none"  # each has its encoder's weights
            whose = load_run_front_end(run, member) if trained else front_end
            model, _ = load_run_model(run, member, whose, tokenizer)
        except UserError as error:
            raise UserError(f"decode.ensemble: {error}") from None
        models.append(model)
    return models


def _incompatibility(
    run: Path, member: SpeechRecipe, first: SpeechRecipe, front_end: FrontEnd, tokenizer: Tokenizer
) -> str | None:
    """Why a run cannot be searched together with the first; None where it can."""
    if load_tokenizer(run).fingerprint() != tokenizer.fingerprint():
        return "its vocabulary differs from the first run's"
    ours, theirs = (r.features.model_dump(exclude=TRAINING_ONLY_FEATURES) for r in (first, member))
    if changed := [f"features.{key}" for key in ours if ours[key] != theirs[key]]:
        return f"its {', '.join(changed)} differ from the first run's"
    if isinstance(extract := front_end.extract, EncoderFeatures):
        theirs = read_description(run)["sha256"]
        if theirs != extract.encoder.source.sha256:
            return "its features.encoder has other weights than the first run's"
    frames = torch.eye(front_end.size)
    if front_end.norm.kind == "global" and not torch.allclose(
        load_run_front_end(run, member).norm(frames), front_end.norm(frames)
    ):
        return f"its statistics in {STATISTICS} differ from the first run's"
    if first.decode.ctc_weight and not member.model.ctc_weight:
        return (
            f"it has no CTC head for decode.ctc_weight = {first.decode.ctc_weight:g}; set it to 0"
        )
    return None


def load_language_scorer(
    decode: DecodeConfig, tokenizer: Tokenizer, device: torch.device
) -> Scorer | None:
    """The language model in `decode.lm`; None without one.

    Raises UserError for a path that is neither a run folder nor a file of n-grams, another
    vocabulary, and a missing kenlm.
    """
    if decode.lm is None:
        return None
    if decode.search == "ctc":
        raise UserError("decode.lm needs decode.search=beam; decode.ctc_weight=1 is CTC alone")
    path = find_language_model(decode.lm)
    if path.is_file():
        return load_ngrams(path, tokenizer.surfaces, decode.lm_unit)
    try:
        loaded = load_language_model(path)
    except UserError as error:
        raise UserError(f"decode.lm: {error}") from None
    if loaded.tokenizer.fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"decode.lm = {decode.lm}: its vocabulary is not this speech model's; "
            "train a language model with text.run=SPEECH_RUN"
        )
    return loaded.model.to(device).eval()


def find_language_model(named: Path) -> Path:
    """The run's folder or the file of n-grams in `decode.lm`. UserError where there is neither."""
    try:
        path = named if named.is_file() else local_run(named)
    except UserError as error:
        raise UserError(f"decode.lm: {error}") from None
    if not path.exists():
        raise UserError(
            f"decode.lm = {named}: neither a run folder nor a file of n-grams. Make a run with: "
            f"{train_command(named)}"
        )
    return path


class LanguageModel(NamedTuple):
    """A run of the task `language`, with the weights of its best checkpoint."""

    recipe: LanguageRecipe
    tokenizer: Tokenizer
    model: nn.Module
    checkpoint: Checkpoint


def load_language_model(run: Path) -> LanguageModel:
    """A language model on the CPU. UserError for a folder that is no such run."""
    recipe = load_any_recipe(run)
    if not isinstance(recipe, LanguageRecipe):
        raise UserError(f"{run}: a run of the task {recipe.task}, no language model")
    tokenizer = load_tokenizer(run)
    (checkpoint,) = choose(run, "best", 1)
    with MemoryLimit(checkpoint):
        model = build_language_model(recipe.model, tokenizer.size)
    load_weights(model, [checkpoint], checkpoint_metadata(tokenizer))
    return LanguageModel(recipe, tokenizer, model, checkpoint)

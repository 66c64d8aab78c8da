"""Recipe -> objects: the only place where settings become modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from asr import settings
from asr.data.corpus import Corpus
from asr.data.loader import Epochs, Utterances
from asr.data.text import Characters, SentencePieces, Tokenizer
from asr.errors import UserError
from asr.models.draw import Draw
from asr.models.language_model import LstmLanguageModel, TransformerLanguageModel
from asr.models.las import LAS
from asr.models.listener import Listener
from asr.models.row_classifier import RowClassifier
from asr.models.speller import Speller
from asr.models.transformer import Transformer
from asr.nn.drop import VShape
from asr.nn.transformer_layers import Stack
from asr.settings import Features, ImageRecipe, LanguageRecipe, Model, SpeechRecipe, Text
from asr.settings.language import LanguageModel
from asr.settings.train import Train
from asr.training import optim as rates
from asr.training.image_objective import BoundObjective, ClassObjective
from asr.training.language_objective import LanguageObjective
from asr.training.loop import Limits
from asr.training.objective import Consistency, Guide, SpeechObjective
from features.augment import SpecAugment
from features.fbank import Fbank, Frames, Mfcc, SlaneyMel
from features.front_end import FrontEnd
from features.normalize import MeanVarianceNorm


def front_end(features: Features, max_seconds: float | None = None) -> FrontEnd:
    """The way from audio to features; statistics of its norm are still to be measured or loaded."""
    masks = features.spec_augment
    with named("features"):
        return FrontEnd(
            extractor(features),
            MeanVarianceNorm(features.mvn, features.mvn_variance),
            features.sample_rate,
            SpecAugment(**masks.model_dump()) if masks else None,
            features.noise,
            max_seconds,
        )


@contextmanager
def named(group: str) -> Iterator[None]:
    """A value that a module refuses is the user's: say in which group of the recipe it stands."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{group}: {error}") from None


def extractor(features: Features) -> Frames:
    """Log-mel (Kaldi's or Slaney's) or MFCC."""
    rate, bins = features.sample_rate, features.mel_bins
    if features.kind == "mfcc":
        ceps, deltas = features.ceps, features.deltas
        return Mfcc(rate, num_mel_bins=bins, num_ceps=ceps, deltas=deltas, dither=features.dither)
    kind = {"logmel": Fbank, "slaney": SlaneyMel}[features.kind]
    return kind(rate, num_mel_bins=bins, dither=features.dither)


def tokenizer(text: Text, texts: Sequence[str]) -> Tokenizer:
    """Made from the training text."""
    if text.kind == "characters":
        return Characters.train(texts)
    return SentencePieces.train(texts, text.size, text.kind)


def speech_model(model: Model, features: int, vocabulary: int) -> nn.Module:
    """`features` values per frame and a vocabulary size -> a model with the common face."""
    make = {"las": las, "transformer": transformer}[model.kind]
    with named("model"):
        return make(model, features, vocabulary)


def transformer(model: settings.Transformer, features: int, vocabulary: int) -> Transformer:
    """Encoder-decoder with the norms, scales and drops of the recipe."""
    plain = with_drop_head(model.model_dump(exclude={"kind", "ctc_weight"}))
    return Transformer(features, vocabulary, ctc=model.ctc_weight > 0, **plain)


def with_drop_head(plain: dict[str, Any]) -> dict[str, Any]:
    """A Transformer's keys, DropHead's schedule made where they hold one."""
    if isinstance(plain.get("drop_head"), dict):
        return plain | {"drop_head": VShape(**plain["drop_head"])}
    return plain


def las(model: settings.Las, features: int, vocabulary: int) -> LAS:
    """Listener and speller, each with its own norms."""
    listening = model.listener.model_dump()
    spelling = model.speller.model_dump()
    sampling = spelling.pop("sampling")
    listener = Listener(features, **listening)
    speller = Speller(
        vocabulary,
        listener.size,
        attention=model.attention,
        attention_size=model.attention_size,
        **spelling,
    )
    return LAS(listener, speller, vocabulary, sampling, ctc=model.ctc_weight > 0)


def speech_objective(recipe: SpeechRecipe, features: int, vocabulary: int) -> SpeechObjective:
    """The model with its loss, on the recipe's device."""
    model = speech_model(recipe.model, features, vocabulary)
    train = recipe.train
    guide = Guide(**train.guide.model_dump()) if train.guide else None
    agree = Consistency(**train.consistency.model_dump()) if train.consistency else None
    objective = SpeechObjective(model, recipe.model.ctc_weight, train.label_smoothing, guide, agree)
    return objective.to(device(train.device))


def share_layer_drop(objective: nn.Module, seed: int) -> None:
    """The ranks of a training leave out the same layers, so that none waits for the others."""
    stacks = [module for module in objective.modules() if isinstance(module, Stack)]
    for number, stack in enumerate(stacks):
        stack.choose_by(seed, number)


def language_model(model: LanguageModel, vocabulary: int) -> nn.Module:
    """LSTM or Transformer over that many tokens."""
    plain = with_drop_head(model.model_dump(exclude={"kind"}))
    make = {"lstm": LstmLanguageModel, "transformer": TransformerLanguageModel}[model.kind]
    with named("model"):
        return make(vocabulary, **plain)


def language_objective(recipe: LanguageRecipe, vocabulary: int) -> LanguageObjective:
    """The language model with its loss, on the recipe's device."""
    model = language_model(recipe.model, vocabulary)
    return LanguageObjective(model, recipe.train.label_smoothing).to(device(recipe.train.device))


def image_objective(
    recipe: ImageRecipe, size: tuple[int, int], classes: int
) -> ClassObjective | BoundObjective:
    """The row classifier or DRAW with its loss, on the recipe's device; images of `size`."""
    plain = recipe.model.model_dump(exclude={"kind"})
    if recipe.model.kind == "draw":
        for cell in ("encoder", "decoder"):
            plain[cell]["hidden_size"] = plain[cell].pop("hidden")
        objective = BoundObjective(Draw(*size, **plain))
    else:
        model = RowClassifier(size[1], classes, **plain)
        objective = ClassObjective(model, recipe.train.label_smoothing)
    return objective.to(device(recipe.train.device))


def device(name: str) -> torch.device:
    """`auto` takes a GPU where there is one. UserError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(name)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"train.device = {name}: this machine has no such GPU; try auto or cpu")
    return chosen


def epochs(
    recipe: SpeechRecipe, corpus: Corpus, front_end: FrontEnd, tokenizer: Tokenizer
) -> Epochs:
    """The training corpus in batches."""
    train = recipe.train
    views = 2 if train.consistency else 1
    return Epochs(
        Utterances(corpus, front_end, tokenizer, recipe.seed, views=views),
        train.batch_seconds,
        recipe.features.speed,
        train.short_first,
        recipe.data.workers,
        train.round_seconds,
    )


def optimizer(train: Train, objective: nn.Module) -> optim.Optimizer:
    """Adam or AdamW."""
    return rates.make_optimizer(objective, **train.optimizer.model_dump())


def schedule(train: Train) -> rates.Schedule:
    """The learning rate as a function of the step."""
    lr, plan = train.optimizer.lr, train.schedule
    if plan.kind == "noam":
        return rates.noam(lr, plan.warmup, plan.width)
    if plan.kind == "constant":
        return rates.constant(lr, plan.warmup)
    return rates.ramp_hold_decay(lr, plan.warmup, plan.hold, plan.floor)


def limits(train: Train, broken: float) -> Limits:
    """How far to train and what each step may do; `broken` share of what is read may be lost."""
    return Limits(
        epochs=train.epochs,
        steps=train.steps,
        accumulate=train.accumulate,
        clip=train.clip,
        precision=train.precision,
        broken=broken,
        bad_steps=train.bad_steps,
    )

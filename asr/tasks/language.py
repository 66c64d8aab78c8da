"""The task `language`: language models over tokens. Its runs can be used as `decode.lm`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from asr.config.language import LanguageDataConfig, LanguageRecipe
from asr.config.loader import at_stage
from asr.data import splits
from asr.data.text_corpus import SentenceBatch, SentenceEpochs, Sentences, read_lines
from asr.data.tokenizer import (
    FEW_PIECES,
    Tokenizer,
    checkpoint_metadata,
    load_tokenizer,
    train_tokenizer,
    used_text,
)
from asr.decoding.scorer import sample
from asr.errors import UserError
from asr.hub import local_run
from asr.io import sha256_of_files
from asr.models.build import build_language_model
from asr.shipped import missing_run
from asr.training.distributed import choose_device, print_first
from asr.training.logging import Log
from asr.training.losses import Objective, Perplexity, Sum, cross_entropy, shift
from asr.training.resume import SHA256, Content
from asr.training.task import Task
from asr.training.warm_start import starting_tokenizer

VOCABULARY_LINES = 1_000_000  # of the training text, evenly spaced, for a new vocabulary
CHECKED_LINES = 1000
MAX_SAMPLE = 200  # tokens of a generated sentence
ANY_LENGTH = 2**31 - 1
INSPECTED = 4  # sentences for train.health


class LanguageObjective(Objective):
    """Label-smoothed cross-entropy per token; <eos> counts as one.

    Perplexities are logged per token and per word; only the latter compare between vocabularies. As
    in n-gram models, the end of a sentence counts as one word.
    """

    def forward(self, batch: SentenceBatch) -> dict[str, Sum]:
        """-> objective, nll, accuracy, perplexity, word_perplexity."""
        inputs, targets = shift(batch.tokens, batch.token_lengths)
        logits: Tensor = self.model(inputs)
        sums = cross_entropy(logits.float(), targets, self.label_smoothing)
        nll, tokens = sums["nll"]
        words = (batch.words + 1).sum()
        perplexities = {"perplexity": (nll, tokens), "word_perplexity": (nll, words)}
        return sums | {name: Perplexity(*pair) for name, pair in perplexities.items()}


@dataclass(frozen=True)
class LanguageTask(Task):
    """Training of a language model. There is no test: perplexities are those of the validation."""

    recipe: LanguageRecipe
    objective: LanguageObjective
    epochs: SentenceEpochs
    validation: SentenceEpochs
    tokenizer: Tokenizer
    metadata: dict[str, str]

    @cached_property
    def content(self) -> Content:
        """The number and hash of the training and validation sentences."""
        data = self.recipe.data
        parts = ("train", self.epochs, data.train), ("valid", self.validation, data.valid)
        return {
            f"data.{role}": {"sentences": len(epochs.sentences), SHA256: sha256_of_files(paths)}
            for role, epochs, paths in parts
        }

    def describe(self) -> str:
        plan, lines = self.epochs.plan(1), self.epochs.sentences
        learned = len(plan.batches.items)
        rest = len(lines) - learned
        over = f" ({rest} more are over data.max_bytes = {self.epochs.longest})" if rest else ""
        megabytes = sum(len(text.text) for text in lines.texts) / 1e6
        return (
            f"{learned} sentences{over} of {megabytes:.3g} MB, vocabulary of "
            f"{self.tokenizer.size}, {len(plan.batches)} batches an epoch, "
            f"{100 * plan.padding:.1f} % padding"
        )

    def as_used(self, recipe: LanguageRecipe) -> LanguageRecipe:
        return recipe.model_copy(update={"text": self.recipe.text})

    def prepare(self, run: Path) -> None:
        """Write the vocabulary, so that a speech model can check that it has the same."""
        self.tokenizer.save(run)

    def validation_batches(self, share: slice = slice(None)) -> Iterator[SentenceBatch]:
        return self.validation.batches(0, share.start or 0, share.step or 1)

    def report(self, log: Log, step: int) -> dict[str, float]:
        """Log a few generated sentences, always from the same random numbers."""
        self.objective.eval()
        model, generator = self.objective.model, torch.Generator().manual_seed(self.recipe.seed)
        device = next(model.parameters()).device
        sentences = sample(model, self.recipe.train.samples, MAX_SAMPLE, generator, device)
        log.text("samples", map(self.tokenizer.decode, sentences), step)
        return {}

    def health_batches(self) -> Iterator[SentenceBatch]:
        sentences = self.validation.sentences
        return (sentences[[row]] for row in sentences.spread(INSPECTED))


def language_task(recipe: LanguageRecipe, run: Path, resume: bool, stage: int = 0) -> LanguageTask:
    """Read the texts, make or load the vocabulary, build the model.

    Raises UserError for a text that is missing or does not fit the recipe.
    """
    recipe = at_stage(recipe, stage)
    data = recipe.data
    training, valid = (read_texts(data, role) for role in ("train", "valid"))
    if resume:
        tokenizer = load_tokenizer(run)
    else:
        tokenizer, reason = _vocabulary(recipe, training)
        text, lines = used_text(recipe.text, tokenizer, reason)
        recipe = recipe.model_copy(update={"text": text})
        print_first(*lines)
    epochs, validation = (
        SentenceEpochs(part, data.batch_bytes, longest, recipe.seed, data.workers)
        for part, longest in ((training, data.max_bytes), (valid, ANY_LENGTH))
    )
    for part, path in ((epochs, data.train[0]), (validation, data.valid[0])):
        lines = part.sentences.sample(CHECKED_LINES)
        print_first(splits.check_vocabulary_coverage(lines, tokenizer, path))
        part.sentences.tokenizer = tokenizer
    epochs.plan(1)  # raises its errors before the run folder is made
    torch.manual_seed(recipe.seed)
    model = build_language_model(recipe.model, tokenizer.size)
    objective = LanguageObjective(model, recipe.train.label_smoothing)
    objective.to(choose_device(recipe.train.device))
    return LanguageTask(
        recipe, objective, epochs, validation, tokenizer, checkpoint_metadata(tokenizer)
    )


def _vocabulary(recipe: LanguageRecipe, training: Sentences) -> tuple[Tokenizer, str]:
    """That of train.init or text.run, which must agree; else a new one. And which it is."""
    init, source = recipe.train.init, recipe.text.run
    if source is None:
        if init is None:
            return train_tokenizer(recipe.text, training.sample(VOCABULARY_LINES)), FEW_PIECES
        reason = f"the vocabulary is that of train.init = {init}"
        return starting_tokenizer(init, "language"), reason
    run = local_run(source)
    if not run.exists():
        raise missing_run(source, "text.run")
    tokenizer = load_tokenizer(run)
    if init and starting_tokenizer(init, "language").fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"text.run = {source}: its vocabulary is not that of train.init = {init}; "
            "start from a run with that vocabulary, or without train.init"
        )
    return tokenizer, f"the vocabulary is that of text.run = {source}"


def read_texts(data: LanguageDataConfig, role: str) -> Sentences:
    """The texts of `train` or `valid`. Raises UserError where one is missing."""
    texts = []
    for path in getattr(data, role):
        if path.suffix == ".tsv":
            splits.make_built_in(data.corpus, path)
        if not path.is_file():
            raise UserError(f"data.{role}: {path} is missing; {_remedy(data.corpus, path)}")
        texts.append(read_lines(path))
    return Sentences(texts)


def _remedy(corpus: str | None, path: Path) -> str:
    """How to get a missing text; a manifest comes with its recordings."""
    if path.suffix != ".tsv" and corpus != "librispeech-lm":
        return "name a .txt, .txt.gz or .tsv file"
    if path.suffix == ".tsv" and corpus == "librispeech-lm":
        corpus = "librispeech"
    return f"make it with: {splits.prepare_command(corpus, path)}"

"""The task of predicting text: corpus, objective and what validation shows.

asr.train trains it as it trains speech. Its runs are what `decode.lm` of a speech model names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from asr import build, corpora
from asr.data.content import SHA256, Content, sha256_of_files
from asr.data.lines import read_lines
from asr.data.sentence_plan import SentenceEpochs
from asr.data.sentences import SentenceBatch, Sentences
from asr.data.text import Tokenizer, about, load_tokenizer
from asr.decoding.sample import sample
from asr.errors import UserError
from asr.recipe import read_recipe
from asr.settings import LanguageRecipe
from asr.settings.language import LanguageData, LanguageModel
from asr.tasks.vocabulary import kept_vocabulary
from asr.training.checkpoint import choose, load_weights
from asr.training.language_objective import LanguageObjective
from asr.training.log import Log
from asr.training.position import Position

VOCABULARY_LINES = 1_000_000  # of the training text, evenly spread, that make a vocabulary
CHECKED_LINES = 1000
LONGEST_SAMPLE = 200  # tokens
ANY_LENGTH = 2**31 - 1
INSPECTED = 4  # sentences that train.health looks at
LONGEST_LINES = 100  # by their bytes: of these the tokens are counted, where places are learned


@dataclass(frozen=True)
class LanguageTask:
    """The Task of asr.train for language models."""

    recipe: LanguageRecipe
    objective: LanguageObjective
    epochs: SentenceEpochs
    held_out: SentenceEpochs
    tokenizer: Tokenizer

    allowed_broken = 0.0  # a text is read whole before training begins

    @property
    def about(self) -> dict[str, str]:
        """What a checkpoint says of itself."""
        return about(self.tokenizer)

    @cached_property
    def content(self) -> Content:
        """Of the texts to learn from and to validate on."""
        data, there = self.recipe.data, (self.epochs.sentences, self.held_out.sentences)
        return {
            f"data.{role}": {"sentences": len(lines), SHA256: sha256_of_files(paths)}
            for role, lines, paths in zip(
                ("train", "valid"), there, (data.train, data.valid), strict=True
            )
        }

    def describe(self) -> str:
        """The corpus in a few words."""
        plan, lines = self.epochs.plan(1), self.epochs.sentences
        learned = len(plan.batches.order)
        rest = len(lines) - learned
        over = f" ({rest} more are over data.max_bytes = {self.epochs.longest})" if rest else ""
        megabytes = sum(len(text.text) for text in lines.texts) / 1e6
        return (
            f"{learned} sentences{over} of {megabytes:.3g} MB, vocabulary of "
            f"{self.tokenizer.size}, {len(plan.batches)} batches an epoch, "
            f"{100 * plan.padding:.1f} % padding"
        )

    def prepare(self, run: Path) -> None:
        """The vocabulary, so that a speech model can tell whether it is its own."""
        self.tokenizer.save(run)

    def valid(self, share: slice = slice(None)) -> Iterator[SentenceBatch]:
        """The validation text, once, or a share of its batches."""
        return self.held_out.batches(0, share.start or 0, share.step or 1)

    def nothing_valid(self) -> str:
        """What to say where none of it could be read."""
        return "no sentence for validation"

    def report(self, log: Log, position: Position) -> dict[str, float]:
        """A few sentences that the model makes up, always from the same random numbers."""
        self.objective.eval()
        model, chance = self.objective.model, torch.Generator().manual_seed(self.recipe.seed)
        device = next(model.parameters()).device
        # Where places are learned there are no more than these.
        longest = min(LONGEST_SAMPLE, getattr(self.recipe.model, "max_positions", LONGEST_SAMPLE))
        said = sample(model, self.recipe.train.samples, longest, chance, device)
        log.text("samples", "\n\n".join(map(self.tokenizer.decode, said)), position.step)
        return {}

    def samples(self) -> Iterator[SentenceBatch]:
        """A few validation sentences to look inside with, each alone and so without padding."""
        there = self.held_out.sentences
        return (there[[row]] for row in there.spread(INSPECTED))

    def finish(self, run: Path, log: Log, position: Position) -> dict[str, float]:
        """Nothing more."""
        return {}


def language_task(recipe: LanguageRecipe, run: Path, resume: bool) -> LanguageTask:
    """Read the texts, make or load the vocabulary, build the model.

    Raises UserError for a text that is missing or cannot be learned from as the recipe stands.
    """
    data = recipe.data
    training, valid = (_read(data, role) for role in ("train", "valid"))
    tokenizer = load_tokenizer(run) if resume else _vocabulary(recipe, training)
    for part, paths, most in (
        (training, data.train, data.max_bytes),
        (valid, data.valid, ANY_LENGTH),
    ):
        lines = part.sample(CHECKED_LINES)
        corpora.check_text(lines, [tokenizer.unknown(line) for line in lines], paths[0])
        part.tokenizer = tokenizer
        _check_places(recipe.model, part, most, paths[0])
    torch.manual_seed(recipe.seed)
    cap, seed, workers = data.batch_bytes, recipe.seed, data.workers
    epochs = SentenceEpochs(training, cap, data.max_bytes, seed, workers)
    epochs.plan(1)  # says what cannot be before the run folder is made
    return LanguageTask(
        recipe,
        build.language_objective(recipe, tokenizer.size),
        epochs,
        SentenceEpochs(valid, cap, ANY_LENGTH, seed, workers),
        tokenizer,
    )


def _check_places(model: LanguageModel, part: Sentences, most: int, path: Path) -> None:
    """UserError where places are learned and a sentence of `most` bytes or less has too many."""
    if getattr(model, "positions", None) != "learned":
        return
    lengths = part.lengths
    rows = np.flatnonzero(lengths <= most)
    longest = rows[np.argsort(lengths[rows])[-LONGEST_LINES:]].tolist()
    places = max((len(part.tokenizer.encode(part.line(row))) for row in longest), default=0) + 1
    if places > model.max_positions:
        raise UserError(
            f"{path}: a sentence has {places} places with its end, and model.max_positions is "
            f"{model.max_positions}; raise it, or take model.positions=sinusoidal"
        )


def _vocabulary(recipe: LanguageRecipe, training: Sentences) -> Tokenizer:
    """That of train.init or of text.run, which must be one where both are given; else a new one."""
    init, given = recipe.train.init, recipe.text.run
    if given is None:
        if init is None:
            return build.tokenizer(recipe.text, training.sample(VOCABULARY_LINES))
        return kept_vocabulary(init, recipe.text)
    tokenizer = load_tokenizer(given)
    if init and load_tokenizer(init).fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"text.run = {given}: its vocabulary is not that of train.init = {init}; "
            "start from a run with that vocabulary, or without train.init"
        )
    return tokenizer


def load_language_model(run: Path, fingerprint: str, device: torch.device) -> torch.nn.Module:
    """The model of a run's best checkpoint, to be added to a speech model of that vocabulary.

    Raises UserError for a folder that is no such run, and for another vocabulary.
    """
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"decode.lm = {run}: no recipe.yaml in it, so it is no run folder")
    recipe = read_recipe(run / "recipe.yaml")
    if not isinstance(recipe, LanguageRecipe):
        raise UserError(f"decode.lm = {run}: a run of the task {recipe.task}, no language model")
    tokenizer = load_tokenizer(run)
    if tokenizer.fingerprint() != fingerprint:
        raise UserError(
            f"decode.lm = {run}: its vocabulary is not this speech model's; "
            "train a language model with text.run=SPEECH_RUN"
        )
    model = build.language_model(recipe.model, tokenizer.size)
    load_weights(model, choose(run, "best", 1), about(tokenizer))
    return model.to(device).eval()


def _read(data: LanguageData, role: str) -> Sentences:
    texts = []
    for path in getattr(data, role):
        if path.suffix == ".tsv":
            corpora.make_built_in(data.corpus, path)
        if not path.is_file():
            raise UserError(f"data.{role}: {path} is not there; {_remedy(data.corpus, path)}")
        texts.append(read_lines(path, data.cache))
    return Sentences(texts)


def _remedy(corpus: str | None, path: Path) -> str:
    """What makes a text that is missing: a manifest comes with its recordings."""
    if corpus is None or (path.suffix != ".tsv" and corpus != "librispeech-lm"):
        return "name a .txt, .txt.gz or .tsv file"
    command = "python -m asr.prepare librispeech-lm --to {folder}"
    if path.suffix == ".tsv":
        command = corpora.PREPARE["librispeech" if corpus == "librispeech-lm" else corpus]
    return f"make it with: {command.format(folder=path.parent, split=path.stem)}"

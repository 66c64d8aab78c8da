"""The task of recognising speech: corpus, objective and what validation shows.

asr.train trains any task; this one brings the training corpus in batches, a SpeechObjective, and
a report for TensorBoard: greedy and CTC word error rates, and for a few fixed utterances the
log-mel picture, where attention looked and what was heard.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from asr import build, corpora
from asr.data.batch import Batch, collate
from asr.data.content import SHA256, Content, sha256_of_files
from asr.data.corpus import Corpus
from asr.data.loader import Epochs, Utterances, load
from asr.data.plan import Item, plan_evaluation
from asr.data.statistics import measure, of_split
from asr.data.text import about, labels_of, load_tokenizer
from asr.nn.memory import Memory
from asr.recognizer import Recognizer
from asr.scoring.pictures import attention_picture, diagonality, feature_picture
from asr.scoring.wer import score
from asr.search import language_scorer
from asr.settings import SpeechRecipe
from asr.tasks.room import check_room
from asr.tasks.vocabulary import kept_vocabulary
from asr.trained import STATISTICS
from asr.training.log import Log
from asr.training.objective import SpeechObjective, shift
from asr.training.position import Position
from features.front_end import FrontEnd

INSPECTED = 4  # utterances that train.health looks at
# Of a larger corpus, so many utterances, evenly spread, are looked at before training begins.
VOCABULARY_UTTERANCES = 300_000
CHECKED_TEXTS = 1000


@dataclass(frozen=True)
class SpeechTask:
    """The Task of asr.train for speech."""

    recipe: SpeechRecipe
    objective: SpeechObjective
    epochs: Epochs
    heard: Utterances  # of the validation split
    recognizer: Recognizer

    @property
    def allowed_broken(self) -> float:
        """Share of the corpus that may turn out unreadable."""
        return self.recipe.data.broken

    def prepare(self, run: Path) -> None:
        """What a run folder needs beside checkpoints, so that it can transcribe on its own."""
        self.recognizer.save(run)

    def describe(self) -> str:
        """The corpus in a few words."""
        corpus, plan = self.epochs.utterances.corpus, self.epochs.plan(1)
        return (
            f"{corpus.seconds.sum() / 3600:.2f} h in {len(corpus)} utterances, "
            f"{len(plan.batches)} batches an epoch, {100 * plan.padding:.1f} % padding"
        )

    @property
    def about(self) -> dict[str, str]:
        """What a checkpoint says of itself."""
        return about(self.recognizer.tokenizer)

    @cached_property
    def content(self) -> Content:
        """Of the manifests to learn from and to validate on; the audio itself is not read."""
        return {
            f"data.{role}": {
                "utterances": len(corpus),
                "seconds": round(float(corpus.seconds.sum()), 1),
                SHA256: sha256_of_files([corpus.path]),
            }
            for role, corpus in (
                ("train", self.epochs.utterances.corpus),
                ("valid", self.heard.corpus),
            )
        }

    def valid(self, share: slice = slice(None)) -> Iterator[Batch]:
        """The validation split, once, or a share of its batches."""
        plan = plan_evaluation(self.heard.corpus.seconds, self.recipe.decode.batch_seconds)
        return load(self.heard, plan.batches[share], self.recipe.data.workers)

    def nothing_valid(self) -> str:
        """What to say where none of it could be read."""
        return self.heard.corpus.unreadable

    def report(self, log: Log, position: Position) -> dict[str, float]:
        """Word error rates and attention's diagonality on validation; pictures and texts.

        Utterances are taken in the order of the manifest, train.wer_utterances of them.
        """
        train = self.recipe.train
        seconds = self.heard.corpus.seconds[: train.wer_utterances]
        plan = plan_evaluation(seconds, self.recipe.decode.batch_seconds)
        texts: dict[str, str] = {}
        ctc_texts: dict[str, str] = {}
        slopes = []
        shown = set(self.heard.corpus[: train.samples].ids)
        for batch in load(self.heard, plan.batches, self.recipe.data.workers):
            if not len(batch):
                continue
            memory = self.recognizer.encode(batch)
            found = self.recognizer.hypotheses(memory)
            texts |= zip(batch.ids, map(self.recognizer.text, found), strict=True)
            paths = self.recognizer.ctc_paths(memory)
            ctc_texts |= zip(batch.ids, map(self.recognizer.text, paths), strict=False)
            weights = self._attention(memory, batch)
            slopes += [diagonality(w) for w in weights]
            for row in (i for i, name in enumerate(batch.ids) if name in shown):
                self._show(log, position.step, batch, row, weights[row])
        self._samples(log, position.step, texts, ctc_texts)
        if not texts:
            return {}
        rates = {"wer": self._rate(texts), "diagonality": float(np.mean(slopes))}
        return rates | ({"ctc_wer": self._rate(ctc_texts)} if ctc_texts else {})

    def samples(self) -> Iterator[Batch]:
        """A few validation utterances to look inside with, each alone and so without padding."""
        for number in range(min(INSPECTED, len(self.heard))):
            batch = collate([self.heard[Item(number, 0, 1.0)]])
            if len(batch):
                yield batch

    def finish(self, run: Path, log: Log, position: Position) -> dict[str, float]:
        """Nothing: asr.evaluate decodes test splits, as often as one likes."""
        return {}

    def _rate(self, texts: dict[str, str]) -> float:
        truth = {u.id: u.text for u in self.heard.corpus[: self.recipe.train.wer_utterances]}
        return score([truth[name] for name in texts], list(texts.values()), draws=1).wer

    @torch.no_grad()
    def _attention(self, memory: Memory, batch: Batch) -> list[np.ndarray]:
        """Where the model looks when it reads the true text: per utterance (U + 1, T)."""
        inputs, _ = shift(batch.tokens, batch.token_lengths)
        weights = self.recognizer.model.attention(memory, inputs.to(memory.states.device))
        frames = memory.valid.sum(dim=1).tolist()
        return [
            w[: u + 1, :t].float().cpu().numpy()
            for w, u, t in zip(weights, batch.token_lengths.tolist(), frames, strict=True)
        ]

    def _show(self, log: Log, step: int, batch: Batch, row: int, weights: np.ndarray) -> None:
        name = batch.ids[row]
        tokens = batch.tokens[row, : batch.token_lengths[row]].tolist()
        labels = labels_of(tokens, self.recognizer.tokenizer)
        log.picture(f"attention/{name}", attention_picture(weights, labels, name), step)
        features = batch.features[row, : batch.lengths[row]].numpy()
        log.picture(f"features/{name}", feature_picture(features, name), step)

    def _samples(
        self, log: Log, step: int, texts: dict[str, str], ctc_texts: dict[str, str]
    ) -> None:
        for utterance in self.heard.corpus[: self.recipe.train.samples]:
            lines = [f"reference: {utterance.text}", f"attention: {texts.get(utterance.id)}"]
            if ctc_texts:
                lines.append(f"CTC: {ctc_texts.get(utterance.id)}")
            log.text(f"decoded/{utterance.id}", "\n\n".join(lines), step)


def speech_task(recipe: SpeechRecipe, run: Path, resume: bool) -> SpeechTask:
    """Read the corpus, make or load vocabulary and statistics, build the model.

    Raises UserError for a corpus that is missing or cannot be learned from as the recipe stands.
    """
    data = recipe.data
    whole = corpora.corpus(data, data.train, "train")
    training = corpora.within(whole, data.min_seconds, data.max_seconds)
    valid = corpora.corpus(data, data.valid, "valid")
    # A file without end must not end the run: validation leaves it out as well, and says so.
    front_end = build.front_end(recipe.features, data.max_seconds * 2)
    if resume:
        tokenizer = load_tokenizer(run)
        if front_end.norm.needs_statistics:
            front_end.norm.load(run / STATISTICS)
    else:
        init, text = recipe.train.init, recipe.text
        part = training.sample(VOCABULARY_UTTERANCES)
        tokenizer = kept_vocabulary(init, text) if init else build.tokenizer(text, part.texts)
        _measure(training, front_end, recipe)
    for part in (training, valid):
        texts = part.sample(CHECKED_TEXTS).texts
        corpora.check_text(texts, [tokenizer.unknown(text) for text in texts], part.path)
    torch.manual_seed(recipe.seed)
    objective = build.speech_objective(recipe, front_end.size, tokenizer.size)
    check_room(recipe, training, tokenizer, front_end, objective)
    lm = language_scorer(recipe.decode, tokenizer, build.device(recipe.train.device))
    return SpeechTask(
        recipe,
        objective,
        build.epochs(recipe, training, front_end, tokenizer),
        Utterances(valid, of_split(front_end, valid, data.workers), tokenizer, recipe.seed),
        Recognizer(objective.model, tokenizer, front_end, recipe.decode, lm=lm),
    )


def _measure(training: Corpus, front_end: FrontEnd, recipe: SpeechRecipe) -> None:
    """The statistics of the training corpus, and a word of it, for all its audio may be read."""
    if front_end.norm.needs_statistics:
        print(f"measuring features for mvn: {recipe.features.mvn}", flush=True)
        measure(training, front_end, recipe.data.workers, recipe.features.speed)

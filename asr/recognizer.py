"""Speech to text in three lines of Python.

from asr.recognizer import Recognizer
recognizer = Recognizer.load("runs/demo")
print(recognizer.transcribe("hello.wav").text)
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asr import build
from asr.data.batch import Batch, Example, collate
from asr.data.text import Tokenizer, load_tokenizer
from asr.decoding.beam import beam_search
from asr.decoding.ctc import ctc_greedy
from asr.decoding.search import Hypothesis, greedy
from asr.errors import UserError
from asr.nn.memory import Memory
from asr.recipe import read_recipe
from asr.settings import Decode, SpeechRecipe
from asr.training.checkpoint import choose, load_weights
from features.audio import from_samples
from features.front_end import FrontEnd

STATISTICS = "features.safetensors"
# A beam of 1 without weights and penalties: the greedy search finds the same, sooner.
GREEDY = Decode().model_dump(exclude={"checkpoint", "average", "batch_seconds"})


@dataclass(frozen=True)
class Transcript:
    """What was heard; times are seconds at which each token was said, None where unknown."""

    text: str
    score: float  # log-probability of the hypothesis
    tokens: tuple[int, ...]
    times: tuple[float, ...] | None = None


class Recognizer:
    """A trained model with everything between audio and text."""

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, front_end: FrontEnd, decode: Decode
    ) -> None:
        self.model, self.tokenizer, self.front_end = model, tokenizer, front_end
        self.decode = decode
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, run: str | os.PathLike[str], overrides: Sequence[str] = ()) -> "Recognizer":
        """The model of a run folder, from its best or last checkpoints as its recipe says.

        `overrides` are recipe keys (`decode.beam=4`). Raises UserError for a folder that is no
        run, holds no checkpoint, or holds one of another model or vocabulary.
        """
        run = Path(run)
        recipe = run_recipe(run, overrides)
        tokenizer = load_tokenizer(run)
        front_end = build.front_end(recipe.features)
        if front_end.norm.needs_statistics:
            front_end.norm.load(run / STATISTICS)
        model = build.speech_model(recipe.model, front_end.size, tokenizer.size)
        chosen = choose(run, recipe.decode.checkpoint, recipe.decode.average)
        load_weights(model, chosen, about(tokenizer))
        return cls(model.to(build.device(recipe.train.device)), tokenizer, front_end, recipe.decode)

    def transcribe(
        self, audio: str | os.PathLike[str] | np.ndarray | Tensor, rate: int | None = None
    ) -> Transcript:
        """A file's path, or samples (S,) or (S, channels) in -1 to 1, at `rate` or the model's.

        Raises features.audio.AudioError for a file that cannot be read. Audio shorter than one
        frame gives an empty text.
        """
        if isinstance(audio, np.ndarray | Tensor):
            own = self.front_end.sample_rate
            waveform = from_samples(audio, rate or own, own)
        else:
            waveform = self.front_end.load(audio)
        features = self.front_end.features(waveform)
        if len(features) == 0:
            return Transcript("", 0.0, ())
        batch = collate([Example("", features, torch.zeros(0, dtype=torch.long))])
        best = self.hypotheses(self.encode(batch))[0]
        return Transcript(self.text(best), best.score, best.tokens)

    @torch.no_grad()
    def encode(self, batch: Batch) -> Memory:
        """What the encoder makes of a batch, without dropout."""
        self.model.eval()
        batch = batch.to(self.device)
        return self.model.encode(batch.features, batch.lengths)

    @torch.no_grad()
    def hypotheses(self, memory: Memory) -> list[Hypothesis]:
        """The best hypothesis of every utterance, searched for as `decode` says."""
        settings = self.decode.model_dump(exclude={"checkpoint", "average", "batch_seconds"})
        if settings == GREEDY | {"max_ratio": self.decode.max_ratio}:
            return greedy(self.model, memory, max_ratio=self.decode.max_ratio)
        ctc = self.model.ctc(memory) if self.decode.ctc_weight else None
        found = beam_search(self.model, memory, ctc=ctc, **settings)
        return [best for best, *_ in found]

    def text(self, hypothesis: Hypothesis) -> str:
        """What a hypothesis says."""
        return self.tokenizer.decode(hypothesis.tokens)

    @torch.no_grad()
    def ctc_texts(self, memory: Memory) -> list[str] | None:
        """What the CTC head alone hears, by its best path; None without one."""
        log_probs = self.model.ctc(memory)
        if log_probs is None:
            return None
        return [self.tokenizer.decode(ids) for ids in ctc_greedy(log_probs, memory.valid)]


def run_recipe(run: Path, overrides: Sequence[str] = ()) -> SpeechRecipe:
    """The resolved recipe of a run. UserError where the folder is no run that recognises speech."""
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run}: no recipe.yaml in it, so it is no run folder")
    recipe = read_recipe(run / "recipe.yaml", overrides)
    if not isinstance(recipe, SpeechRecipe):
        raise UserError(f"{run}: a run of the task {recipe.task}; only speech can be transcribed")
    return recipe


def about(tokenizer: Tokenizer) -> dict[str, str]:
    """What a checkpoint must share with the run that reads it."""
    return {"vocabulary": tokenizer.fingerprint()}

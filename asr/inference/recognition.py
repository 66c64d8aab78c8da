"""The recognizer: audio of any length -> text with timed words.

Shapes: B utterances, S samples, T memory frames, U tokens, V vocabulary.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.config.loader import write_recipe
from asr.config.schema import DecodeConfig, Recipe
from asr.data.batching import Batch, Example, collate, plan_evaluation
from asr.data.tokenizer import BLANK, SOS, Tokenizer, about, load_tokenizer
from asr.decoding.alignment import has_ctc_path
from asr.decoding.scorer import Hypothesis, Scorer
from asr.decoding.segmentation import Segment, is_silent, split_at_pauses
from asr.errors import UserError
from asr.inference.decode import SpeechDecoder
from asr.inference.load import (
    load_ensemble,
    load_language_scorer,
    load_run_front_end,
    load_run_model,
    load_run_recipe,
    save_inputs,
)
from asr.inference.transcript import EMPTY_TRANSCRIPT, Transcript, merge_segments, timed_transcript
from asr.nn.attention import Memory
from asr.training.checkpoint import NotSaved, save_checkpoint
from asr.training.distributed import choose_device
from features import AudioError, NoSamples
from features.audio import from_samples
from features.front_end import FrontEnd

MANY_FRAMES = 3 * 2**20  # a multiple of every reduction
Audio = str | os.PathLike[str] | np.ndarray | Tensor  # a path, or samples (S,) or (S, channels)


class Recognizer(SpeechDecoder):
    """A trained model with everything between audio and text; see SpeechDecoder.

    max_segment_seconds: longer audio is split at pauses. steps: of the checkpoints whose mean the
    model is, empty for a model that is not from a run folder.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        front_end: FrontEnd,
        decode: DecodeConfig,
        max_segment_seconds: float,
        lm: Scorer | None = None,
        steps: Sequence[int] = (),
        ensemble: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(model, tokenizer, decode, lm, ensemble)
        self.front_end, self.max_segment_seconds = front_end, max_segment_seconds
        self.steps = tuple(steps)

    @classmethod
    def load(cls, run: str | os.PathLike[str], overrides: Sequence[str] = ()) -> "Recognizer":
        """The model of a run folder, from the checkpoints that its recipe chooses.

        `overrides` are recipe keys (`decode.beam=4`). Raises UserError for a folder that is no
        run, has no checkpoint, or has one of another model or vocabulary.
        """
        run = Path(run)
        recipe = load_run_recipe(run, overrides)
        decode, tokenizer = recipe.decode, load_tokenizer(run)
        front_end = load_run_front_end(run, recipe)
        model, steps = load_run_model(run, recipe, front_end.size, tokenizer)
        ensemble = load_ensemble(recipe, front_end, tokenizer, overrides)
        seconds = decode.max_segment_seconds or max(1.0, recipe.data.max_seconds)
        lm = load_language_scorer(decode, tokenizer, choose_device(recipe.train.device))
        return cls(model, tokenizer, front_end, decode, seconds, lm, steps, ensemble)

    def transcribe(self, audio: Audio, rate: float | None = None) -> Transcript:
        """A file, or samples (S,) or (S, channels) in -1 to 1, at `rate` or the model's.

        Raises features.AudioError for a file or samples that cannot be read. Audio that is empty,
        silent, or shorter than one frame gives an empty text.
        """
        return self._transcribe([self._waveform(audio, rate)])[0]

    def transcribe_files(
        self, paths: Iterable[Path], faults: dict[Path, str] | None = None
    ) -> Iterator[tuple[Path, Transcript]]:
        """Transcripts in the order of the paths, decoded together where the files are short.

        A file that cannot be read is skipped and added to `faults`; without `faults`, AudioError.
        """
        waveforms: dict[Path, Tensor] = {}
        seconds = 0.0
        for path in paths:
            try:
                waveforms[path] = self._waveform(path)
            except AudioError as error:
                if faults is None:
                    raise
                faults[path] = str(error)
                continue
            seconds += len(waveforms[path]) / self.front_end.sample_rate
            if seconds >= self.decode.batch_seconds:
                yield from zip(waveforms, self._transcribe(list(waveforms.values())), strict=True)
                waveforms, seconds = {}, 0.0
        yield from zip(waveforms, self._transcribe(list(waveforms.values())), strict=True)

    def _waveform(self, audio: Audio, rate: float | None = None) -> Tensor:
        """(S,) at the model's rate."""
        own = self.front_end.sample_rate
        try:
            if isinstance(audio, np.ndarray | Tensor):
                return from_samples(audio, own if rate is None else rate, own)
            return self.front_end.load(audio)
        except NoSamples:
            return torch.zeros(0)

    def _transcribe(self, waveforms: Sequence[Tensor]) -> list[Transcript]:
        """Waveforms (S,) of any length, split where they are too long."""
        splits = [self.segments(waveform) for waveform in waveforms]
        parts = [
            waveform[start:end]
            for waveform, segments in zip(waveforms, splits, strict=True)
            for start, end in segments
        ]
        transcripts = [EMPTY_TRANSCRIPT] * len(parts)
        for rows, batch in self.batches(parts):
            results = self.transcripts(*self.recognize(batch))
            for row, transcript in zip(rows, results, strict=True):
                transcripts[row] = transcript
        rest, rate = iter(transcripts), self.front_end.sample_rate
        return [merge_segments(split, list(islice(rest, len(split))), rate) for split in splits]

    def segments(self, waveform: Tensor) -> list[Segment]:
        """The segments in which a waveform (S,) is decoded."""
        longest, rate = self.max_segment_seconds, self.front_end.sample_rate
        return split_at_pauses(waveform, rate, longest, min(self.decode.overlap, longest / 4))

    def batches(
        self, waveforms: Sequence[Tensor], speaker: str | None = None
    ) -> Iterator[tuple[list[int], Batch]]:
        """Batches of the waveforms (S,) with sound and a frame at least, and their indices."""
        rate, speeds = self.front_end.sample_rate, self.decode.others
        no_tokens = torch.zeros(0, dtype=torch.long)
        seconds = np.array([len(waveform) / rate for waveform in waveforms])
        for planned in plan_evaluation(seconds, self.decode.batch_seconds).batches:
            rows = [item.index for item in planned if not is_silent(waveforms[item.index], rate)]
            features = [self.front_end.at_speeds(waveforms[row], speaker, speeds) for row in rows]
            inputs = {row: own for row, own in zip(rows, features, strict=True) if len(own[0])}
            if inputs:
                examples = [Example("", own, no_tokens, more) for own, *more in inputs.values()]
                yield list(inputs), collate(examples)

    @torch.no_grad()
    def transcripts(self, memory: Memory, hypotheses: Sequence[Hypothesis]) -> list[Transcript]:
        """The hypotheses of a batch with timed words."""
        tokens = [hypothesis.tokens for hypothesis in hypotheses]
        ctc, log_probs = self.model.ctc(memory), [None] * len(tokens)
        if ctc is not None:
            frames = memory.valid.sum(dim=1).tolist()
            log_probs = [row[:end].float().cpu() for row, end in zip(ctc, frames, strict=True)]
        aligned = all(
            own is not None and has_ctc_path(ids, len(own))
            for ids, own in zip(tokens, log_probs, strict=True)
        )
        weights = [None] * len(tokens) if aligned else self.attention(memory, tokens)
        seconds, rows = self.frame_seconds, zip(hypotheses, log_probs, weights, strict=True)
        return [timed_transcript(best, self.tokenizer, seconds, *scores) for best, *scores in rows]

    @torch.no_grad()
    def attention(self, memory: Memory, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Attention weights (U + 1, T) for U tokens of each utterance, with a last row for EOS."""
        rows = [torch.tensor([SOS, *ids]) for ids in tokens]
        padded = pad_sequence(rows, batch_first=True, padding_value=BLANK)
        weights = self.model.attention(memory, padded.to(memory.states.device))
        frames = memory.valid.sum(dim=1).tolist()
        return [
            row[: len(own), :length].float().cpu()
            for row, own, length in zip(weights, rows, frames, strict=True)
        ]

    @property
    def frame_seconds(self) -> float:
        """Seconds per frame of memory: the frame shift times the encoder's reduction."""
        reduction = MANY_FRAMES / int(self.model.memory_lengths(torch.tensor([MANY_FRAMES])))
        return reduction * self.front_end.extract.shift / self.front_end.sample_rate


# Derived runs: an ordinary run folder made from another one, by asr.export and asr.prune.
WITHOUT_OTHERS = ("decode.lm=null", "decode.ensemble=[]")  # overrides: load one model alone


def check_new_folder(to: Path) -> None:
    """Raise UserError where the folder is not empty."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: is there already; name a new folder")


def derived_recipe(recipe: Recipe, to: Path) -> dict[str, Any]:
    """The recipe's tree under the new folder's name; its one checkpoint is already an average."""
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
    """Write a run folder with one checkpoint; without `training` it cannot be resumed.

    Raises UserError where it cannot be written, and removes the folder.
    """
    try:
        to.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, to / "recipe.yaml")
        save_inputs(to, recognizer.tokenizer, recognizer.front_end)
        save_checkpoint(to, recognizer.model, training, step, loss, about(recognizer.tokenizer))
        if card:
            (to / "README.md").write_text(card, encoding="utf-8")
    except (OSError, NotSaved) as error:
        shutil.rmtree(to, ignore_errors=True)  # it was empty
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--to {to}: cannot be written ({reason}); make room, try again") from None

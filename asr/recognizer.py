"""Speech to text in three lines of Python.

from asr.recognizer import Recognizer
recognizer = Recognizer.load("runs/demo")
print(recognizer.transcribe("hello.wav").text)
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr import build
from asr.data.batch import Batch, Example, collate
from asr.data.plan import plan_evaluation
from asr.data.text import Tokenizer, load_tokenizer
from asr.decoding.ctc import ctc_greedy
from asr.decoding.long import Piece, cut_at_pauses, is_silent
from asr.decoding.search import Hypothesis, Scorer
from asr.decoding.times import fits
from asr.nn.memory import Memory
from asr.search import Others, language_scorer, search
from asr.settings import Decode
from asr.tokens import BLANK, SOS
from asr.trained import STATISTICS, run_ensemble, run_front_end, run_model, run_recipe
from asr.transcript import NOTHING, Transcript, joined, timed
from features.front_end import FrontEnd
from features.samples import AudioError, NoSamples, from_samples

MANY_FRAMES = 3 * 2**20  # a multiple of every reduction


class Recognizer:
    """A trained model with everything between audio and text.

    longest: seconds of audio that the model hears at once; more is cut at pauses. lm: what
    asr.search.language_scorer gives for `decode`. steps: of the checkpoints whose mean the model
    is, none where it is not from a run folder. ensemble: models that the search follows as well.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        front_end: FrontEnd,
        decode: Decode,
        longest: float = 30.0,
        lm: Scorer | None = None,
        steps: Sequence[int] = (),
        ensemble: Sequence[nn.Module] = (),
    ) -> None:
        self.model, self.tokenizer, self.front_end = model, tokenizer, front_end
        self.decode, self.longest, self.lm, self.steps = decode, longest, lm, tuple(steps)
        self.ensemble = tuple(ensemble)
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, run: str | os.PathLike[str], overrides: Sequence[str] = ()) -> "Recognizer":
        """The model of a run folder, from its best or last checkpoints as its recipe says.

        `overrides` are recipe keys (`decode.beam=4`). Raises UserError for a folder that is no
        run, holds no checkpoint, or holds one of another model or vocabulary.
        """
        run = Path(run)
        recipe = run_recipe(run, overrides)
        decode, tokenizer = recipe.decode, load_tokenizer(run)
        front_end = run_front_end(run, recipe)
        model, steps = run_model(run, recipe, front_end.size, tokenizer)
        ensemble = run_ensemble(recipe, front_end, tokenizer, overrides)
        longest = decode.longest or max(1.0, recipe.data.max_seconds)
        lm = language_scorer(decode, tokenizer, build.device(recipe.train.device))
        return cls(model, tokenizer, front_end, decode, longest, lm, steps, ensemble)

    def save(self, run: Path) -> None:
        """Vocabulary and statistics: with recipe and checkpoints all that `load` needs."""
        self.tokenizer.save(run)
        if self.front_end.norm.needs_statistics:
            self.front_end.norm.save(run / STATISTICS)

    def transcribe(
        self, audio: str | os.PathLike[str] | np.ndarray | Tensor, rate: float | None = None
    ) -> Transcript:
        """A file's path, or samples (S,) or (S, channels) in -1 to 1, at `rate` or the model's.

        Raises features.samples.AudioError for a file or samples that cannot be read, such as
        (channels, samples). Audio that is empty, silent, or shorter than one frame gives an empty
        text.
        """
        return self._transcribe([self._waveform(audio, rate)])[0]

    def transcribe_files(
        self, paths: Iterable[Path], faults: dict[Path, str] | None = None
    ) -> Iterator[tuple[Path, Transcript]]:
        """Transcripts in the order of the paths, decoded together where the files are short.

        A file that cannot be read is left out and noted in `faults`; without that, AudioError.
        """
        waiting: dict[Path, Tensor] = {}
        seconds = 0.0
        for path in paths:
            try:
                waiting[path] = self._waveform(path)
            except AudioError as error:
                if faults is None:
                    raise
                faults[path] = str(error)
                continue
            seconds += len(waiting[path]) / self.front_end.sample_rate
            if seconds >= self.decode.batch_seconds:
                yield from zip(waiting, self._transcribe(list(waiting.values())), strict=True)
                waiting, seconds = {}, 0.0
        yield from zip(waiting, self._transcribe(list(waiting.values())), strict=True)

    def _waveform(
        self, audio: str | os.PathLike[str] | np.ndarray | Tensor, rate: float | None = None
    ) -> Tensor:
        """(S,) at the model's rate."""
        own = self.front_end.sample_rate
        try:
            if isinstance(audio, np.ndarray | Tensor):
                return from_samples(audio, own if rate is None else rate, own)
            return self.front_end.load(audio)
        except NoSamples:
            return torch.zeros(0)

    def _transcribe(self, waveforms: Sequence[Tensor]) -> list[Transcript]:
        """Waveforms (S,) of any length, cut where they are too long for the model."""
        cuts = [self.cut(waveform) for waveform in waveforms]
        pieces = [
            waveform[piece.start : piece.end]
            for waveform, cut in zip(waveforms, cuts, strict=True)
            for piece in cut
        ]
        found = [NOTHING] * len(pieces)
        for rows, batch in self.batches(pieces):
            for row, told in zip(rows, self.transcripts(*self.hear(batch)), strict=True):
                found[row] = told
        told, rate = iter(found), self.front_end.sample_rate
        return [joined(cut, list(islice(told, len(cut))), rate) for cut in cuts]

    def cut(self, waveform: Tensor) -> list[Piece]:
        """Where a waveform (S,) is parted into pieces that the model hears at once."""
        overlap = min(self.decode.overlap, self.longest / 4)
        return cut_at_pauses(waveform, self.front_end.sample_rate, self.longest, overlap)

    def batches(
        self, waveforms: Sequence[Tensor], speaker: str | None = None
    ) -> Iterator[tuple[list[int], Batch]]:
        """Waveforms (S,) that the model takes whole, of like length together, with their numbers.

        What is silent or shorter than a frame is in none.
        """
        rate, speeds = self.front_end.sample_rate, self.decode.others
        none = torch.zeros(0, dtype=torch.long)
        seconds = np.array([len(waveform) / rate for waveform in waveforms])
        for planned in plan_evaluation(seconds, self.decode.batch_seconds).batches:
            rows = [item.index for item in planned if not is_silent(waveforms[item.index], rate)]
            heard = {row: self.front_end.at_speeds(waveforms[row], speaker, speeds) for row in rows}
            heard = {row: features for row, features in heard.items() if len(features[0])}
            if heard:
                examples = [Example("", own, none, more) for own, *more in heard.values()]
                yield list(heard), collate(examples)

    def hear(self, batch: Batch) -> tuple[Memory, list[Hypothesis]]:
        """What the encoder makes of a batch, and the best hypothesis of every utterance."""
        memory = self.encode(batch)
        return memory, self.hypotheses(memory, self.encode_others(batch))

    def encode(self, batch: Batch) -> Memory:
        """What the encoder makes of a batch, without dropout."""
        return self._encode(self.model, batch.features, batch.lengths)

    def encode_others(self, batch: Batch) -> Others:
        """What every model of the ensemble makes of it at every speed, but what `encode` gives."""
        _, *more = product((self.model, *self.ensemble), batch.readings)
        return [(model, self._encode(model, *reading)) for model, reading in more]

    @torch.no_grad()
    def _encode(self, model: nn.Module, features: Tensor, lengths: Tensor) -> Memory:
        model.eval()
        return model.encode(features.to(self.device), lengths.to(self.device))

    def hypotheses(self, memory: Memory, others: Others = ()) -> list[Hypothesis]:
        """The best hypothesis of every utterance, searched for as `decode` says."""
        return [best for best, *_ in self.nbest(memory, self.decode, 1, others)]

    @torch.no_grad()
    def nbest(
        self, memory: Memory, decode: Decode, most: int, others: Others = ()
    ) -> list[list[Hypothesis]]:
        """Up to `most` hypotheses of every utterance, best first."""
        return search(self.model, memory, decode, self.lm, most, others)

    @torch.no_grad()
    def transcripts(self, memory: Memory, found: Sequence[Hypothesis]) -> list[Transcript]:
        """The hypotheses of a batch with their words in time."""
        ctc, said = self.model.ctc(memory), [hypothesis.tokens for hypothesis in found]
        logs = [None] * len(found) if ctc is None else real_frames(ctc, memory.valid)
        aligned = all(
            own is not None and fits(t, len(own)) for t, own in zip(said, logs, strict=True)
        )
        weights = [None] * len(found) if aligned else self.attention(memory, said)
        step = self.frame_seconds
        return [
            timed(hypothesis, self.tokenizer, step, own, attention)
            for hypothesis, own, attention in zip(found, logs, weights, strict=True)
        ]

    @torch.no_grad()
    def attention(self, memory: Memory, said: Sequence[Sequence[int]]) -> list[Tensor]:
        """Where the model looks as it says U tokens of each: (U + 1, T), the end's row last."""
        rows = [torch.tensor([SOS, *tokens]) for tokens in said]
        tokens = pad_sequence(rows, batch_first=True, padding_value=BLANK)
        weights = self.model.attention(memory, tokens.to(memory.states.device))
        frames = memory.valid.sum(dim=1).tolist()
        return [
            row[: len(own), :length].float().cpu()
            for row, own, length in zip(weights, rows, frames, strict=True)
        ]

    @property
    def frame_seconds(self) -> float:
        """From one frame of memory to the next: the frame shift times the encoder's reduction."""
        many = torch.tensor([MANY_FRAMES])
        reduction = MANY_FRAMES / int(self.model.memory_lengths(many))
        return reduction * self.front_end.extract.shift / self.front_end.sample_rate

    def text(self, hypothesis: Hypothesis) -> str:
        """What a hypothesis says."""
        return self.tokenizer.decode(hypothesis.tokens)

    @torch.no_grad()
    def ctc_paths(self, memory: Memory) -> list[Hypothesis]:
        """What the CTC head alone hears, by its best path and not scored; nothing without one."""
        log_probs = self.model.ctc(memory)
        if log_probs is None:
            return []
        return [Hypothesis(tuple(ids), 0.0, True) for ids in ctc_greedy(log_probs, memory.valid)]


def real_frames(values: Tensor, valid: Tensor) -> list[Tensor]:
    """values (B, T, V), valid (B, T) -> (T', V) of each utterance, on the CPU."""
    frames = valid.sum(dim=1).tolist()
    return [row[:length].float().cpu() for row, length in zip(values, frames, strict=True)]

"""The recognizer: audio of any length -> text with timed words.

Shapes: B utterances, S samples, T memory frames, U tokens, V vocabulary.
"""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.config.loader import write_recipe
from asr.config.schema import DecodeConfig, Recipe
from asr.data.batching import Batch, Example, collate, plan_evaluation
from asr.data.tokenizer import BLANK, SOS, Tokenizer, about, load_tokenizer
from asr.decoding.alignment import has_ctc_path
from asr.decoding.ctc_search import ctc_gains
from asr.decoding.scorer import Hypothesis, Scorer
from asr.decoding.segmentation import LOWEST, SILENT, Segment, loudness, split_at_pauses
from asr.errors import UserError, check_list, is_out_of_memory
from asr.features import AudioError, NoSamples
from asr.features.audio import from_samples
from asr.features.files import name_of
from asr.features.front_end import FrontEnd
from asr.inference.decode import SpeechDecoder
from asr.inference.hub import local_run
from asr.inference.load import (
    load_ensemble,
    load_language_scorer,
    load_run_front_end,
    load_run_model,
    load_run_recipe,
    save_inputs,
)
from asr.inference.transcript import (
    EMPTY_TRANSCRIPT,
    Transcript,
    merge_segments,
    timed_transcript,
)
from asr.nn.attention import Memory
from asr.training.checkpoint import NotSaved, save_checkpoint
from asr.training.distributed import choose_device
from asr.training.oom import SHAPES_DECODING, limit_onednn_cache, release_device_memory

Audio = str | os.PathLike[str] | np.ndarray | Tensor  # a path, or samples (S,) or (S, channels)


@dataclass(eq=False)
class _Recording:
    """Audio while it is transcribed: its segments so far, and their transcripts."""

    audio: Audio
    blocks: Iterator[Tensor]  # (S,)
    segments: list[Segment] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)  # empty until decoded
    undecoded: int = 0
    level: float = LOWEST  # of its loudest part so far
    complete: bool = False  # all of it has been read
    fault: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing will change it any more."""
        return self.fault is not None or (self.complete and not self.undecoded)

    def read(self, sample_rate: int) -> Iterator[Tensor]:
        """The blocks, while their level is measured."""
        for block in self.blocks:
            self.level = max(self.level, loudness(block, sample_rate))
            yield block

    def add(self, group: Iterable[tuple[Segment, Tensor]]) -> Iterator["_Part"]:
        """Append segments with their samples -> those that have samples, which need decoding."""
        for segment, samples in group:
            if len(samples):
                self.undecoded += 1
                yield _Part(self, len(self.segments), samples)
            self.segments.append(segment)
            self.transcripts.append(EMPTY_TRANSCRIPT)

    def set(self, index: int, result: Transcript | Exception) -> None:
        """The transcript of a segment, or why there is none."""
        self.undecoded -= 1
        if isinstance(result, Exception):
            self.fault = result
        else:
            self.transcripts[index] = result


class _Part(NamedTuple):
    """A segment to decode: the samples (S,) of segment `index` of a recording."""

    recording: _Recording
    index: int
    samples: Tensor


def _finished(queue: deque[_Recording]) -> Iterator[_Recording]:
    """Take the finished recordings from the front of the queue."""
    while queue and queue[0].is_finished:
        yield queue.popleft()


NO_SPEECH = Hypothesis((), 0.0, True)
MANY_FRAMES = 3 * 2**20  # a multiple of every reduction
FEWEST_FRAMES = 10  # of features: 0.1 s has no word, but a model gives a letter for it


def has_no_speech(front_end: FrontEnd, waveform: Tensor) -> bool:
    """Whether audio (S,) is silent or of fewer than FEWEST_FRAMES frames: its text is empty."""
    if front_end.extract.num_frames(len(waveform)) < FEWEST_FRAMES:
        return True
    return loudness(waveform, front_end.sample_rate) <= SILENT


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
        """The model of a run, from the checkpoints that its recipe chooses.

        `run` is a folder, a shipped run (`conformer`), or hf:USER/NAME[@REVISION] on the
        Hugging Face Hub. `overrides` are recipe keys (`decode.beam=4`). Raises UserError for a
        folder that is no run, has no checkpoint, or has one of another model or vocabulary, and as
        local_run does.
        """
        run = local_run(run)
        limit_onednn_cache(SHAPES_DECODING)
        recipe = load_run_recipe(run, overrides)
        decode, tokenizer = recipe.decode, load_tokenizer(run)
        front_end = load_run_front_end(run, recipe)
        model, steps = load_run_model(run, recipe, front_end.size, tokenizer)
        ensemble = load_ensemble(recipe, front_end, tokenizer, overrides)
        seconds = decode.max_segment_seconds or max(1.0, recipe.data.max_seconds)
        lm = load_language_scorer(decode, tokenizer, choose_device(recipe.train.device))
        return cls(model, tokenizer, front_end, decode, seconds, lm, steps, ensemble)

    def __call__(self, audio: Audio, sample_rate: float | None = None) -> Transcript:
        """The transcript of a file, or of samples in -1 to 1, (S,) or (S, channels).

        sample_rate: of the samples, in Hz. Raises AudioError for a file or samples that cannot be
        read. Audio without speech, or shorter than `min_seconds`, gives an empty text.
        """
        (transcript,) = self.transcribe([audio], sample_rate)
        return transcript

    def transcribe(
        self, audios: Sequence[Audio], sample_rate: float | None = None
    ) -> list[Transcript]:
        """The transcripts of several recordings, decoded together where they are short.

        Each is as for a call of the model; all samples have the same rate.
        """
        if isinstance(audios, str | os.PathLike | np.ndarray | Tensor):
            raise UserError(
                "transcribe takes a list, [AUDIO, ...]; call the model for one: m(AUDIO)"
            )
        recordings = (_Recording(audio, self._blocks(audio, sample_rate)) for audio in audios)
        return [self._result(recording) for recording in self._transcribe(recordings)]

    def transcribe_files(
        self, paths: Iterable[Path], faults: dict[Path, str] | None = None
    ) -> Iterator[tuple[Path, Transcript]]:
        """Transcripts in the order of the paths, decoded together where the files are short.

        A file that cannot be read, or cannot be decoded even alone, is skipped and added to
        `faults`; without `faults`, its exception is raised. Files are read while they are decoded:
        memory depends on max_segment_seconds and decode.batch_seconds, never on a file's length.
        """
        check_list("paths", paths)
        recordings = (_Recording(path, self._blocks(path)) for path in paths)
        for recording in self._transcribe(recordings):
            if faults is None or recording.fault is None:
                yield recording.audio, self._result(recording)
            else:
                faults[recording.audio] = fault_line(recording.fault, name_of(recording.audio))

    def _blocks(self, audio: Audio, sample_rate: float | None = None) -> Iterator[Tensor]:
        """The waveform at the model's rate, in blocks (S,)."""
        with suppress(NoSamples):
            if isinstance(audio, np.ndarray | Tensor):
                if sample_rate is None:
                    rate = self.front_end.sample_rate
                    raise AudioError(f"samples need their sample rate: sample_rate={rate}, say")
                yield from_samples(audio, sample_rate, self.front_end.sample_rate)
            else:
                yield from self.front_end.stream(audio)

    def _result(self, recording: "_Recording") -> Transcript:
        if recording.fault is not None:
            raise recording.fault
        rate = self.front_end.sample_rate
        merged = merge_segments(recording.segments, recording.transcripts, rate)
        return replace(merged, level=recording.level)

    def _transcribe(self, recordings: Iterable["_Recording"]) -> Iterator["_Recording"]:
        """Each recording, in order, once it is decoded or has a fault."""
        queue: deque[_Recording] = deque()
        parts: list[_Part] = []  # to be decoded together
        seconds, rate = 0.0, self.front_end.sample_rate
        for recording in recordings:
            queue.append(recording)
            for number, group in enumerate(self._groups(recording)):
                if number:  # a long recording: decode before more of it is read
                    self._decode(parts)
                    yield from _finished(queue)
                    seconds = 0.0
                if recording.fault is not None:
                    break
                seconds += sum(end - start for (start, end), _ in group) / rate
                parts += recording.add(group)
            if seconds >= self.decode.batch_seconds:
                self._decode(parts)
                seconds = 0.0
            yield from _finished(queue)
        self._decode(parts)
        yield from _finished(queue)

    def _groups(self, recording: "_Recording") -> Iterator[list[tuple[Segment, Tensor]]]:
        """`segment_groups` of a recording, whose fault is recorded."""
        try:
            yield from self.segment_groups(recording.read(self.front_end.sample_rate))
        except (AudioError, MemoryError, RuntimeError) as error:
            recording.fault = error
        recording.complete = True

    def _decode(self, parts: list["_Part"]) -> None:
        """Decode the segments, as many together as possible, and empty the list."""
        sound = [part for part in parts if part.recording.fault is None]
        parts.clear()
        seconds = np.array([len(part.samples) / self.front_end.sample_rate for part in sound])
        for planned in plan_evaluation(seconds, self.decode.batch_seconds).batches:
            batch = [sound[item.index] for item in planned]
            results = decode_in_halves(self._recognize, [part.samples for part in batch])
            for part, result in zip(batch, results, strict=True):
                part.recording.set(part.index, result)

    def _recognize(self, waveforms: Sequence[Tensor]) -> list[Transcript]:
        """Transcripts of waveforms (S,) in one batch; empty for those shorter than a frame."""
        transcripts = [EMPTY_TRANSCRIPT] * len(waveforms)
        rows, batch = self.batch(waveforms)
        if rows:
            results = self.transcripts(*self.recognize(batch))
            for row, transcript in zip(rows, results, strict=True):
                transcripts[row] = transcript
        return transcripts

    def segments(self, blocks: Iterable[Tensor]) -> Iterator[tuple[Segment, Tensor]]:
        """The segments in which audio in blocks (S,) is decoded, and their samples.

        A segment that is silent or of a few frames has none, for there is nothing to decode.
        """
        longest, rate = self.max_segment_seconds, self.front_end.sample_rate
        overlap = min(self.decode.overlap, longest / 4)
        for segment, samples in split_at_pauses(blocks, rate, longest, overlap):
            empty = has_no_speech(self.front_end, samples)
            yield segment, torch.zeros(0) if empty else samples

    def segment_groups(self, blocks: Iterable[Tensor]) -> Iterator[list[tuple[Segment, Tensor]]]:
        """`segments`, as many at a time as fit into decode.batch_seconds, and one at least."""
        most = self.decode.batch_seconds * self.front_end.sample_rate
        group: list[tuple[Segment, Tensor]] = []
        longest = 0
        for segment, samples in self.segments(blocks):
            longest = max(longest, segment.end - segment.start)
            if group and longest * (len(group) + 1) > most:
                yield group
                group, longest = [], segment.end - segment.start
            group.append((segment, samples))
        if group:
            yield group

    def batch(
        self, waveforms: Sequence[Tensor], speaker: str | None = None
    ) -> tuple[list[int], Batch]:
        """The indices of the waveforms (S,) that have a frame at least, and these as a batch."""
        speeds, no_tokens = self.decode.other_speeds, torch.zeros(0, dtype=torch.long)
        inputs: dict[int, Example] = {}
        for row, waveform in enumerate(waveforms):
            if len(waveform):
                own, *others = self.front_end.at_speeds(waveform, speaker, speeds)
                if len(own):
                    inputs[row] = Example("", own, no_tokens, others)
        return list(inputs), collate(list(inputs.values()))

    def recognize(self, batch: Batch) -> tuple[Memory, list[Hypothesis]]:
        """The memory of a batch, and the best hypotheses; an empty one for no speech."""
        memory = self.encode(batch)
        hypotheses = self.hypotheses(memory, self.encode_other_speeds(batch))
        return memory, self._without_hallucinations(memory, hypotheses)

    @torch.no_grad()
    def _without_hallucinations(
        self, memory: Memory, hypotheses: Sequence[Hypothesis]
    ) -> list[Hypothesis]:
        """The hypotheses, empty where decode.no_speech_log_prob judges that there is no speech."""
        threshold = self.decode.no_speech_log_prob
        unsure = [
            threshold is not None and _mean(best.log_probs) < threshold for best in hypotheses
        ]
        if not any(unsure) or (log_probs := self.model.ctc(memory)) is None:
            return list(hypotheses)
        gains = ctc_gains(log_probs, memory.valid, [best.tokens for best in hypotheses])
        return [
            NO_SPEECH if doubt and gain < 0 else best
            for best, doubt, gain in zip(hypotheses, unsure, gains, strict=True)
        ]

    @torch.no_grad()
    def transcripts(self, memory: Memory, hypotheses: Sequence[Hypothesis]) -> list[Transcript]:
        """The hypotheses of a batch with timed words."""
        tokens = [hypothesis.tokens for hypothesis in hypotheses]
        ctc, log_probs = self.model.ctc(memory), [None] * len(tokens)
        if ctc is not None:
            frames = memory.valid.sum(dim=1).tolist()
            log_probs = [row[:end] for row, end in zip(ctc.float().cpu(), frames, strict=True)]
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
        weights = self.model.attention(memory, padded.to(memory.states.device)).float().cpu()
        frames = memory.valid.sum(dim=1).tolist()
        return [
            row[: len(own), :length] for row, own, length in zip(weights, rows, frames, strict=True)
        ]

    @property
    def min_seconds(self) -> float:
        """Shorter audio has an empty transcript."""
        extract = self.front_end.extract
        return (extract.window + (FEWEST_FRAMES - 1) * extract.shift) / extract.sample_rate

    @property
    def frame_seconds(self) -> float:
        """Seconds per frame of memory: the frame shift times the encoder's reduction."""
        reduction = MANY_FRAMES / int(self.model.memory_lengths(torch.tensor([MANY_FRAMES])))
        return reduction * self.front_end.extract.shift / self.front_end.sample_rate


def _mean(log_probs: Sequence[float]) -> float:
    """0 for none, as after a search of the CTC head alone."""
    return sum(log_probs) / max(len(log_probs), 1)


Item, Result = TypeVar("Item"), TypeVar("Result")


def decode_in_halves(
    decode: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]
) -> list[Result | Exception]:
    """decode(items); where that fails, of each half; an item that fails alone has its exception.

    Exceptions such as those of a lack of memory; others are errors of settings or of ours.
    """
    try:
        return decode(items)
    except (MemoryError, RuntimeError) as error:
        # A traceback keeps what its functions had in memory.
        failure = error.with_traceback(None) if is_out_of_memory(error) else error
    if is_out_of_memory(failure):
        release_device_memory()
    if len(items) == 1:
        return [failure]
    middle = len(items) // 2
    return [
        result
        for half in (items[:middle], items[middle:])
        for result in decode_in_halves(decode, half)
    ]


def fault_line(error: Exception, name: str) -> str:
    """In one line, why the audio of that name has no transcript."""
    if isinstance(error, AudioError):
        return str(error)
    if is_out_of_memory(error):
        return f"{name}: out of memory; lower decode.max_segment_seconds or decode.beam"
    return f"{name}: cannot be decoded ({' '.join(str(error).split())[:200]})"


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

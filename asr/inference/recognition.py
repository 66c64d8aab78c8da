"""The recognizer: audio of any length -> text with timed words.

Transcription and evaluation share one stream: recordings are split at pauses into segments, the
segments decoded in batches while more is read, and what fails together decoded again in halves.

Shapes: B utterances, S samples, T memory frames, U tokens, V vocabulary.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from asr.config.schema import DecodeConfig, SpeechRecipe
from asr.data.batching import Batch, Example, collate, plan_evaluation
from asr.data.tokenizer import Tokenizer, load_tokenizer
from asr.decoding.alignment import has_ctc_path
from asr.decoding.scorer import Hypothesis, Scorer
from asr.decoding.segmentation import (
    LOWEST,
    SILENT,
    Segment,
    loudness,
    sound_and_silence,
    split_at_pauses,
)
from asr.errors import UserError, check_list, is_out_of_memory
from asr.features import AudioError, NoSamples
from asr.features.audio import array_and_rate, from_samples
from asr.features.files import name_of
from asr.features.front_end import FrontEnd
from asr.hub import local_run
from asr.inference.decode import Encoded, attention, best_hypotheses, drop_hallucinations, encode
from asr.inference.load import (
    load_ensemble,
    load_language_scorer,
    load_run_front_end,
    load_run_model,
    load_run_recipe,
)
from asr.inference.transcript import Transcript, merge_segments, timed_transcript
from asr.training.distributed import choose_device
from asr.training.oom import release_device_memory

# A path; a file's content, or an open file; samples (S,), (S, C) or (C, S); or samples with their
# rate, as Hugging Face has them: {"array": samples, "sampling_rate": Hz}.
Audio = str | os.PathLike[str] | bytes | IO[bytes] | np.ndarray | Tensor | Mapping[str, Any]

MANY_FRAMES = 3 * 2**20  # a multiple of every reduction
FEWEST_FRAMES = 10  # of features: 0.1 s has no word, but a model gives a letter for it


class Recognizer:
    """A trained model with everything between audio and text.

    lm: from load_language_scorer. ensemble: models whose log-probabilities join the model's mean.
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
        self.model, self.tokenizer, self.front_end = model, tokenizer, front_end
        self.decode, self.max_segment_seconds = decode, max_segment_seconds
        self.lm, self.steps, self.ensemble = lm, tuple(steps), tuple(ensemble)

    @classmethod
    def load(cls, run: str | os.PathLike[str], overrides: Sequence[str] = ()) -> "Recognizer":
        """The model of a run, from the checkpoints that its recipe chooses.

        `run` is a folder, a shipped run (`conformer`), or hf:USER/NAME[@REVISION] on the
        Hugging Face Hub. `overrides` are recipe keys (`decode.beam=4`). Raises UserError for a
        folder that is no run, has no checkpoint, or has one of another model or vocabulary, and as
        local_run does.
        """
        run = local_run(run)
        recipe = load_run_recipe(run, overrides)
        decode, tokenizer = recipe.decode, load_tokenizer(run)
        front_end = load_run_front_end(run, recipe)
        model, steps = load_run_model(run, recipe, front_end, tokenizer)
        ensemble = load_ensemble(recipe, front_end, tokenizer, overrides)
        seconds = segment_seconds(recipe, front_end)
        lm = load_language_scorer(decode, tokenizer, choose_device(recipe.train.device))
        return cls(model, tokenizer, front_end, decode, seconds, lm, steps, ensemble)

    def __call__(self, audio: Audio, sample_rate: float | None = None) -> Transcript:
        """The transcript of a file, also open or as bytes; of samples (S,), (S, C) or (C, S),
        floats in -1 to 1 or integers; or of {"array": samples, "sampling_rate": Hz}.

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
        one = str | os.PathLike | bytes | np.ndarray | Tensor | Mapping
        if isinstance(audios, one) or hasattr(audios, "read"):
            raise UserError(
                "transcribe takes a list, [AUDIO, ...]; call the model for one: m(AUDIO)"
            )
        recordings = (_recording(audio, sample_rate) for audio in audios)
        return [self._transcript(each) for each in decode_stream(self, recordings, transcripts)]

    def transcribe_files(
        self, paths: Iterable[Path], faults: dict[Path, str] | None = None
    ) -> Iterator[tuple[Path, Transcript]]:
        """Transcripts in the order of the paths, decoded together where the files are short.

        A file that cannot be read, or cannot be decoded even alone, is skipped and added to
        `faults`; without `faults`, its exception is raised. Files are read while they are decoded:
        memory depends on max_segment_seconds and decode.batch_seconds, never on a file's length.
        """
        check_list("paths", paths)
        for recording in decode_stream(self, map(Recording, paths), transcripts):
            if faults is None or recording.fault is None:
                yield recording.audio, self._transcript(recording)
            else:
                faults[recording.audio] = fault_line(recording)

    @property
    def batch_seconds(self) -> float:
        """Padded seconds that are decoded together, on the model's device."""
        device = next(self.model.parameters()).device
        return self.decode.seconds_at_once(on_gpu=device.type != "cpu")

    def to(self, device: torch.device | str) -> "Recognizer":
        """Move all models to a device, such as "cuda:1"; errors as those of nn.Module.to."""
        for model in (self.model, self.lm, *self.ensemble):
            if isinstance(model, nn.Module):  # n-grams are on no device
                model.to(device)
        return self

    def __repr__(self) -> str:
        kind, size = type(self.model).__name__, sum(p.numel() for p in self.model.parameters())
        device = next(self.model.parameters()).device
        return (
            f"Recognizer({kind}, {size / 1e6:.1f} M parameters, {device}, beam {self.decode.beam})"
        )

    @property
    def min_seconds(self) -> float:
        """Shorter audio has an empty transcript."""
        extract = self.front_end.extract
        return (extract.window + (FEWEST_FRAMES - 1) * extract.shift) / extract.sample_rate

    def _transcript(self, recording: "Recording[Transcript]") -> Transcript:
        if recording.fault is not None:
            raise recording.fault
        rate = self.front_end.sample_rate
        merged = merge_segments(recording.segments, recording.results, rate)
        return replace(merged, level=recording.level)


def segment_seconds(recipe: SpeechRecipe, front_end: FrontEnd) -> float:
    """The longest segment that is decoded at once.

    Raises UserError for a decode.max_segment_seconds beyond what the features' encoder takes.
    """
    decode = recipe.decode
    longest = front_end.longest * min(decode.speeds)
    seconds = decode.max_segment_seconds or min(max(1.0, recipe.data.max_seconds), longest)
    if seconds > longest:
        raise UserError(
            f"decode.max_segment_seconds = {seconds:g}: {recipe.features.encoder} takes at most "
            f"{longest:g} s; lower it"
        )
    return seconds


def frame_seconds(recognizer: Recognizer) -> float:
    """Seconds per frame of memory: the frame shift times the encoder's reduction."""
    memory_frames = int(recognizer.model.memory_lengths(torch.tensor([MANY_FRAMES])))
    extract = recognizer.front_end.extract
    return MANY_FRAMES / memory_frames * extract.shift / extract.sample_rate


def decodes_in_parts(max_silence: float | None, front_end: FrontEnd, waveform: Tensor) -> bool:
    """Whether audio (S,) has no speech or a long silence, so that it is not decoded as it is."""
    parts = sound_and_silence(waveform, front_end.sample_rate, max_silence)
    return len(parts) > 1 or has_no_speech(front_end, waveform)


def has_no_speech(front_end: FrontEnd, waveform: Tensor) -> bool:
    """Whether audio (S,) is silent or of fewer than FEWEST_FRAMES frames: its text is empty."""
    if front_end.extract.num_frames(len(waveform)) < FEWEST_FRAMES:
        return True
    return loudness(waveform, front_end.sample_rate) <= SILENT


# A batch


def decode_batch(recognizer: Recognizer, batch: Batch) -> tuple[Encoded, list[Hypothesis]]:
    """The batch in the model, and the best hypotheses; an empty one for no speech."""
    encoded = encode((recognizer.model, *recognizer.ensemble), batch)
    ranked = best_hypotheses(encoded, recognizer.decode, recognizer.lm)
    best, threshold = [best for best, *_ in ranked], recognizer.decode.no_speech_log_prob
    return encoded[0], drop_hallucinations(encoded[0], best, threshold)


def transcripts(
    recognizer: Recognizer, encoded: Encoded, hypotheses: Sequence[Hypothesis]
) -> list[Transcript]:
    """The hypotheses of a batch with timed words."""
    tokens = [hypothesis.tokens for hypothesis in hypotheses]
    log_probs: list[Tensor | None] = [None] * len(tokens)
    if encoded.ctc is not None:
        frames = encoded.memory.valid.sum(dim=1).tolist()
        rows = zip(encoded.ctc.float().cpu(), frames, strict=True)
        log_probs = [row[:length] for row, length in rows]
    aligned = all(
        row is not None and has_ctc_path(ids, len(row))
        for ids, row in zip(tokens, log_probs, strict=True)
    )
    weights = [None] * len(tokens) if aligned else attention(encoded, tokens)
    tokenizer, seconds = recognizer.tokenizer, frame_seconds(recognizer)
    return [
        timed_transcript(best, tokenizer, seconds, *scores)
        for best, *scores in zip(hypotheses, log_probs, weights, strict=True)
    ]


# The stream

Result = TypeVar("Result")
# Turns a decoded batch into a result for each of its segments: `transcripts`, for example.
Format = Callable[[Recognizer, Encoded, Sequence[Hypothesis]], list[Result]]


@dataclass(eq=False)
class Recording(Generic[Result]):
    """Audio while it is decoded: its segments so far, and their results."""

    audio: Audio
    speaker: str | None = None  # whose statistics normalise the features, where there are any
    sample_rate: float | None = None  # of samples
    segments: list[Segment] = field(default_factory=list)
    results: list[Result | None] = field(default_factory=list)  # None without speech
    undecoded: int = 0  # segments
    level: float = LOWEST  # of its loudest part so far
    complete: bool = False  # all of it has been read
    fault: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing will change it any more."""
        return self.fault is not None or (self.complete and not self.undecoded)


def _recording(audio: Audio, sample_rate: float | None) -> Recording:
    """Audio to decode. Raises UserError for what is neither a file nor samples."""
    if read := getattr(audio, "read", None):
        audio = read()
    if isinstance(audio, str | os.PathLike | bytes | np.ndarray | Tensor):
        return Recording(audio, sample_rate=sample_rate)
    try:
        samples, rate = array_and_rate(audio)
    except (KeyError, IndexError, TypeError, ValueError):
        wanted = 'a path, bytes, an array of samples, or {"array": samples, "sampling_rate": Hz}'
        raise UserError(f"audio of type {type(audio).__name__}: give {wanted}") from None
    if sample_rate not in (None, rate):
        raise UserError(f"sample_rate={sample_rate:g}, but the audio's sampling_rate is {rate:g}")
    return Recording(samples, sample_rate=rate)


class _Part(NamedTuple):
    """A segment to decode: the samples (S,) of segment `index` of a recording."""

    recording: Recording
    index: int
    samples: Tensor


def decode_stream(
    recognizer: Recognizer, recordings: Iterable[Recording[Result]], form: Format[Result]
) -> Iterator[Recording[Result]]:
    """Each recording, in order, once it is decoded or has a fault.

    A recording is read while it is decoded, and recordings that are short are decoded together:
    memory depends on max_segment_seconds and decode.batch_seconds alone.
    """
    queue: deque[Recording] = deque()
    parts: list[_Part] = []  # to be decoded together
    seconds, rate = 0.0, recognizer.front_end.sample_rate
    for recording in recordings:
        queue.append(recording)
        for number, group in enumerate(_groups(recognizer, recording)):
            if number:  # a long recording: decode before more of it is read
                _decode(recognizer, parts, form)
                yield from _finished(queue)
                seconds = 0.0
            if recording.fault is not None:
                break
            seconds += sum(end - start for (start, end), _ in group) / rate
            parts += _add(recording, group)
        if seconds >= recognizer.batch_seconds:
            _decode(recognizer, parts, form)
            seconds = 0.0
        yield from _finished(queue)
    _decode(recognizer, parts, form)
    yield from _finished(queue)


def _finished(queue: deque[Recording]) -> Iterator[Recording]:
    """Take the finished recordings from the front of the queue."""
    while queue and queue[0].is_finished:
        yield queue.popleft()


def _groups(recognizer: Recognizer, recording: Recording) -> Iterator[list[tuple[Segment, Tensor]]]:
    """The segments with their samples, as many at a time as fit into decode.batch_seconds.

    At least one; none after a fault, which is recorded.
    """
    most = recognizer.batch_seconds * recognizer.front_end.sample_rate
    group: list[tuple[Segment, Tensor]] = []
    longest = 0
    try:
        for segment, samples in _segments(recognizer, recording):
            length = segment.end - segment.start
            longest = max(longest, length)
            if group and longest * (len(group) + 1) > most:
                yield group
                group, longest = [], length
            group.append((segment, samples))
        if group:
            yield group
    except (AudioError, MemoryError, RuntimeError) as error:
        recording.fault = error
    recording.complete = True


def _segments(recognizer: Recognizer, recording: Recording) -> Iterator[tuple[Segment, Tensor]]:
    """The parts of a recording, and their samples where they are decoded: not without speech."""
    front_end, longest = recognizer.front_end, recognizer.max_segment_seconds
    rate, max_silence = front_end.sample_rate, recognizer.decode.max_silence
    overlap = min(recognizer.decode.overlap, longest / 4)
    blocks = _blocks(front_end, recording)
    for (start, _), samples in split_at_pauses(blocks, rate, longest, overlap):
        for part, has_sound in sound_and_silence(samples, rate, max_silence):
            own = samples[part.start : part.end]
            decoded = has_sound and not has_no_speech(front_end, own)
            segment = Segment(start + part.start, start + part.end)
            yield segment, own.clone() if decoded else torch.zeros(0)


def _blocks(front_end: FrontEnd, recording: Recording) -> Iterator[Tensor]:
    """The waveform at the model's rate, in blocks (S,), while its level is measured."""
    audio, rate = recording.audio, front_end.sample_rate
    with suppress(NoSamples):
        if isinstance(audio, np.ndarray | Tensor):
            if recording.sample_rate is None:
                raise AudioError(f"samples need their sample rate: sample_rate={rate}, say")
            blocks = iter([from_samples(audio, recording.sample_rate, rate)])
        else:
            blocks = front_end.stream(audio)
        for block in blocks:
            recording.level = max(recording.level, loudness(block, rate))
            yield block


def _add(recording: Recording, group: Iterable[tuple[Segment, Tensor]]) -> Iterator[_Part]:
    """Append segments with their samples -> those that have samples, which need decoding."""
    for segment, samples in group:
        if len(samples):
            recording.undecoded += 1
            yield _Part(recording, len(recording.segments), samples)
        recording.segments.append(segment)
        recording.results.append(None)


def _decode(recognizer: Recognizer, parts: list[_Part], form: Format) -> None:
    """Decode the segments, as many together as possible, and empty the list."""
    sound = [part for part in parts if part.recording.fault is None]
    parts.clear()
    rate, most = recognizer.front_end.sample_rate, recognizer.batch_seconds
    seconds = np.array([len(part.samples) / rate for part in sound])
    decode = partial(_decode_together, recognizer, form)
    for planned in plan_evaluation(seconds, most).batches:
        batch = [sound[item.index] for item in planned]
        for part, result in zip(batch, decode_in_halves(decode, batch), strict=True):
            part.recording.undecoded -= 1
            if isinstance(result, Exception):
                part.recording.fault = result
            else:
                part.recording.results[part.index] = result


def _decode_together(
    recognizer: Recognizer, form: Format[Result], parts: Sequence[_Part]
) -> list[Result]:
    """The results of segments in one batch."""
    front_end, speeds = recognizer.front_end, recognizer.decode.other_speeds
    examples = []
    for part in parts:
        plain, *others = front_end.at_speeds(part.samples, part.recording.speaker, speeds)
        examples.append(Example("", plain, torch.zeros(0, dtype=torch.long), others))
    batch = collate(examples, frame_seconds=front_end.frame_seconds)
    return form(recognizer, *decode_batch(recognizer, batch))


Item = TypeVar("Item")


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


def fault_line(recording: Recording) -> str:
    """In one line, why a recording has no result."""
    error, name = recording.fault, name_of(recording.audio)
    if isinstance(error, AudioError):
        return str(error)
    if is_out_of_memory(error):
        return f"{name}: out of memory; lower decode.max_segment_seconds or decode.beam"
    return f"{name}: cannot be decoded ({' '.join(str(error).split())[:200]})"

"""Decode a split, score it, and write the result: files, HTML page, printed lines."""

import io
import os
import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.image import imsave

from asr.analysis.page import write_page
from asr.analysis.plots import attention_picture
from asr.analysis.runs import (
    decode_settings,
    evaluation_notes,
    unequal_decoding,
    unfinished_note,
)
from asr.analysis.score_files import (
    SavedEvaluation,
    evaluation_name,
    read_evaluation,
    write_evaluation,
)
from asr.analysis.statistics import MIN_UNITS
from asr.analysis.wer import (
    Score,
    between,
    by_group,
    group_lines,
    interval_over_speakers,
    percent,
    score,
    tidy,
    untrained,
)
from asr.config.schema import SpeechRecipe
from asr.data import splits
from asr.data.batching import Batch, Example, collate, plan_evaluation
from asr.data.corpus import Corpus, audio_remedy
from asr.data.loader import UtteranceDataset, load_batches, with_split_statistics
from asr.data.manifest import read_rows
from asr.data.progress import AudioProgress
from asr.data.tokenizer import labels_of
from asr.decoding.alignment import HypothesisHealth, hypothesis_health, mean_health
from asr.decoding.fusion import NgramScorer
from asr.decoding.scorer import Hypothesis
from asr.errors import UserError
from asr.features import AudioError
from asr.features.front_end import FrontEnd
from asr.features.tar import member_of
from asr.hub import is_on_hub, local_run
from asr.inference.decode import Encoded, attention, ctc_hypotheses, encode
from asr.inference.encoders import stored_features
from asr.inference.load import load_run_recipe
from asr.inference.recognition import (
    Recognizer,
    Recording,
    decode_batch,
    decode_stream,
    decodes_in_parts,
    fault_line,
    frame_seconds,
    transcripts,
)
from asr.inference.transcript import EMPTY_TRANSCRIPT, Transcript, merge_segments
from asr.io import check_run_folder, check_writable
from asr.shipped import find_run, is_installed

# Where the decoder loops or stops early; eos_threshold would refuse ends that it is unsure of.
SAFE_SEARCH = "decode.beam=4 decode.ctc_weight=0.3 decode.eos_threshold=null"
MANY_EMPTY = 0.02  # share of the utterances


@dataclass(frozen=True)
class DecodedUtterance:
    """An utterance, or a segment of a long one."""

    searched: Transcript
    ctc: Transcript  # by the CTC head alone; empty without one
    finished: bool  # False where the length limit ended it
    health: HypothesisHealth

    @property
    def text(self) -> str:
        return self.searched.text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.searched.tokens


NOT_DECODED = DecodedUtterance(
    EMPTY_TRANSCRIPT, EMPTY_TRANSCRIPT, False, HypothesisHealth(None, 0.0)
)
Labels = Mapping[str, Mapping[str, str]]  # column -> utterance id -> group


@dataclass(frozen=True)
class Evaluation:
    """A split, decoded and scored."""

    title: str
    corpus: Corpus
    decoded: Sequence[DecodedUtterance]  # in the order of the corpus, perhaps NOT_DECODED
    reasons: Mapping[str, str]  # utterance id -> why it was not decoded
    score: Score
    groups: Mapping[str, Mapping[str, Score]]
    metadata: Mapping[str, Any]  # for score.json


@dataclass(frozen=True)
class EvaluationSplit:
    """A split of a run that is to be evaluated; its manifest is read, its audio is not."""

    address: str  # of the run: its folder, or hf:USER/NAME[@REVISION]
    run: Path
    split: str  # as the caller names it
    name: str  # of the folder of results
    recipe: SpeechRecipe
    corpus: Corpus
    labels: Labels
    overrides: Sequence[str]

    def result_folder(self) -> Path:
        """RUN/evaluate/SPLIT, of a run of the hub evaluate/NAME/SPLIT here.

        UserError for a run of the installed package, and where the folder is another split's, or
        cannot be written.
        """
        if is_on_hub(self.address):
            return check_writable(Path("evaluate", Path(self.address).name, self.name))
        if is_installed(self.run):
            raise UserError(f"{self.run}: is not written to; add --out FOLDER")
        splits.check_result_name(self.recipe.data, self.split, self.name)
        return check_writable(self.run / "evaluate" / self.name)

    def load(self) -> Recognizer:
        """The run's model. Prints notes where its training has not finished, and where its
        vocabulary or n-grams do not fit the split.
        """
        recognizer = Recognizer.load(self.run, self.overrides)
        if threads := self.recipe.train.threads:
            torch.set_num_threads(threads)
        path, tokenizer = self.corpus.path, recognizer.tokenizer
        unknown = splits.check_vocabulary_coverage(self.corpus.texts, tokenizer, path)
        lm, notes = self.recipe.decode.lm, [unfinished_note(self.run), unknown]
        if isinstance(recognizer.lm, NgramScorer):
            note = recognizer.lm.note(self.corpus.texts)
            notes.append(note and f"decode.lm = {lm}: of {path} {note}")
        elif lm:
            notes.append(unfinished_note(find_run(lm)))
        for note in filter(None, notes):
            print(note, flush=True)
        return recognizer

    def evaluate(self) -> tuple[Evaluation, Recognizer]:
        """Decode and score every utterance, the unreadable ones as empty.

        -> also the model, for the pictures of `write`.
        """
        corpus, recipe = self.corpus, self.recipe
        recognizer = for_split(self.load(), corpus, recipe)
        by_id, reasons = decode_split(recognizer, corpus, recipe)
        decoded = [by_id.get(name, NOT_DECODED) for name in corpus.ids]
        result = score(corpus.texts, [d.text for d in decoded], corpus.ids, corpus.speakers)
        groups = {column: by_group(result, group_of) for column, group_of in self.labels.items()}
        metadata = {
            "decode": recipe.decode.model_dump(mode="json"),
            "steps": recognizer.steps,
            "overrides": self.overrides,
            "not_decoded": len(reasons),
            "in_segments": int(too_long(recognizer, corpus.seconds).sum()),
            "wer_interval_over_speakers": _interval_over_speakers(result),
            "groups": {
                column: {name: _group_facts(part) for name, part in parts.items()}
                for column, parts in groups.items()
            },
        }
        if recipe.model.ctc_weight:
            ctc = [d.ctc.text for d in decoded]
            metadata["ctc_wer"] = score(corpus.texts, ctc, corpus.ids, draws=1).wer
        run = Path(self.address) if is_on_hub(self.address) else self.run.resolve()
        title = f"{run.name}: {self.name}"
        evaluation = Evaluation(title, corpus, decoded, reasons, result, groups, metadata)
        return evaluation, recognizer


def open_split(
    run: str | os.PathLike[str],
    split: str,
    overrides: Sequence[str] = (),
    by: Sequence[str] = (),
    address: str | None = None,
) -> EvaluationSplit:
    """A split of a run: `train`, `valid`, a name under data.test, or a manifest (.tsv).

    run: as for local_run. by: columns of the manifest, whose groups are scored too. address: whence
    the run is, if not `run`. Raises UserError for a split or column that does not exist, for
    overrides that do not fit the run, and as local_run does.
    """
    address, run = address or os.fspath(run), local_run(run)
    recipe = load_run_recipe(run, overrides)
    name, corpus = evaluation_name(split), splits.load_split(recipe.data, split)
    labels = {
        column: {row["id"]: row[column] for _, row in read_rows(corpus.path, ("id", column))}
        for column in by
    }
    return EvaluationSplit(address, run, split, name, recipe, corpus, labels, overrides)


def _group_facts(part: Score) -> dict[str, Any]:
    return {
        "wer": part.wer,
        "cer": part.cer,
        "words": part.words,
        "wer_interval": part.wer_interval,
        "wer_interval_over_speakers": _interval_over_speakers(part),
    }


def _interval_over_speakers(part: Score) -> tuple[float, float] | None:
    return interval_over_speakers(part) if len(part.speakers) >= MIN_UNITS else None


def for_split(recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe) -> Recognizer:
    """The recognizer with the statistics of the split's speakers, if it normalises by them.

    Whatever the manifest says, it reads no more of a file at once than twice the longest segment.
    """
    workers, speeds = recipe.data.workers, recipe.decode.speeds
    front_end = copy(recognizer.front_end)
    front_end.max_seconds = 2 * recognizer.max_segment_seconds
    long = too_long(recognizer, corpus.seconds)
    front_end = with_split_statistics(
        front_end, corpus.take(np.flatnonzero(~long)), workers, speeds
    )
    if front_end.norm.kind == "speaker":
        _measure_long(corpus.take(np.flatnonzero(long)), front_end, speeds)
    recognizer = copy(recognizer)
    recognizer.front_end = front_end
    return recognizer


def _measure_long(corpus: Corpus, front_end: FrontEnd, speeds: Sequence[float]) -> None:
    """Add long recordings to the statistics of their speakers, a block at a time."""
    for utterance in corpus:
        with suppress(AudioError):
            for block in front_end.stream(utterance.audio):
                for features, speaker in front_end.features_for_statistics(
                    block, utterance.speaker, speeds
                ):
                    front_end.norm.add(features, speaker)


def too_long(recognizer: Recognizer, seconds: np.ndarray) -> np.ndarray:
    """Which utterances of these lengths are decoded in segments: bool of the same shape."""
    return seconds > recognizer.max_segment_seconds


def read_batches(recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe) -> Iterable[Batch]:
    """The batches of the utterances that are not too long, the longest first.

    They lack utterances without speech or with a long silence. recognizer: from for_split.
    """
    chosen = corpus.take(np.flatnonzero(~too_long(recognizer, corpus.seconds)))
    dataset = UtteranceDataset(
        chosen,
        recognizer.front_end,
        recognizer.tokenizer,
        recipe.seed,
        other_speeds=recipe.decode.other_speeds,
        skips=partial(decodes_in_parts, recognizer.decode.max_silence),
        cache=stored_features(chosen, recognizer.front_end),
    )
    plan = plan_evaluation(chosen.seconds, recognizer.batch_seconds)
    return load_batches(dataset, plan.batches, recipe.data.workers)


def decode_split(
    recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe
) -> tuple[dict[str, DecodedUtterance], dict[str, str]]:
    """Decoded utterances by id, and by id why others were not. UserError if none was.

    recognizer: from for_split. What its batches lack, too long or without speech, and batches that
    cannot be decoded, as where they exceed the memory, are decoded as asr.transcribe decodes files.
    """
    decoded: dict[str, DecodedUtterance] = {}
    reasons: dict[str, str] = {}
    whole = partial(decoded_utterances, timed=False)
    progress = AudioProgress("decoded", float(corpus.seconds.sum()))
    seconds = dict(zip(corpus.ids, corpus.seconds.tolist(), strict=True))
    for batch in read_batches(recognizer, corpus, recipe):
        reasons |= {broken.id: broken.reason for broken in batch.broken}
        if len(batch):
            with suppress(MemoryError, RuntimeError):
                results = whole(recognizer, *decode_batch(recognizer, batch))
                decoded |= zip(batch.ids, results, strict=True)
                progress.add(sum(seconds[name] for name in batch.ids))
    left = [u for u in corpus if u.id not in decoded and u.id not in reasons]
    recordings = (Recording(utterance.audio, utterance.speaker) for utterance in left)
    stream = decode_stream(recognizer, recordings, decoded_utterances)
    for utterance, recording in zip(left, stream, strict=True):
        if recording.fault is None:
            decoded[utterance.id] = _merged(recording, recognizer.front_end.sample_rate)
        else:
            reasons[utterance.id] = fault_line(recording)
        progress.add(utterance.seconds)
    if not decoded:
        raise UserError(corpus.unreadable(next(iter(reasons.values()))))
    return decoded, reasons


def decoded_utterances(
    recognizer: Recognizer,
    encoded: Encoded,
    hypotheses: Sequence[Hypothesis],
    timed: bool = True,
) -> list[DecodedUtterance]:
    """The results of a batch. timed: with the times of the words, by which segments are merged."""
    form = transcripts if timed else _untimed
    searched = form(recognizer, encoded, hypotheses)
    ctc = form(recognizer, encoded, ctc_hypotheses(encoded)) or [EMPTY_TRANSCRIPT] * len(searched)
    window = max(1, round(1 / frame_seconds(recognizer)))
    weights = attention(encoded, [best.tokens for best in hypotheses])
    health = [
        hypothesis_health(best.tokens, attended, window)
        for best, attended in zip(hypotheses, weights, strict=True)
    ]
    finished = [best.finished for best in hypotheses]
    return [DecodedUtterance(*each) for each in zip(searched, ctc, finished, health, strict=True)]


def _untimed(
    recognizer: Recognizer, encoded: Encoded, hypotheses: Sequence[Hypothesis]
) -> list[Transcript]:
    """The hypotheses' texts alone, many times faster than with times."""
    decode = recognizer.tokenizer.decode
    return [Transcript(decode(each.tokens), each.score, each.tokens) for each in hypotheses]


def _merged(recording: Recording[DecodedUtterance], rate: int) -> DecodedUtterance:
    """The segments of an utterance as one."""
    segments, parts = recording.segments, recording.results
    pairs = zip(segments, parts, strict=True)
    known = [(part, end - start) for (start, end), part in pairs if part is not None]
    return DecodedUtterance(
        merge_segments(segments, [part and part.searched for part in parts], rate),
        merge_segments(segments, [part and part.ctc for part in parts], rate),
        all(part.finished for part, _ in known),
        mean_health([part.health for part, _ in known], [length for _, length in known]),
    )


def evaluation_of_run(run: Path, given: Path, name: str, corpus: Corpus) -> SavedEvaluation:
    """The evaluation of the same split by another run, or the one in a folder of results.

    given: what --against names, of which `run` is the folder. Raises UserError where there is none,
    or one of another split.
    """
    check_run_folder(run)
    folder = run if (run / "score.json").is_file() else run / "evaluate" / name
    out = str(Path("evaluate", given.name, name))
    words = "python", "-m", "asr.evaluate", given, "--split", corpus.path, "--out", out
    command = shlex.join(map(str, words))
    first = f"first run {command}, then compare --against {shlex.quote(out)}"
    if not folder.is_dir():
        load_run_recipe(run)  # refuses what is no run of speech
        raise UserError(f"--against {given}: not evaluated on this split; {first}")
    result = read_evaluation(folder)
    expected = dict(zip(corpus.ids, map(tidy, corpus.texts), strict=True))
    texts = {u.id: u.reference for u in result.score.utterances}
    if texts != expected:
        what = "utterances" if texts.keys() != expected.keys() else "texts"
        raise UserError(f"--against {given}: its evaluation {name} is of other {what}; {first}")
    return result


def reservations(run: Path, saved: SavedEvaluation, now: Evaluation) -> list[str]:
    """What else than the models may cause a difference to the saved evaluation."""
    unequal = unequal_decoding(decode_settings(saved.metadata), decode_settings(now.metadata))
    values = "; ".join(
        f"{key} {value} instead of {other}" for key, (other, value) in unequal.items()
    )
    notes = [f"not decoded alike, which may cause a difference: {values}"] if unequal else []
    return notes + evaluation_notes(run, run, saved.metadata)


def write(folder: Path, evaluation: Evaluation, recognizer: Recognizer, pictures: int) -> None:
    """Write the page, with attention pictures of the worst utterances, and the files."""
    corpus, decoded, result = evaluation.corpus, evaluation.decoded, evaluation.score
    worst = sorted(range(len(corpus)), key=lambda i: -result.utterances[i].errors)[:pictures]
    uris = {corpus[i].id: attention_uri(recognizer, corpus, i, decoded[i].tokens) for i in worst}
    # A page can link to audio that is readable and a separate file.
    readable = (utterance for utterance in corpus if utterance.id not in evaluation.reasons)
    audio = {u.id: u.audio for u in readable if member_of(u.audio) is None}
    write_page(
        folder / "page.html",
        result,
        title=evaluation.title,
        facts=dict(_page_facts(evaluation)),
        audio=audio,
        pictures={name: uri for name, uri in uris.items() if uri},
        groups=evaluation.groups,
        flags=dict.fromkeys(evaluation.reasons, ("not decoded",)) | _flags(evaluation),
    )
    health = [utterance.health for utterance in decoded]
    columns = {
        "coverage": ["" if one.coverage is None else f"{one.coverage:.3f}" for one in health],
        "repetition": [f"{one.repetition:.3f}" for one in health],
        "finished": ["yes" if utterance.finished else "no" for utterance in decoded],
    }
    if "ctc_wer" in evaluation.metadata:
        columns["ctc"] = [tidy(utterance.ctc.text) for utterance in decoded]
    write_evaluation(folder, result, evaluation.metadata, columns)


@torch.no_grad()
def attention_uri(
    recognizer: Recognizer, corpus: Corpus, index: int, tokens: Sequence[int]
) -> str | None:
    """The attention over utterance `index` as a PNG in a data URI; reads the audio again.

    None for an empty hypothesis, or one decoded in segments.
    """
    if not tokens or too_long(recognizer, corpus.seconds[index]):
        return None
    utterance = corpus[index]
    front_end, tokenizer = recognizer.front_end, recognizer.tokenizer
    features = front_end.features(front_end.load(utterance.audio), utterance.speaker)
    batch = collate([Example(utterance.id, features, torch.tensor(tokens))])
    (encoded,) = encode([recognizer.model], batch)
    (weights,) = attention(encoded, [tokens])
    labels, seconds = labels_of(tokens, tokenizer), weights.shape[1] * frame_seconds(recognizer)
    picture = attention_picture(weights.numpy(), labels, seconds, utterance.id)
    file = io.BytesIO()
    imsave(file, picture, format="png")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def _page_facts(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    metadata, decode = evaluation.metadata, evaluation.metadata["decode"]
    yield "checkpoint", f"{decode['checkpoint']}, of step {_steps(evaluation)}"
    yield "beam", f"{decode['beam']}{', CTC alone' * (decode['search'] == 'ctc')}"
    if decode["search"] == "beam":
        yield "CTC weight", str(decode["ctc_weight"])
        yield "length penalty", str(decode["length_penalty"])
    if len(decode["speeds"]) > 1:
        yield "speeds", " ".join(f"{speed:g}" for speed in decode["speeds"])
    if decode["ensemble"]:
        yield "ensemble with", " ".join(decode["ensemble"])
    if decode["lm"] and decode["lm_weight"]:
        yield "language model", f"{decode['lm']}, weight {decode['lm_weight']}"
    if metadata["wer_interval_over_speakers"]:
        low, high = metadata["wer_interval_over_speakers"]
        yield "WER over speakers", f"{percent(low)} – {percent(high)}"
    if "ctc_wer" in metadata:
        yield "WER of CTC alone", percent(metadata["ctc_wer"])
    yield "flagged", _flag_counts(_flags(evaluation)) or "none"


def _flags(evaluation: Evaluation) -> dict[str, tuple[str, ...]]:
    """By id, why a decoded utterance is flagged: empty, cut off, low coverage, repetition.

    An empty text is right where the reference is empty.
    """
    flags = {
        scored.id: ("cut off",) * (not one.finished) + one.health.flags
        if one.text
        else ("empty",) * bool(scored.reference)
        for scored, one in zip(evaluation.score.utterances, evaluation.decoded, strict=True)
    }
    return {
        name: raised for name, raised in flags.items() if raised and name not in evaluation.reasons
    }


def _flag_counts(flags: Mapping[str, Sequence[str]]) -> str:
    """3 cut off, 1 repetition"""
    counts = Counter(chain.from_iterable(flags.values()))
    return ", ".join(f"{count} {flag}" for flag, count in counts.most_common())


def _steps(evaluation: Evaluation) -> str:
    return " ".join(map(str, evaluation.metadata["steps"]))


def summary(evaluation: Evaluation) -> Iterator[str]:
    """The lines to print."""
    result, metadata = evaluation.score, evaluation.metadata
    average, count = metadata["decode"]["average"], len(metadata["steps"])
    if count < average:
        yield (
            f"mean of {count} checkpoints (step {_steps(evaluation)}): the run has no more, "
            f"decode.average = {average} asks for more"
        )
    if long := metadata["in_segments"]:
        yield f"{long} utterances exceed decode.max_segment_seconds and are decoded in segments"
    for name, reason in evaluation.reasons.items():
        yield f"not decoded, scored as empty: {name}: {reason}"
    if evaluation.reasons:
        yield f"audio that cannot be read: {audio_remedy(evaluation.corpus.path)}"
    remark, ctc = untrained(result.wer), metadata.get("ctc_wer")
    if remark and ctc is not None and not untrained(ctc):
        remark = f"but CTC alone has {percent(ctc)}: try {SAFE_SEARCH}"
    remark = f" ({remark})" if remark else ""
    yield f"{evaluation.title}: WER {percent(result.wer)}, CER {percent(result.cer)}{remark}"
    over_speakers = metadata["wer_interval_over_speakers"]
    intervals = {"utterances": result.wer_interval, "speakers": over_speakers}
    known = [f"{between(side)} over {units}" for units, side in intervals.items() if side]
    if known:
        yield f"95 % intervals of WER: {', '.join(known)}"
    yield (
        f"{result.sentences} utterances, {result.words} words: {result.substitutions} substituted, "
        f"{result.deletions} deleted, {result.insertions} inserted"
    )
    if flags := _flags(evaluation):
        names = " ".join(list(flags)[:5]) + (" ..." if len(flags) > 5 else "")
        yield f"{len(flags)} flagged ({_flag_counts(flags)}): {names}"
        empty = sum("empty" in raised for raised in flags.values())
        rule = metadata["decode"].get("no_speech_log_prob")
        if rule is not None and empty > MANY_EMPTY * result.sentences:
            yield "decode.no_speech_log_prob=null shows what was decoded for the empty ones"
    for column, parts in evaluation.groups.items():
        yield from group_lines(column, parts)

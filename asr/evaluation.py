"""A split decoded and scored: what was heard, how healthy it is, where attention was."""

import io
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.image import imsave

from asr.data.batch import Batch, Example, collate
from asr.data.corpus import Corpus, Utterance
from asr.data.loader import Utterances, load
from asr.data.plan import plan_evaluation
from asr.data.statistics import of_split
from asr.data.text import labels_of
from asr.decoding.health import Health, health, together
from asr.decoding.search import Hypothesis
from asr.errors import UserError
from asr.nn.memory import Memory
from asr.recognizer import Recognizer
from asr.scoring.parts import by_group
from asr.scoring.pictures import attention_picture
from asr.scoring.wer import Score, score, summarize
from asr.settings import SpeechRecipe
from asr.transcript import NOTHING, joined
from features.samples import AudioError


@dataclass(frozen=True)
class Heard:
    """One utterance, decoded."""

    text: str
    ctc: str  # what the CTC head alone heard; empty without one
    tokens: tuple[int, ...]
    finished: bool  # False where the length limit ended it
    health: Health


UNREAD = Heard("", "", (), False, Health(None, 0.0, 0.0))


Labels = Mapping[str, Mapping[str, str]]  # column -> utterance id -> group


@dataclass(frozen=True)
class Evaluation:
    """A split, decoded and scored."""

    title: str
    corpus: Corpus
    heard: Sequence[Heard]  # in the order of the corpus, UNREAD where it could not be read
    reasons: Mapping[str, str]  # why not, by utterance id
    score: Score
    groups: Mapping[str, Mapping[str, Score]]
    about: Mapping[str, Any]  # for score.json


def evaluate(
    recognizer: Recognizer,
    corpus: Corpus,
    recipe: SpeechRecipe,
    labels: Labels,
    title: str,
    overrides: Sequence[str],
) -> Evaluation:
    """Decode and score every utterance, the unreadable ones as empty."""
    found, reasons = recognise(recognizer, corpus, recipe)
    heard = [found.get(name, UNREAD) for name in corpus.ids]
    result = score(corpus.texts, [h.text for h in heard], corpus.ids, corpus.speakers)
    groups = {column: by_group(result, group_of) for column, group_of in labels.items()}
    speakers = summarize(result.utterances, interval_over="speakers")
    about = {
        "decode": recipe.decode.model_dump(mode="json"),
        "steps": recognizer.steps,
        "overrides": overrides,
        "not_decoded": len(reasons),
        "in_pieces": int(too_long(recognizer, corpus.seconds).sum()),
        "wer_interval_over_speakers": speakers.wer_interval,
        "groups": {
            column: {name: group(part) for name, part in parts.items()}
            for column, parts in groups.items()
        },
    }
    if recipe.model.ctc_weight:
        ctc = [h.ctc for h in heard]
        about["ctc_wer"] = score(corpus.texts, ctc, corpus.ids, draws=1).wer
    return Evaluation(title, corpus, heard, reasons, result, groups, about)


def group(part: Score) -> dict[str, Any]:
    """What score.json says of a part of the split."""
    speakers = summarize(part.utterances, interval_over="speakers")
    return {
        "wer": part.wer,
        "words": part.words,
        "wer_interval": part.wer_interval,
        "wer_interval_over_speakers": speakers.wer_interval,
    }


def recognise(
    recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe
) -> tuple[dict[str, Heard], dict[str, str]]:
    """What was heard, by utterance id; and why some could not be read.

    Utterances that are too long for the model are cut as asr.transcribe cuts recordings.
    Raises UserError where none could be read.
    """
    heard: dict[str, Heard] = {}
    reasons: dict[str, str] = {}
    for batch in batches(recognizer, corpus, recipe):
        reasons |= {broken.id: broken.reason for broken in batch.broken}
        if len(batch):
            heard |= zip(batch.ids, decode(recognizer, *recognizer.hear(batch)), strict=True)
    for row in np.flatnonzero(too_long(recognizer, corpus.seconds)):
        utterance = corpus[int(row)]
        try:
            heard[utterance.id] = decode_long(recognizer, utterance)
        except AudioError as error:
            reasons[utterance.id] = str(error)
    if not heard:
        raise UserError(corpus.unreadable)
    return heard, reasons


def too_long(recognizer: Recognizer, seconds: np.ndarray) -> np.ndarray:
    """Which utterances of these lengths the model does not hear at once: bool of the same shape."""
    return seconds > recognizer.longest


def batches(recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe) -> Iterable[Batch]:
    """What the model hears at once of a split, read: the longest utterances first.

    Statistics per speaker are taken over the split itself, as at training over its corpus; the
    recogniser keeps them in place of those it had.
    """
    workers, decode = recipe.data.workers, recipe.decode
    front_end = of_split(recognizer.front_end, corpus, workers, decode.speeds)
    recognizer.front_end = front_end
    heard = corpus.take(np.flatnonzero(~too_long(recognizer, corpus.seconds)))
    utterances = Utterances(
        heard, front_end, recognizer.tokenizer, recipe.seed, others=decode.others
    )
    plan = plan_evaluation(heard.seconds, decode.batch_seconds)
    return load(utterances, plan.batches, workers)


def decode(recognizer: Recognizer, memory: Memory, found: Sequence[Hypothesis]) -> list[Heard]:
    """One batch, in its order."""
    ctc = [recognizer.text(path) for path in recognizer.ctc_paths(memory)] or [""] * len(found)
    state = healths(recognizer, memory, found)
    return [
        Heard(recognizer.text(best), alone, best.tokens, best.finished, own)
        for best, alone, own in zip(found, ctc, state, strict=True)
    ]


def healths(recognizer: Recognizer, memory: Memory, found: Sequence[Hypothesis]) -> list[Health]:
    """Of the hypotheses of a batch, by where attention was."""
    window = max(1, round(1 / recognizer.frame_seconds))
    weights = recognizer.attention(memory, [best.tokens for best in found])
    return [
        health(best.tokens, looked.shape[1], looked, window)
        for best, looked in zip(found, weights, strict=True)
    ]


def decode_long(recognizer: Recognizer, utterance: Utterance) -> Heard:
    """One utterance in pieces. Raises AudioError where it cannot be read."""
    front_end = recognizer.front_end
    waveform = front_end.load(utterance.audio)
    pieces = recognizer.cut(waveform)
    told, alone = ([NOTHING] * len(pieces) for _ in range(2))  # the search's, and that of CTC
    best: dict[int, Hypothesis] = {}
    state: dict[int, Health] = {}
    waveforms = [waveform[start:end] for start, end in pieces]
    for rows, batch in recognizer.batches(waveforms, utterance.speaker):
        memory, found = recognizer.hear(batch)
        best |= zip(rows, found, strict=True)
        state |= zip(rows, healths(recognizer, memory, found), strict=True)
        for said, pick in ((found, told), (recognizer.ctc_paths(memory), alone)):
            for row, one in zip(rows, recognizer.transcripts(memory, said), strict=False):
                pick[row] = one
    whole, ctc = (joined(pieces, each, front_end.sample_rate) for each in (told, alone))
    finished = all(part.finished for part in best.values())
    overall = together(list(state.values()), [len(waveforms[row]) for row in state])
    return Heard(whole.text, ctc.text, whole.tokens, finished, overall)


def health_columns(heard: Sequence[Heard]) -> dict[str, list[str]]:
    """The columns of hypotheses.tsv that tell loops and deletions."""
    coverage = ["" if h.health.coverage is None else f"{h.health.coverage:.3f}" for h in heard]
    return {
        "coverage": coverage,
        "repetition": [f"{h.health.repetition:.3f}" for h in heard],
        "length_ratio": [f"{h.health.length_ratio:.3f}" for h in heard],
        "finished": ["yes" if h.finished else "no" for h in heard],
    }


@torch.no_grad()
def attention_uri(
    recognizer: Recognizer, corpus: Corpus, index: int, tokens: Sequence[int]
) -> str | None:
    """Where attention was as utterance `index` was heard: a PNG as a data URI.

    None where nothing was heard, or in pieces. The audio is read once more, so that a split of any
    size keeps no attention in memory.
    """
    if not tokens or too_long(recognizer, corpus.seconds[index]):
        return None
    utterance = corpus[index]
    front_end, tokenizer = recognizer.front_end, recognizer.tokenizer
    features = front_end.features(front_end.load(utterance.audio), utterance.speaker)
    batch = collate([Example(utterance.id, features, torch.tensor(tokens))])
    (weights,) = recognizer.attention(recognizer.encode(batch), [tokens])
    picture = attention_picture(weights.numpy(), labels_of(tokens, tokenizer), utterance.id)
    file = io.BytesIO()
    imsave(file, picture, format="png")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"

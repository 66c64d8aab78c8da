"""A corpus of a program's examples: any torch Dataset of recordings with texts."""

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from asr.data.corpus import Corpus, ExampleAudio, Utterance
from asr.errors import UserError
from asr.features import AudioError
from asr.features.audio import array_and_rate, audio_seconds

WANTED = (
    'a mapping with "audio" (a path, or {"array": samples, "sampling_rate": Hz}) and "text", and '
    'if known "id", "speaker" and "seconds"'
)


class Examples(Protocol):
    """A map-style torch Dataset, or a list, of mappings as in WANTED."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def corpus_of(examples: Examples, name: str) -> Corpus:
    """The corpus of examples, each of which is read once for its text and its duration.

    name: in messages. Raises UserError for examples that are not as in WANTED, and where there are
    none or an id is repeated.
    """
    if not hasattr(examples, "__len__") or isinstance(examples, Mapping):
        raise UserError(f"{name}: must be a list or a Dataset with a length; each example {WANTED}")
    utterances = [_utterance(examples, index, name) for index in range(len(examples))]
    if not utterances:
        raise UserError(f"{name}: no examples")
    ids: dict[str, int] = {}
    for index, utterance in enumerate(utterances):
        if (first := ids.setdefault(utterance.id, index)) != index:
            raise UserError(f"{name}[{index}]: the id {utterance.id} of {name}[{first}] again")
    return Corpus(utterances, Path(name))


def _utterance(examples: Examples, index: int, name: str) -> Utterance:
    where, example = f"{name}[{index}]", examples[index]
    try:
        audio, text = example["audio"], example["text"]
        if not isinstance(text, str):
            raise TypeError
        seconds = example.get("seconds")
        seconds = _seconds(audio) if seconds is None else float(seconds)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise UserError(f"{where}: an example must be {WANTED}") from None
    except AudioError as error:
        raise UserError(f"{where}: {error}") from None
    identity = str(example.get("id", index))
    speaker = str(example.get("speaker", identity))
    source = ExampleAudio(examples, index, name)
    text = unicodedata.normalize("NFC", " ".join(text.split()))
    return Utterance(identity, speaker, source, seconds, text)


def _seconds(audio: Any) -> float:
    if isinstance(audio, str | Path):
        return audio_seconds(audio)
    samples, rate = array_and_rate(audio)
    return max(samples.shape) / rate

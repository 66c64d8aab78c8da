"""The model card of an exported run: README.md with the metadata that the Hugging Face Hub reads.

https://github.com/huggingface/hub-docs/blob/main/modelcard.md
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from asr.analysis.curves import read_scalars
from asr.analysis.report import markdown_text
from asr.analysis.runs import HOURS, SECONDS, read_cost
from asr.analysis.wer import between, percent
from asr.config.language import LanguageRecipe
from asr.config.schema import SpeechRecipe
from asr.errors import UserError
from asr.hub import LIBRARY
from asr.io import read_front_matter, read_json

TASK = {"type": "automatic-speech-recognition", "name": "Automatic Speech Recognition"}
# data.corpus -> the data set's name on the Hugging Face Hub
DATASETS = dict.fromkeys(("librispeech", "mini-librispeech"), "openslr/librispeech_asr")
ENGLISH = (*DATASETS, "spoken-numbers")
UNLICENSED = "not stated; ask the author, and see the licences of the training data"
MAX_LICENCE = 100  # characters


def model_card(
    name: str,
    run: Path,
    recipe: SpeechRecipe,
    steps: Sequence[int],
    parameters: int,
    about: Path | None,
    licence: str | None,
    address: str,
) -> str:
    """The card of the weights at `steps` of a run, exported as `name`.

    about: a text to include. address: how a command names the exported run. Raises UserError for a
    text that cannot be read, and for a damaged evaluation.
    """
    rated = dict(evaluations(run, steps))
    facts = description(run, recipe, steps, parameters, rated, address)
    return _card(name, card_metadata(name, recipe, rated), facts, about, licence)


def language_card(
    name: str,
    run: Path,
    recipe: LanguageRecipe,
    tokens: int,
    step: int,
    parameters: int,
    about: Path | None,
    licence: str | None,
    address: str,
) -> str:
    """The card of a language model over `tokens` tokens, as model_card."""
    tags = ["speech", "language-model", recipe.model.kind, "layer-normalization"]
    metadata = {"library_name": LIBRARY, "pipeline_tag": "text-generation", "tags": tags}
    facts = [
        f"A language model ({recipe.model.kind}) of {parameters / 1e6:.2f} M parameters in fp16, "
        f"step {step:,}, for speech models with its vocabulary of {tokens} tokens.",
        "",
        f"    python -m asr.transcribe SPEECH_RUN file.wav decode.lm={address}",
        "",
    ]
    curves = read_scalars(run, {"valid/perplexity", "valid/word_perplexity"})
    values = [curve.values[curve.steps == step] for _, curve in sorted(curves.items())]
    if all(map(len, values)):
        of_tokens, of_words = (value[0] for value in values)
        facts.append(
            f"Perplexity on validation: {of_tokens:.2f} per token, {of_words:.0f} per word."
        )
    return _card(name, metadata, facts, about, licence)


def _card(
    name: str,
    metadata: dict[str, Any],
    facts: Iterable[str],
    about: Path | None,
    licence: str | None,
) -> str:
    more, text = read_about(about) if about else ({}, [])
    if licence:
        metadata["license"] = licence[:MAX_LICENCE]
    metadata |= more
    terms = metadata.get("license")
    lines = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n",
        f"# {markdown_text(name)}",
        "",
        *text,
        *facts,
        f"\nLicence: {markdown_text(str(terms)) if terms else UNLICENSED}.",
        "",
    ]
    return "\n".join(lines)


def read_about(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The metadata at the start of a text for the card, empty if there is none, and its lines.

    Raises UserError if the file cannot be read.
    """
    try:
        metadata, text = read_front_matter(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--about {path}: cannot be read ({error})") from None
    if not isinstance(metadata, dict):
        raise UserError(f"--about {path}: its metadata must be keys with values (language: en)")
    return metadata, [text, ""]


def card_metadata(
    name: str, recipe: SpeechRecipe, rated: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The metadata for the hub; `model-index` has the error rates in percent."""
    corpus = recipe.data.corpus
    metadata: dict[str, Any] = {"language": "en"} if corpus in ENGLISH else {}
    metadata |= {
        "library_name": LIBRARY,
        "pipeline_tag": TASK["type"],
        "tags": ["speech", recipe.model.kind, "layer-normalization"],
    }
    if corpus in DATASETS:
        metadata["datasets"] = [DATASETS[corpus]]
    metadata["metrics"] = ["wer", "cer"]
    named = ("train", "valid", *recipe.data.test)  # others are manifests, perhaps of other corpora
    results = [
        evaluation_result(corpus if split in named else None, split, rates)
        for split, rates in rated.items()
    ]
    if results:
        metadata["model-index"] = [{"name": name, "results": results}]
    return metadata


def evaluation_result(corpus: str | None, split: str, rates: Mapping[str, Any]) -> dict[str, Any]:
    """The error rates of one split as an entry of `model-index`.

    Their names say what helped the model and is not exported: a language model, other runs.
    """
    dataset = {"name": f"{corpus} {split}" if corpus else split, "type": corpus or "other"}
    part, dash, config = split.partition("-")  # test-clean; dev-clean-2 is not on the hub
    if corpus in DATASETS and dash and config in ("clean", "other"):
        split = "validation" if part == "dev" else part
        dataset |= {"type": DATASETS[corpus], "config": config, "split": split}
    decode = rates["about"]["decode"]
    helped = " with a language model" * bool(decode["lm"] and decode["lm_weight"])
    helped += " in an ensemble" * bool(decode.get("ensemble"))
    metrics = [
        {"type": kind, "value": round(100 * rates[kind], 2), "name": kind.upper() + helped}
        for kind in ("wer", "cer")
    ]
    return {"task": dict(TASK), "dataset": dataset, "metrics": metrics}


def rates_in_card(run: Path) -> str:
    """The word error rates in the metadata of a run's README.md, in one line."""
    metadata, _ = read_front_matter(run / "README.md")
    (model,) = metadata["model-index"]
    rates = [
        f"WER {rate['value']:.1f} % on {result['dataset']['name']}"
        for result in model["results"]
        for rate in result["metrics"]
        if rate["type"] == "wer"
    ]
    return f"{', '.join(rates)}; limits: {run / 'README.md'}"


def description(
    run: Path,
    recipe: SpeechRecipe,
    steps: Sequence[int],
    parameters: int,
    rated: Mapping[str, Mapping[str, Any]],
    address: str,
) -> Iterator[str]:
    """The lines on model, training cost and evaluations of these weights."""
    cost = read_cost(read_scalars(run, {HOURS, SECONDS})).at(max(steps))
    millions = f"{parameters / 1e6:.2f} M parameters"
    *sooner, last = (f"{step:,}" for step in sorted(steps))
    which = (
        f"mean of the weights at steps {', '.join(sooner)} and {last}" if sooner else f"step {last}"
    )
    yield f"A {recipe.model.kind} model of {millions} in fp16, {which}."
    if recipe.train.init:
        yield f"It was fine-tuned from {markdown_text(recipe.train.init.name)}."
    if recipe.features.encoder:
        facts = read_json(run / "encoder.json")
        trained = "Its encoder was" if recipe.features.train != "none" else "Its features are"
        licence = facts["licence"] or "not stated"
        yield f"{trained} pretrained as {Path(facts['name']).name} (licence: {licence})."
    if cost and all(cost):
        hours, seconds = cost
        yield (
            f"Training took {duration(seconds)} up to step {last}, for {duration(3600 * hours)} of "
            f"audio, repetitions counted ({3600 * hours / seconds:.0f} times real time)."
        )
    yield from ("", f"    python -m asr.transcribe {address} file.wav", "")
    rows = [row for split, rates in rated.items() for row in _rows(split, rates)]
    if rows:
        yield "| split | part | words | WER | 95 % over utterances | over speakers |"
        yield "|---|---|---:|---:|---|---|"
    yield from rows
    yield from ("", "`recipe.yaml` holds every setting, without the paths of manifests.")


def duration(seconds: float) -> str:
    """Seconds as text: 38 s, 4.3 min, 26.0 h."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def evaluations(run: Path, steps: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The splits on which the checkpoints of `steps` were evaluated, and their score.json.

    Evaluations of other checkpoints are skipped with a printed line. UserError for a damaged one.
    """
    for file in sorted(run.glob("evaluate/*/score.json")):
        try:
            rates = read_json(file)
            if (decoded := rates["about"].get("steps", steps)) != steps:
                was, now = (" ".join(map(str, numbers[:9])) for numbers in (decoded, steps))
                reason = f"is of step {was}, not {now}; evaluate and export again"
                print(f"not in the card: {file} {reason}")
                continue
            list(_rows(file.parent.name, rates))
            evaluation_result(None, file.parent.name, rates)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error)[:200]
            raise UserError(f"{file}: damaged evaluation ({reason}); evaluate again") from None
        yield file.parent.name, rates


def _rows(split: str, rates: Mapping[str, Any]) -> Iterator[str]:
    """A table row for the split and one for each of its groups (asr.evaluate --by)."""
    metadata = rates["about"]
    decode = metadata["decode"]
    settings = [f"beam {decode['beam']}"]
    if decode.get("search") == "ctc":
        settings.append("CTC alone")
    else:
        keys = ("ctc_weight", *(["lm_weight"] if decode["lm"] else []))
        settings += [f"{key} {decode[key]}" for key in keys]
    if len(speeds := decode.get("speeds", [1.0])) > 1:
        settings.append(f"speeds {' '.join(f'{speed:g}' for speed in speeds)}")
    if others := decode.get("ensemble"):
        settings.append(f"{len(others)} more in an ensemble")
    if missing := metadata.get("not_decoded"):
        settings.append(f"{missing} utterances not decoded, scored as empty")
    parts = {", ".join(["all", *settings]): {**rates, **metadata}}
    for column, groups in metadata["groups"].items():
        parts |= {f"{column} {name}": group for name, group in groups.items()}
    for name, part in parts.items():
        names = map(markdown_text, (split, name[:200]))
        cells = (*names, f"{part['words']:,}", percent(part["wer"]))
        spans = (part.get("wer_interval"), part.get("wer_interval_over_speakers"))
        yield f"| {' | '.join((*cells, *(between(s) if s else '-' for s in spans)))} |"

"""A run to pass on: python -m asr.export RUN --to FOLDER or --push-to USER/NAME [--about TEXT.md]

Imports beyond the command line's happen where they are used, so that --help is fast.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from asr.arguments import CommandParser
from asr.errors import UserError, run_command
from asr.io import read_json, read_small_file

if TYPE_CHECKING:
    from asr.config.schema import Recipe, SpeechRecipe

TASK = {"type": "automatic-speech-recognition", "name": "Automatic Speech Recognition"}
# data.corpus -> the data set's name on the Hugging Face Hub
DATASETS = dict.fromkeys(("librispeech", "mini-librispeech"), "openslr/librispeech_asr")
ENGLISH = (*DATASETS, "spoken-numbers")


def main() -> None:
    """Average the checkpoints, convert to fp16, write the run folder and its card."""
    parser = CommandParser(
        prog="python -m asr.export",
        description="A run folder to pass on: the weights that decoding would use, averaged, in "
        "fp16, without optimiser state and local paths; and README.md, its model card.",
        epilog="Keys of the run's recipe can be overridden: decode.average=5 decode.beam=8 ...",
    )
    add = parser.add_argument
    add("run", type=Path, help="a speech run's folder")
    parser.add_overrides()
    add("--to", type=Path, help="folder of the exported run")
    add("--push-to", metavar="USER/NAME", help="upload it to the Hugging Face Hub")
    add("--private", action="store_true", help="--push-to: visible to its owner alone")
    about = (
        "put into the card: data, licences, limits; metadata (language, license, datasets, ...) "
        "may stand at its begin as YAML between two lines of ---"
    )
    add("--about", type=Path, metavar="TEXT.md", help=about)
    args = parser.parse()
    if args.push_to:
        push(args.run, args.overrides, args.push_to, args.private, args.to, args.about)
    elif args.to and not args.private:
        export(args.run, args.overrides, args.to, args.about)
        print(f"the run is in {args.to}")
    else:
        missing = "--private needs --push-to USER/NAME" if args.private else "name a folder"
        raise UserError(f"{missing}: --to FOLDER, or --push-to USER/NAME")


def push(
    run: Path,
    overrides: Sequence[str],
    repo: str,
    private: bool,
    to: Path | None = None,
    about: Path | None = None,
) -> None:
    """Export the run, into a temporary folder unless `to` is given, and upload it to the hub."""
    from asr.inference.hub import check_repo, push_run

    check_repo(repo)
    with nullcontext() if to else TemporaryDirectory() as temporary:
        folder = to or Path(temporary) / repo.partition("/")[2]
        export(run, overrides, folder, about, f"hf:{repo}")
        print(f"the run is at {push_run(folder, repo, private)}; load it as hf:{repo}")


def export(
    run: Path,
    overrides: Sequence[str],
    to: Path,
    about: Path | None = None,
    address: str = "THIS_FOLDER",
) -> None:
    """Write the exported run folder, whose card names it as `address`.

    UserError, before anything is written, where it cannot be.
    """
    from asr.analysis.report import markdown_text
    from asr.inference.load import load_run_recipe
    from asr.inference.recognition import WITHOUT_OTHERS, Recognizer, check_new_folder, write_run
    from asr.training.checkpoint import choose

    recipe = load_run_recipe(run, overrides)
    check_new_folder(to)
    metadata, text = read_about(about) if about else ({}, [])
    recognizer = Recognizer.load(run, [*overrides, *WITHOUT_OTHERS, "train.device=cpu"])
    checkpoints = choose(run, recipe.decode.checkpoint, recipe.decode.average)
    model = recognizer.model.half()
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"{run}: {name} has values that fp16 cannot hold; pass on RUN itself")
    best, parameters = checkpoints[0], sum(weight.numel() for weight in model.parameters())
    steps = [checkpoint.step for checkpoint in checkpoints]
    title = f"# {markdown_text(to.resolve().name)}"
    rated = dict(evaluations(run, steps))
    head = front_matter(card_metadata(to.resolve().name, recipe, rated) | metadata)
    lines = [head, title, "", *text, *card(run, recipe, steps, parameters, rated, address), ""]
    smaller = exported_recipe(recipe, to)
    write_run(to, smaller, recognizer, None, best.step, best.loss, "\n".join(lines))
    if recipe.decode.lm:
        print(f"without the language model {recipe.decode.lm}: pass it on as a run of its own")
    for other in recipe.decode.ensemble:
        print(f"without {other} of its ensemble: pass it on as a run of its own")


def exported_recipe(recipe: "SpeechRecipe", to: Path) -> "Recipe":
    """The run's recipe without the paths of this machine."""
    from asr.config.loader import validate
    from asr.inference.recognition import derived_recipe

    tree = derived_recipe(recipe, to)
    tree["data"] |= {"corpus": None, "train": None, "valid": None, "test": {}}
    tree["train"] |= {"init": None, "device": "auto", "trackers": []}
    tree["decode"] |= {"lm": None, "ensemble": []}
    return validate(tree, f"--to {to}")


def read_about(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The metadata at the begin of a text for the card, if there are any, and the text's lines.

    Raises UserError where it cannot be read.
    """
    import yaml

    try:
        text = read_small_file(path).strip()
        if not text.startswith("---\n"):
            return {}, [text, ""]
        head, _, text = text.removeprefix("---\n").partition("\n---")
        metadata = yaml.safe_load(head)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--about {path}: cannot be read ({error})") from None
    if not isinstance(metadata, dict):
        raise UserError(f"--about {path}: its metadata must be keys with values, as language: en")
    return metadata, [text.strip(), ""]


def front_matter(metadata: Mapping[str, Any]) -> str:
    """Metadata as the Hugging Face Hub reads them at the begin of a card."""
    import yaml

    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n"


def card_metadata(
    name: str, recipe: "SpeechRecipe", rated: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The metadata of a model card, as the hub reads them; error rates as `model-index`, percent.

    https://github.com/huggingface/hub-docs/blob/main/modelcard.md
    """
    corpus = recipe.data.corpus
    metadata: dict[str, Any] = {"language": "en"} if corpus in ENGLISH else {}
    metadata |= {
        "library_name": "layernorm-asr",
        "pipeline_tag": TASK["type"],
        "tags": ["speech", recipe.model.kind, "layer-normalization"],
    }
    if corpus in DATASETS:
        metadata["datasets"] = [DATASETS[corpus]]
    metadata["metrics"] = ["wer", "cer"]
    results = [_result(corpus, split, rates) for split, rates in rated.items()]
    if results:
        metadata["model-index"] = [{"name": name, "results": results}]
    return metadata


def _result(corpus: str | None, split: str, rates: Mapping[str, Any]) -> dict[str, Any]:
    """The error rates of one split as an entry of `model-index`."""
    dataset = {"name": f"{corpus} {split}" if corpus else split, "type": corpus or "other"}
    part, dash, config = split.partition("-")  # test-clean
    if corpus in DATASETS and dash:
        split = "validation" if part == "dev" else part
        dataset |= {"type": DATASETS[corpus], "config": config, "split": split}
    metrics = [
        {"type": kind, "value": round(100 * rates[kind], 2), "name": kind.upper()}
        for kind in ("wer", "cer")
    ]
    return {"task": dict(TASK), "dataset": dataset, "metrics": metrics}


def card(
    run: Path,
    recipe: "SpeechRecipe",
    steps: Sequence[int],
    parameters: int,
    rated: Mapping[str, Mapping[str, Any]],
    address: str,
) -> Iterator[str]:
    """The lines of the model card: model, training cost, evaluations of these weights."""
    from asr.analysis.curves import finite, read_scalars
    from asr.analysis.runs import HOURS, SECONDS

    curves = {name: finite(curve) for name, curve in read_scalars(run, {HOURS, SECONDS}).items()}
    hours, seconds = (curves[n].values[-1] if len(curves[n]) else None for n in (HOURS, SECONDS))
    millions = f"{parameters / 1e6:.2f} M parameters"
    yield f"A {recipe.model.kind} model of {millions} in fp16, step {steps[0]:,}."
    if hours is not None and seconds:
        yield (
            f"Training took {seconds / 3600:.1f} hours for {hours:.0f} hours of audio, repetitions "
            f"counted ({3600 * hours / seconds:.0f} times real time)."
        )
    yield from ("", f"    python -m asr.transcribe {address} file.wav", "")
    rows = [row for split, rates in rated.items() for row in _rows(split, rates)]
    if rows:
        yield "| split | part | words | WER | 95 % over utterances | over speakers |"
        yield "|---|---|---:|---:|---|---|"
    yield from rows
    yield from ("", "`recipe.yaml` holds every setting, without the paths of manifests.")


def evaluations(run: Path, steps: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The splits on which the checkpoints of `steps` were evaluated, and their score.json.

    Others are skipped with a printed line. UserError for a damaged one.
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
            _result(None, file.parent.name, rates)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error)[:200]
            raise UserError(f"{file}: damaged evaluation ({reason}); evaluate again") from None
        yield file.parent.name, rates


def _rows(split: str, rates: Mapping[str, Any]) -> Iterator[str]:
    """A row for the split and one for each of its groups (asr.evaluate --by)."""
    from asr.analysis.report import markdown_text
    from asr.analysis.wer import between, percent

    about = rates["about"]
    decode = about["decode"]
    keys = ("beam", "ctc_weight", *(["lm_weight"] if decode["lm"] else []))
    settings = [f"{key} {decode[key]}" for key in keys]
    if len(speeds := decode.get("speeds", [1.0])) > 1:
        settings.append(f"speeds {' '.join(f'{speed:g}' for speed in speeds)}")
    if others := decode.get("ensemble"):
        settings.append(f"{len(others)} more in an ensemble")
    parts = {", ".join(["all", *settings]): {**rates, **about}}
    for column, groups in about["groups"].items():
        parts |= {f"{column} {name}": group for name, group in groups.items()}
    for name, part in parts.items():
        names = map(markdown_text, (split, name[:200]))
        cells = (*names, f"{part['words']:,}", percent(part["wer"]))
        spans = (part.get("wer_interval"), part.get("wer_interval_over_speakers"))
        yield f"| {' | '.join((*cells, *(between(s) if s else '-' for s in spans)))} |"


if __name__ == "__main__":
    run_command(main)

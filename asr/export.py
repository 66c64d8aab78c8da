"""A run to pass on: python -m asr.export RUN --to FOLDER [--about TEXT.md]"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from asr import command, derived
from asr.errors import UserError
from asr.recipe import validate
from asr.recognizer import Recognizer
from asr.runs.reading import HOURS, SECONDS
from asr.scoring.events import read_scalars
from asr.scoring.files import between, percent
from asr.settings import Recipe, SpeechRecipe
from asr.trained import run_recipe
from asr.training.checkpoint import choose


def main() -> None:
    """Average, halve, describe, write."""
    parser = derived.arguments(
        "asr.export",
        "A run folder to pass on: the weights that decoding would use, averaged, in fp16, without "
        "the optimiser and without this machine's paths; and README.md, its card.",
        source="a speech run's folder",
        target="folder of the exported run",
        examples="decode.average=5 decode.beam=8",
    )
    parser.add_argument(
        "--about", type=Path, metavar="TEXT.md", help="put into the card: data, licences, limits"
    )
    args = parser.parse_intermixed_args()
    export(args.run, args.overrides, args.to, args.about)


def export(run: Path, overrides: Sequence[str], to: Path, told: Path | None = None) -> None:
    """From run folder to run folder. UserError, before anything is written, where it cannot be."""
    recipe = run_recipe(run, overrides)
    derived.check_new(to)
    text = _text(told)
    recognizer = Recognizer.load(run, [*overrides, *derived.ALONE, "train.device=cpu"])
    checkpoints = choose(run, recipe.decode.checkpoint, recipe.decode.average)
    model = recognizer.model.half()
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"{run}: {name} has values that fp16 cannot hold; pass on RUN itself")
    best, size = checkpoints[0], sum(weight.numel() for weight in model.parameters())
    steps = [checkpoint.step for checkpoint in checkpoints]
    lines = [f"# {to.resolve().name}", "", *text, *card(run, recipe, steps, size), ""]
    smaller, told_of = exported_recipe(recipe, to), "\n".join(lines)
    derived.write_run(to, smaller, recognizer, None, best.step, best.loss, told_of)
    if recipe.decode.lm:
        print(f"without the language model {recipe.decode.lm}: pass it on as a run of its own")
    for other in recipe.decode.ensemble:
        print(f"without {other} of its ensemble: pass it on as a run of its own")
    print(f"the run is in {to}")


def _text(told: Path | None) -> list[str]:
    try:
        return [told.read_text(encoding="utf-8").strip(), ""] if told else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--about {told}: cannot be read ({error})") from None


def exported_recipe(recipe: SpeechRecipe, to: Path) -> Recipe:
    """The run's recipe without what lies on this machine alone."""
    tree = derived.plain_recipe(recipe, to)
    tree["data"] |= {"corpus": None, "train": None, "valid": None, "test": {}}
    tree["train"] |= {"init": None, "device": "auto"}
    tree["decode"] |= {"lm": None, "ensemble": []}
    return validate(tree, f"--to {to}")


def card(run: Path, recipe: SpeechRecipe, steps: Sequence[int], size: int) -> Iterator[str]:
    """What the run folder itself knows: model, cost, and what was evaluated with these weights."""
    curves = read_scalars(run, {HOURS, SECONDS})
    hours, seconds = (curves[n].values[-1] if len(curves[n]) else None for n in (HOURS, SECONDS))
    millions = f"{size / 1e6:.2f} M parameters"
    yield f"A {recipe.model.kind} model of {millions} in fp16, step {steps[0]:,}."
    if hours is not None and seconds is not None:
        yield (
            f"Training took {seconds / 3600:.1f} hours for {hours:.0f} hours of audio, repetitions "
            f"counted ({3600 * hours / seconds:.0f} times real time)."
        )
    yield from ("", "    python -m asr.transcribe THIS_FOLDER file.wav", "")
    rows = [row for file in sorted(run.glob("evaluate/*/score.json")) for row in _rows(file, steps)]
    if rows:
        yield "| split | part | words | WER | 95 % over utterances | over speakers |"
        yield "|---|---|---:|---:|---|---|"
    yield from rows
    yield from ("", "`recipe.yaml` holds every setting; the manifests' paths are left out.")


def _rows(file: Path, steps: Sequence[int]) -> Iterator[str]:
    """A line for the split and one for each of its groups (asr.evaluate --by).

    None where it was decoded with other checkpoints than those of `steps`.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        wide = found["about"]
        if (decoded := wide.get("steps", steps)) != steps:
            was, now = (" ".join(map(str, found)) for found in (decoded, steps))
            print(
                f"not in the card: {file} is of step {was}, not {now}; evaluate again, then export"
            )
            return
        decode = wide["decode"]
        keys = ("beam", "ctc_weight", *(["lm_weight"] if decode["lm"] else []))
        settings = [f"{key} {decode[key]}" for key in keys]
        if len(speeds := decode.get("speeds", [1.0])) > 1:
            settings.append(f"speeds {' '.join(f'{speed:g}' for speed in speeds)}")
        if others := decode.get("ensemble"):
            settings.append(f"{len(others)} more in an ensemble")
        parts = {", ".join(["all", *settings]): found | wide}
        for column, groups in wide["groups"].items():
            parts |= {f"{column} {name}": group for name, group in groups.items()}
        for name, part in parts.items():
            cells = (file.parent.name, name, f"{part['words']:,}", percent(part["wer"]))
            spans = (part.get("wer_interval"), part.get("wer_interval_over_speakers"))
            yield f"| {' | '.join((*cells, *(between(s) if s else '-' for s in spans)))} |"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: damaged evaluation ({error}); evaluate again") from None


if __name__ == "__main__":
    command.run(main)

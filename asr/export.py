"""A run to pass on: python -m asr.export RUN --to FOLDER [--about TEXT.md]

Imports beyond the command line's happen where they are used, so that --help is fast.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr.arguments import CommandParser, run_folder
from asr.errors import UserError, run_command
from asr.io import read_json, read_small_file

if TYPE_CHECKING:
    from asr.config.schema import Recipe, SpeechRecipe

UNLICENSED = "not stated; ask the author, and see the licences of the training data"


def main() -> None:
    """Average the checkpoints, convert to fp16, write the run folder and its card."""
    parser = CommandParser(
        prog="python -m asr.export",
        description="A run folder to pass on: the weights that decoding would use, averaged, in "
        "fp16, without optimiser state and local paths; and README.md, its model card.",
        epilog="Keys of the run's recipe can be overridden: decode.average=5 decode.beam=8 ...",
    )
    add = parser.add_argument
    add("run", type=run_folder, help="a speech run's folder")
    parser.add_overrides()
    add("--to", type=Path, required=True, help="folder of the exported run")
    add("--about", type=Path, metavar="TEXT.md", help="put into the card: data, licences, limits")
    add("--license", metavar="ID", help="of the weights, for the card: cc-by-4.0, mit, ...")
    args = parser.parse()
    export(args.run, args.overrides, args.to, args.about, args.license)


def export(
    run: Path,
    overrides: Sequence[str],
    to: Path,
    about: Path | None = None,
    licence: str | None = None,
) -> None:
    """Write the exported run folder. UserError, before anything is written, where it cannot be."""
    from asr.analysis.report import markdown_text
    from asr.inference.load import load_run_recipe
    from asr.inference.recognition import WITHOUT_OTHERS, Recognizer, check_new_folder, write_run
    from asr.training.checkpoint import choose

    recipe = load_run_recipe(run, overrides)
    check_new_folder(to)
    try:
        text = [read_small_file(about).strip(), ""] if about else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--about {about}: cannot be read ({error})") from None
    recognizer = Recognizer.load(run, [*overrides, *WITHOUT_OTHERS, "train.device=cpu"])
    checkpoints = choose(run, recipe.decode.checkpoint, recipe.decode.average)
    model = recognizer.model.half()
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"{run}: {name} has values that fp16 cannot hold; pass on RUN itself")
    best, parameters = checkpoints[0], sum(weight.numel() for weight in model.parameters())
    steps = [checkpoint.step for checkpoint in checkpoints]
    title = f"# {markdown_text(to.resolve().name)}"
    terms = markdown_text(licence[:100]) if licence else UNLICENSED
    lines = [title, "", *text, *card(run, recipe, steps, parameters), f"\nLicence: {terms}.", ""]
    smaller = exported_recipe(recipe, to)
    write_run(to, smaller, recognizer, None, best.step, best.loss, "\n".join(lines))
    if recipe.decode.lm:
        print(f"without the language model {recipe.decode.lm}: pass it on as a run of its own")
    for other in recipe.decode.ensemble:
        print(f"without {other} of its ensemble: pass it on as a run of its own")
    print(f"the run is in {to}")


def exported_recipe(recipe: "SpeechRecipe", to: Path) -> "Recipe":
    """The run's recipe without the paths of this machine."""
    from asr.config.loader import validate
    from asr.inference.recognition import derived_recipe

    tree = derived_recipe(recipe, to)
    tree["data"] |= {"corpus": None, "train": None, "valid": None, "test": {}}
    tree["train"] |= {"init": None, "device": "auto"}
    tree["decode"] |= {"lm": None, "ensemble": []}
    return validate(tree, f"--to {to}")


def card(run: Path, recipe: "SpeechRecipe", steps: Sequence[int], parameters: int) -> Iterator[str]:
    """The lines of the model card: model, training cost, evaluations of these weights."""
    from asr.analysis.curves import read_scalars
    from asr.analysis.runs import HOURS, SECONDS, Run, read_cost

    curves = read_scalars(run, {HOURS, SECONDS})
    cost = read_cost(Run(run, {}, curves, None, run.name)).at(max(steps))
    millions = f"{parameters / 1e6:.2f} M parameters"
    yield f"A {recipe.model.kind} model of {millions} in fp16, step {steps[0]:,}."
    if cost and all(cost):
        hours, seconds = cost
        yield (
            f"Training took {duration(seconds)} up to this step, for {duration(3600 * hours)} of "
            f"audio, repetitions counted ({3600 * hours / seconds:.0f} times real time)."
        )
    yield from ("", "    python -m asr.transcribe THIS_FOLDER file.wav", "")
    rows = [row for file in sorted(run.glob("evaluate/*/score.json")) for row in _rows(file, steps)]
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


def _rows(file: Path, steps: Sequence[int]) -> Iterator[str]:
    """A row for the split and one for each of its groups (asr.evaluate --by).

    None, with a printed line, where it was decoded with other checkpoints than those of `steps`.
    """
    from asr.analysis.report import markdown_text
    from asr.analysis.wer import between, percent

    try:
        rates = read_json(file)
        about = rates["about"]
        if (decoded := about.get("steps", steps)) != steps:
            was, now = (" ".join(map(str, numbers[:9])) for numbers in (decoded, steps))
            print(f"not in the card: {file} is of step {was}, not {now}; evaluate and export again")
            return
        decode = about["decode"]
        keys = ("beam", "ctc_weight", *(["lm_weight"] if decode["lm"] else []))
        settings = [f"{key} {decode[key]}" for key in keys]
        if len(speeds := decode.get("speeds", [1.0])) > 1:
            settings.append(f"speeds {' '.join(f'{speed:g}' for speed in speeds)}")
        if others := decode.get("ensemble"):
            settings.append(f"{len(others)} more in an ensemble")
        parts = {", ".join(["all", *settings]): rates | about}
        for column, groups in about["groups"].items():
            parts |= {f"{column} {name}": group for name, group in groups.items()}
        for name, part in parts.items():
            names = map(markdown_text, (file.parent.name, name[:200]))
            cells = (*names, f"{part['words']:,}", percent(part["wer"]))
            spans = (part.get("wer_interval"), part.get("wer_interval_over_speakers"))
            yield f"| {' | '.join((*cells, *(between(s) if s else '-' for s in spans)))} |"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error)[:200]
        raise UserError(f"{file}: damaged evaluation ({reason}); evaluate again") from None


if __name__ == "__main__":
    run_command(main)

"""A run to pass on: python -m asr.export RUN --to FOLDER [--about TEXT.md | --onnx]

Imports beyond the command line's happen where they are used, so that --help is fast.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr.arguments import CommandParser
from asr.errors import UserError, run_command
from asr.io import read_json, read_small_file

if TYPE_CHECKING:
    from asr.config.schema import Recipe, SpeechRecipe


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
    add("--to", type=Path, required=True, help="folder of the exported run")
    add("--about", type=Path, metavar="TEXT.md", help="put into the card: data, licences, limits")
    onnx = "write ONNX files and model.json instead of a run, see docs/onnx.md"
    add("--onnx", action="store_true", help=onnx)
    args = parser.parse()
    if args.onnx:
        export_onnx(args.run, args.overrides, args.to, args.about)
        return
    export(args.run, args.overrides, args.to, args.about)


def export(run: Path, overrides: Sequence[str], to: Path, about: Path | None = None) -> None:
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
    lines = [title, "", *text, *card(run, recipe, steps, parameters), ""]
    smaller = exported_recipe(recipe, to)
    write_run(to, smaller, recognizer, None, best.step, best.loss, "\n".join(lines))
    if recipe.decode.lm:
        print(f"without the language model {recipe.decode.lm}: pass it on as a run of its own")
    for other in recipe.decode.ensemble:
        print(f"without {other} of its ensemble: pass it on as a run of its own")
    print(f"the run is in {to}")


def export_onnx(run: Path, overrides: Sequence[str], to: Path, about: Path | None) -> None:
    """Write the ONNX files of a run. UserError where they cannot be written."""
    from asr.inference.load import load_run_recipe
    from asr.inference.onnx_export import write_onnx
    from asr.inference.recognition import WITHOUT_OTHERS, Recognizer, check_new_folder

    if about:
        raise UserError("--about is the text of a model card, which --onnx does not write")
    recipe = load_run_recipe(run, overrides)
    check_new_folder(to)
    recognizer = Recognizer.load(run, [*overrides, *WITHOUT_OTHERS, "train.device=cpu"])
    write_onnx(recognizer, recipe, to)
    print(f"{', '.join(sorted(path.name for path in to.iterdir()))} are in {to}")


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
    yield from ("", "    python -m asr.transcribe THIS_FOLDER file.wav", "")
    rows = [row for file in sorted(run.glob("evaluate/*/score.json")) for row in _rows(file, steps)]
    if rows:
        yield "| split | part | words | WER | 95 % over utterances | over speakers |"
        yield "|---|---|---:|---:|---|---|"
    yield from rows
    yield from ("", "`recipe.yaml` holds every setting, without the paths of manifests.")


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

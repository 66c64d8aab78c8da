"""A run to pass on: python -m asr.export RUN --to FOLDER, --push-to USER/NAME or --onnx --to FOLDER

Imports beyond the command line's happen where they are used, so that --help is fast.
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from asr.arguments import CommandParser, run_folder
from asr.errors import UserError, run_command

if TYPE_CHECKING:
    from torch.nn import Module

    from asr.config.schema import Recipe, SpeechRecipe

# Keys under `train:` that depend on the machine, with what the exported recipe has instead.
OF_MACHINE = {
    "init": None,
    "new_vocabulary": False,
    "device": "auto",
    "threads": None,
    "trackers": [],
}


def main() -> None:
    """Average the checkpoints, convert to fp16, write the run folder and its card."""
    parser = CommandParser(
        prog="python -m asr.export",
        description="A run folder to pass on: the weights that decoding would use, averaged, in "
        "fp16, without optimiser state and local paths; and README.md, its model card.",
        epilog="Keys of the run's recipe can be overridden: decode.average=5 decode.beam=8 ...",
    )
    add = parser.add_argument
    add("run", type=run_folder, help="the folder of a speech run or of a language model's")
    parser.add_overrides()
    add("--to", type=Path, help="folder of the exported run")
    add("--push-to", metavar="USER/NAME", help="upload it to the Hugging Face Hub")
    add("--private", action="store_true", help="--push-to: visible to its owner alone")
    about = (
        "put into the card: data, licences, limits; metadata (language, license, datasets, ...) "
        "may come first, as YAML between two lines of ---"
    )
    add("--about", type=Path, metavar="TEXT.md", help=about)
    add("--license", metavar="ID", help="of the weights, for the card: cc-by-4.0, mit, ...")
    add("--with-encoder", action="store_true", help="copy the pretrained encoder of its features")
    onnx = "write ONNX files and model.json instead of a run, see docs/onnx.md"
    add("--onnx", action="store_true", help=onnx)
    args = parser.parse()
    check_combination(args)
    if args.onnx:
        export_onnx(args.run, args.overrides, args.to)
    elif args.push_to:
        push(args)
    else:
        export(args, args.to)
        print(f"the run is in {args.to}")


def check_combination(args: argparse.Namespace) -> None:
    """Raise UserError for arguments that do not fit together."""
    if args.private and not args.push_to:
        raise UserError("--private needs --push-to USER/NAME")
    if not args.to and (args.onnx or not args.push_to):
        raise UserError(
            f"name a folder: --to FOLDER{'' if args.onnx else ', or --push-to USER/NAME'}"
        )
    if args.onnx:
        of_runs = {"--push-to": args.push_to, "--about": args.about, "--license": args.license}
        for name in filter(of_runs.get, of_runs):
            raise UserError(f"{name} is for a run with its model card, which --onnx does not write")


def push(args: argparse.Namespace) -> None:
    """Export the run, into a temporary folder without --to, and upload it to the hub."""
    from asr.hub import check_repo, push_run

    repo = args.push_to
    check_repo(repo)
    with nullcontext() if args.to else TemporaryDirectory() as temporary:
        to = args.to or Path(temporary) / repo.partition("/")[2]
        export(args, to, f"hf:{repo}")
        print(f"the run is at {push_run(to, repo, args.private)}; load it as hf:{repo}")


def export(args: argparse.Namespace, to: Path, address: str = "THIS_FOLDER") -> None:
    """Write the exported run folder, whose card names it as `address`.

    UserError, before anything is written, where it cannot be.
    """
    from asr.analysis.model_card import model_card
    from asr.inference.derived import load_alone, write_run
    from asr.inference.encoders import check_shared, copy_files, shared_name
    from asr.inference.load import load_any_recipe
    from asr.training.checkpoint import choose

    run = args.run
    if load_any_recipe(run).task == "language":
        export_language_model(args, to, address)
        return
    recipe, recognizer = load_alone(run, args.overrides, to)
    checkpoints = choose(run, recipe.decode.checkpoint, recipe.decode.average)
    encoder = recognizer.front_end.extract.encoder if recipe.features.encoder else None
    if encoder:
        if recipe.features.train == "none" and not args.with_encoder:
            check_shared(encoder.source)
        encoder.source = encoder.source._replace(name=shared_name(encoder.source.name))
    best, parameters = checkpoints[0], in_fp16(recognizer.model, run)
    steps = [checkpoint.step for checkpoint in checkpoints]
    smaller = exported_recipe(recipe, to, encoder and encoder.source.name)
    name, about, licence = to.resolve().name, args.about, args.license
    card = model_card(name, run, recipe, steps, parameters, about, licence, address)
    write_run(to, smaller, recognizer, best.step, best.loss, card)
    if encoder and args.with_encoder and recipe.features.train == "none":
        copy_files(encoder.source.folder, to)
    if recipe.decode.lm:
        print(f"without the language model {recipe.decode.lm}: pass it on as a separate run")
    for other in recipe.decode.ensemble:
        print(f"without {other} of its ensemble: pass it on as a separate run")


def export_language_model(args: argparse.Namespace, to: Path, address: str) -> None:
    """Write the best weights of a language model, in fp16, as a run folder with its card.

    UserError, before anything is written, where it cannot be.
    """
    from asr.analysis.model_card import language_card
    from asr.config.loader import validate
    from asr.inference.derived import check_new, derived_recipe, write_run
    from asr.inference.load import load_language_model

    run = args.run
    if args.overrides or args.with_encoder:
        given = "--with-encoder" if args.with_encoder else args.overrides[0]
        raise UserError(f"{given}: changes nothing in {run}, a language model")
    check_new(to)
    trained = load_language_model(run)
    tree = derived_recipe(trained.recipe, to)
    for role in ("train", "valid"):
        tree["data"][role] = [Path(path).name for path in tree["data"][role]]
    tree["text"]["run"] = None
    tree["train"] |= OF_MACHINE
    step, loss = trained.checkpoint.step, trained.checkpoint.loss
    card = language_card(
        name=to.resolve().name,
        run=run,
        recipe=trained.recipe,
        tokens=trained.tokenizer.size,
        step=step,
        parameters=in_fp16(trained.model, run),
        about=args.about,
        licence=args.license,
        address=address,
    )
    write_run(to, validate(tree, f"--to {to}"), trained, step, loss, card)


def in_fp16(model: "Module", run: Path) -> int:
    """Convert the weights to fp16; -> their number. UserError for values that it cannot hold."""
    for name, weight in model.half().state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"{run}: {name} has values that fp16 cannot hold; pass on RUN itself")
    return sum(weight.numel() for weight in model.parameters())


def export_onnx(run: Path, overrides: Sequence[str], to: Path) -> None:
    """Write the ONNX files of a run. UserError where they cannot be written."""
    from asr.inference.derived import load_alone
    from asr.inference.onnx_export import write_onnx

    recipe, recognizer = load_alone(run, overrides, to)
    print(write_onnx(recognizer, recipe, to))
    print(f"{', '.join(sorted(path.name for path in to.iterdir()))} are in {to}")


def exported_recipe(recipe: "SpeechRecipe", to: Path, encoder: str | None) -> "Recipe":
    """The run's recipe without what belongs to this machine: paths, device, threads, workers.

    encoder: its name for others.
    """
    from asr.config.loader import validate
    from asr.config.schema import DataConfig
    from asr.inference.derived import derived_recipe

    tree = derived_recipe(recipe, to)
    tree["data"] |= {"corpus": None, "train": None, "valid": None, "test": {}}
    tree["data"]["workers"] = DataConfig().workers
    tree["features"]["encoder"] = encoder
    for key in ("noise_files", "room_responses"):  # null would be white noise, and no rooms
        if manifest := tree["features"][key]:
            tree["features"][key] = Path(manifest).name
    tree["train"] |= OF_MACHINE
    tree["decode"] |= {"lm": None, "ensemble": []}
    return validate(tree, f"--to {to}")


if __name__ == "__main__":
    run_command(main)

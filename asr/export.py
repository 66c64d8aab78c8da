"""A run to pass on: python -m asr.export RUN --to FOLDER or --push-to USER/NAME [--about TEXT.md]

Imports beyond the command line's happen where they are used, so that --help is fast.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from asr.arguments import CommandParser, run_folder
from asr.errors import UserError, run_command

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
    add("run", type=run_folder, help="a speech run's folder")
    parser.add_overrides()
    add("--to", type=Path, help="folder of the exported run")
    add("--push-to", metavar="USER/NAME", help="upload it to the Hugging Face Hub")
    add("--private", action="store_true", help="--push-to: visible to its owner alone")
    about = (
        "put into the card: data, licences, limits; metadata (language, license, datasets, ...) "
        "may stand at its begin as YAML between two lines of ---"
    )
    add("--about", type=Path, metavar="TEXT.md", help=about)
    add("--license", metavar="ID", help="of the weights, for the card: cc-by-4.0, mit, ...")
    args = parser.parse()
    text = {"about": args.about, "licence": args.license}
    if args.push_to:
        push(args.run, args.overrides, args.push_to, args.private, args.to, **text)
    elif args.to and not args.private:
        export(args.run, args.overrides, args.to, **text)
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
    licence: str | None = None,
) -> None:
    """Export the run, into a temporary folder unless `to` is given, and upload it to the hub."""
    from asr.inference.hub import check_repo, push_run

    check_repo(repo)
    with nullcontext() if to else TemporaryDirectory() as temporary:
        folder = to or Path(temporary) / repo.partition("/")[2]
        export(run, overrides, folder, about, licence, f"hf:{repo}")
        print(f"the run is at {push_run(folder, repo, private)}; load it as hf:{repo}")


def export(
    run: Path,
    overrides: Sequence[str],
    to: Path,
    about: Path | None = None,
    licence: str | None = None,
    address: str = "THIS_FOLDER",
) -> None:
    """Write the exported run folder, whose card names it as `address`.

    UserError, before anything is written, where it cannot be.
    """
    from asr.analysis.model_card import model_card
    from asr.inference.load import load_run_recipe
    from asr.inference.recognition import WITHOUT_OTHERS, Recognizer, check_new_folder, write_run
    from asr.training.checkpoint import choose

    recipe = load_run_recipe(run, overrides)
    check_new_folder(to)
    recognizer = Recognizer.load(run, [*overrides, *WITHOUT_OTHERS, "train.device=cpu"])
    checkpoints = choose(run, recipe.decode.checkpoint, recipe.decode.average)
    model = recognizer.model.half()
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"{run}: {name} has values that fp16 cannot hold; pass on RUN itself")
    best, parameters = checkpoints[0], sum(weight.numel() for weight in model.parameters())
    steps = [checkpoint.step for checkpoint in checkpoints]
    name, smaller = to.resolve().name, exported_recipe(recipe, to)
    card = model_card(name, run, recipe, steps, parameters, about, licence, address)
    write_run(to, smaller, recognizer, None, best.step, best.loss, card)
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


if __name__ == "__main__":
    run_command(main)

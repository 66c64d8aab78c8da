"""Train a recipe: python -m asr.train RECIPE.yaml [key.path=value ...] [--run DIR] [--resume]"""

from pathlib import Path

from asr.arguments import CommandParser, key_of
from asr.errors import EXIT_STOPPED, print_line, run_command
from asr.shipped import run_names


def main() -> int:
    """Parse the arguments, read the recipe, train."""
    parser = CommandParser(
        prog="python -m asr.train",
        description="Train the model that a recipe describes.",
        epilog="Every key of a recipe can be overridden: train.optimizer.lr=3e-4 seed=2 ... "
        "SIGTERM, Ctrl-C or a closed terminal finish the step, save, and exit with code "
        f"{EXIT_STOPPED}; a second one ends the run at once. Exit code 2: one line of error. "
        "Several GPUs: torchrun --nproc-per-node N -m -- asr.train RECIPE --run DIR; without the --"
        " torchrun takes --run for its --run-path.",
    )
    recipe = "a recipe, the name of a shipped one (demo), or a run folder, to resume that run"
    parser.add_argument("recipe", type=Path, help=recipe)
    parser.add_overrides()
    parser.add_argument("--run", type=Path, help="run folder (default: runs/ + the recipe's run)")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint, if there is one"
    )
    parser.add_argument(
        "--force", action="store_true", help="resume although recipe or data changed"
    )
    args = parser.parse()
    # Imported here, since torch takes seconds, which --help need not wait.
    from asr.config.loader import default_run, read_recipe
    from asr.training.trainer import train

    recipe = read_recipe(args.recipe, args.overrides)
    overridden = set(map(key_of, args.overrides))
    if str(args.recipe) in run_names() and not (recipe.train.init or args.resume):
        print_line(f"training from random weights; train.init={args.recipe} starts from its own")
    run = args.run or default_run(args.recipe, recipe, overridden)
    return train(recipe, run, args.resume, args.force, overridden)


if __name__ == "__main__":
    run_command(main)

"""The command that makes a run which a recipe or a command names, and which is not there."""

import shlex
from pathlib import Path

from asr.errors import UserError

# In the working directory, as commands name them; else those of the checkout.
RECIPES = (Path("recipes"), Path(__file__).parents[2] / "recipes")


def missing_run(run: Path, key: str = "") -> UserError:
    """The error for a run that is not there. key: the recipe's key that names it."""
    name = f"{key} = {run}" if key else str(run)
    return UserError(f"{name}: there is no such run. Make it with: {train_command(run)}")


def find_recipe(name: str) -> Path | None:
    """The file of a recipe that comes with the project; None if there is none of that name."""
    paths = (folder / f"{name}.yaml" for folder in RECIPES)
    return next((path for path in paths if path.is_file()), None)


def train_command(run: Path) -> str:
    """The command that trains a run: by its own recipe, by that of its name, or by any."""
    own = run / "recipe.yaml"
    if own.is_file():
        return f"python -m asr.train {_quoted(own)} --run {_quoted(run)} --resume"
    recipe = find_recipe(run.name)
    if recipe is None:
        return f"python -m asr.train RECIPE.yaml --run {_quoted(run)}"
    where = "" if run == Path("runs", run.name) else f" --run {_quoted(run)}"
    return f"python -m asr.train {_quoted(recipe)}{where}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))

"""The command that makes a run which a recipe or a command names, and which is not there."""

import shlex
from pathlib import Path

from asr.errors import UserError
from asr.shipped import not_installed, recipe_names


def missing_run(run: Path, key: str = "") -> UserError:
    """The error for a run that is not there. key: the recipe's key that names it."""
    name = f"{key} = {run}" if key else str(run)
    if (below := Path("runs") / run).is_dir():
        return UserError(f"{name}: there is no such run. Did you mean {below}?")
    if elsewhere := not_installed(run):
        return UserError(f"{name}: {elsewhere}")
    return UserError(f"{name}: there is no such run. Make it with: {train_command(run)}")


def train_command(run: Path) -> str:
    """The command that trains a run: by its stored recipe, by that of its name, or by any."""
    stored = run / "recipe.yaml"
    if stored.is_file():
        return f"python -m asr.train {_quoted(stored)} --run {_quoted(run)} --resume"
    if run.name not in recipe_names():
        return f"python -m asr.train RECIPE.yaml --run {_quoted(run)}"
    where = "" if run == Path("runs", run.name) else f" --run {_quoted(run)}"
    return f"python -m asr.train {run.name}{where}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))

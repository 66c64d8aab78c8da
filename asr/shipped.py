"""Recipes and trained runs that come with the package and have a name: demo, conformer; what to do
where a run is not there.

In a checkout they are in recipes/ and pretrained/ beside asr/; in a wheel, inside asr/. A file or
folder of the user with the same name takes precedence.
"""

import difflib
import re
import shlex
from pathlib import Path

from asr.errors import UserError

PACKAGE = Path(__file__).parent
RUNS = ("conformer", "las", "lm", "transformer")  # in pretrained/; a wheel has some (setup.cfg)
NAME = re.compile(r"\w{1,100}", re.ASCII)


def _folder(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def recipe_names() -> list[str]:
    """The names of the recipes, in alphabetical order."""
    return sorted(path.stem for path in _folder("recipes").glob("*.yaml"))


def find_recipe(path: Path, folder: Path) -> Path:
    """The file of a recipe: `path`, relative to `folder`, or the shipped recipe of that name.

    The name of a shipped run also names its recipe.
    """
    if NAME.fullmatch(str(path)) and not (folder / path).is_file():
        shipped = _folder("recipes") / f"{path}.yaml", _folder("pretrained") / path / "recipe.yaml"
        return next(filter(Path.is_file, shipped), folder / path)
    return folder / path


def find_run(path: Path) -> Path:
    """The folder of a run: `path`, or the shipped run of that name."""
    shipped = _folder("pretrained") / path
    named = NAME.fullmatch(str(path)) and not path.is_dir()
    return shipped if named and (shipped / "recipe.yaml").is_file() else path


def run_names() -> list[str]:
    """The shipped runs that this installation has."""
    return [name for name in RUNS if find_run(Path(name)) != Path(name)]


def not_installed(run: Path) -> str | None:
    """Where to get a shipped run that this installation lacks; None for other runs."""
    if str(run) not in RUNS or find_run(run) != run:
        return None
    return (
        f"this installation only has {' and '.join(run_names()) or 'no trained run'}; {run} is in "
        "pretrained/ of the project's repository: give the path of that folder"
    )


def is_installed(run: Path) -> bool:
    """Whether the run is in the installed package; commands do not write there."""
    return PACKAGE in run.absolute().parents


def missing_run(run: Path, key: str = "") -> UserError:
    """The error for a run that is not there. key: the recipe's key that names it."""
    name = f"{key} = {run}" if key else str(run)
    if (below := Path("runs") / run).is_dir():
        return UserError(f"{name}: there is no such run. Did you mean {below}?")
    if elsewhere := not_installed(run):
        return UserError(f"{name}: {elsewhere}")
    if run.parent.name == "pretrained" and run.name in run_names():  # outside the checkout
        return UserError(f"{name}: there is no such run. Did you mean {run.name}?")
    trained = [str(path) for path in Path("runs").glob("*")]
    if near := difflib.get_close_matches(str(run), [*run_names(), *trained], n=1, cutoff=0.8):
        return UserError(f"{name}: there is no such run. Did you mean {near[0]}?")
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

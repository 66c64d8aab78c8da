"""The grid of a sweep: `key=a,b,c` arguments -> one Trial for every combination, named by it.

Only keys with several values stand in a name. Commas within brackets, braces or quotes belong to
the value: features.speed=[0.9,1.1],[1.0] has two values.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from asr.errors import UserError
from asr.recipe import RecipeError, flat, read_recipe
from asr.scoring.groups import short_names
from asr.settings import Recipe

_LONGEST_NAME = 200  # bytes; file systems allow 255
_MOST = 10_000


@dataclass(frozen=True)
class Trial:
    """One run of the grid."""

    name: str  # of its folder
    overrides: tuple[str, ...]  # key.path=value, as asr.train takes them
    recipe: Recipe


def read_grid(recipe: Path, arguments: Sequence[str]) -> list[Trial]:
    """Every run of the grid, each recipe validated; the last key varies fastest.

    Raises UserError with one line for the first argument or combination that cannot be used.
    """
    axes = dict(map(_axis, arguments))
    if len(axes) < len(arguments):
        keys = [argument.partition("=")[0].strip() for argument in arguments]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"command line: {twice} stands twice; give its values in one list")
    size = 1
    for values in axes.values():
        size *= len(values)
    if size > _MOST:
        raise UserError(f"command line: a grid of {size} runs; at most {_MOST} are allowed")
    rows = [tuple(zip(axes, row, strict=True)) for row in product(*axes.values())]
    overrides = [tuple(f"{key}={value}" for key, value in row) for row in rows]
    recipes = [_checked(recipe, changes) for changes in overrides]
    names = _names(axes, rows, flat(recipes[0]))
    return [Trial(*parts) for parts in zip(names, overrides, recipes, strict=True)]


def split_values(text: str) -> list[str]:
    """At the commas outside of brackets, braces and quotes: "[1,2],3" -> ["[1,2]", "3"]."""
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        depth += (sign in "[{") - (sign in "]}") if not quote else 0
        if sign == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += sign
    return [value.strip() for value in values]


def _axis(argument: str) -> tuple[str, list[str]]:
    key, equals, text = argument.partition("=")
    key, values = key.strip(), split_values(text)
    if not equals or not key:
        raise UserError(f"command line: {argument!r} is not of the form key.path=a,b,c")
    if "" in values:
        raise UserError(f"command line: {argument!r} has an empty value; write {key}=a,b,c")
    if len(set(values)) < len(values):
        raise UserError(f"command line: {argument!r} has a value twice")
    if key.startswith("decode.") and len(values) > 1:
        raise UserError(
            f"command line: {argument} would train the same model {len(values)} times; train it "
            f"once, then give {key}=... and --out to python -m asr.evaluate RUN"
        )
    if key == "run":
        raise UserError("command line: a sweep names its runs itself; choose their folder by --out")
    return key, values


def _checked(path: Path, overrides: tuple[str, ...]) -> Recipe:
    try:
        return read_recipe(path, overrides)
    except RecipeError as error:
        raise UserError(f"{error} (of {' '.join(overrides) or 'the recipe itself'})") from None


def _names(
    axes: dict[str, list[str]], rows: Iterable[tuple[tuple[str, str], ...]], keys: Iterable[str]
) -> list[str]:
    varying = [key for key, values in axes.items() if len(values) > 1]
    short = short_names(varying, {*keys, *varying})
    names = []
    for number, row in enumerate(rows):
        parts = [f"{short[key]}={value}" for key, value in row if key in short]
        name = re.sub(r"[^\w.,+=\[\]-]", "-", ",".join(parts)) or "run"
        crowded = name in names or len(name.encode()) > _LONGEST_NAME
        names.append(f"{number:04d}" if crowded else name)
    return names

"""What pydantic finds wrong with a recipe, in one line."""

import difflib
from collections.abc import Iterable
from typing import Any, get_args

from pydantic_core import ErrorDetails

from asr.settings import RECIPES, Recipe, Settings


def plain_keys(location: Iterable[Any]) -> tuple[str, ...]:
    """Pydantic puts a union's chosen tag into the path; a recipe has no such key."""
    keys = list(location)
    if len(keys) > 1 and keys[0] == "model" and keys[1] in KINDS:
        del keys[1]
    return tuple(map(str, keys))


def explain(detail: ErrorDetails, keys: tuple[str, ...], kind: type[Recipe]) -> str:
    """The wrong key, its value and what it should be, or which key may have been meant."""
    name = ".".join(keys)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], _siblings(detail["loc"], kind), n=1, cutoff=0.5)
        return f"{name} is not a recipe key.{f' Did you mean {near[0]!r}?' if near else ''}"
    if detail["type"] == "missing":
        return f"{name} is missing."
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if detail["type"] in ("model_type", "model_attributes_type"):
        inner = _siblings((*detail["loc"], ""), kind)
        message = f"should hold keys of its own, {{{inner[0]}: VALUE, ...}}"
    if not keys:  # of several groups, which the message names
        return f"{message}."
    value = repr(detail["input"])
    return f"{name} = {value if len(value) < 60 else value[:57] + '...'}: {message}."


def _siblings(location: tuple[Any, ...], recipe: type[Recipe]) -> list[str]:
    """The keys that may stand where an unknown one stood."""
    group: Any = recipe
    for key in location[:-1]:
        if key in KINDS:
            group = next(kind for kind in _groups(group) if key in _kind_of(kind))
            continue
        fields = next((g.model_fields for g in _groups(group) if key in g.model_fields), {})
        group = fields[key].annotation if key in fields else None
    return [name for one in _groups(group) for name in one.model_fields]


def _groups(annotation: Any) -> list[type[Settings]]:
    """The Settings classes in a type such as `SpecAugment | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for part in get_args(annotation) for found in _groups(part)]


def _kind_of(group: type[Settings]) -> tuple[str, ...]:
    return get_args(group.model_fields["kind"].annotation) if "kind" in group.model_fields else ()


KINDS = {
    kind
    for recipe in RECIPES.values()
    for group in _groups(recipe.model_fields["model"].annotation)
    for kind in _kind_of(group)
}

"""Recipes whose values are at, beside and beyond the bounds of the schema, or of another type.

`odd_recipe` walks the pydantic classes of asr/config/: a key's type and bounds give its values. It
starts from a recipe that is trained in a second; legal values may be odd, but not so large that the
training only takes long (CAPS).
"""

import math
import random
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from fuzz_files import TEXTS, odd_value
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asr.config.language import LanguageRecipe
from asr.config.schema import SpeechRecipe
from asr.images.config import ImageRecipe

RECIPES = {"speech": SpeechRecipe, "language": LanguageRecipe, "images": ImageRecipe}
# Legal, but the command would only take long: more threads, processes or batches.
CAPS = {"threads": 4, "workers": 2, "accumulate": 8, "wer_utterances": 8, "samples": 8, "beam": 40}
# Made on this machine in a minute, where missing.
SLOW = ("spoken-numbers",)
NUMBERS = (0, 1, 2, 3, 5, 0.5, 1.0, -1, 1e-9, 1e308, 5e-324, 2**31, 2**63, 10**18, math.nan)
NUMBERS += (math.inf,)
WORDS = ("1e-3", "yes", "0x10", "1_000", "1:30", "~", "null", "=", "<<", "2024-01-01", "é")
WORDS += ("\ud800",)
TAGGED = ("!!python/name:os.system", "!!binary aGk=", "&a [*a]", "!x 1", "<<: {a: 1}", "? {a: 1}")


def odd_recipe(tree: dict[str, Any], paths: list[str], chance: random.Random) -> dict[str, Any]:
    """The tree of a recipe with one to three odd values; paths: files of odd kinds."""
    kind = RECIPES[tree["task"]]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _change(tree, kind, paths, chance)
    return tree


def as_text(tree: dict[str, Any], chance: random.Random) -> str:
    """YAML, at times with a tag, an alias or a block that is nested deeply."""
    text = yaml.safe_dump(tree, sort_keys=False)
    if chance.random() < 0.05:
        lines = text.splitlines()
        at = chance.randrange(len(lines))
        lines[at] = (
            f"{lines[at].partition(':')[0]}: {chance.choice((*TAGGED, '[' * 900, '{a: ' * 50))}"
        )
        text = "\n".join(lines)
    return text


def _change(group: dict[str, Any], kind: type[BaseModel], paths: list[str], chance: Any) -> None:
    names = list(kind.model_fields)
    name = chance.choice(names)
    inner = _groups(kind.model_fields[name].annotation)
    old = group.get(name)
    if inner and isinstance(old, dict) and chance.random() < 0.9:
        fitting = [one for one in inner if old.keys() <= one.model_fields.keys()] or inner
        _change(old, chance.choice(fitting), paths, chance)
    elif chance.random() < 0.03:
        group[chance.choice((*TEXTS, "lr", "x" * 200))] = odd_value(chance)
    else:
        field = kind.model_fields[name]
        value = field_value(field.annotation, field.metadata, paths, chance)
        if name in CAPS and isinstance(value, int) and 0 < value < 1 << 31:
            value = min(value, CAPS[name])
        group[name] = "librispeech" if value in SLOW else value


def field_value(annotation: Any, metadata: list[Any], paths: list[str], chance: Any) -> Any:
    """A value for a key of that type, mostly at or beyond its bounds."""
    draw = chance.random()
    if draw < 0.08:
        return odd_value(chance)
    if draw < 0.12:
        return chance.choice(WORDS)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return field_value(parts[0], [*metadata, *parts[1:]], paths, chance)
    if origin in (Union, types.UnionType):
        return field_value(chance.choice(parts), metadata, paths, chance)
    if origin is Literal:
        return chance.choice((*parts, *parts, f"{parts[0]}x", list(parts)))
    if origin is tuple:
        count = chance.choice((0, 1, 2, 2, 3, 21, 300))
        return [field_value(parts[0], metadata, paths, chance) for _ in range(count)]
    if origin is dict:
        name = chance.choice((*TEXTS, "test", "valid", ".x"))
        return {name: field_value(parts[1], metadata, paths, chance)}
    return _plain_value(annotation, metadata, paths, chance)


def _plain_value(kind: Any, metadata: list[Any], paths: list[str], chance: Any) -> Any:
    if _groups(kind):
        group: dict[str, Any] = {}
        for _ in range(chance.randint(0, 3)):
            _change(group, kind, paths, chance)
        return group
    if kind is Path:
        return chance.choice(paths)
    if kind is bool:
        return chance.choice((True, False, True, False, 1, "yes"))
    if kind in (int, float):
        return _number(kind, metadata, chance)
    return chance.choice((*TEXTS, "a/b", "x" * 199, "con", "cuda:7"))


def _number(kind: type, metadata: list[Any], chance: Any) -> Any:
    flat = [m for one in metadata for m in (one.metadata if isinstance(one, FieldInfo) else [one])]
    bounds = [
        getattr(m, name) for m in flat for name in ("ge", "gt", "le", "lt") if hasattr(m, name)
    ]
    near = [b + step for b in bounds for step in (-1, 0, 1)]
    if kind is float:
        near += [math.nextafter(b, side) for b in bounds for side in (-math.inf, math.inf)]
    value = chance.choice((*near, *near, *NUMBERS))
    if bounds and chance.random() < 0.5 and math.isfinite(value):  # legal, mostly
        least, most = min(bounds), max(bounds) if len(bounds) > 1 else math.inf
        value = kind(min(max(value, least), most))
    return value if chance.random() < 0.9 else str(value)


def _groups(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [group for part in get_args(annotation) for group in _groups(part)]

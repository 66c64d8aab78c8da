"""Write docs/recipes.md from the recipe schema: python tests/recipe_reference.py > docs/recipes.md

Types, bounds and defaults come from pydantic's fields, meanings from the comments on them.
"""

import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from asr.config.json_schema import meaning
from asr.config.language import LanguageRecipe
from asr.config.loader import groups_in
from asr.config.schema import Config, Recipe, SpeechRecipe
from asr.images.config import ImageRecipe

HEAD = """# Recipe keys

A recipe is a YAML file with the keys that differ from these defaults. `base: OTHER.yaml`, beside
it, or `base: demo`, a shipped recipe (`python -m asr.recipe --list`), starts from another; another
`model.kind` replaces the base's model. The command line overrides any key:
`python -m asr.train demo seed=2 train.epochs=30`. Unknown keys and values out of bounds are
errors. Relative paths start from the working directory. `python -m asr.recipe RECIPE.yaml` prints
every key, resolved.

Editors with the YAML language server complete and check the keys of a recipe whose first line is
`# yaml-language-server: $schema=schema.json`, beside a copy of `recipes/schema.json`
(`python -m asr.recipe --schema`).

Bounds are intervals: [0, 1) includes 0 but not 1. `python tests/recipe_reference.py` writes this
page from the comments in `asr/config/` and `asr/images/config.py`.
"""
TASKS = (
    ("Every task", Recipe, ("task", "run", "seed", "train", "stages")),
    ("Speech recognition (`task: speech`)", SpeechRecipe, ()),
    ("Language models (`task: language`)", LanguageRecipe, ()),
    ("Images (`task: images`)", ImageRecipe, ()),
)
UNBOUNDED = 1_000_000_000  # the largest value of integers without a practical limit
PLAIN = {bool: "bool", str: "text", Path: "path", type(None): "`null`"}


Heading = tuple[str, str]  # titles of a task and of a section within it
Shown = dict[tuple[str, ...], Any]  # a row, or a group -> where it is


def reference() -> str:
    """The text of the page."""
    lines, shown = [HEAD], {}
    for title, recipe, keys in TASKS:
        own = keys or [key for key in recipe.model_fields if key not in TASKS[0][2]]
        lines += [f"## {title}", ""]
        lines += _section("", (title, title), recipe, own, shown)
    return "\n".join(lines).rstrip() + "\n"


def rows(recipe: type[Config], path: str = "") -> Iterator[tuple[str, str]]:
    """Every key below `recipe` by its dotted path, with its meaning ("" where it has none)."""
    for key, field in recipe.model_fields.items():
        groups = groups_in(field.annotation)
        if not groups or _is_optional(field):
            yield f"{path}{key}", meaning(recipe, key)
        for group in groups:
            yield from rows(group, f"{path}{key}.")


def _section(
    path: str, where: Heading, config: type[Config], keys: Iterable[str], shown: Shown
) -> Iterator[str]:
    """The table of a group's keys, then a section for each group within it."""
    yield from _table(path, where, config, keys, shown)
    for key in keys:
        groups = groups_in(config.model_fields[key].annotation)
        for group in groups:
            inner = f"`{path}{key}`" + (f" (`kind: {kind_of(group)}`)" if len(groups) > 1 else "")
            if (path, key, repr(group)) in shown:
                continue
            shown[path, key, repr(group)] = inner
            text = re.sub("^Section `.*?`: ", "", inspect.getdoc(group) or "")
            yield from (f"### {inner}", "", _markdown(text[:1].upper() + text[1:]), "")
            within = where[0], inner
            yield from _section(f"{path}{key}.", within, group, group.model_fields, shown)


def _table(
    path: str, where: Heading, config: type[Config], keys: Iterable[str], shown: Shown
) -> Iterator[str]:
    """A row for each key; the names of keys that an earlier table has, if there are two or more."""
    fields = {key: config.model_fields[key] for key in keys}
    plain = [k for k, f in fields.items() if not groups_in(f.annotation) or _is_optional(f)]
    rows = {}
    for key in sorted(plain, key=lambda key: key != "kind"):
        field = fields[key]
        types = type_text(field.annotation, field.metadata)
        rows[key] = (key, types, default_text(field), _markdown(meaning(config, key)))
    repeated: dict[Heading, list[str]] = {}
    for key, row in rows.items():
        if key != "kind" and row in shown:
            repeated.setdefault(shown[row], []).append(key)
    repeated = {other: names for other, names in repeated.items() if len(names) > 1}
    for names in repeated.values():
        for key in names:
            del rows[key]
    shown |= dict.fromkeys(rows.values(), where)
    if rows:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
        yield from (f"| `{path}{key}` | {' | '.join(row[1:])} |" for key, row in rows.items())
        yield ""
    for (task, title), names in repeated.items():
        other = "" if task == where[0] else " of speech"
        yield from (f"As in {title}{other}: {', '.join(f'`{name}`' for name in names)}.", "")


def _is_optional(field: FieldInfo) -> bool:
    """Whether a group may be null or a plain value, so that it needs its own row."""
    parts = get_args(field.annotation)
    return not all(groups_in(part) for part in parts if get_origin(part) is not Literal)


def kind_of(config: type[Config]) -> str:
    """`las` for the group whose key `kind` must be `las`."""
    return get_args(config.model_fields["kind"].annotation)[0]


def type_text(annotation: Any, metadata: Any = ()) -> str:
    """A type with its bounds in words: `integer, 1 to 256`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for one in parts[1:] for m in getattr(one, "metadata", [one])]
        return type_text(parts[0], [*inner, *metadata])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, types.UnionType):
        return "; or ".join(type_text(part) for part in parts)
    if origin in (tuple, list):
        if origin is tuple and parts[-1] is not Ellipsis:
            return f"list of {len(parts)}: {type_text(parts[0])}"
        return f"list{_bounds(metadata, ' of length ')}: {type_text(parts[0])}"
    if origin is dict:
        if parts[1] is Any:
            return "keys of that section"
        return f"name: {type_text(parts[1])}"
    if groups_in(annotation):
        return "keys below"
    if annotation in (int, float):
        return annotation.__name__ + _bounds(metadata, " ")
    return PLAIN[annotation] + _pattern(metadata)


def _bounds(metadata: Any, before: str) -> str:
    """` [1, 64]`, ` ≥ 1` or ` > 0`; "" without bounds."""
    actual = {
        name: getattr(one, name)
        for one in metadata
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length")
        if getattr(one, name, None) is not None
    }
    low = actual.get("ge", actual.get("min_length", actual.get("gt")))
    high = actual.get("le", actual.get("max_length", actual.get("lt")))
    if low is None and high is None:
        return ""
    if low is None:
        return f"{before}{'<' if 'lt' in actual else '≤'} {_number(high)}"
    if high is None or high >= UNBOUNDED:
        return f"{before}{'>' if 'gt' in actual else '≥'} {_number(low)}"
    left, right = "(" if "gt" in actual else "[", ")" if "lt" in actual else "]"
    return f"{before}{left}{_number(low)}, {_number(high)}{right}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _pattern(metadata: Any) -> str:
    patterns = [one.pattern for one in metadata if getattr(one, "pattern", None)]
    return f" matching `{patterns[0]}`".replace("|", "\\|") if patterns else ""


def default_text(field: FieldInfo) -> str:
    """The default as a recipe writes it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _markdown(text: str) -> str:
    """Text in one line of a table: no markup but code."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(reference(), end="")

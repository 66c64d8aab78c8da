"""YAML file + overrides -> a validated Recipe, or one line that explains the mistake.

A recipe may name another as its `base:` and then holds only what differs. A model of another `kind`
replaces the base's model completely, since the keys of one kind mean nothing to the other.
Only plain YAML is read: no tags, no anchors, no environment variables, no code.
"""

import difflib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from operator import eq
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from asr.config.schema import Config, Recipe
from asr.errors import UserError
from asr.io import atomic_write, read_small_file

# Task -> its recipe class, imported when a recipe names the task.
RECIPES = {
    "speech": "asr.config.schema:SpeechRecipe",
    "language": "asr.config.language:LanguageRecipe",
    "images": "asr.images.config:ImageRecipe",
}
MAX_BYTES = 1_000_000
MAX_DEPTH = 20


class RecipeError(UserError):
    """A recipe that cannot be used; the message names file, dotted key and remedy."""


def read_recipe(path: Path | str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file with its bases and the command line's `key.path=value` overrides.

    Raises RecipeError with one line on any mistake.
    """
    path = Path(path)
    tree = _with_bases(path, ())
    changed = set()
    for override in overrides:
        keys, change = _parse_override(override)
        tree = _merge(tree, change)
        changed.add(keys)
    return validate(tree, str(path), changed)


def validate(tree: Mapping[str, Any], place: str, overridden: Iterable[tuple] = ()) -> Recipe:
    """A plain mapping -> Recipe.

    Raises RecipeError naming `place`, or the command line for a key among `overridden`.
    """
    task = tree.get("task", "speech")
    if not isinstance(task, str) or task not in RECIPES:
        raise RecipeError(f"{place}: task = {task!r}: must be one of {', '.join(RECIPES)}.")
    kind = pkgutil.resolve_name(RECIPES[task])
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    keys = _recipe_keys(first["loc"], kind)
    # Of the two keys one may be the group of the other: eq stops at the end of the shorter.
    if keys and any(all(map(eq, keys, changed)) for changed in overridden):
        place = "command line"
    more = f" ({len(details) - 1} more like it)" if len(details) > 1 else ""
    raise RecipeError(f"{place}: {_explain(first, keys, kind)}{more}")


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write every key, as a file that read_recipe reads."""
    atomic_write(path, as_yaml(recipe))


def as_yaml(recipe: Recipe) -> str:
    """Every key with its value, in the catalogue's order."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key by its dotted path: {"model.listener.norm": "ba", ...}."""
    return dict(leaves(recipe.model_dump(mode="json")))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything in nested mappings that is not a mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Files and overrides


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases (a few bytes could expand to gigabytes), repeated keys and dates."""

    # No key is a date, but a run may be named after one.
    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias in the place of a value."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(None, None, "aliases are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a repeated key, of which PyYAML would silently keep the last."""
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"key {key.value!r} is repeated"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in seen:
        raise RecipeError(f"{path}: base names a recipe that is based on it: remove the loop.")
    tree = _load(path)
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base must be the name of a recipe file, it is {base!r}.")
    base_path = path.parent / base
    if not base_path.is_file():
        raise RecipeError(f"{path}: base {base!r} does not exist (looked for {base_path}).")
    return _merge(_with_bases(base_path, (*seen, resolved)), tree)


def _load(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(read_small_file(path, MAX_BYTES), PlainLoader)
    except UserError as error:
        raise RecipeError(f"{error}; is this a recipe?") from None
    except FileNotFoundError:
        names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise RecipeError(f"{path}: there is no such recipe.{hint}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise RecipeError(f"{path}:{line}: not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(f"{path}: not valid YAML: {reason}.") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values; see recipes/demo.yaml")
    return tree


def _parse_override(text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The override `a.b=1` -> its keys (a, b) and the change {a: {b: 1}}."""
    name, equals, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise RecipeError(f"command line: {text!r} is not of the form key.path=value.")
    try:
        change = yaml.load(value, PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RecipeError(f"command line: the value in {text!r} is not valid YAML.") from None
    for key in reversed(keys):
        change = {key: change}
    return keys, change


def _merge(base: Mapping[str, Any], change: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """`change` merged into `base`, mapping by mapping; a model of another kind replaces the old."""
    if depth > MAX_DEPTH:
        raise RecipeError(f"recipe keys are nested more than {MAX_DEPTH} deep.")
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            is_model = depth == 0 and key == "model"
            if not (is_model and value.get("kind", old.get("kind")) != old.get("kind")):
                value = _merge(old, value, depth + 1)
        merged[key] = value
    return merged


# Errors


def _explain(detail: ErrorDetails, keys: tuple[str, ...], recipe: type[Recipe]) -> str:
    """The wrong key, its value and what it should be, or which key may have been meant."""
    name = ".".join(keys)
    if detail["type"] == "extra_forbidden":
        siblings = _sibling_keys(detail["loc"], recipe)
        near = difflib.get_close_matches(keys[-1], siblings, n=1, cutoff=0.5)
        return f"{name} is not a recipe key.{f' Did you mean {near[0]!r}?' if near else ''}"
    if detail["type"] == "missing":
        return f"{name} is missing."
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if detail["type"] in ("model_type", "model_attributes_type"):
        inner = _sibling_keys((*detail["loc"], ""), recipe)
        message = f"should hold keys of its own, {{{inner[0]}: VALUE, ...}}"
    if not keys:  # of several groups, which the message names
        return f"{message}."
    value = repr(detail["input"])
    return f"{name} = {value if len(value) < 60 else value[:57] + '...'}: {message}."


def _recipe_keys(location: Iterable[Any], recipe: type[Recipe]) -> tuple[str, ...]:
    """Pydantic's path without the kind of model, which it inserts after `model`."""
    keys = list(location)
    if len(keys) > 1 and keys[0] == "model" and keys[1] in _model_kinds(recipe):
        del keys[1]
    return tuple(map(str, keys))


def _sibling_keys(location: tuple[Any, ...], recipe: type[Recipe]) -> list[str]:
    """The keys that are allowed where pydantic found the last one of `location`."""
    group: Any = recipe
    kinds = _model_kinds(recipe)
    for key in location[:-1]:
        if key in kinds:
            group = kinds[key]
            continue
        fields = next((g.model_fields for g in _groups(group) if key in g.model_fields), {})
        group = fields[key].annotation if key in fields else None
    return [name for one in _groups(group) for name in one.model_fields]


def _model_kinds(recipe: type[Recipe]) -> dict[str, type[Config]]:
    """The values of `model.kind` of a task, each with its class."""
    groups = _groups(recipe.model_fields["model"].annotation)
    return {get_args(group.model_fields["kind"].annotation)[0]: group for group in groups}


def _groups(annotation: Any) -> list[type[Config]]:
    """The config classes in a type such as `SpecAugmentConfig | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [group for part in get_args(annotation) for group in _groups(part)]

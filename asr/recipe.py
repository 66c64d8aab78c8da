"""Every key of a recipe with its value: python -m asr.recipe RECIPE.yaml [key.path=value ...]

YAML file + overrides -> a validated Recipe.
A recipe may name another as its `base:` and then holds only what differs. A model whose `kind`
differs from the base's replaces it whole, since its keys belong to another thing.
Only plain YAML is read: no tags, no anchors, no environment variables, no code.
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError

from asr.errors import UserError, writing
from asr.settings import RECIPES, Recipe
from asr.settings.mistakes import KINDS, explain, plain_keys

MAX_BYTES = 1_000_000
MAX_DEPTH = 20


class RecipeError(UserError):
    """A recipe that cannot be used; the message names file, dotted key and remedy."""


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases (a few bytes could stand for gigabytes), repeated keys and dates."""

    # No key is a date, but a run may be named after one.
    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias where a value should stand."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(None, None, "aliases are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice: PyYAML would keep the last in silence."""
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    None, None, f"key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_recipe(path: Path | str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file with its bases and the command line's `key.path=value` overrides.

    Raises RecipeError with one line on any mistake.
    """
    path = Path(path)
    tree = _with_bases(path, ())
    changed = set()
    for override in overrides:
        keys, value = _parse_override(override)
        tree = _merge(tree, _nested(keys, value))
        changed.add(tuple(keys))
    return validate(tree, str(path), changed)


def validate(tree: Mapping[str, Any], place: str, overridden: Iterable[tuple] = ()) -> Recipe:
    """A plain mapping -> Recipe; `place` and the overridden key paths go into the error line."""
    kind = _recipe_kind(tree, place)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    keys = plain_keys(first["loc"])
    if keys and any(
        keys[: len(changed)] == changed or changed[: len(keys)] == keys for changed in overridden
    ):
        place = "command line"
    more = f" ({len(details) - 1} more like it)" if len(details) > 1 else ""
    raise RecipeError(f"{place}: {explain(first, keys, kind)}{more}")


def _recipe_kind(tree: Mapping[str, Any], place: str) -> type[Recipe]:
    task = tree.get("task", "speech")
    if not isinstance(task, str) or task not in RECIPES:
        raise RecipeError(f"{place}: task = {task!r}: must be one of {', '.join(RECIPES)}.")
    return RECIPES[task]


def write_recipe(recipe: Recipe, path: Path) -> None:
    """The fully resolved recipe: every key, as a file that read_recipe takes; whole or not."""
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        part.write_text(as_yaml(recipe), encoding="utf-8")
        part.replace(path)


def as_yaml(recipe: Recipe) -> str:
    """Every key with its value, in the catalogue's order."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key by its dotted path: {"model.listener.norm": "ba", ...}."""
    return dict(_leaves(recipe.model_dump(mode="json"), ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in seen:
        raise RecipeError(
            f"{path}: base names a recipe that is based on this one. Remove the ring."
        )
    tree = _load(path)
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base must be the name of a recipe file, it is {base!r}.")
    base_path = path.parent / base
    if not base_path.is_file():
        raise RecipeError(f"{path}: base {base!r} is not there (looked for {base_path}).")
    return _merge(_with_bases(base_path, (*seen, resolved)), tree)


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{path}: larger than {MAX_BYTES} bytes; is this a recipe?")
        tree = yaml.load(path.read_text(encoding="utf-8"), PlainLoader)
    except FileNotFoundError:
        raise RecipeError(f"{path}: there is no such recipe.{_nearest_file(path)}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise RecipeError(f"{path}:{line}: not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(f"{path}: not valid YAML: {reason}.") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise RecipeError(
            f"{path}: a recipe is a mapping of keys to values; see recipes/demo.yaml."
        )
    return tree


def _parse_override(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"command line: {text!r} is not of the form key.path=value.")
    try:
        return keys, yaml.load(value, PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RecipeError(f"command line: the value in {text!r} is not valid YAML.") from None


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _merge(base: Mapping[str, Any], change: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """`change` laid over `base`, mappings key by key."""
    if depth > MAX_DEPTH:
        raise RecipeError(f"recipe keys are nested more than {MAX_DEPTH} deep.")
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merge = both and not _another_model(old, value)
        merged[key] = _merge(old, value, depth + 1) if merge else value
    return merged


def _another_model(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the new group says kind: transformer, and the old one's keys are those of las."""
    kinds = old.get("kind"), new.get("kind", old.get("kind"))
    return kinds[0] != kinds[1] and all(str(kind) in KINDS for kind in kinds)


def _nearest_file(path: Path) -> str:
    there = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def main() -> int:
    """Prints the recipe; 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.recipe", description="Show every key of a recipe with its value."
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    try:  # not asr.command.run, which no room below the commands may import
        print(as_yaml(read_recipe(args.recipe, args.overrides)), end="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

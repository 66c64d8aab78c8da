"""YAML file + overrides -> a validated Recipe, or one line that explains the mistake.

A recipe may name another as its `base:` and then holds only what differs. A model of another `kind`
replaces the base's model completely, since the keys of one kind mean nothing to the other.
Only plain YAML is read: no tags, no aliases, no environment variables, no code.
"""

import difflib
import json
import pkgutil
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import eq
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from asr.config.schema import Config, Recipe, SpeechRecipe
from asr.errors import UserError
from asr.io import atomic_write, read_small_file
from asr.shipped import find_recipe, not_installed, recipe_names

# Task -> its recipe class, imported when a recipe names the task.
RECIPES = {
    "speech": "asr.config.schema:SpeechRecipe",
    "language": "asr.config.language:LanguageRecipe",
    "images": "asr.images.config:ImageRecipe",
}
COMMAND_LINE = "command line"
MAX_BYTES = 100_000  # PyYAML needs seconds for them
MAX_BASES = 10
MAX_DEPTH = 20
MAX_DIGITS = 100
MAX_MESSAGE = 200  # characters; pydantic's may have the whole value
INVALID = (yaml.YAMLError, ValueError, OverflowError)  # OverflowError: of "\\Uffffffff"
IN_WORDS = {  # pydantic's types of errors whose messages name types of Python
    "string_type": "should be text; write it in quotes",
    "tuple_type": "should be a list, [VALUE, ...]",
    "dict_type": "should hold names with values, {NAME: VALUE, ...}",
}
SCALARS = ("bool", "float", "int", "null")
NAMED = ("test", "lr_factors")  # mappings of free names, which {} empties
NEEDED = {  # key -> what it changes nothing without, in words, and the setting to add
    "decode.lm_weight": ("a language model", "decode.lm=RUN_OR_NGRAMS"),
    "decode.lm_unit": ("a language model", "decode.lm=RUN_OR_NGRAMS"),
    "train.new_vocabulary": ("a trained model", "train.init=RUN"),
}
NO_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters and surrogates


class RecipeError(UserError):
    """A recipe that cannot be used; the message names file, dotted key and remedy."""


def read_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file with its bases and the command line's `key.path=value` overrides.

    path: a file, the name of a shipped recipe (`demo`), or a run folder, whose recipe is read. With
    that of the run in train.init, train.new_vocabulary, which made the run's own, is false unless
    it is overridden. Raises RecipeError with one line on any mistake.
    """
    path = find_recipe(Path(path), Path())
    if (path / "recipe.yaml").is_file():
        path /= "recipe.yaml"
    recipe, key = _overridden(_with_bases(path), overrides, str(path)), "train.new_vocabulary"
    init = recipe.train.init
    is_own = init and init.resolve() == path.parent.resolve()
    is_asked = any(text.startswith(key) for text in overrides)
    if recipe.train.new_vocabulary and is_own and not is_asked:
        recipe = override(recipe, [f"{key}=false"], str(path))
    return recipe


def default_run(path: Path | str, recipe: Recipe, overridden: Container[str]) -> Path:
    """The folder to train in: `path` if it is a run folder and `run` is not overridden, else runs/
    and the recipe's `run`.
    """
    path = Path(path)
    is_run = (path / "recipe.yaml").is_file() and "run" not in overridden
    return path if is_run else Path("runs") / recipe.run


def override(recipe: Recipe, overrides: Iterable[str], source: str) -> Recipe:
    """The recipe with `key.path=value` overrides. Raises RecipeError as read_recipe does."""
    return _overridden(recipe.model_dump(mode="json"), overrides, source)


def _overridden(tree: dict[str, Any], overrides: Iterable[str], source: str) -> Recipe:
    if isinstance(overrides, str | dict):
        is_text = isinstance(overrides, str)
        texts = [overrides] if is_text else [f"{k}={v}" for k, v in overrides.items()]
        raise RecipeError(f"overrides = {_shown(overrides)}: must be a list, {texts}.")
    changed, changes = set(), {}
    for text in overrides:
        keys, change = _parse_override(text)
        if keys[-1] in NAMED:  # {} empties the mapping of the file, whatever is added to it then
            tree = _merge(tree, change)
        changes = _merge(changes, change, top=False)
        changed.add(keys)
    # Together, for model.kind replaces the model of the file, but no other override.
    recipe = validate(_merge(tree, changes), source, changed)
    _check_effect(recipe, changes)
    return recipe


def _check_effect(recipe: Recipe, changes: Mapping[str, Any]) -> None:
    """Raise RecipeError where the command line changes a setting of what is not there, such as a
    norm or a language model.

    A recipe may have one beside another norm, so that a sweep over norms can start from it.
    """
    settings = flat(recipe)
    for key, value in leaves(changes):
        section, _, name = key.rpartition(".")
        norm, reason = settings.get(f"{section}.norm"), None
        if name == "recurrent_gain" and norm != "ba":
            reason = "only ba has this gain"
        elif name in ("eps", "norm_layers", "zero_variance") and norm == "none":
            reason = "it changes nothing"
        if reason:
            fault = f"does not fit {section}.norm = {norm}: {reason}."
            raise RecipeError(f"{COMMAND_LINE}: {key} = {value} {fault}")
        what, remedy = NEEDED.get(key, ("", ""))
        if remedy and settings[remedy.partition("=")[0]] is None:
            raise RecipeError(
                f"{COMMAND_LINE}: {key} = {value} changes nothing without {what}: add {remedy}."
            )


def parse_recipe(text: str, source: str) -> Recipe:
    """The text of as_yaml -> Recipe. Raises RecipeError, which names `source`."""
    return validate(_parse(text, source), source)


def validate(tree: Mapping[str, Any], source: str, overridden: Iterable[tuple] = ()) -> Recipe:
    """A plain mapping -> Recipe.

    Raises RecipeError naming `source`, or the command line for a key among `overridden`.
    """
    task = tree.get("task", "speech")
    if not isinstance(task, str) or task not in RECIPES:
        raise RecipeError(f"{source}: task = {_shown(task)}: must be one of {', '.join(RECIPES)}.")
    kind = pkgutil.resolve_name(RECIPES[task])
    try:
        # As JSON, since strict types of Python would be tuples and paths; of JSON, lists and text.
        recipe = kind.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        where = COMMAND_LINE if any(keys[:1] == ("stages",) for keys in overridden) else source
        for number in range(len(recipe.stages)):
            at_stage(recipe, number + 1, f"{where}: stages[{number}]")
        return recipe
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    keys = _recipe_keys(first["loc"], kind)
    # Of the two keys one may be the group of the other: eq stops at the end of the shorter.
    if keys and any(all(map(eq, keys, changed)) for changed in overridden):
        source = COMMAND_LINE
    more = f" ({len(details) - 1} more like it)" if len(details) > 1 else ""
    model = tree.get("model")
    model_kind = str(model.get("kind")) if isinstance(model, Mapping) else ""
    raise RecipeError(f"{source}: {_explain(first, keys, kind, model_kind)}{more}")


def at_stage(recipe: Recipe, stage: int, source: str = "recipe") -> Recipe:
    """The recipe with the changes of its first `stage` stages, without the key `stages`.

    Raises RecipeError, which names `source`, where a stage does not fit the recipe.
    """
    tree = recipe.model_dump(mode="json")
    for changes in tree.pop("stages")[:stage]:
        # A group without changes may be none of the task's.
        tree = _merge(tree, {k: group for k, group in changes.items() if k != "start" and group})
    return validate(tree, source)


def every_stage(recipe: Recipe) -> list[Recipe]:
    """The recipe at its start and in each of its stages."""
    return [at_stage(recipe, number) for number in range(len(recipe.stages) + 1)]


def training_speeds(stages: Iterable[SpeechRecipe]) -> list[float]:
    """The speeds of features.speed_perturb in all stages, in ascending order."""
    return sorted({speed for each in stages for speed in each.features.speed_perturb})


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write every key, as a file that read_recipe reads."""
    atomic_write(path, as_yaml(recipe))


def as_yaml(recipe: Recipe) -> str:
    """Every key with its value, in the catalogue's order."""
    tree = recipe.model_dump(mode="json")
    return yaml.dump(tree, Dumper=PlainDumper, sort_keys=False, allow_unicode=True)


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key by its dotted path: {"model.listener.norm": "ba", ...}."""
    return dict(leaves(recipe.model_dump(mode="json")))


def non_default(recipe: Recipe) -> set[str]:
    """The dotted paths of the keys whose values are not the defaults."""
    return {key for key, _ in leaves(recipe.model_dump(mode="json", exclude_defaults=True))}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything in nested mappings that is not a mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Files and overrides


class PlainLoader(yaml.SafeLoader):
    """YAML without tags, aliases (a few bytes could expand to gigabytes) and repeated keys.

    A scalar without quotes is a boolean, a number, null or text: no key is a date or a time, but a
    run may be named after one.
    """

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] in SCALARS]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        """The tag of a node. 1:30 is text, not 90, the number in base 60 that YAML 1.1 reads."""
        if kind is yaml.ScalarNode and (":" in value or len(value) > MAX_DIGITS):
            return self.DEFAULT_SCALAR_TAG
        return super().resolve(kind, value, implicit)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias, a tag and deep nesting."""
        event = self.peek_event()
        fault = f"nested more than {MAX_DEPTH} deep" if self.depth > MAX_DEPTH else None
        if isinstance(event, yaml.AliasEvent):
            fault = "aliases are not allowed"
        elif getattr(event, "tag", None) is not None:
            fault = "tags (!) are not allowed; write such a text in quotes"
        if fault:
            raise yaml.MarkedYAMLError(None, None, fault, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is no text or is repeated: PyYAML would silently keep the last."""
        seen = set()
        for key, _ in node.value:
            fault = None
            if key.tag != self.DEFAULT_SCALAR_TAG:
                fault = "a key must be text; write it in quotes"
            elif key.value in seen:
                fault = f"key {_shown(key.value)} is repeated"
            if fault:
                raise yaml.MarkedYAMLError(None, None, fault, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class PlainDumper(yaml.SafeDumper):
    """Writes what PlainLoader reads: text of the form 1e3 is in quotes."""


# YAML 1.2 reads 1e-3 as a number, PyYAML only 1.0e-3.
for plain in (PlainLoader, PlainDumper):
    number = re.compile(r"[-+]?[0-9]+([.][0-9]*)?[eE][-+]?[0-9]+$")
    plain.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))


def _with_bases(path: Path) -> dict[str, Any]:
    trees = []
    while len(trees) < MAX_BASES:
        try:
            tree = _load(path)
        except RecipeError as error:
            of = f" (a base of {trees[-1][0]})" if trees else ""
            raise RecipeError(f"{error}{of}") from None
        base = tree.pop("base", None)
        trees.append((path, tree))
        if base is None:
            return reduce(_merge, [tree for _, tree in reversed(trees)])
        if not (isinstance(base, str) and 0 < len(base) < 256):
            raise RecipeError(f"{path}: base = {_shown(base)}: must be the name of a recipe file.")
        path = find_recipe(Path(base), path.parent)
    raise RecipeError(
        f"{trees[0][0]}: more than {MAX_BASES} recipes are based on one another: remove the loop."
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        text = read_small_file(path, MAX_BYTES)
    except UserError as error:
        raise RecipeError(f"{error}; is this a recipe?") from None
    except FileNotFoundError:
        if elsewhere := not_installed(path):
            raise RecipeError(f"{path}: {elsewhere}.") from None
        names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
        near = [str(path.parent / name) for name in near]
        near += difflib.get_close_matches(path.stem, recipe_names(), n=1, cutoff=0.7)
        below = Path("runs") / path
        near = [str(below), *near] if (below / "recipe.yaml").is_file() else near
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(f"{path}: there is no such recipe.{hint}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError as error:  # not UTF-8
        raise RecipeError(f"{path}: not valid YAML: {error}.") from None
    return _parse(text, str(path))


def _parse(text: str, source: str) -> dict[str, Any]:
    """The text of a recipe -> a mapping whose values are plain."""
    if len(text) > MAX_BYTES:
        raise RecipeError(f"{source}: larger than {MAX_BYTES} bytes")
    try:
        tree = yaml.load(text, PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise RecipeError(f"{source}:{line}: not valid YAML: {str(error.problem)[:200]}.") from None
    except INVALID as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(f"{source}: not valid YAML: {reason}.") from None
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{source}: a recipe is a mapping of keys to values; python -m asr.recipe demo prints "
            "one"
        )
    _check_values(tree, source)
    return tree


def _parse_override(text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The override `a.b=1` -> its keys (a, b) and the change {a: {b: 1}}."""
    name, equals, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise RecipeError(f"{COMMAND_LINE}: {_shown(text)} is not of the form key.path=value.")
    try:
        change = yaml.load(value, PlainLoader)
    except INVALID:
        raise RecipeError(
            f"{COMMAND_LINE}: the value in {_shown(text)} is not valid YAML."
        ) from None
    for key in reversed(keys):
        change = {key: change}
    _check_values(change, COMMAND_LINE)
    return keys, change


def _check_values(value: Any, source: str, keys: tuple[str, ...] = ()) -> None:
    """Raise RecipeError for values that no key can have."""
    name = ".".join(keys)
    if len(keys) > MAX_DEPTH:
        raise RecipeError(f"{source}: {name[:60]}...: nested more than {MAX_DEPTH} deep.")
    if isinstance(value, str) and (found := NO_TEXT.search(value)):
        raise RecipeError(f"{source}: {name} = {_shown(value)}: has the character {found[0]!r}.")
    for key, part in value.items() if isinstance(value, dict) else ():
        _check_values(part, source, (*keys, key))
    for part in value if isinstance(value, list) else ():
        _check_values(part, source, keys)


def _merge(base: Mapping[str, Any], change: Mapping[str, Any], top: bool = True) -> dict[str, Any]:
    """`change` merged into `base`, mapping by mapping; a model of another kind replaces the old,
    and {} one of NAMED.
    """
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and (value or key not in NAMED):
            is_model = top and key == "model"
            if not (is_model and value.get("kind", old.get("kind")) != old.get("kind")):
                value = _merge(old, value, top=False)
        merged[key] = value
    return merged


# Errors


def _explain(
    detail: ErrorDetails, keys: tuple[str, ...], recipe: type[Recipe], model_kind: str
) -> str:
    """The wrong key, its value and what it should be, or which key may have been meant."""
    name = ".".join(keys)
    if detail["type"] == "extra_forbidden":
        return f"{name} is not a recipe key{_suggestion(keys, detail['input'], recipe, model_kind)}"
    if detail["type"] == "missing":
        return f"{name} is missing."
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")[:MAX_MESSAGE]
    if detail["type"] == "union_tag_invalid":
        kinds = ", ".join(_model_kinds(recipe))
        return f"{name}.kind = {_shown(detail['ctx']['tag'])}: must be one of {kinds}."
    message = IN_WORDS.get(detail["type"], message)
    if re.match(r"[a-z]\w*(\.\w+)+ = ", message):  # of several keys, which it names itself
        return f"{message}."
    if detail["type"] in ("model_type", "model_attributes_type"):
        group = "".join(f"{key}." for key in keys if not key.isdecimal())  # without list indexes
        inner = next(path for path in _paths(recipe, model_kind) if path.startswith(group))
        message = f"should be a group of keys, {{{inner.removeprefix(group)}: VALUE, ...}}"
    if not keys:  # of several groups, which the message names
        return f"{message}."
    return f"{name} = {_shown(detail['input'])}: {message}."


def _shown(value: Any) -> str:
    """The value as Python writes it, shortened."""
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _recipe_keys(location: Iterable[Any], recipe: type[Recipe]) -> tuple[str, ...]:
    """Pydantic's path without the kind of model, which it inserts after `model`."""
    keys = list(location)
    if len(keys) > 1 and keys[0] == "model" and keys[1] in _model_kinds(recipe):
        del keys[1]
    return tuple(map(str, keys))


def _suggestion(keys: tuple[str, ...], value: Any, recipe: type[Recipe], model_kind: str) -> str:
    """The end of a message on an unknown key: of which kind of model it is, or what was meant.

    That is the key most like it (model.encoder.layers: model.encoder_layers), or else of those with
    the most similar last word the one most like it (train.lr: train.optimizer.lr).
    """
    name = ".".join(keys)
    meant, _ = next(leaves({name: value}), (name, None))  # model.encoder={layers: 3}
    known = [path for path in _paths(recipe, model_kind) if not path.startswith("stages.")]
    last = {path: path.rpartition(".")[2] for path in known}
    near = difflib.get_close_matches(meant, known, n=1, cutoff=0.9)
    words = difflib.get_close_matches(meant.rpartition(".")[2], last.values(), n=1, cutoff=0.7)
    same = [path for path in known if last[path] in words]
    near = near or difflib.get_close_matches(meant, same, n=1, cutoff=0.0)
    kinds = [kind for kind in _model_kinds(recipe) if name in _paths(recipe, kind)]
    of = f" of model.kind = {model_kind}, but of {' and '.join(kinds)}" if kinds else ""
    if near:
        return f"{of}. Did you mean {near[0]}?"
    return f"{of}." if kinds else ". docs/recipes.md lists all."


def _paths(recipe: type[Config], model_kind: str, prefix: str = "") -> Iterator[str]:
    """The dotted path of every key and group, in the catalogue's order."""
    for key, field in recipe.model_fields.items():
        yield f"{prefix}{key}"
        groups = groups_in(field.annotation)
        if not prefix and key == "model":
            kinds = _model_kinds(recipe)
            groups = [kinds[model_kind]] if model_kind in kinds else groups
        for group in groups:
            yield from _paths(group, model_kind, f"{prefix}{key}.")


def _model_kinds(recipe: type[Recipe]) -> dict[str, type[Config]]:
    """The values of `model.kind` of a task, each with its class."""
    groups = groups_in(recipe.model_fields["model"].annotation)
    return {get_args(group.model_fields["kind"].annotation)[0]: group for group in groups}


def groups_in(annotation: Any) -> list[type[Config]]:
    """The config classes in a type such as `SpecAugmentConfig | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [group for part in get_args(annotation) for group in groups_in(part)]

"""JSON Schema of recipes, with which editors complete and check their keys.

It is made from the pydantic models. The description of a key is its comment in their source, as in
docs/recipes.md. A recipe with a `base:` holds only what differs, so no key is required; where such
a recipe leaves out `task` or `model.kind`, the keys of all of them are allowed. The loader checks
more: what depends on several keys, and what is missing.

The schema keeps to draft-07, which yaml-language-server implements whole.
"""

import ast
import inspect
import io
import pkgutil
import tokenize
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from asr.config.loader import RECIPES
from asr.config.schema import Config

BASE = "the recipe that this one changes: a file beside it, or the name of a shipped recipe"


def recipe_schema() -> dict[str, Any]:
    """The schema of a recipe of any task, complete or with a `base:`."""
    classes = {task: pkgutil.resolve_name(name) for task, name in RECIPES.items()}
    refs, parts = models_json_schema(
        [(each, "validation") for each in classes.values()], schema_generator=_Generator
    )
    definitions = parts["$defs"]
    for each in classes.values():
        definitions[each.__name__]["properties"]["base"] = {"type": "string", "description": BASE}
    tasks = {task: refs[each, "validation"] for task, each in classes.items()}
    task = {"enum": list(tasks), "default": "speech", "description": "selects the task"}
    default = {"if": _has("base"), "then": {"anyOf": list(tasks.values())}, "else": tasks["speech"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Recipe of layernorm-asr",
        "type": "object",
        "properties": {"task": task},
        "allOf": _branches("task", tasks, default),
        "$defs": definitions,
    }


class _Generator(GenerateJsonSchema):
    """Pydantic's generator, with comments as descriptions and without required keys."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """The schema of a group of keys."""
        group = super().model_schema(schema)
        for key, value in group["properties"].items():
            if text := meaning(schema["cls"], key):
                value["description"] = text
            if isinstance(value.get("default"), dict):  # each of its keys has one
                del value["default"]
        return group

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """A group whose other keys depend on its `kind`; without one, those of any kind."""
        kinds = {str(kind): self.generate_inner(each) for kind, each in schema["choices"].items()}
        kind = {"enum": list(kinds), "description": "selects the model"}
        return {
            "type": "object",
            "properties": {"kind": kind},
            "allOf": _branches("kind", kinds, {"anyOf": list(kinds.values())}),
        }

    def tuple_schema(self, schema: core_schema.TupleSchema) -> JsonSchemaValue:
        """A list. `prefixItems`, which draft-07 lacks, is needed nowhere: all items are alike."""
        value = super().tuple_schema(schema)
        if items := value.pop("prefixItems", None):
            (value["items"],) = [item for n, item in enumerate(items) if item not in items[:n]]
        return value

    def field_is_required(self, field: Any, total: bool) -> bool:
        """False for every key."""
        return False

    def field_title_should_be_set(self, schema: Any) -> bool:
        """False: the title would repeat the key."""
        return False


def _has(key: str) -> dict[str, Any]:
    return {"required": [key]}


def _branches(
    key: str, choices: Mapping[str, Any], otherwise: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The schema for each value of a key, and that for a group without the key.

    Not `oneOf`, with which an editor reports a typo as a fault of all choices.
    """
    cases = [
        {"if": {**_has(key), "properties": {key: {"const": value}}}, "then": choice}
        for value, choice in choices.items()
    ]
    return [*cases, {"if": {"not": _has(key)}, "then": otherwise}]


def meaning(config: type[Config], key: str) -> str:
    """The comment of a key in the class that defines it; "" where there is none."""
    for cls in config.__mro__:
        if issubclass(cls, Config) and key in inspect.get_annotations(cls):
            return _comments(cls).get(key, "")
    raise KeyError(key)


@cache
def _comments(cls: type[Config]) -> Mapping[str, str]:
    """Key -> the comment lines directly above its line and the comments on its lines."""
    source = inspect.getsource(cls)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    alone = {row for row, t in comments.items() if not t.line[: t.start[1]].strip()}
    meanings = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            rows = range(first, node.end_lineno + 1)
            texts = (comments[row].string.lstrip("# ") for row in rows if row in comments)
            meanings[ast.unparse(node.target)] = " ".join(t for t in texts if t != "fmt: skip")
    return meanings

"""Completion of commands, options, runs, splits, recipe keys and values in the shell.

By argcomplete:

    eval "$(register-python-argcomplete layernorm-asr)"      # in ~/.bashrc or ~/.zshrc

The recipe is read for its keys, since they depend on its task and model.
"""

import argparse
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from asr.arguments import EXAMPLES, CommandParser, Completing, StoreOnce
from asr.errors import UserError


def complete() -> None:
    """Print the completions of the command line in COMP_LINE, and exit."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        raise SystemExit(1) from None  # the shell shows no message here
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    words = argcomplete.split_line(line, point)[3]
    names = [name for group in EXAMPLES.values() for name in group]
    if len(words) > 1 and words[1] in names:
        parser = _parser_of(words[1])
        os.environ["_ARGCOMPLETE"] = "2"  # the words start at the command
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=names)
    argcomplete.safe_actions.add(StoreOnce)  # otherwise completers see no values
    argcomplete.autocomplete(parser)


def _parser_of(command: str) -> CommandParser:
    """The parser of a command, with completers for what only the disk or a recipe has."""
    from argcomplete.completers import FilesCompleter

    from asr.shipped import recipe_names, run_names

    def recipes(prefix: str, **_: Any) -> list[str]:
        return [*recipe_names(), *FilesCompleter(["yaml"])(prefix)]

    def runs(prefix: str, **_: Any) -> list[str]:
        folders = (path.parent for path in Path("runs").glob("**/recipe.yaml"))
        return [*run_names(), *map(str, folders), *FilesCompleter([""])(prefix)]

    completers = {
        "recipe": recipes,
        "overrides": _settings,
        "grid": _settings,
        "split": _splits,
        "evaluate": _splits,
        **dict.fromkeys(("run", "runs", "against"), runs),
    }
    CommandParser.completing = True
    try:
        importlib.import_module(f"asr.{command}").main()
    except Completing as ended:
        for action in ended.parser._actions:
            if action.dest in completers:
                action.completer = completers[action.dest]
        return ended.parser
    raise AssertionError(f"{command} parses no arguments")


def _recipe(parsed_args: argparse.Namespace) -> Any:
    """The recipe that a command line names, or that of its run; None where there is none."""
    from asr.config.loader import read_recipe
    from asr.shipped import find_run

    args = vars(parsed_args)
    try:
        return read_recipe(args.get("recipe") or find_run(Path(args["run"])))
    except (UserError, OSError, KeyError, TypeError):
        return None


def _splits(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """What --split takes beside manifests."""
    recipe = _recipe(parsed_args)
    return ["train", "valid", *getattr(recipe.data, "test", ())] if recipe else []


def _settings(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> Iterator[str]:
    """`key.path=` of every key of the recipe; after the = its values, if they are names."""
    if (recipe := _recipe(parsed_args)) is None:
        return
    key, equals, _ = prefix.partition("=")
    for name, annotation in _keys(recipe):
        if not equals:
            yield f"{name}="
        elif name == key:
            yield from (f"{name}={value}" for value in _values(annotation))


def _keys(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and type of every key of a recipe, or of a group of keys that it does not set."""
    from asr.config.loader import groups_in
    from asr.config.schema import Config

    fields = group.model_fields if isinstance(group, type) else type(group).model_fields
    for name, field in fields.items():
        value = None if isinstance(group, type) else getattr(group, name)
        if not isinstance(value, Config):
            yield f"{path}{name}", field.annotation
        for inner in [value] if isinstance(value, Config) else groups_in(field.annotation):
            yield from _keys(inner, f"{path}{name}.")


def _values(annotation: Any) -> Iterator[str]:
    """The names that a type allows: of Literal[...], true and false, null."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is NoneType:
        yield "null"
    else:
        for part in get_args(annotation):
            yield from _values(part)

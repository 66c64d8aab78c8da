"""Print every key of a recipe: python -m asr.recipe RECIPE.yaml [key.path=value ...]"""

import json
from pathlib import Path

from asr.arguments import CommandParser
from asr.errors import run_command
from asr.shipped import recipe_names


def main() -> None:
    """Print the resolved recipe as YAML, the schema of recipes, or their names."""
    parser = CommandParser(
        prog="python -m asr.recipe", description="Print every key of a recipe with its value."
    )
    text = "a recipe, or the name of a shipped one: demo"
    parser.add_argument("recipe", nargs="?", type=Path, help=text)
    parser.add_overrides()
    text = "print the JSON Schema of recipes instead, for editors that complete and check keys; "
    text += "recipes/schema.json is this file"
    parser.add_argument("--schema", action="store_true", help=text)
    text = "print the names of the shipped recipes instead"
    parser.add_argument("--list", action="store_true", help=text)
    args = parser.parse()
    if args.schema + args.list + bool(args.recipe) != 1:
        parser.error("give one of RECIPE, --schema, --list")
    if args.list:
        print(*recipe_names(), sep="\n")
        return
    if args.schema:
        from asr.config.json_schema import recipe_schema

        print(json.dumps(recipe_schema(), indent=1))
        return
    from asr.config.loader import as_yaml, read_recipe  # loads pydantic, so not for --help

    print(as_yaml(read_recipe(args.recipe, args.overrides)), end="")


if __name__ == "__main__":
    run_command(main)

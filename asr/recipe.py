"""Print every key of a recipe: python -m asr.recipe RECIPE.yaml [key.path=value ...]"""

import json
from pathlib import Path

from asr.arguments import CommandParser
from asr.errors import UserError, run_command


def main() -> None:
    """Print the resolved recipe as YAML, or the schema of recipes."""
    parser = CommandParser(
        prog="python -m asr.recipe", description="Print every key of a recipe with its value."
    )
    parser.add_argument("recipe", nargs="?", type=Path, help="a recipe, e.g. recipes/demo.yaml")
    parser.add_overrides()
    text = "print the JSON Schema of recipes instead, with which editors complete and check keys; "
    text += "recipes/schema.json is this file"
    parser.add_argument("--schema", action="store_true", help=text)
    args = parser.parse()
    if args.schema == bool(args.recipe):
        raise UserError("give a recipe, or --schema alone")
    if args.schema:
        from asr.config.json_schema import recipe_schema

        print(json.dumps(recipe_schema(), indent=1))
        return
    from asr.config.loader import as_yaml, read_recipe  # loads pydantic, which --help need not

    print(as_yaml(read_recipe(args.recipe, args.overrides)), end="")


if __name__ == "__main__":
    run_command(main)

"""Print every key of a recipe: python -m asr.recipe RECIPE.yaml [key.path=value ...]"""

from pathlib import Path

from asr.arguments import CommandParser
from asr.errors import run_command


def main() -> None:
    """Print the resolved recipe as YAML."""
    parser = CommandParser(
        prog="python -m asr.recipe", description="Print every key of a recipe with its value."
    )
    parser.add_argument("recipe", type=Path)
    parser.add_overrides()
    args = parser.parse()
    from asr.config.loader import as_yaml, read_recipe  # loads pydantic, which --help need not

    print(as_yaml(read_recipe(args.recipe, args.overrides)), end="")


if __name__ == "__main__":
    run_command(main)

"""Every recipe key with its type, bounds and default: the catalogue a user reads."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from asr.settings.base import Settings
from asr.settings.data import Data, Features, SpecAugment, Text
from asr.settings.decode import Decode
from asr.settings.las import Las
from asr.settings.train import Train
from asr.settings.transformer import Transformer

Model = Annotated[Las | Transformer, Field(discriminator="kind")]


class Recipe(Settings):
    """What the recipes of all tasks have: one experiment."""

    task: str
    run: str  # folder under runs/
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    train: Train = Train()

    @field_validator("run")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not name or name.startswith(("/", ".")) or ".." in name.split("/"):
            raise ValueError(f"{name!r} must be a plain folder name, it is put under runs/")
        return name


class SpeechRecipe(Recipe):
    """Speech to text."""

    task: Literal["speech"] = "speech"
    data: Data
    features: Features = Features()
    text: Text = Text()
    model: Model
    decode: Decode = Decode()


RECIPES: dict[str, type[Recipe]] = {"speech": SpeechRecipe}

__all__ = [
    "RECIPES",
    "Data",
    "Decode",
    "Features",
    "Las",
    "Model",
    "Recipe",
    "Settings",
    "SpecAugment",
    "SpeechRecipe",
    "Text",
    "Train",
    "Transformer",
]

"""Every recipe key with its type, bounds and default: the catalogue a user reads."""

from typing import Annotated

from pydantic import Field, field_validator

from asr.settings.base import Settings
from asr.settings.data import Data, Features, SpecAugment, Text
from asr.settings.las import Las
from asr.settings.train import Decode, Train
from asr.settings.transformer import Transformer

Model = Annotated[Las | Transformer, Field(discriminator="kind")]


class Recipe(Settings):
    """One experiment."""

    run: str  # folder under runs/
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    data: Data
    features: Features = Features()
    text: Text = Text()
    model: Model
    train: Train = Train()
    decode: Decode = Decode()

    @field_validator("run")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not name or name.startswith(("/", ".")) or ".." in name.split("/"):
            raise ValueError(f"{name!r} must be a plain folder name, it is put under runs/")
        return name


__all__ = [
    "Data",
    "Decode",
    "Features",
    "Las",
    "Model",
    "Recipe",
    "Settings",
    "SpecAugment",
    "Text",
    "Train",
    "Transformer",
]

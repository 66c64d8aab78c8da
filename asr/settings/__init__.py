"""Every recipe key with its type, bounds and default: the catalogue a user reads."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from asr.settings.base import Settings
from asr.settings.data import Data, Features, SpecAugment, Text
from asr.settings.decode import Decode
from asr.settings.images import Draw, ImageData, Rows
from asr.settings.language import LanguageData, LanguageModel, LanguageText
from asr.settings.las import Las
from asr.settings.train import ALONE, OF_SPEECH, Train
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


class SilentRecipe(Recipe):
    """A task without audio."""

    @property
    def idle(self) -> dict[str, str]:
        """Keys under `train:` that change nothing here, each with what there is instead."""
        return OF_SPEECH

    @model_validator(mode="after")
    def _nothing_idle(self) -> "SilentRecipe":
        usual = Train()
        for key, instead in self.idle.items():
            if getattr(self.train, key) != getattr(usual, key):
                raise ValueError(f"train.{key} changes nothing in task {self.task}: {instead}")
        return self


class SpeechRecipe(Recipe):
    """Speech to text."""

    task: Literal["speech"] = "speech"
    data: Data
    features: Features = Features()
    text: Text = Text()
    model: Model
    decode: Decode = Decode()

    @model_validator(mode="after")
    def _ctc_decoding_has_its_head(self) -> "SpeechRecipe":
        alone, weight = self.decode.search == "ctc", self.decode.ctc_weight
        if (alone or weight) and not self.model.ctc_weight:
            wanted = "search=ctc" if alone else f"ctc_weight={weight:g}"
            raise ValueError(
                f"decode.{wanted} needs a CTC head, and model.ctc_weight = 0 leaves it out: "
                "set decode.ctc_weight=0 and decode.search=beam, or train with a head"
            )
        return self


class ImageRecipe(SilentRecipe):
    """Small images: their classes, read row by row, or a model that draws such images."""

    task: Literal["images"]
    data: ImageData = ImageData()
    model: Annotated[Rows | Draw, Field(discriminator="kind")]

    @property
    def idle(self) -> dict[str, str]:
        """Those of speech, samples of text, and the smoothing of labels, of which DRAW has none."""
        labels = {"label_smoothing": ALONE} if self.model.kind == "draw" else {}
        return OF_SPEECH | {"samples": ALONE} | labels

    @model_validator(mode="after")
    def _draw_is_black_and_white(self) -> "ImageRecipe":
        if self.model.kind == "draw" and self.data.pixels != "binary":
            raise ValueError("model.kind draw models black and white: set data.pixels=binary")
        return self


class LanguageRecipe(SilentRecipe):
    """A language model."""

    task: Literal["language"]
    data: LanguageData
    text: LanguageText = LanguageText()
    model: LanguageModel


RECIPES: dict[str, type[Recipe]] = {
    "speech": SpeechRecipe,
    "language": LanguageRecipe,
    "images": ImageRecipe,
}

__all__ = [
    "RECIPES",
    "Data",
    "Decode",
    "Draw",
    "Features",
    "ImageData",
    "ImageRecipe",
    "LanguageRecipe",
    "Las",
    "Model",
    "Recipe",
    "Rows",
    "Settings",
    "SpecAugment",
    "SpeechRecipe",
    "Text",
    "Train",
    "Transformer",
]

"""What a task (speech, language models, images) brings to the training loop."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Protocol

from asr.config.schema import Recipe
from asr.data.batching import Epochs, TaskBatch
from asr.training.logging import Log
from asr.training.losses import Objective
from asr.training.resume import Content


class Task(Protocol):
    """A model, its data and the report of a validation; tasks inherit what they do not define."""

    recipe: Recipe  # that of the stage
    objective: Objective
    epochs: Epochs
    metadata: dict[str, str]  # metadata of a checkpoint; to load it, they must be equal
    content: Content  # fingerprint of the training and validation data
    max_unreadable: float = 0.0  # share of the corpus that may be unreadable
    # Prefix of weights that are not from train.init where that run has none of them.
    pretrained: ClassVar[str | None] = None

    def describe(self) -> str:
        """The corpus in a few words."""

    def as_used(self, recipe: Recipe) -> Recipe:
        """The recipe of a new run with what is used where that is not what was asked for."""
        return recipe

    def prepare(self, run: Path) -> None:
        """Write what the run folder needs beside the recipe and checkpoints."""

    def validation_batches(self, share: slice = slice(None)) -> Iterator[TaskBatch]:
        """The validation data once, or a share of their batches."""

    def no_validation_data(self) -> str:
        """The error where there are none that can be read."""
        return "no validation data"

    def report(self, log: Log, step: int) -> dict[str, float]:
        """Log texts and pictures of a validation; -> more figures of it.

        `diagonality` of attention, if it is one of them, is what train.alarm watches.
        """

    def health_batches(self) -> Iterator[TaskBatch]:
        """A few validation batches without padding, for train.health."""

    def audio_remedy(self) -> str:
        """What to run where too much of the training data cannot be read."""
        return "make the data again"

    def finish(self, run: Path, log: Log, step: int) -> None:
        """Test the finished model."""

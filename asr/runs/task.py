"""What a run trains: a task brings its corpus, its objective and what validation shows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from asr.data.content import Content
from asr.settings import Recipe
from asr.training.given import Batch, Epochs
from asr.training.log import Log
from asr.training.objective import Objective
from asr.training.position import Position


class Task(Protocol):
    """What is trained on what; asr/tasks/speech.py has the first."""

    recipe: Recipe
    objective: Objective
    epochs: Epochs
    about: dict[str, str]  # what a checkpoint says of itself; another one's must agree
    content: Content  # of the files it learns from and is validated on
    allowed_broken: float  # share of the corpus that may turn out unreadable

    def describe(self) -> str: ...

    def prepare(self, run: Path) -> None: ...

    def valid(self, share: slice = slice(None)) -> Iterator[Batch]: ...

    def nothing_valid(self) -> str: ...  # what to say where none of that could be read

    def report(self, log: Log, position: Position) -> dict[str, float]: ...

    def samples(self) -> Iterator[Batch]: ...

    def finish(self, run: Path, log: Log, position: Position) -> dict[str, float]: ...

"""The tasks over small images: name a digit row by row, or draw digits.

asr.train trains them as it trains speech. At the end of a run the best checkpoint is judged on all
test images, and RUN/evaluate/test/score.json says how it did.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asr import build
from asr.data.content import SHA256, Content, sha256_of_tensors
from asr.data.corpora import mnist
from asr.data.images import ImageBatch, ImageEpochs, Images, binary, digits, in_order
from asr.errors import UserError
from asr.scoring.classes import confusion, mean_interval, wilson_interval
from asr.scoring.files import percent, replace_files
from asr.scoring.pictures import confusion_picture, tiles
from asr.settings import ImageData, ImageRecipe
from asr.training.checkpoint import choose, load_weights
from asr.training.image_objective import BoundObjective, ClassObjective, bound_of
from asr.training.log import Log
from asr.training.position import Position

AT_ONCE = 500  # images of a batch without gradients
INSPECTED = 100  # images that train.health looks at
DRAWN = 64  # digits in the picture of generated ones
BINARY_SEED = 0  # not the recipe's: runs of different seeds shall see the same images


@dataclass(frozen=True)
class ImageTask:
    """What both have in common: the Task of asr.train but for what it shows."""

    recipe: ImageRecipe
    objective: ClassObjective | BoundObjective
    epochs: ImageEpochs
    held_out: Images
    test: Images

    allowed_broken = 0.0  # nothing is read that could be broken

    @property
    def about(self) -> dict[str, str]:
        """What a checkpoint says of itself."""
        return {"images": f"{self.test.pixels.shape[1:]}".removeprefix("torch.")}

    @cached_property
    def content(self) -> Content:
        """Of the images to learn from and those held out, which are of the same files."""
        training, held_out = self.epochs.images, self.held_out
        parts = (training.pixels, training.labels, held_out.pixels, held_out.labels)
        count = len(training) + len(held_out)
        return {"data.folder": {"images": count, SHA256: sha256_of_tensors(*parts)}}

    def describe(self) -> str:
        """The images in a few words."""
        rows, columns = self.test.pixels.shape[1:]
        return (
            f"{len(self.epochs.images)} training images of {rows} x {columns}, "
            f"{len(self.epochs.plan(1).batches)} batches an epoch, "
            f"{len(self.held_out)} for validation, {len(self.test)} for the test"
        )

    def prepare(self, run: Path) -> None:
        """Nothing but the recipe is needed beside checkpoints."""

    def valid(self, share: slice = slice(None)) -> Iterator[ImageBatch]:
        """The images held out of the training set, once, or a share of their batches."""
        torch.manual_seed(self.recipe.seed)  # DRAW's noise: every validation draws the same
        return islice(in_order(self.held_out, AT_ONCE), share.start, share.stop, share.step)

    def nothing_valid(self) -> str:
        """What to say where none of them could be read."""
        return "no image for validation"

    def samples(self) -> Iterator[ImageBatch]:
        """The first few of them, in one batch, to look inside with."""
        return in_order(self.held_out.part("valid", slice(None, INSPECTED)), INSPECTED)

    def _load_best(self, run: Path) -> int:
        best = choose(run, "best", 1)
        load_weights(self.objective.model, best, self.about)
        self.objective.eval()
        return best[0].step

    def _batches(self, images: Images) -> Iterator[ImageBatch]:
        device = next(self.objective.parameters()).device
        for batch in in_order(images, AT_ONCE):
            yield batch.to(device)


class ClassTask(ImageTask):
    """Name the class."""

    def report(self, log: Log, position: Position) -> dict[str, float]:
        """The confusions of validation as a picture."""
        self.objective.eval()
        counts = self._confusion(self.held_out)[0]
        picture = confusion_picture(counts, f"validation, step {position.step}")
        log.picture("confusion", picture, position.step)
        return {}

    def finish(self, run: Path, log: Log, position: Position) -> dict[str, float]:
        """The best checkpoint on all test images: score.json, and the figures for hparams."""
        step = self._load_best(run)
        counts, nats = self._confusion(self.test)
        right, count = int(counts.trace()), int(counts.sum())
        low, high = wilson_interval(right, count)
        figures = {"accuracy": right / count, "error": 1 - right / count, "nats": nats}
        interval = {"accuracy_interval": [low, high], "error_interval": [1 - high, 1 - low]}
        whole = {"images": count, "right": right, "confusion": counts.tolist(), "step": step}
        _write(run, {**figures, **interval, **whole})
        log.picture("test/confusion", confusion_picture(counts, "test"), position.step)
        log.note(
            f"test: accuracy {percent(right / count)} (95 % interval {percent(low)} to "
            f"{percent(high)}), {count - right} of {count} wrong, by the checkpoint of step {step}"
        )
        return {f"test/{name}": value for name, value in figures.items()}

    @torch.no_grad()
    def _confusion(self, images: Images) -> tuple[np.ndarray, float]:
        found, nats = [], 0.0
        for batch in self._batches(images):
            log_probs = self.objective.model(batch.images).float().log_softmax(dim=1)
            nats -= float(log_probs.gather(1, batch.labels.unsqueeze(1)).sum())
            found.append(log_probs.argmax(dim=1).cpu())
        classes = log_probs.size(1)
        counts = confusion(images.labels.numpy(), torch.cat(found).numpy(), classes)
        return counts, nats / len(images)


class DrawTask(ImageTask):
    """Draw images like these."""

    @torch.no_grad()
    def report(self, log: Log, position: Position) -> dict[str, float]:
        """Generated images, finished and as they grow."""
        self.objective.eval()
        canvases = self.objective.model.sample(DRAWN).cpu().numpy()  # (T, N, R, C)
        log.picture("drawn/finished", tiles(canvases[-1], 8), position.step)
        shown = np.linspace(0, len(canvases) - 1, min(8, len(canvases))).round().astype(int)
        grown = canvases[shown, :8].swapaxes(0, 1).reshape(-1, *canvases.shape[2:])
        log.picture("drawn/growing", tiles(grown, len(shown)), position.step)
        return {}

    @torch.no_grad()
    def finish(self, run: Path, log: Log, position: Position) -> dict[str, float]:
        """The best checkpoint's bound on all test images: score.json, and the figure for hparams.

        The interval is that of the mean over images; z is drawn once for each.
        """
        step = self._load_best(run)
        torch.manual_seed(self.recipe.seed)
        model = self.objective.model
        parts = [bound_of(model, batch.images).cpu() for batch in self._batches(self.test)]
        bounds = torch.cat(parts).double().numpy()
        nats, interval = float(bounds.mean()), mean_interval(bounds)
        whole = {"nats": nats, "nats_interval": interval, "images": len(bounds), "step": step}
        _write(run, whole)
        spread = " (95 % interval {:.2f} to {:.2f})".format(*interval) if interval else ""
        log.note(
            f"test: bound {nats:.2f} nats an image{spread} over {len(bounds)} images, by the "
            f"checkpoint of step {step}"
        )
        return {"test/nats": nats}


def image_task(recipe: ImageRecipe, run: Path, resume: bool) -> ImageTask:
    """Read the images and build the model. UserError where they are missing or damaged."""
    training, test = read(recipe.data)
    kept = len(training) - max(1, round(recipe.data.valid * len(training)))
    if not kept:
        raise UserError(
            "data.folder: one training image; two are needed, one of them to validate on"
        )
    held_out = training.part("valid", slice(kept, None))
    training = training.part("train", slice(None, kept))
    size, classes = tuple(test.pixels.shape[1:]), int(training.labels.max()) + 1
    if max(held_out.labels.max(), test.labels.max()) >= classes:
        raise UserError(
            f"data.folder: the first {kept} images, to learn from, have classes 0 to {classes - 1} "
            "alone, the others more; shuffle the training images"
        )
    torch.manual_seed(recipe.seed)
    objective = build.image_objective(recipe, size, classes)
    epochs = ImageEpochs(training, recipe.data.batch, recipe.seed, recipe.data.shift)
    task = DrawTask if recipe.model.kind == "draw" else ClassTask
    return task(recipe, objective, epochs, held_out, test)


def read(data: ImageData) -> tuple[Images, Images]:
    """Training and test images as the recipe wants them."""
    if data.folder is not None and not data.folder.is_dir():
        raise UserError(
            f"data.folder: {data.folder} is not there. Make it with: python -m asr.prepare mnist "
            f"--to {data.folder}, or take scikit-learn's digits: data.folder=null"
        )
    both = digits() if data.folder is None else mnist.read(data.folder)
    if data.pixels == "grey":
        return both
    train, test = (binary(images, BINARY_SEED) for images in both)
    return train, test


def _write(run: Path, score: dict[str, Any]) -> None:
    folder = run / "evaluate" / "test"
    folder.mkdir(parents=True, exist_ok=True)
    replace_files(folder, {"score.json": json.dumps(score, indent=1) + "\n"})

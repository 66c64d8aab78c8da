"""The task `images`: classify digits row by row, or generate digits with DRAW.

At the end of a run the best checkpoint is tested on all test images: RUN/evaluate/test/score.json.
An example of an added task: a config, data in batches, a model with its objective, and the Task.

B images, T glimpses.
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
from torch import Tensor, nn
from torch.nn import functional

from asr.analysis.plots import confusion_picture, tiles
from asr.analysis.statistics import confusion, spread
from asr.analysis.wer import percent
from asr.config.loader import at_stage
from asr.errors import UserError
from asr.images import data as mnist
from asr.images.config import ImageDataConfig, ImageRecipe
from asr.images.data import ImageBatch, ImageEpochs, Images, in_order, sha256_of_tensors
from asr.images.models import Draw, RowClassifier
from asr.io import write_files
from asr.training.checkpoint import choose, load_weights
from asr.training.distributed import choose_device
from asr.training.logging import Log
from asr.training.losses import Objective, Sum
from asr.training.resume import SHA256, Content
from asr.training.task import Task

BATCH = 500  # images per batch in validation and test
INSPECTED = 100  # images for train.health
DRAWN = 64  # generated images in a picture
BINARY_SEED = 0  # not the recipe's seed, so that all runs have the same binary images


class ClassObjective(Objective):
    """Label-smoothed cross-entropy per image."""

    def forward(self, batch: ImageBatch) -> dict[str, Sum]:
        """-> objective, nll, accuracy."""
        logits = self.model(batch.images).float()
        loss = functional.cross_entropy(
            logits, batch.labels, reduction="sum", label_smoothing=self.label_smoothing
        )
        nll = functional.cross_entropy(logits.detach(), batch.labels, reduction="sum")
        correct = (logits.argmax(dim=1) == batch.labels).sum()
        count = torch.full((), len(batch), device=logits.device)
        totals = {"objective": loss, "nll": nll, "accuracy": correct}
        return {name: Sum(total, count) for name, total in totals.items()}


class BoundObjective(Objective):
    """The variational bound per image (DRAW); nll is the bound itself."""

    def forward(self, batch: ImageBatch) -> dict[str, Sum]:
        """-> objective, nll, and its parts reconstruction and divergence."""
        reconstruction, divergence = (part.float().sum() for part in self.model(batch.images))
        bound = reconstruction + divergence
        count = torch.full((), len(batch), device=bound.device)
        parts = {"nll": bound, "reconstruction": reconstruction, "divergence": divergence}
        logged = {name: Sum(total.detach(), count) for name, total in parts.items()}
        return {"objective": Sum(bound, count), **logged}


def bound_of(model: nn.Module, images: Tensor) -> Tensor:
    """The bound of each image in nats: (B, R, C) -> (B,)."""
    drawing = model(images)
    return drawing.reconstruction + drawing.divergence.sum(dim=1)


@dataclass(frozen=True)
class ImageTask(Task):
    """The common part of classification and generation."""

    recipe: ImageRecipe
    objective: ClassObjective | BoundObjective
    epochs: ImageEpochs
    validation: Images
    test: Images
    metadata: dict[str, str]

    @cached_property
    def content(self) -> Content:
        """The number and hash of the training and validation images."""
        training, valid = self.epochs.images, self.validation
        parts = (training.pixels, training.labels, valid.pixels, valid.labels)
        count = len(training) + len(valid)
        return {"data.folder": {"images": count, SHA256: sha256_of_tensors(*parts)}}

    def describe(self) -> str:
        rows, columns = self.test.pixels.shape[1:]
        return (
            f"{len(self.epochs.images)} training images of {rows} x {columns}, "
            f"{len(self.epochs.plan(1).batches)} batches an epoch, "
            f"{len(self.validation)} for validation, {len(self.test)} for the test"
        )

    def validation_batches(self, share: slice = slice(None)) -> Iterator[ImageBatch]:
        torch.manual_seed(self.recipe.seed)  # the same noise in DRAW in every validation
        return islice(in_order(self.validation, BATCH), share.start, share.stop, share.step)

    def health_batches(self) -> Iterator[ImageBatch]:
        """The first validation images, in one batch."""
        return in_order(self.validation.part("valid", slice(None, INSPECTED)), INSPECTED)

    def finish(self, run: Path, log: Log, step: int) -> None:
        """Test the best checkpoint and write score.json."""
        best = choose(run, "best", 1)
        load_weights(self.objective.model, best, self.metadata)
        self.objective.eval()
        figures, details, line = self._test(log, step)
        folder, tested = run / "evaluate" / "test", best[0].step
        log.scalars("test", figures, step)
        folder.mkdir(parents=True, exist_ok=True)
        score = {**figures, **details, "step": tested}
        write_files(folder, {"score.json": json.dumps(score, indent=1) + "\n"})
        log.info(f"test: {line}, by the checkpoint of step {tested}")

    def _test(self, log: Log, step: int) -> tuple[dict[str, float], dict[str, Any], str]:
        """-> figures over the test images, other entries of score.json, a line for the log."""
        raise NotImplementedError

    def _batches(self, images: Images) -> Iterator[ImageBatch]:
        device = next(self.objective.parameters()).device
        for batch in in_order(images, BATCH):
            yield batch.to(device)


class ClassTask(ImageTask):
    """Classify images."""

    def report(self, log: Log, step: int) -> dict[str, float]:
        """Log the confusion matrix of the validation images."""
        self.objective.eval()
        counts, _ = self._confusion(self.validation)
        title = f"validation, step {step}"
        log.picture("valid_confusion", confusion_picture(counts, title), step)
        return {}

    def _test(self, log: Log, step: int) -> tuple[dict[str, float], dict[str, Any], str]:
        from scipy.stats import binomtest  # slow to import

        counts, nll = self._confusion(self.test)
        right, count = int(counts.trace()), int(counts.sum())
        low, high = map(float, binomtest(right, count).proportion_ci(method="wilson"))
        figures = {"accuracy": right / count, "error": 1 - right / count, "nll": nll}
        intervals = {"accuracy_interval": [low, high], "error_interval": [1 - high, 1 - low]}
        details = {**intervals, "images": count, "right": right, "confusion": counts.tolist()}
        log.picture("test/confusion", confusion_picture(counts, "test"), step)
        interval = f"95 % interval {percent(low)} to {percent(high)}"
        line = f"accuracy {percent(right / count)} ({interval}), {count - right} of {count} wrong"
        return figures, details, line

    @torch.no_grad()
    def _confusion(self, images: Images) -> tuple[np.ndarray, float]:
        """-> confusion matrix, mean nll."""
        predicted, nll = [], 0.0
        for batch in self._batches(images):
            log_probs = self.objective.model(batch.images).float().log_softmax(dim=1)
            nll -= float(log_probs.gather(1, batch.labels.unsqueeze(1)).sum())
            predicted.append(log_probs.argmax(dim=1).cpu())
        classes = log_probs.size(1)
        counts = confusion(images.labels.numpy(), torch.cat(predicted).numpy(), classes)
        return counts, nll / len(images)


class DrawTask(ImageTask):
    """Generate images with DRAW."""

    @torch.no_grad()
    def report(self, log: Log, step: int) -> dict[str, float]:
        """Log generated images: after the last glimpse, and some after several glimpses."""
        self.objective.eval()
        canvases = self.objective.model.sample(DRAWN).cpu().numpy()  # (T, N, R, C)
        log.picture("valid_drawn/finished", tiles(canvases[-1], 8), step)
        shown = np.linspace(0, len(canvases) - 1, min(8, len(canvases))).round().astype(int)
        rows = canvases[shown, :8].swapaxes(0, 1).reshape(-1, *canvases.shape[2:])
        log.picture("valid_drawn/growing", tiles(rows, len(shown)), step)
        return {}

    @torch.no_grad()
    def _test(self, log: Log, step: int) -> tuple[dict[str, float], dict[str, Any], str]:
        """The interval is of the mean bound over images; z is drawn once for each image."""
        torch.manual_seed(self.recipe.seed)
        model = self.objective.model
        parts = [bound_of(model, batch.images).cpu() for batch in self._batches(self.test)]
        bounds = torch.cat(parts).double().numpy()
        over = spread(bounds)
        nll, interval = over.mean, over.interval
        spread_text = " (95 % interval {:.2f} to {:.2f})".format(*interval) if interval else ""
        line = f"bound {nll:.2f} nats an image{spread_text} over {len(bounds)} images"
        return {"nll": nll}, {"nll_interval": interval, "images": len(bounds)}, line


def image_task(recipe: ImageRecipe, run: Path, resume: bool, stage: int = 0) -> ImageTask:
    """Read the images and build the model. Raises UserError if they are missing or damaged."""
    recipe = at_stage(recipe, stage)
    training, test = read(recipe.data)
    count = len(training) - max(1, round(recipe.data.valid * len(training)))
    if not count:
        raise UserError("data.folder: has one training image; validation needs another one")
    validation = training.part("valid", slice(count, None))
    training = training.part("train", slice(None, count))
    size, classes = tuple(test.pixels.shape[1:]), int(training.labels.max()) + 1
    if max(validation.labels.max(), test.labels.max()) >= classes:
        raise UserError(
            f"data.folder: the first {count} images, for training, only have classes 0 to "
            f"{classes - 1}, the others more; shuffle the training images"
        )
    torch.manual_seed(recipe.seed)
    if recipe.model.kind == "draw":
        kind, objective = DrawTask, BoundObjective(Draw(*size, recipe.model))
    else:
        model = RowClassifier(size[1], classes, recipe.model)
        kind, objective = ClassTask, ClassObjective(model, recipe.train.label_smoothing)
    objective.to(choose_device(recipe.train.device))
    epochs = ImageEpochs(training, recipe.data.batch, recipe.seed, recipe.data.shift)
    metadata = {"images": f"Size({list(size)})"}
    return kind(recipe, objective, epochs, validation, test, metadata)


def read(data: ImageDataConfig) -> tuple[Images, Images]:
    """The training and test images of the recipe."""
    if data.folder is not None and data.folder.is_file():
        raise UserError(f"data.folder: {data.folder} is a file; name its folder")
    if data.folder is not None and not data.folder.is_dir():
        raise UserError(
            f"data.folder: {data.folder} is missing. Make it with: python -m asr.prepare mnist "
            f"--to {data.folder}, or take scikit-learn's digits: data.folder=null"
        )
    train, test = mnist.digits() if data.folder is None else mnist.read(data.folder)
    if data.pixels == "grey":
        return train, test
    return mnist.binary(train, BINARY_SEED), mnist.binary(test, BINARY_SEED)

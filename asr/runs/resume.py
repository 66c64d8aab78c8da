"""Going on with a run: from which checkpoint, and whether the recipe is still the same."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import yaml

from asr.data import content
from asr.errors import UserError
from asr.recipe import PlainLoader, as_yaml, flat, read_recipe, validate
from asr.settings import Recipe
from asr.training.checkpoint import TRAINING, Checkpoint, list_checkpoints, read_training
from asr.training.recovery import newest_sound, set_aside

# Where and how fast a run is made, what is logged of it and how it is decoded: not what it learns.
NOT_LEARNING = (
    "run",
    "data.cache",
    "data.corpus",
    "data.outside",
    "data.test",
    "data.workers",
    "decode",
    "train.alarm",
    "train.debug",
    "train.device",
    "train.health",
    "train.log_every",
    "train.samples",
    "train.save_every",
    "train.threads",
    "train.wer_utterances",
)
# What may change in the middle of a run: besides, what says how far to go.
HARMLESS = (
    *NOT_LEARNING,
    "data.broken",
    "train.bad_steps",
    "train.epochs",
    "train.init",  # read at the start alone
    "train.keep",
    "train.keep_best",
    "train.steps",
    "train.validate_every",
)


class Start:
    """Where a run that is there already goes on: a checkpoint and its training state."""

    def __init__(self, run: Path, checkpoint: Checkpoint, damaged: tuple[Path, ...]) -> None:
        self.run, self.checkpoint, self.damaged = run, checkpoint, damaged
        self.state = read_training(checkpoint)

    def notes(self, recipe: Recipe, force: bool) -> list[str]:
        """What the log should say of damage and changes.

        Raises UserError where the recipe changed in more than HARMLESS, unless forced.
        """
        said = [
            f"{folder}: damaged, its checksums differ; it is set aside as damaged-{folder.name}"
            for folder in self.damaged
        ]
        if said:
            said.append(f"going on from the one before it, step {self.checkpoint.step}")
        changed = self._changes(recipe, force)
        grave = [line for key, line in changed.items() if not is_harmless(key)]
        if grave and not force:
            raise UserError(
                f"{self.run}: its recipe was another: {'; '.join(grave)}. Take the old values, "
                "choose another --run, or go on all the same with --resume --force"
            )
        return said + [f"changed in the recipe: {line}" for line in changed.values()]

    def content_notes(self, now: content.Content, force: bool) -> list[str]:
        """What the log should say of data that changed under the same name.

        Raises UserError where any did, unless forced.
        """
        # Runs of an older version do not know what they were trained on.
        changed = content.changes(self.state.get("content", {}), now).values()
        if changed and not force:
            raise UserError(
                f"{self.run}: its data have changed since: {'; '.join(changed)}. Take the old "
                "files, choose another --run, or go on all the same with --resume --force"
            )
        return [f"changed since: {line}" for line in changed]

    def set_damaged_aside(self) -> None:
        """Out of the way of whoever looks for the last or the best checkpoint."""
        for folder in self.damaged:
            set_aside(folder)

    def _changes(self, recipe: Recipe, force: bool) -> dict[str, str]:
        """Dotted key -> a line, for every key that has another value now."""
        text = self.state.get("recipe")
        try:
            if text is None:  # a run of an older version
                old = read_recipe(self.run / "recipe.yaml")
            elif fingerprint(text) == fingerprint(as_yaml(recipe)):
                return {}
            else:
                old = validate(yaml.load(text, PlainLoader), f"{self.checkpoint.folder}: recipe")
        except UserError as error:
            if force:
                return {"recipe": f"what it was cannot be read ({error})"}
            raise UserError(f"{error} (of the run so far; --force goes on all the same)") from None
        return changes(old, recipe)


def find_start(run: Path, resume: bool) -> Start | None:
    """The checkpoint to go on from; None where the run has none, so that it starts anew.

    Raises UserError where there is one and `resume` is not asked, and where all are damaged.
    """
    if not resume:
        if any((run / "checkpoints").glob("[0-9]*")):
            raise UserError(f"{run}: already holds a run; add --resume, or choose another --run")
        return None
    found = newest_sound(run)
    if found.checkpoint:
        return Start(run, found.checkpoint, found.damaged)
    there = list_checkpoints(run)
    if there and not any((checkpoint.folder / TRAINING).exists() for checkpoint in there):
        raise UserError(
            f"{run}: exported, without the state of a training; start another run from its weights "
            f"with train.init={run}"
        )
    if found.damaged:
        raise UserError(
            f"{run / 'checkpoints'}: all of its checkpoints are damaged, their checksums differ; "
            "remove them to start anew"
        )
    return None


def changes(old: Recipe, new: Recipe) -> dict[str, str]:
    """Dotted key -> `key old -> new`, for every key in which two recipes differ."""
    before, now = (flat(recipe) for recipe in (old, new))
    return {
        key: f"{key} {before.get(key, 'not there')} -> {now.get(key, 'not there')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def is_harmless(key: str) -> bool:
    """Whether a run may go on where this key has changed."""
    return key.endswith(".backend") or is_among(key, HARMLESS)


def is_among(key: str, keys: Iterable[str]) -> bool:
    """Whether a dotted key is one of these, or below one."""
    return any(key == known or key.startswith(f"{known}.") for known in keys)


def fingerprint(text: str) -> str:
    """The recipe's hash, as a checkpoint's weights carry it."""
    return hashlib.sha256(text.encode()).hexdigest()

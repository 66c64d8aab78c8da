"""Resume a run: choose the checkpoint, and refuse where recipe, data or objective have changed."""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from asr.config.loader import as_yaml, flat, parse_recipe, read_recipe, validate
from asr.config.schema import Recipe, TrainConfig
from asr.errors import UserError
from asr.training.checkpoint import (
    TRAINING,
    Checkpoint,
    checkpoint_folders,
    list_checkpoints,
    newest_sound,
    read_training,
)
from asr.training.distributed import world
from asr.training.optim import make_schedule
from asr.training.state import TrainState, progress

# Keys without effect on what is learned: folder, speed and log of a run, and decoding.
NOT_LEARNING = (
    "run", "decode",
    "data.corpus", "data.allow_outside_audio", "data.test", "data.workers",
    "train.alarm", "train.debug", "train.device", "train.health", "train.log_every",
    "train.samples", "train.save_every", "train.threads", "train.trackers",
    "train.wer_utterances",
)  # fmt: skip
# Keys that may change in the middle of a run: these, and those that set its end.
HARMLESS = (
    *NOT_LEARNING, "data.max_unreadable", "train.bad_steps", "train.early_stopping",
    "train.epochs", "train.keep", "train.keep_best", "train.steps", "train.validate_every",
)  # fmt: skip
OF_START = ("init", "new_vocabulary")  # keys under `train:` that only the start of a run reads
SHA256, OBJECTIVE = "sha256", "objective"

# What a training learns from: recipe key, or OBJECTIVE -> figures to report ("utterances": 600) and
# the SHA256 of all of it, so that a change under the same name is noticed.
Content = Mapping[str, Mapping[str, int | float | str]]


class ResumePoint:
    """The checkpoint from which a run is resumed, and its training state."""

    def __init__(self, run: Path, checkpoint: Checkpoint, damaged: list[Path]) -> None:
        self.run, self.checkpoint, self.damaged = run, checkpoint, damaged
        self.state = read_training(checkpoint)

    @cached_property
    def begun_with(self) -> Recipe:
        """The recipe in the checkpoint. Raises UserError for one of an older version."""
        return parse_recipe(self.state["recipe"], f"{self.checkpoint.folder}: recipe")

    def as_asked(self, recipe: Recipe) -> Recipe:
        """The recipe with what only the start of a run reads as it was begun: OF_START, and the
        section `text` and features.encoder where they are those of RUN/recipe.yaml, which has the
        vocabulary and the commit that are used.
        """
        with suppress(UserError):  # of an older version
            begun = self.begun_with
            of_start = {key: getattr(begun.train, key) for key in OF_START}
            train = recipe.train.model_copy(update=of_start)
            recipe = recipe.model_copy(update={"train": train})
            used = read_recipe(self.run / "recipe.yaml")
            if not recipe.task == used.task == begun.task:
                return recipe
            if recipe.task != "images" and recipe.text == used.text:
                recipe = recipe.model_copy(update={"text": begun.text})
            if recipe.task == "speech" and (name := recipe.features.encoder):
                first = begun.features.encoder
                if name == used.features.encoder and name.startswith(f"{first}@"):
                    features = recipe.features.model_copy(update={"encoder": first})
                    recipe = recipe.model_copy(update={"features": features})
        return recipe

    def check_recipe(
        self, recipe: Recipe, overridden: AbstractSet[str], force: bool
    ) -> tuple[Recipe, list[str]]:
        """-> the recipe to write into the run, and lines for the log.

        It keeps the run's decode settings, but for the keys `overridden`. Raises UserError where a
        key has changed that is neither harmless nor a file for check_content, unless forced, and
        where the run has done more than asked.
        """
        lines = self._check_changes(recipe, force)
        self._check_end(recipe.train)
        stored, kept = with_stored_settings(recipe, self.run, overridden)
        return stored, lines + kept

    def _check_changes(self, recipe: Recipe, force: bool) -> list[str]:
        """-> lines for the log on damaged checkpoints and changed keys."""
        lines = [
            f"{folder}: damaged, its checksums differ; it is set aside as damaged-{folder.name}"
            for folder in self.damaged
        ]
        if lines:
            lines.append(f"resuming from the one before it, step {self.checkpoint.step}")
        changed = self._changes(recipe, force)
        new, checked = flat(recipe), {*self.state["content"]}  # their files may have been moved
        if new.get("features.train") == "none" and not (self.run / "encoder").exists():
            checked.add("features.encoder")  # its weights are
        moved = {key for key in changed if key in checked and new.get(key) is not None}
        harmful = [line for key, line in changed.items() if not (is_harmless(key) or key in moved)]
        if harmful and not force:
            raise UserError(
                f"{self.run}: its recipe was another: {'; '.join(harmful)}. Restore the old values,"
                " choose another --run, or resume nevertheless with --resume --force"
            )
        return lines + [f"changed in the recipe: {line}" for line in changed.values()]

    def _check_end(self, train: TrainConfig) -> None:
        """Raise UserError where the run has done more than `train` asks for."""
        position = self.state["position"]
        unit, end, done = "steps", train.steps, position["step"]
        if end is None:  # an epoch that has begun counts
            unit, end = "epochs", train.epochs
            done = position["epoch"] - (position["batch"] == 0)
        if done > end:
            raise UserError(
                f"{self.run}: {done} {unit} are done, more than train.{unit} = {end}: raise it, or "
                "choose another --run"
            )

    def check_content(self, content: Content, force: bool) -> list[str]:
        """-> lines for the log on data that changed under their name, and on another objective.

        Refused unless forced.
        """
        changed = content_changes(self.state["content"], content).values()
        if changed and not force:
            raise UserError(
                f"{self.run}: its data or objective have changed since: {'; '.join(changed)}. "
                "Restore the old ones, choose another --run, or resume nevertheless with "
                "--resume --force"
            )
        return [f"changed since: {line}" for line in changed]

    def changed_course(self, train: TrainConfig, batches: int) -> list[str]:
        """Lines for the log where the planned end or the number of ranks has changed.

        Another end may change the learning rate. train: the settings of the stage. batches: those
        of the current epoch.
        """
        lines, ranks = self._rate_change(train, batches), 1 + len(self.state["ranks"])
        if ranks != world():
            step = f"{world()} x {train.accumulate} batches"
            lines.append(f"{ranks} ranks trained so far, now {world()}: a step takes {step}")
        return lines

    def _rate_change(self, new: TrainConfig, batches: int) -> list[str]:
        """Of the old recipe only the end matters: the log names all other keys that changed."""
        try:
            old = self.begun_with.train
        except UserError:  # of an older version
            return []
        ends = {"steps": old.steps, "epochs": old.epochs}
        state = TrainState(**self.state["position"])
        schedule = make_schedule(new.schedule, new.optimizer.lr)
        after = min(state.batch + new.accumulate * world(), batches)
        before, now = (
            schedule(state.step + 1, progress(replace(state, batch=after), config, batches))
            for config in (new.model_copy(update=ends), new)
        )
        if math.isclose(before, now, rel_tol=0.01):
            return []
        return [
            f"learning rate {before:.3g} -> {now:.3g} at step {state.step + 1}: train.schedule.kind"
            f" = {new.schedule.kind} spans the whole run, whose planned end has changed; --force "
            f"train.schedule.kind=constant train.optimizer.lr={before:.3g} keeps the rate"
        ]

    def _changes(self, recipe: Recipe, force: bool) -> dict[str, str]:
        """Dotted key -> a line, for every key with another value now."""
        if self.state["recipe"] == as_yaml(recipe):
            return {}
        try:
            old = self.begun_with
        except UserError as error:
            if force:
                return {"recipe": f"the old one cannot be read ({error})"}
            raise UserError(f"{error} (of the run so far; --force ignores it)") from None
        if (metric := old.train.metric) != recipe.train.metric:
            raise UserError(
                f"{self.run}: its checkpoints are ranked by {metric}, which cannot change to "
                f"{recipe.train.metric}: restore train.early_stopping.metric, or choose another "
                "--run; train.init can start it from this one's weights"
            )
        return changes(old, recipe)


def asked_recipe(run: Path) -> Recipe | None:
    """The recipe that a run was begun with; RUN/recipe.yaml has the vocabulary that it uses.

    None where it has no checkpoint that can be read.
    """
    checkpoints = list_checkpoints(run)  # not newest_sound: the run may be in training
    with suppress(UserError):
        return ResumePoint(run, checkpoints[-1], []).begun_with if checkpoints else None
    return None


def find_resume_point(run: Path, resume: bool) -> ResumePoint | None:
    """The newest sound checkpoint; None where the run has none and starts anew.

    Raises UserError where there is a checkpoint but not `resume`, and where all are damaged.
    """
    if not resume:
        if checkpoint_folders(run):
            raise UserError(f"{run}: already holds a run; add --resume, or choose another --run")
        return None
    newest, damaged = newest_sound(run)
    if newest:
        return ResumePoint(run, newest, damaged)
    checkpoints = list_checkpoints(run)
    if checkpoints and not any((each.folder / TRAINING).exists() for each in checkpoints):
        raise UserError(
            f"{run}: exported or pruned, without the state of a training; start another run from "
            f"its weights with train.init={run}"
        )
    if damaged:
        raise UserError(
            f"{run / 'checkpoints'}: all of its checkpoints are damaged, their checksums differ; "
            "remove them to start anew"
        )
    return None


def with_stored_settings(
    recipe: Recipe, run: Path, overridden: AbstractSet[str]
) -> tuple[Recipe, list[str]]:
    """The recipe with the vocabulary's section `text` of RUN/recipe.yaml, the commit of its encoder
    and its decode settings, but for `overridden`; lines of a log.

    asr.evaluate --tune writes decode settings there. Raises UserError where they do not fit
    `overridden`.
    """
    path = run / "recipe.yaml"
    tree = recipe.model_dump(mode="json")
    try:
        stored = read_recipe(path).model_dump(mode="json")
    except UserError as error:
        return recipe, [f"{error} It is written again, with the recipe's decode settings"]
    tree |= {"text": stored["text"]} if "text" in stored else {}
    features, encoder = tree.get("features", {}), stored.get("features", {}).get("encoder")
    if encoder and encoder.startswith(f"{features.get('encoder')}@"):
        features["encoder"] = encoder
    decode, of_run = tree.get("decode", {}), stored.get("decode", {})
    kept = [key for key in decode if not {"decode", f"decode.{key}"} & overridden]
    decode |= {key: of_run[key] for key in kept if key in of_run}
    merged = validate(tree, str(path))
    lines = changes(recipe, merged).items()
    return merged, [f"kept in {path}: {line}" for key, line in lines if key.startswith("decode")]


def unread(asked: TrainConfig, begun: TrainConfig) -> list[str]:
    """Lines for the log on keys of OF_START that a resumed run has otherwise."""
    pairs = {key: (getattr(asked, key), getattr(begun, key)) for key in OF_START}
    return [
        f"train.{key} = {value} is not read: the run began with {first}"
        for key, (value, first) in pairs.items()
        if value and value != first
    ]


def changes(old: Recipe, new: Recipe) -> dict[str, str]:
    """Dotted key -> `key old -> new`, for every key in which two recipes differ."""
    before, now = (flat(recipe) for recipe in (old, new))
    return {
        key: f"{key} {before.get(key, 'missing')} -> {now.get(key, 'missing')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def content_changes(old: Content, new: Content) -> dict[str, str]:
    """Recipe key -> one line, for every key of both whose content differs."""
    lines = {}
    for key in sorted(old.keys() & new.keys()):
        before, now = old[key], new[key]
        if before.get(SHA256) == now.get(SHA256):
            continue
        figures = [
            f"{before.get(name, 'unknown')} {name} -> {value}"
            for name, value in now.items()
            if name != SHA256 and before.get(name) != value
        ]
        same = f"the same {'class' if key == OBJECTIVE else 'size'}, but another content"
        lines[key] = f"{key}: {', '.join(figures) or same}"
    return lines


def is_harmless(key: str) -> bool:
    """Whether a run may be resumed with another value of this key."""
    return key.endswith(".backend") or is_among(key, HARMLESS)


def is_among(key: str, keys: Iterable[str]) -> bool:
    """Whether a dotted key is one of `keys`, or below one."""
    return any(key == known or key.startswith(f"{known}.") for known in keys)

"""One training run: the task, validation, checkpoints, resume and signals around trainer.fit."""

import math
import pkgutil
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

import torch

from asr.config.loader import as_yaml, at_stage, flat, parse_recipe, write_recipe
from asr.config.schema import Recipe
from asr.errors import EXIT_STOPPED, UserError
from asr.io import lock_run_folder
from asr.shipped import find_run
from asr.training import distributed, optim, trainer
from asr.training.averaging import EvaluationWeights
from asr.training.checkpoint import (
    choose,
    load_weights,
    prune,
    save_checkpoint,
    set_aside,
    unreadable,
)
from asr.training.debug import dump_bad_batch, stop_at_nan
from asr.training.distributed import add_sums, gather, is_first, rank, world
from asr.training.inspection import measure
from asr.training.logging import Log, NullLog, figure_texts
from asr.training.losses import Objective, Sum, means
from asr.training.oom import SHAPES, SHAPES_ROUNDED, limit_onednn_cache, release_memory
from asr.training.resume import (
    Content,
    ResumePoint,
    changes,
    find_resume_point,
    with_stored_decode,
)
from asr.training.signals import Stop, Stopped
from asr.training.trainer import BatchStats, Callbacks, Epochs, TaskBatch, TrainState, fit, validate

# The maker of each task: (recipe, run folder, whether the run is resumed, stage) -> Task. Resolved
# only when needed: training speech imports neither images nor language models.
TASKS: Mapping[str, str] = {
    "speech": "asr.tasks.speech:speech_task",
    "language": "asr.tasks.language:language_task",
    "images": "asr.images.task:image_task",
}


class Task(Protocol):
    """A model, its data and the report of a validation; tasks inherit what they do not define."""

    recipe: Recipe
    objective: Objective
    epochs: Epochs
    about: dict[str, str]  # metadata of a checkpoint; to load it, they must be equal
    content: Content  # fingerprint of the training and validation data
    max_unreadable: float = 0.0  # share of the corpus that may be unreadable

    def describe(self) -> str:
        """The corpus in a few words."""

    def prepare(self, run: Path) -> None:
        """Write what the run folder needs beside the recipe and checkpoints."""

    def validation_batches(self, share: slice = slice(None)) -> Iterator[TaskBatch]:
        """The validation data once, or a share of their batches."""

    def no_validation_data(self) -> str:
        """The error where there are none that can be read."""

    def report(self, log: Log, state: TrainState) -> dict[str, float]:
        """Log texts and pictures of a validation; -> more figures of it."""

    def health_batches(self) -> Iterator[TaskBatch]:
        """A few validation batches without padding, for train.health."""

    def finish(self, run: Path, log: Log, state: TrainState) -> dict[str, float]:
        """Test the finished model; -> figures of the test."""
        return {}


STAGE_ENDED = -1  # instead of an exit code


class Training:
    """One stage of a run, from its first step or a checkpoint to its end.

    `recipe` is that of the whole run, `task.recipe` that of the stage.
    """

    def __init__(self, task: Task, recipe: Recipe, stage: int, run: Path) -> None:
        self.task, self.recipe, self.stage, self.run = task, recipe, stage, run
        self.config = task.recipe.train
        self.optimizer = optim.make_optimizer(self.config.optimizer, task.objective)
        model, decay = task.objective.model, self.config.ema
        self.weights = EvaluationWeights(model, self.optimizer, decay)
        self.state = TrainState()
        self.trackers = {name: secrets.token_hex(8) for name in self.config.trackers}  # -> run id
        self.content = task.content  # now: the files may change during training
        distributed.check_share(len(task.epochs.plan(1).batches))
        self.metrics: dict[str, float] = {}  # of the last validation
        self.validated = self.saved = -1  # steps
        self.validations = 0  # of this process
        self.stop = Stop()
        self.stage_ended = False

    def train(
        self, start: ResumePoint | None, stored: Recipe | None, messages: Sequence[str]
    ) -> int:
        """Train to the end -> 0, of the stage -> STAGE_ENDED, or until a signal -> EXIT_STOPPED.

        Logs `messages` first. `stored`: the recipe to write into the run; None after a stage that
        this process has trained.
        """
        if len(set(gather(start and start.checkpoint.step))) > 1:
            raise UserError(f"{self.run}: must be on a disk that all machines share")
        distributed.synchronize(self.task.objective)
        if world() > 1:  # all ranks skip the same layers in a step, so that none waits for others
            stacks = [m for m in self.task.objective.modules() if hasattr(m, "choose_by")]
            for number, stack in enumerate(stacks):
                stack.choose_by(self.task.recipe.seed, number)
        more = self._restore(start) if start else []
        if self.stage > self.state.stage:
            more.append(self._begin_stage())
        if stored:
            if is_first():  # not sooner: a recipe whose model does not fit must replace no other
                write_recipe(stored, self.run / "recipe.yaml")
            more.append(self._summary(start is not None))
        total = trainer.planned_steps(self.task.epochs, self.config, self.state)
        warmup = self.config.schedule.warmup
        if stored and total <= warmup:
            more.append(f"all {total} steps are within train.schedule.warmup = {warmup}")
        settings = self.run, self.config.log_every, total, self.state.step
        tracking = self.trackers, flat(self.recipe)
        with self.stop, Log(*settings, *tracking) if is_first() else NullLog() as self.log:
            self.log.info(*messages, *more)
            with suppress(Stopped):
                self._fit()
            if self.stop.requested_on_any_rank():
                return self._stopped()
            if self.stage_ended:
                # Even where this step is saved: in mid-epoch, perhaps, and not at the next one's
                # start.
                self.save(self.metrics["valid/nll"] if self._is_validated() else math.inf)
                return STAGE_ENDED
            self.log.finish(as_yaml(self.recipe), flat(self.recipe), self.metrics)
            self.log.info(f"finished at step {self.state.step}; the run is in {self.run}")
        return 0

    def _fit(self) -> None:
        """The remaining steps, the last validation, and the test of the finished model."""
        if self._validation_is_due():
            self.check()
        task, state, log = self.task, self.state, self.log.info if is_first() else print
        callbacks = Callbacks(
            lambda state, step: self.log.step(state, step, self._is_last()),
            self.after_step,
            self.after_epoch,
            self.log.info,
            lambda: self.stage_ended or self.stop.signal is not None,
            self._dump,
        )
        schedule = optim.make_schedule(self.config.schedule, self.config.optimizer.lr)
        with stop_at_nan(task.objective, state, log) if self.config.debug else nullcontext():
            fit(
                task.objective,
                task.epochs,
                self.optimizer,
                schedule,
                state,
                self.config,
                task.max_unreadable,
                callbacks,
            )
        if self.stage_ended:
            return
        if not self._is_validated() and not self.stop.requested_on_any_rank():
            self.check()
        with self.weights.applied():
            if is_first():
                with self.stop.interruptible():
                    self.metrics |= task.finish(self.run, self.log, state)

    def after_step(self, state: TrainState) -> None:
        """Validate and save where it is due."""
        self.weights.update(state.step)
        every = self.config.validate_every
        if every and state.step % every == 0:
            self.check()
        elif state.step % self.config.save_every == 0 and not self._validates_next():
            self.save(math.inf)

    def after_epoch(self, state: TrainState) -> None:
        """Validate, unless validate_every counts steps, and end the stage where another is due."""
        if not self.config.validate_every and not self._is_validated():
            self.check()
        self.stage_ended = _due_stage(self.recipe, state) > self.stage

    def check(self) -> None:
        """Validate: loss, word error rates, pictures, alarm, checkpoint.

        All ranks compute the loss, rank 0 does the rest. A signal to any rank interrupts it;
        resuming then repeats it.
        """
        begin = time.perf_counter()
        with self.weights.applied():
            self._check()
        self.log.exclude(time.perf_counter() - begin)

    def _check(self) -> None:
        state, log = self.state, self.log
        self._check_weights()
        random = trainer.random_state()
        try:
            sums, stats = self.stop.interruptible_on_all_ranks(self._validate)
            losses = means(add_sums(sums)[0])
            log.info(*trainer.unreadable_report(BatchStats.total(gather(stats))))
            if not losses:
                raise UserError(self.task.no_validation_data())
            if math.isnan(losses["nll"]):
                cause = optim.probable_cause(self.config.optimizer)
                raise UserError(f"step {state.step}: the validation loss is NaN; {cause}")
            reported = self.stop.interruptible_on_all_ranks(self._report)
        except Stopped:
            return
        finally:
            trainer.restore_random_state(random)
        figures = losses | reported
        self.metrics = {f"valid/{name}": value for name, value in figures.items()}
        log.scalars("valid", figures, state.step)
        log.info(f"step {state.step}  validation: {'  '.join(figure_texts(figures))}")
        self._alarm(reported)
        self.validated = state.step
        self._save(losses["nll"])  # the weights that were checked above
        release_memory()

    def _validate(self) -> tuple[dict[str, Sum], BatchStats]:
        share = slice(rank(), None, world())
        return validate(
            self.task.objective, self.task.validation_batches(share), self.config.precision
        )

    def _report(self) -> dict[str, float]:
        """The task's report, and health figures at the first validation and every `health` ones."""
        if not is_first():
            return {}
        reported, every = self.task.report(self.log, self.state), self.config.health
        if every and self.validations % every == 0:
            figures = measure(self.task.objective, self.task.health_batches())
            self.log.scalars("valid_health", figures, self.state.step)
        self.validations += 1
        return reported

    def _alarm(self, reported: Mapping[str, float]) -> None:
        """Log a line where attention is not diagonal from step alarm.steps on."""
        config, reached = self.config.alarm, reported.get("diagonality", 1.0)
        if config.steps and self.state.step >= config.steps and reached < config.diagonality:
            self.log.info(
                f"ALARM: attention is not diagonal yet ({reached:.2f} < {config.diagonality:g}). "
                "Try a higher model.ctc_weight, train.short_first=true, more reduction, a lower lr."
            )

    def save(self, loss: float) -> None:
        """Write a checkpoint of everything that a resume needs."""
        with self.weights.applied():
            self._check_weights()
            self._save(loss)

    def _check_weights(self) -> None:
        """Raise UserError where weights that would be saved have diverged."""
        tensors = self.task.objective.state_dict() | (self.weights.trained or {})
        optim.check_weights(tensors, self.state.step, self.config.optimizer)

    def _save(self, loss: float) -> None:
        self.saved = self.state.step
        random, trained = gather(trainer.random_state()), self.weights.state()
        if not is_first():
            return
        training = {
            "optimizer": self.optimizer.state_dict(),
            "position": asdict(self.state),
            "random": random[0],
            "ranks": random[1:],
            "trained": trained,
            "recipe": as_yaml(self.recipe),
            "content": self.content,
            "validated": self.validated,
            "metrics": self.metrics,
            "trackers": self.trackers,
        }
        # The curves up to this step are on the disk before the checkpoint.
        self.log.flush()
        model, about = self.task.objective.model, self.task.about
        save_checkpoint(self.run, model, training, self.saved, loss, about)
        prune(self.run, self.config.keep, self.config.keep_best)

    def _restore(self, start: ResumePoint) -> list[str]:
        """Load the checkpoint; -> lines for the log where ranks or planned steps have changed."""
        checkpoint, saved = start.checkpoint, start.state
        load_weights(self.task.objective.model, [checkpoint], self.task.about)
        try:
            optim.load_moments(self.optimizer, saved["optimizer"])
            self.weights.load(saved["trained"])
        except ValueError as error:
            raise unreadable(checkpoint, error) from None
        self.state = TrainState(**saved["position"])
        random = [saved["random"], *saved["ranks"]]
        if rank() < len(random):
            trainer.restore_random_state(random[rank()])
        self.saved = self.state.step
        self.validated, self.metrics, known = (
            saved["validated"],
            saved["metrics"],
            saved["trackers"],
        )
        self.trackers = {name: known.get(name, new) for name, new in self.trackers.items()}
        lines = self._rate_change(saved["recipe"])
        saved.clear()  # its file is mapped into memory, and would keep its disk space
        if len(random) != world():
            step = f"{world()} x {self.config.accumulate} batches"
            lines.append(f"{len(random)} ranks trained so far, now {world()}: a step takes {step}")
        return lines

    def _rate_change(self, recipe: str) -> list[str]:
        """A line where another end of the run changes the learning rate of the next step.

        recipe: the text of the one so far. Of its keys only those of the end matter: the log names
        all others that have changed.
        """
        try:
            old = parse_recipe(recipe, "recipe").train
        except UserError:  # of an older version
            return []
        ends = {"steps": old.steps, "epochs": old.epochs}
        new, state = self.config, self.state
        schedule = optim.make_schedule(new.schedule, new.optimizer.lr)
        batches = len(self.task.epochs.plan(state.epoch).batches)
        after = min(state.batch + new.accumulate * world(), batches)
        before, now = (
            schedule(state.step + 1, trainer.progress(replace(state, batch=after), config, batches))
            for config in (new.model_copy(update=ends), new)
        )
        if math.isclose(before, now, rel_tol=0.01):
            return []
        return [
            f"learning rate {before:.3g} -> {now:.3g} at step {state.step + 1}: train.schedule.kind"
            f" = {new.schedule.kind} spans the whole run, whose planned end has changed; --force "
            f"train.schedule.kind=constant train.optimizer.lr={before:.3g} keeps the rate"
        ]

    def _stopped(self) -> int:
        if self.saved != self.state.step:
            self.save(math.inf)
        self.log.info(
            f"{self.stop.signal}: stopped after step {self.state.step} and saved; "
            "the same command with --resume continues"
        )
        return EXIT_STOPPED

    def _validation_is_due(self) -> bool:
        """Whether a signal interrupted the validation of the checkpoint that is resumed."""
        step, every = self.state.step, self.config.validate_every
        due = step % every == 0 if every else self.state.batch == 0
        return step > 0 and due and not self._is_validated()

    def _is_validated(self) -> bool:
        return self.validated == self.state.step

    def _begin_stage(self) -> str:
        """-> a line for the log with what changes."""
        before, now = (at_stage(self.recipe, n) for n in (self.state.stage, self.stage))
        self.state.stage = self.stage
        place = f"stage {self.stage + 1} of {len(self.recipe.stages) + 1}"
        return (
            f"{place}, from epoch {self.state.epoch} on: {', '.join(changes(before, now).values())}"
        )

    def _validates_next(self) -> bool:
        """Whether a validation follows this step (at the end of an epoch or the run) and saves it.

        A checkpoint before it, too, could put a point on the curves twice after a crash.
        """
        return self._is_last() or (not self.config.validate_every and self._ends_epoch())

    def _is_last(self) -> bool:
        if self.config.steps is not None:
            return self.state.step >= self.config.steps
        return self.state.epoch >= self.config.epochs and self._ends_epoch()

    def _ends_epoch(self) -> bool:
        return self.state.batch >= len(self.task.epochs.plan(self.state.epoch).batches)

    def _dump(self, group: Sequence[TaskBatch]) -> str:
        folder = self.run / "bad_batches" / f"{self.state.step:08d}"
        return dump_bad_batch(folder, group, self.task.objective)

    def _summary(self, resumed: bool) -> str:
        parameters = sum(p.numel() for p in self.task.objective.parameters())
        return (
            f"{'resuming' if resumed else 'training'} {self.task.recipe.run}: "
            f"{parameters / 1e6:.2f} M parameters, {self.task.describe()}"
            f"{f', {world()} ranks' if world() > 1 else ''}"
        )


def train(
    recipe: Recipe,
    run: Path,
    resume: bool = False,
    force: bool = False,
    given: AbstractSet[str] = frozenset(),
) -> int:
    """Train into the run folder -> exit code: 0 at the end, EXIT_STOPPED where a signal stopped it.

    A resumed run keeps the decode settings in its folder, but for the keys `given`.

    Raises UserError where the folder already holds a run but `resume` is not set, where that run
    had another recipe or other data, unless `force`, and where another process trains in it.
    """
    if recipe.train.trackers:
        from asr.training.trackers import check_installed

        check_installed(recipe.train.trackers)
    limit_onednn_cache(SHAPES_ROUNDED if recipe.train.round_seconds > 0.0 else SHAPES)
    group = distributed.process_group(recipe.train.device)
    with group, lock_run_folder(run) if is_first() else nullcontext():
        restarted = distributed.restarted_by_torchrun(run)
        code = _train_stage(recipe, run, resume or restarted, force, given, begun=False)
        while code == STAGE_ENDED:  # the next one starts from the checkpoint at this one's end
            code = _train_stage(recipe, run, True, force, given, begun=True)
        return code


def _train_stage(
    recipe: Recipe, run: Path, resume: bool, force: bool, given: AbstractSet[str], begun: bool
) -> int:
    with distributed.first_rank_first():  # rank 0 writes what the others read
        start = find_resume_point(run, resume)
        stored, messages = recipe, []
        if start and not begun:
            messages = start.check_recipe(recipe, force)
            start.check_end(recipe.train)
            stored, kept = with_stored_decode(recipe, run, given)
            messages += kept
        training = _open(recipe, run, start)
        if start:
            messages += start.check_content(training.content, force)
            for folder in start.damaged:  # so that none is taken for the last or the best one
                set_aside(folder)
        elif is_first():
            training.task.prepare(run)
    distributed.record_launch(run)
    return training.train(start, None if begun else stored, messages)


def _open(recipe: Recipe, run: Path, start: ResumePoint | None) -> Training:
    """The training of the due stage, with new or `train.init` weights."""
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    make_task = pkgutil.resolve_name(TASKS[recipe.task])
    state = TrainState(**start.state["position"]) if start else TrainState()
    stage = _due_stage(recipe, state)
    task = make_task(recipe, run, start is not None or not is_first(), stage)
    if recipe.train.init and not start:
        best = choose(find_run(recipe.train.init), "best", 1)
        load_weights(task.objective.model, best, task.about)
    return Training(task, recipe, stage, run)


def _due_stage(recipe: Recipe, state: TrainState) -> int:
    return trainer.due_stage(state, recipe.train, [stage.start for stage in recipe.stages])

"""One training run: what happens between the steps of asr.training.loop.fit.

Validation, pictures, checkpoints, going on after a crash and ending when a signal asks for it.
"""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from asr import build
from asr.errors import UserError
from asr.recipe import as_yaml, flat, write_recipe
from asr.runs import health
from asr.runs.debug import stop_at_nan
from asr.runs.resume import Start, fingerprint
from asr.runs.task import Task
from asr.training.checkpoint import load_weights, prune, save_checkpoint
from asr.training.distributed import (
    add_sums,
    begin_alike,
    check_share,
    gather,
    is_first,
    rank,
    world,
)
from asr.training.evidence import keep_evidence
from asr.training.faults import left_out
from asr.training.flat import give_back
from asr.training.given import Batch, Between, Read
from asr.training.log import Log, Silence
from asr.training.loop import fit, planned_steps, validate
from asr.training.objective import Sum, means
from asr.training.optim import load_moments
from asr.training.position import Position, position_state, random_state, restore_random_state
from asr.training.signals import Stop, Stopped

STOPPED = 3  # exit code of a run that a signal ended: all is saved, --resume goes on


class Training:
    """One run, from its first step or a checkpoint to its end."""

    def __init__(self, task: Task, run: Path) -> None:
        self.task, self.run, self.settings = task, run, task.recipe.train
        self.optimizer = build.optimizer(self.settings, task.objective)
        self.position = Position()
        self.content = task.content  # now: while it trains, its files may change
        self.limits = build.limits(self.settings, task.allowed_broken)
        check_share(len(task.epochs.plan(1).batches))
        self.metrics: dict[str, float] = {}
        self.validated = self.saved = -1  # steps
        self.checks = 0  # validations of this process
        self.stop = Stop()

    def go(self, start: Start | None = None, notes: Sequence[str] = ()) -> int:
        """Train to the end -> 0, or until a signal asks to stop -> STOPPED.

        `notes` are said first.
        """
        if len(set(gather(start and start.checkpoint.step))) > 1:
            raise UserError(f"{self.run}: must lie on a disk that all machines share")
        begin_alike(self.task.objective)
        if world() > 1:
            build.share_layer_drop(self.task.objective, self.task.recipe.seed)
        more = self._restore(start) if start else []
        if is_first():  # not sooner: a recipe whose model does not fit must not replace the run's
            write_recipe(self.task.recipe, self.run / "recipe.yaml")
        total = planned_steps(self.task.epochs, self.limits, self.position)
        here = self.run, self.settings.log_every, total, self.position.step
        with self.stop, Log(*here) if is_first() else Silence() as self.log:
            self.log.note(*notes, *more, self._greeting(start is not None))
            with suppress(Stopped):
                self._train()
            if self.stop.asked_any():
                return self._stopped()
            self.log.recipe(as_yaml(self.task.recipe), flat(self.task.recipe), self.metrics)
            self.log.note(f"finished at step {self.position.step}; the run is in {self.run}")
        return 0

    def _train(self) -> None:
        """All steps that are left, validation at the end, and what the task does then."""
        if self._validation_is_due():
            self.check()
        between = Between(
            lambda position, step: self.log.step(position, step, self._is_last()),
            self.after_step,
            self.after_epoch,
            self.log.note,
            lambda: self.stop.asked is not None,
            self._keep_evidence,
        )
        objective, schedule = self.task.objective, build.schedule(self.settings)
        limits, position = self.limits, self.position
        epochs, note = self.task.epochs, self.log.note if is_first() else print
        debug = stop_at_nan(objective, position, note) if self.settings.debug else nullcontext()
        with debug:
            fit(objective, epochs, self.optimizer, schedule, position, limits, between)
        if self.validated != self.position.step and not self.stop.asked_any():
            self.check()
        if is_first():
            with self.stop.broken_off():
                self.metrics |= self.task.finish(self.run, self.log, self.position)

    def after_step(self, position: Position) -> None:
        """Validate and save where it is due."""
        every = self.settings.validate_every
        if every and position.step % every == 0:
            self.check()
        elif position.step % self.settings.save_every == 0 and not self._validates_next():
            self.save(math.inf)

    def after_epoch(self, position: Position) -> None:
        """Validate, unless that goes by steps."""
        if not self.settings.validate_every and self.validated != position.step:
            self.check()

    def check(self) -> None:
        """Validation: loss, word error rates, pictures, a checkpoint, perhaps the alarm.

        Ranks share the loss; the first does the rest. A signal to one of them ends it at once, and
        resuming begins it anew.
        """
        position, log, begin = self.position, self.log, time.perf_counter()
        random = random_state()
        try:
            sums, read = self.stop.broken_off_by_any(self._validate)
            losses = means(add_sums(sums)[0])
            log.note(*left_out(Read.by_all(gather(read))))
            if not losses:
                raise UserError(self.task.nothing_valid())
            shown = self.stop.broken_off_by_any(self._show)
        except Stopped:
            return
        finally:
            restore_random_state(random)
        self.metrics = {f"valid/{name}": value for name, value in (losses | shown).items()}
        log.scalars("valid", losses | shown, position.step)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in (losses | shown).items())
        log.note(f"step {position.step}  validation: {figures}")
        log.note(*health.alarm(self.settings.alarm, position.step, shown))
        self.validated = position.step
        self.save(losses["nats"])
        give_back()
        log.pause(time.perf_counter() - begin)

    def _validate(self) -> tuple[dict[str, Sum], Read]:
        share = slice(rank(), None, world())
        return validate(self.task.objective, self.task.valid(share), self.settings.precision)

    def _show(self) -> dict[str, float]:
        """What the task shows, and what asr.health finds, at the first validation and as due."""
        if not is_first():
            return {}
        shown, every = self.task.report(self.log, self.position), self.settings.health
        if every and self.checks % every == 0:
            figures = health.measure(self.task.objective, self.task.samples())
            self.log.scalars("health", figures, self.position.step)
            health.write(self.run, self.position.step, figures)
        self.checks += 1
        return shown

    def save(self, loss: float) -> None:
        """A checkpoint of everything that resuming needs."""
        self.saved = self.position.step
        random = gather(random_state())
        if is_first():
            self._write(loss, random)

    def _write(self, loss: float, random: Sequence[dict[str, Any]]) -> None:
        recipe = as_yaml(self.task.recipe)
        training = {
            "optimizer": self.optimizer.state_dict(),
            "position": position_state(self.position),
            "random": random[0],
            "ranks": random[1:],
            "recipe": recipe,
            "content": self.content,
            "validated": self.validated,
            "metrics": self.metrics,
        }
        # What the curves show up to here is on the disk before the checkpoint that follows it.
        self.log.flush()
        model, step = self.task.objective.model, self.position.step
        about = {**self.task.about, "recipe": fingerprint(recipe)}
        save_checkpoint(self.run, model, training, step, loss, about)
        prune(self.run, self.settings.keep, self.settings.keep_best)

    def _restore(self, start: Start) -> list[str]:
        """To where the checkpoint was made; -> what the log should say of it."""
        checkpoint, state = start.checkpoint, start.state
        load_weights(self.task.objective.model, [checkpoint], self.task.about)
        load_moments(self.optimizer, state["optimizer"])
        self.position = Position(**state["position"])
        random = [state["random"], *state.get("ranks", [])]
        if rank() < len(random):
            restore_random_state(random[rank()])
        self.saved = self.position.step
        measured = self.saved if math.isfinite(checkpoint.loss) else -1
        self.validated = state.get("validated", measured)
        self.metrics = state.get("metrics", {})
        step = f"{world()} x {self.limits.accumulate} batches"
        line = f"{len(random)} ranks trained so far, now {world()}: a step takes {step}"
        return [line] if len(random) != world() else []

    def _stopped(self) -> int:
        if self.saved != self.position.step:
            self.save(math.inf)
        self.log.note(
            f"{self.stop.asked}: stopped after step {self.position.step} and saved; "
            "the same command with --resume goes on"
        )
        return STOPPED

    def _validation_is_due(self) -> bool:
        """Whether the checkpoint was taken when a signal had broken a validation off."""
        step, every = self.position.step, self.settings.validate_every
        due = step % every == 0 if every else self.position.batch == 0
        return step > 0 and due and self.validated != step

    def _validates_next(self) -> bool:
        """At the end of an epoch or the run: validation follows and saves what this step made.

        Were it saved before as well, a crash between could put a point on the curves twice.
        """
        return self._is_last() or (not self.settings.validate_every and self._ends_epoch())

    def _is_last(self) -> bool:
        if self.limits.steps is not None:
            return self.position.step >= self.limits.steps
        return self.position.epoch >= self.limits.epochs and self._ends_epoch()

    def _ends_epoch(self) -> bool:
        return self.position.batch >= len(self.task.epochs.plan(self.position.epoch).batches)

    def _keep_evidence(self, group: Sequence[Batch]) -> str:
        folder = self.run / "evidence" / f"{self.position.step:08d}"
        return keep_evidence(folder, group, self.task.objective)

    def _greeting(self, resumed: bool) -> str:
        parameters = sum(p.numel() for p in self.task.objective.parameters())
        return (
            f"{'resuming' if resumed else 'training'} {self.task.recipe.run}: "
            f"{parameters / 1e6:.2f} M parameters, {self.task.describe()}"
            f"{f', {world()} ranks' if world() > 1 else ''}"
        )

"""Train a recipe of any task: `train` opens the run, `Training.loop` is the training loop.

A step reads `accumulate` batches on each rank, sums their objective, divides the gradient by the
number of targets of the whole step, clips it and updates the weights.

To resume, the TrainState, the weights, the optimiser and the random state suffice: the learning
rate is a function of the step, the data are one of seed, epoch and utterance, and bf16 needs no
loss scaler.
"""

import math
import pkgutil
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asr import __version__
from asr.config.loader import as_yaml, at_stage, every_stage, flat, non_default, write_recipe
from asr.config.schema import Recipe, TrainConfig
from asr.data.batching import Broken, Epochs, TaskBatch
from asr.errors import EXIT_STOPPED, UserError, WorkerKilled
from asr.io import lock_run_folder
from asr.nn.dropout import LayerDrop
from asr.training import distributed, optim
from asr.training.averaging import EvaluationWeights
from asr.training.checkpoint import (
    choose,
    load_weights,
    prune,
    read_training,
    save_checkpoint,
    set_aside,
    unreadable,
)
from asr.training.distributed import add_gradients, add_sums, gather, is_first, rank, world
from asr.training.logging import Log, NullLog, Step, figure_texts
from asr.training.losses import Sum, add, means, read
from asr.training.oom import (
    SHAPES,
    SHAPES_ROUNDED,
    limit_onednn_cache,
    release_memory,
    retry_in_halves,
)
from asr.training.resume import ResumePoint, changes, find_resume_point, unread
from asr.training.signals import Stop, Stopped
from asr.training.state import (
    TrainState,
    count_validation,
    due_stage,
    has_stopped_early,
    is_finished,
    progress,
    random_state,
    rank_of,
    restore_random_state,
    share_at_epoch,
    stage_at_epoch,
)
from asr.training.task import Task
from asr.training.warm_start import has_new_vocabulary, starting_weights

# The maker of each task: (recipe, run folder, whether the run is resumed, stage) -> Task. Resolved
# only when needed: training speech imports neither images nor language models.
TASKS: Mapping[str, str] = {
    "speech": "asr.tasks.speech:speech_task",
    "language": "asr.tasks.language:language_task",
    "images": "asr.images.task:image_task",
}
HARDLY_A_WORD = 0.9  # word error rate; an empty transcript has 1
MAX_NAMED = 5  # utterances that the report of a validation names
MAX_LOGGED = 40  # of a step that is not used


@dataclass(frozen=True)
class BatchStats:
    """Counts over the batches of a step or of a validation, on one rank or on all."""

    batches: int = 0
    utterances: int = 0  # readable ones
    seconds: float = 0.0  # of audio
    broken: tuple[Broken, ...] = ()
    stop: bool = False  # whether a signal asks to stop before this step

    @classmethod
    def of(cls, group: Sequence[TaskBatch], stop: bool = False) -> "BatchStats":
        """Over batches of this rank."""
        broken = tuple(each for batch in group for each in batch.broken)
        seconds = sum(batch.seconds for batch in group)
        return cls(len(group), sum(map(len, group)), seconds, broken, stop)

    @classmethod
    def total(cls, parts: Sequence["BatchStats"]) -> "BatchStats":
        """Of several batches or ranks together."""
        return cls(
            sum(part.batches for part in parts),
            sum(part.utterances for part in parts),
            sum(part.seconds for part in parts),
            tuple(each for part in parts for each in part.broken),
            any(part.stop for part in parts),
        )


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Mixed precision for `bf16`; parameters and optimiser stay fp32.

    None on a device without bf16 instructions: a CPU's matrix product in bf16 then takes twenty
    times as long as in fp32.
    """
    mixed = precision == "bf16" and distributed.computes_bf16(device)
    return torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()


def sum_gradients(
    objective: nn.Module, group: Sequence[TaskBatch], precision: str
) -> dict[str, Sum]:
    """Put the gradient of the group's summed objective into the parameters; -> all its sums."""
    objective.zero_grad(set_to_none=True)
    sums: dict[str, Sum] = {}
    device = next(objective.parameters()).device
    for batch in group:
        with autocast(device, precision):
            out = objective(batch)
        if out["objective"].total.requires_grad:  # not where LayerDrop skips all that trains
            out["objective"].total.backward()
        add(sums, out)
    return sums


def take_step(
    objective: nn.Module,
    group: Sequence[TaskBatch],
    optimizer: torch.optim.Optimizer,
    lr: float,
    config: TrainConfig,
    log: Callable[[str], None] = print,
) -> Step:
    """One update from the batches of all ranks; none where loss or gradient is not finite.

    Unreadable batches, which are empty, are skipped.
    """
    objective.train()
    device = next(objective.parameters()).device
    group = [batch.to(device) for batch in group if len(batch)]
    messages: list[str] = []
    sums = retry_in_halves(
        lambda part: sum_gradients(objective, part, config.precision), group, messages.append
    )
    sums, lines = add_sums(sums, messages)
    add_gradients(objective)
    for line in lines:
        log(line)
    gradients = [p.grad for p in objective.parameters() if p.grad is not None]
    if not gradients:  # every utterance of the step was unreadable
        return Step(sums, 0.0, lr)
    # Summed, then divided by the targets of the whole step: a short utterance weighs no more. The
    # only wait for the device in a step.
    norm, total, count = read([nn.utils.get_total_norm(gradients), *sums["objective"]]).tolist()
    norm = norm / count if count else math.nan
    step = Step(sums, norm, lr, finite=math.isfinite(norm) and math.isfinite(total))
    if step.finite:
        torch._foreach_mul_(gradients, min(1.0, config.clip / (norm + 1e-6)) / count)
        for settings in optimizer.param_groups:
            settings["lr"] = lr * settings.get("lr_factor", 1.0)
        optimizer.step()
    return step


@torch.no_grad()
def validate(
    objective: nn.Module, batches: Iterable[TaskBatch], precision: str
) -> tuple[dict[str, Sum], BatchStats]:
    """-> the objective's sums over the batches, in eval mode, and their counts."""
    objective.eval()
    device = next(objective.parameters()).device
    sums: dict[str, Sum] = {}
    stats = BatchStats()
    for batch in batches:
        stats = BatchStats.total([stats, BatchStats.of([batch])])
        if len(batch):
            with autocast(device, precision):
                add(sums, objective(batch.to(device)))
    return sums, stats


def unreadable_report(stats: BatchStats) -> list[str]:
    """A line on the unreadable utterances of a validation, if there are any."""
    if not stats.broken:
        return []
    ids = " ".join(broken.id for broken in stats.broken[:MAX_NAMED])
    more = " ..." if len(stats.broken) > MAX_NAMED else ""
    count = f"{len(stats.broken)} of {stats.utterances + len(stats.broken)} utterances"
    return [f"validation: {count} skipped: {ids}{more} ({stats.broken[0].reason})"]


def planned_steps(epochs: Epochs, config: TrainConfig, state: TrainState) -> int:
    """Steps of the whole run; without config.steps, as if all epochs had as many as the first."""
    if config.steps is not None:
        return config.steps
    batches, at_once = len(epochs.plan(1).batches), config.accumulate * world()
    per_epoch = math.ceil(batches / at_once)
    rest = math.ceil(max(0, batches - state.batch) / at_once)
    return state.step + max(0, rest + (config.epochs - state.epoch) * per_epoch)


class Training:
    """A run in progress: its task, weights and position, and the files that it writes.

    `recipe` is that of the whole run as asked for, `used` that in the run folder, with the
    vocabulary and the encoder's commit; `config` is the section `train` of the stage; `parts` are
    what a program has in place of the recipe's data and objective.
    """

    def __init__(self, recipe: Recipe, run: Path, parts: Mapping[str, Any] | None = None) -> None:
        self.recipe, self.run, self.parts = recipe, run, parts or {}
        self.state = TrainState()
        self.saved = self.validated = -1  # steps of the last checkpoint and the last validation
        self.metrics: dict[str, float] = {}  # of that validation
        self.validations = 0  # of this process
        self.bad_steps = 0  # without a finite gradient, in a row
        self.trackers = {name: secrets.token_hex(8) for name in recipe.train.trackers}  # -> run id
        self.alarmed: set[str] = set()  # what this process has warned of, each once
        self.stop, self.log = Stop(), NullLog()

    def loop(self) -> None:
        """Train from the state's position to the end of the run, or to a signal on any rank.

        Raises UserError where too many utterances are unreadable, a batch does not fit in memory,
        the weights have diverged, or config.bad_steps steps in a row have no finite gradient.
        """
        state, steps = self.state, None
        while True:
            if state.batch and state.batch >= self.batches_of_epoch():
                state.epoch, state.batch, steps = state.epoch + 1, 0, None
            if self.validation_is_due():
                self.validate_and_save()
            elif state.step % self.config.save_every == 0 and state.step not in (0, self.saved):
                self.save()
            if is_finished(state, self.config):
                self.report_early_stop()
                return
            stage = self.due_stage()
            if stage > state.stage and not self.stop.requested_on_any_rank():
                self.begin_stage(stage)
            begin = time.perf_counter()
            steps = steps or self.steps_of_epoch()
            group, stats = next(steps)
            if stats.stop:
                return
            self.count(stats)
            share = progress(state, self.config, self.batches_of_epoch())
            lr = self.schedule(state.step + 1, share)
            self.set_step()
            step = take_step(
                self.task.objective, group, self.optimizer, lr, self.config, self.log_memory
            )
            state.step += 1
            self.check_finite(step, group)
            state.train_seconds += time.perf_counter() - begin
            self.weights.update(state.step)
            self.log.step(state, step, stats.seconds, share >= 1.0)

    def batches_of_epoch(self) -> int:
        """Batches of the current epoch, on all ranks."""
        return len(self.task.epochs.plan(self.state.epoch).batches)

    def steps_of_epoch(self) -> Iterator[tuple[list[TaskBatch], BatchStats]]:
        """For each step of the epoch up to `accumulate` batches of this rank, and counts of all.

        A rank may have none in the last step. A signal to one rank stops all before the same step.
        """
        state, stop = self.state, self.stop
        source: Iterator[TaskBatch] = iter(())
        if not stop.signal:
            source = iter(self.task.epochs.batches(state.epoch, state.batch + rank(), world()))
        while True:
            group: list[TaskBatch] = []
            try:
                if not stop.signal:
                    group = list(islice(source, self.config.accumulate))
            except (RuntimeError, WorkerKilled):
                if not stop.signal:  # a signal ends the loader's processes, too
                    raise
            stats = BatchStats.total(gather(BatchStats.of(group, stop.signal is not None)))
            assert stats.batches or stats.stop, "an epoch has fewer batches than planned"
            yield group, stats

    def count(self, stats: BatchStats) -> None:
        """Add the batches of a step to the state. Raises UserError for too many unreadable ones.

        max_unreadable of the corpus may be unreadable in an epoch, but one utterance in any.
        """
        state = self.state
        state.batch += stats.batches
        state.audio_seconds += stats.seconds
        state.utterances += stats.utterances
        state.broken += len(stats.broken)
        for broken in stats.broken:
            self.log.info(f"skipped {broken.id}: {broken.reason}")
        if state.broken > self.allowed_unreadable * state.epoch:
            seen = state.utterances + state.broken
            raise UserError(
                f"{state.broken} of {seen} training utterances so far cannot be read, more than "
                "the share data.max_unreadable of the corpus; the log names each; "
                f"{self.task.audio_remedy()}"
            )

    def set_step(self) -> None:
        """Set what depends on the step. All ranks skip the same layers: none waits for others."""
        self.task.objective.set_step(self.state.step)
        if world() > 1:
            for number, layer_drop in enumerate(self.layer_drops):
                layer_drop.seed(self.task.recipe.seed, number, self.state.step)

    def check_finite(self, step: Step, group: Sequence[TaskBatch]) -> None:
        """Log the utterances of a step without a finite gradient.

        Dumps the batches and raises UserError where these are config.bad_steps in a row. Raises
        UserError at once where not the batches but the weights are the reason.
        """
        if step.finite:
            self.bad_steps = 0
            return
        number, objective = self.state.step, self.task.objective
        named = dict(objective.named_parameters())
        optim.check_weights(named, number - 1, self.config.optimizer)
        ids = list(chain(*gather([name for batch in group for name in batch.ids])))
        more = [f"and {len(ids) - MAX_LOGGED} more"] if len(ids) > MAX_LOGGED else []
        listed = " ".join(ids[:MAX_LOGGED] + more)
        self.log.info(f"step {number}: loss or gradient not finite, not used; utterances {listed}")
        self.bad_steps += 1
        if self.bad_steps >= self.config.bad_steps:
            from asr.training.debug import dump_bad_batch  # which few runs need

            dumped = dump_bad_batch(self.run / "bad_batches" / f"{number:08d}", group, objective)
            raise UserError(
                f"step {number}: {self.bad_steps} steps in a row without a finite gradient; lower "
                f"train.optimizer.lr or train.clip. The log names the utterances. {dumped}"
            )

    def validation_is_due(self) -> bool:
        """At the end, after every epoch or `validate_every` steps, and before the first step that
        starts from other weights, whose figures say what training adds to them.

        Not where it is in the checkpoint that was resumed; a signal may have interrupted it.
        """
        state, every = self.state, self.config.validate_every
        due = state.step % every == 0 if every else state.batch == 0
        due = due or is_finished(state, self.config)
        first = 0 if self.recipe.train.init else 1
        return due and state.step >= first and state.step != self.validated

    def validate_and_save(self) -> None:
        """Validate: loss, word error rates, pictures, alarm. Then save.

        A signal to any rank interrupts it; resuming then repeats it.
        """
        begin = time.perf_counter()
        with self.weights.applied():
            self.check_weights()
            random = random_state()
            try:
                figures = self.validation_figures()
            except Stopped:
                return
            finally:
                restore_random_state(random)
            step, self.validated = self.state.step, self.state.step
            self.metrics = {f"valid/{name}": value for name, value in figures.items()}
            self.log.scalars("valid", figures, step)
            self.log.info(f"step {step}  validation: {'  '.join(figure_texts(figures))}")
            self.alarm(figures)
            self.count_validation(gather(figures)[0])  # rank 0 alone decodes
            self.write_checkpoint()
            release_memory()
        self.log.exclude(time.perf_counter() - begin)

    def validation_figures(self) -> dict[str, float]:
        """The loss by all ranks, the task's report by rank 0. Raises Stopped after a signal."""
        sums, stats = self.stop.interruptible_on_all_ranks(self.validate_share)
        losses = means(add_sums(sums)[0])
        self.log.info(*unreadable_report(BatchStats.total(gather(stats))))
        if not losses:
            raise UserError(self.task.no_validation_data())
        if math.isnan(losses["nll"]):
            raise UserError(
                f"step {self.state.step}: the validation loss is NaN; lower train.optimizer.lr = "
                f"{self.config.optimizer.lr:g}"
            )
        return losses | self.stop.interruptible_on_all_ranks(self.report)

    def validate_share(self) -> tuple[dict[str, Sum], BatchStats]:
        """-> sums and counts over this rank's share of the validation data."""
        batches = self.task.validation_batches(slice(rank(), None, world()))
        return validate(self.task.objective, batches, self.config.precision)

    def report(self) -> dict[str, float]:
        """The task's report, and health figures at the first validation and every `health` ones."""
        if not is_first():
            return {}
        reported, every = self.task.report(self.log, self.state.step), self.config.health
        if every and self.validations % every == 0:
            from asr.training.inspection import measure  # which few runs need

            figures = measure(self.task.objective, self.task.health_batches())
            self.log.scalars("valid_health", figures, self.state.step)
        self.validations += 1
        return reported

    def alarm(self, figures: Mapping[str, float]) -> None:
        """Log a line, once, where attention is not diagonal from step alarm.steps on, and one where
        hardly a word is recognised.
        """
        config, alarms = self.config.alarm, {}
        if not config.steps or self.state.step < config.steps:
            return
        if (diagonality := figures.get("diagonality", 1.0)) < config.diagonality:
            alarms["diagonality"] = (
                f"attention is not diagonal yet ({diagonality:.2f} < {config.diagonality:g}). Try "
                "train.guided_attention, a higher model.ctc_weight, more reduction, a lower rate"
            )
        rates = [figures[name] for name in ("wer", "ctc_wer") if name in figures]
        if rates and min(rates) >= HARDLY_A_WORD:
            alarms["wer"] = (
                "hardly a word is recognised yet. Compare transcripts and audio (TensorBoard, page "
                "Text), or lower train.optimizer.lr"
            )
        self.log.info(*(f"ALARM: {alarms[name]}." for name in alarms if name not in self.alarmed))
        self.alarmed |= alarms.keys()

    def log_memory(self, line: str) -> None:
        """Log the first batch that did not fit in memory; the remedy of all is the same."""
        if "memory" not in self.alarmed:
            self.log.info(f"{line} (logged once)")
        self.alarmed.add("memory")

    def count_validation(self, figures: Mapping[str, float]) -> None:
        """For train.early_stopping. Raises UserError where the metric is not among the figures."""
        if early := self.config.early_stopping:
            if early.metric not in figures:
                key = f"train.early_stopping.metric = {early.metric}"
                raise UserError(f"{key}: the validation has {', '.join(figures)}; choose one")
            count_validation(self.state, early, figures[early.metric])

    def report_early_stop(self) -> None:
        """Log why the run ends before its planned end, if it does."""
        state, metric = self.state, self.config.metric
        if has_stopped_early(state, self.config):
            (best,) = figure_texts({metric: state.best})
            self.log.info(
                f"stopped early: {metric} has not improved for {state.not_improved} validations; "
                f"best {best} at step {state.best_step}"
            )

    def save(self) -> None:
        """Write a checkpoint of everything that a resume needs."""
        with self.weights.applied():
            self.check_weights()
            self.write_checkpoint()

    def check_weights(self) -> None:
        """Raise UserError where weights that would be saved have diverged."""
        tensors = self.task.objective.state_dict() | (self.weights.trained or {})
        optim.check_weights(tensors, self.state.step, self.config.optimizer)

    def write_checkpoint(self) -> None:
        """Within weights.applied(): rank 0 writes what all ranks need to resume."""
        self.saved = self.state.step
        random, trained = gather(random_state()), self.weights.state()
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
        metric, loss = self.config.metric, math.inf
        if self.validated == self.saved:
            loss = rank_of(metric, self.metrics[f"valid/{metric}"])
        # The curves up to this step are on the disk before the checkpoint.
        self.log.flush()
        model, metadata = self.task.objective.model, self.task.metadata
        save_checkpoint(self.run, model, training, self.saved, loss, metadata)
        prune(self.run, self.config.keep, self.config.keep_best)

    def load(self, start: ResumePoint) -> None:
        """Load all of a checkpoint but its position."""
        checkpoint, saved = start.checkpoint, start.state
        load_weights(self.task.objective.model, [checkpoint], self.task.metadata)
        try:
            optim.load_moments(self.optimizer, saved["optimizer"])
            self.weights.load(saved["trained"])
            random = [saved["random"], *saved["ranks"]]
            if rank() < len(random):
                restore_random_state(random[rank()])
        except ValueError as error:
            raise unreadable(checkpoint, error) from None
        self.saved, self.validated = saved["position"]["step"], saved["validated"]
        self.metrics, known = saved["metrics"], saved["trackers"]
        self.trackers = {name: known.get(name, new) for name, new in self.trackers.items()}
        saved.clear()  # its file is mapped into memory, and would keep its disk space

    def make_task(self, stage: int, resume: bool) -> None:
        """Read the data and build the model, with the settings of a stage."""
        make = pkgutil.resolve_name(TASKS[self.recipe.task])
        task = make(self.recipe, self.run, resume or not is_first(), stage, **self.parts)
        self.set_task(task)
        for each in every_stage(self.recipe):
            optim.check_patterns(self.task.objective.model, each.train)

    def set_task(self, task: Task) -> None:
        """Train this task from now on."""
        self.task, self.config = task, task.recipe.train
        self.content = task.content  # now: the files may change during training
        optim.freeze(task.objective.model, self.config.freeze)
        batches, share = task.epochs.plan(1).batches, task.max_unreadable
        distributed.check_share(len(batches))
        # Unreadable utterances an epoch: a share, but one in a corpus of any size.
        self.allowed_unreadable = max(share * sum(map(len, batches)), math.ceil(share))

    def make_optimizer(self) -> None:
        """Make what the loop needs beside the task, for weights equal on all ranks."""
        objective, config = self.task.objective, self.config
        distributed.synchronize(objective)
        self.layer_drops = [m for m in objective.modules() if isinstance(m, LayerDrop)]
        self.optimizer = optim.make_optimizer(config.optimizer, objective)
        self.schedule = optim.make_schedule(config.schedule, config.optimizer.lr)
        self.weights = EvaluationWeights(objective.model, self.optimizer, config.ema)
        if config.debug:
            from asr.training.debug import stop_at_nan  # which few runs need

            log = (lambda text: self.log.info(text)) if is_first() else print
            stop_at_nan(objective, self.state, log)

    def open(self, resume: bool, force: bool, overridden: AbstractSet[str]) -> list[str]:
        """Start a run or resume it -> lines for the log. `overridden`: keys on the command line."""
        recipe, messages = self.recipe, []
        with distributed.first_rank_first():  # rank 0 writes what the others read
            start = find_resume_point(self.run, resume)
            if start:
                asked, self.recipe = recipe.train, start.as_asked(recipe)
                recipe, messages = start.check_recipe(self.recipe, overridden, force)
                messages += unread(asked, self.recipe.train)
                self.state = TrainState(**start.state["position"])
            stage = self.due_stage()
            self.make_task(stage, resume=start is not None)
            if start:
                messages += start.check_content(self.content, force)
                for folder in start.damaged:  # so that none is taken for the last or the best one
                    set_aside(folder)
            else:
                if resume:
                    messages.append(f"{self.run} has no checkpoint: training starts from step 0")
                messages += self.prepare()
                recipe = self.task.as_used(recipe)
        distributed.record_launch(self.run)
        if len(set(gather(start and start.checkpoint.step))) > 1:
            raise UserError(f"{self.run}: must be on a disk that all machines share")
        self.make_optimizer()
        if start:
            messages += start.changed_course(self.config, self.batches_of_epoch())
            self.load(start)
        if stage > self.state.stage:
            messages.append(self.enter_stage(stage))
        if is_first():  # not sooner: a recipe whose model does not fit must replace no other
            write_recipe(recipe, self.run / "recipe.yaml")
        self.used = recipe
        return [*messages, *self.summary(resumed=start is not None)]

    def prepare(self) -> list[str]:
        """Prepare a new run: the weights of `train.init`, and the task's files -> lines to log."""
        lines: list[str] = []
        if init := self.recipe.train.init:
            (checkpoints, lines), task = starting_weights(init, self.recipe), self.task
            model, metadata, kept = task.objective.model, task.metadata, ()
            if has_new_vocabulary(self.recipe, metadata):
                metadata, kept = {}, model.of_vocabulary
                names = ", ".join(f"{prefix}*" for prefix in kept)
                lines.append(f"train.new_vocabulary: the weights {names} start at random")
            load_weights(model, checkpoints, metadata, task.pretrained, kept)
        if is_first():
            self.task.prepare(self.run)
        return lines

    def summary(self, resumed: bool) -> list[str]:
        """Lines on the model, the corpus, and settings that the run is too short for."""
        recipe, warmup = self.task.recipe, self.config.schedule.warmup
        device = next(self.task.objective.parameters()).device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        lines = [
            f"{'resuming' if resumed else 'training'} {recipe.run}: "
            f"{self.count_parameters()}, {self.task.describe()}"
            f"{f', {world()} ranks' if world() > 1 else ''}, on {name}; "
            f"layernorm-asr {__version__}, torch {torch.__version__}"
        ]
        total = planned_steps(self.task.epochs, self.config, self.state)
        if self.config.precision == "bf16" and not distributed.computes_bf16(device):
            lines.append(
                "train.precision = bf16 computes in fp32 here: "
                f"this {'GPU' if device.type == 'cuda' else 'CPU'} has no instructions for bf16"
            )
        early, every = self.config.early_stopping, self.config.validate_every
        if early and every and total // every <= early.patience:
            lines.append(
                f"train.early_stopping.patience = {early.patience} cannot end this run, which has "
                f"{total // every} validations: lower train.validate_every = {every}"
            )
        if total <= warmup:
            lines.append(f"all {total} steps are within train.schedule.warmup = {warmup}")
        if self.config.schedule.kind == "noam":
            peak, factor = self.schedule(max(warmup, 1), 0.0), self.config.optimizer.lr
            lines.append(
                f"train.schedule.kind = noam: the learning rate rises to {peak:.2g}, with the "
                f"factor train.optimizer.lr = {factor:g}"
            )
        return lines + self.unreached_stages()

    def unreached_stages(self) -> list[str]:
        """A line where the last epoch begins too early for the last stage to begin with it."""
        config, starts = self.config, self.stage_starts()
        last = replace(self.state, epoch=config.epochs, batch=0)  # the beginning of the last epoch
        if config.steps is not None:
            epoch = math.ceil(self.batches_of_epoch() / (config.accumulate * world()))  # steps
            last = replace(last, step=(config.steps - 1) // epoch * epoch)
        reached = stage_at_epoch(last, config, starts)
        if reached == len(starts):
            return []
        return [
            f"stages[{reached}].start = {starts[reached]:g} is never reached: a stage begins with "
            f"an epoch, and the last one begins at {share_at_epoch(last, config):.2f} of the run: "
            "lower it, or train longer"
        ]

    def count_parameters(self) -> str:
        """In millions; where some are frozen, also those that train."""
        parameters = list(self.task.objective.parameters())
        total = sum(p.numel() for p in parameters) / 1e6
        trained = sum(p.numel() for p in parameters if p.requires_grad) / 1e6
        return f"{total:.2f} M parameters" + (
            f", of which {trained:.2f} M train" if self.config.freeze else ""
        )

    def due_stage(self) -> int:
        """The stage of the recipe that trains from the state's position on."""
        return due_stage(self.state, self.recipe.train, self.stage_starts())

    def stage_starts(self) -> list[float]:
        """Shares of the run."""
        return [stage.start for stage in self.recipe.stages]

    def enter_stage(self, stage: int) -> str:
        """-> a line for the log with what changes."""
        before, now = (at_stage(self.recipe, n) for n in (self.state.stage, stage))
        self.state.stage = stage
        number = f"stage {stage + 1} of {len(self.recipe.stages) + 1}"
        changed = changes(before, now)
        line = f"{number}, from epoch {self.state.epoch} on: {', '.join(changed.values())}"
        return f"{line}; {self.count_parameters()}" if "train.freeze" in changed else line

    def begin_stage(self, stage: int) -> None:
        """Save, and resume with the settings of the next stage."""
        if self.saved != self.state.step:
            self.save()
        del self.task, self.optimizer, self.weights  # before others take as much memory
        with distributed.first_rank_first():
            start = find_resume_point(self.run, resume=True)
            self.make_task(stage, resume=True)
            start.check_content(self.content, force=False)
        self.make_optimizer()
        self.load(start)
        self.log.total = planned_steps(self.task.epochs, self.config, self.state)
        self.log.info(self.enter_stage(stage))

    def finish(self) -> None:
        """Test the finished model."""
        with self.weights.applied(), suppress(Stopped):
            if is_first():
                with self.stop.interruptible():
                    self.task.finish(self.run, self.log, self.state.step)

    def log_results(self, overridden: AbstractSet[str]) -> None:
        """Log the settings that were chosen, and the figures of the best checkpoint."""
        if not is_first():
            return
        recipe = self.used
        chosen = {"seed", *overridden, *non_default(recipe)} - {"run"}
        settings = {key: value for key, value in flat(recipe).items() if key in chosen}
        best = read_training(choose(self.run, "best", 1)[0])["metrics"]
        self.log.finish(as_yaml(recipe), settings, best, self.state.step)


def train(
    recipe: Recipe,
    run: Path,
    resume: bool = False,
    force: bool = False,
    overridden: AbstractSet[str] = frozenset(),
    parts: Mapping[str, Any] | None = None,
) -> int:
    """Train into the run folder -> exit code: 0 at the end, EXIT_STOPPED where a signal stopped it.

    A resumed run keeps the decode settings in its folder, but for the keys `overridden`. parts:
    keyword arguments of the task, see TASKS.

    Raises UserError where the folder already holds a run but `resume` is not set, where that run
    had another recipe or other data, unless `force`, and where another process trains in it.
    """
    if recipe.train.trackers:
        from asr.training.trackers import check_installed

        check_installed(recipe.train.trackers)
    limit_onednn_cache(SHAPES_ROUNDED if recipe.train.round_seconds > 0.0 else SHAPES)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    group = distributed.process_group(recipe.train.device)
    with group, lock_run_folder(run) if is_first() else nullcontext():
        distributed.check_device(recipe.train.device)  # before a corpus is made
        distributed.printed_lines()  # those of another training of this process
        training = Training(recipe, run, parts)
        restarted = distributed.restarted_by_torchrun(run)
        messages = training.open(resume or restarted, force, overridden)
        state, config, stop = training.state, training.config, training.stop
        total = planned_steps(training.task.epochs, config, state)
        settings = run, config.log_every, total, state.step, training.trackers, flat(training.used)
        with stop, Log(*settings) if is_first() else nullcontext(NullLog()) as training.log:
            training.log.record(*distributed.printed_lines())
            training.log.info(*messages)
            training.loop()
            if not stop.requested_on_any_rank():
                training.finish()
            if stop.requested_on_any_rank():
                if training.saved != state.step:
                    training.save()
                training.log.info(
                    f"{stop.signal}: stopped after step {state.step} and saved; "
                    "the same command with --resume continues"
                )
                return EXIT_STOPPED
            if training.bad_steps:
                unused = f"the last {training.bad_steps} steps changed no weight"
                training.log.info(f"{unused}: their gradients were not finite")
            training.log_results(overridden)
            training.log.info(f"finished at step {state.step}; the run is in {run}")
            return 0

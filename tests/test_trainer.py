"""The training loop on a tiny objective: one step against torch, and when training stops."""

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from asr.config.loader import read_recipe
from asr.config.schema import TrainConfig
from asr.data.batching import Batch, Broken, EpochPlan
from asr.errors import UserError
from asr.training import distributed, trainer
from asr.training.losses import Objective, Sum, means
from asr.training.optim import tri_stage
from asr.training.state import TrainState
from asr.training.task import Task
from asr.training.trainer import Training, planned_steps, take_step, validate

F, V = 5, 7
RECIPE = read_recipe("demo")
CONFIG = TrainConfig(epochs=1, clip=1e9)
MAX_UNREADABLE = 0.01


class Frames(Objective):
    """Classifies every frame by its token: an Objective of one linear layer."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(F, V))
        self.steps = []

    def set_step(self, step):
        self.steps.append(step)

    def forward(self, batch):
        logits = self.model(batch.features).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, batch.tokens.flatten(), reduction="sum")
        count = torch.tensor(batch.tokens.numel())
        return {"objective": Sum(total, count), "nll": Sum(total.detach(), count)}


def batch(number, size=2, frames=3, broken=0):
    draw = torch.Generator().manual_seed(number)
    ids = tuple(f"u{number}.{i}" for i in range(size))
    features = torch.randn(size, frames, F, generator=draw)
    tokens = torch.randint(0, V, (size, frames), generator=draw)
    lost = tuple(Broken(f"b{number}.{i}", "no such file") for i in range(broken))
    full = torch.full((size,), frames)
    return Batch(ids, features, full, tokens, full, 0.5 * size, lost)


class Few(Task):
    """A task with the same batches in every epoch, and its Epochs."""

    about: ClassVar = {}
    content: ClassVar = {}

    def __init__(self, all_batches, config=CONFIG, objective=None, max_unreadable=MAX_UNREADABLE):
        self.all_batches, self.read = all_batches, []
        self.recipe = RECIPE.model_copy(update={"train": config})
        self.objective, self.epochs = objective or Frames(), self
        self.max_unreadable = max_unreadable

    def plan(self, epoch):
        return EpochPlan([[None] * (len(b) + len(b.broken)) for b in self.all_batches], 0.0)

    def batches(self, epoch, skip=0, every=1):
        for number in range(skip, len(self.all_batches), every):
            self.read.append((epoch, number))
            yield self.all_batches[number]


class Observed(Training):
    """A training that writes no file: it keeps what it would log, validate and save, in order.

    It is its own log.
    """

    def __init__(self, task, state=None, schedule=None):
        super().__init__(task.recipe, Path("unused"))
        self.state = state or self.state
        self.set_task(task)
        self.make_optimizer()
        self.optimizer = torch.optim.SGD(task.objective.parameters(), lr=99.0)
        self.schedule = schedule or tri_stage(0.1, 0, hold=1.0, floor=1.0)
        self.log, self.steps, self.events, self.notes = self, [], [], []

    def info(self, line):
        self.notes.append(line)

    def step(self, state, step, audio, last):
        self.steps.append(step)
        self.events.append(("step", state.step, state.epoch, state.batch))
        if last:
            self.events.append("last")

    def validate_and_save(self):
        self.validated = self.state.step
        self.events.append(("validate", self.state.step, self.state.epoch, self.state.batch))

    def save(self):
        self.saved = self.state.step
        self.events.append(("save", self.saved))


def run(batches, config, state=None, objective=None, max_unreadable=MAX_UNREADABLE, **more):
    training = Observed(Few(batches, config, objective, max_unreadable), state, **more)
    training.loop()
    return training.task.objective, training.state, training, training.task


def test_accumulated_batches_are_one_large_batch():
    """Micro-batches of different sizes: summed, then divided by all targets of the step."""
    ours, judge = Frames(), Frames()
    parts = [batch(1, size=2), batch(2, size=5), batch(3, size=1)]
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step = take_step(ours, parts, optimizer, 0.3, CONFIG)
    features = torch.cat([part.features for part in parts]).flatten(0, 1)
    tokens = torch.cat([part.tokens for part in parts]).flatten()
    loss = nn.functional.cross_entropy(judge.model(features), tokens)
    loss.backward()
    theirs = torch.optim.SGD(judge.parameters(), lr=0.3)
    norm = nn.utils.get_total_norm([p.grad for p in judge.parameters()])
    theirs.step()
    torch.testing.assert_close(ours.state_dict(), judge.state_dict())
    assert step.norm == pytest.approx(float(norm)) and step.lr == 0.3
    assert means(step.sums)["objective"] == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("clip", [1e-3, 0.2, 1e3])
def test_clipping_matches_torch(clip):
    ours, judge = Frames(), Frames()
    one = batch(1)
    config = TrainConfig(epochs=1, clip=clip)
    take_step(ours, [one], torch.optim.SGD(ours.parameters(), lr=1.0), 1.0, config)
    out = judge(one)["objective"]
    (out.total / out.count).backward()
    nn.utils.clip_grad_norm_(judge.parameters(), clip)
    torch.optim.SGD(judge.parameters(), lr=1.0).step()
    torch.testing.assert_close(ours.state_dict(), judge.state_dict())


def test_a_non_finite_gradient_is_skipped_and_reported(monkeypatch):
    bad = batch(2)
    bad.features[0, 0, 0] = math.inf
    objective, state, seen, _ = run([bad], CONFIG)
    torch.testing.assert_close(objective.state_dict(), Frames().state_dict())
    assert state.step == 1
    assert seen.notes == ["step 1: loss or gradient not finite, not used; utterances u2.0 u2.1"]
    monkeypatch.setattr(trainer, "MAX_LOGGED", 1)
    assert run([bad], CONFIG)[2].notes[0].endswith("; utterances u2.0 and 1 more")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_diverged_stops_the_run_at_the_next_step(value):
    """The second step, whose loss it makes NaN, names the update of the first."""
    training = Observed(Few([batch(1), batch(2), batch(3)], TrainConfig(save_every=1)))

    def diverge():
        if training.state.step == 1:
            with torch.no_grad():
                training.task.objective.model.bias[3:5] = torch.tensor([value, -value])

    training.save = diverge
    with pytest.raises(UserError, match=r"^step 1: a weight of model.bias is .* lower train.optim"):
        training.loop()


def test_ten_bad_steps_in_a_row_stop_the_run_but_not_nine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the batches are kept
    bad = batch(2)
    bad.features[:] = math.nan
    run([*[bad] * 9, batch(1)] * 2, TrainConfig(epochs=1))
    with pytest.raises(UserError, match=r"step 10: 10 steps in a row without a finite gradient"):
        run([bad] * 12, TrainConfig(epochs=1))


def test_steps_and_epochs_and_the_validations_and_checkpoints_between():
    all_batches, config = [batch(n) for n in range(5)], TrainConfig(epochs=2, accumulate=2)
    objective, state, seen, few = run(all_batches, config.model_copy(update={"save_every": 2}))
    assert few.read == [(e, n) for e in (1, 2) for n in range(5)]
    assert seen.events == [
        ("step", 1, 1, 2),
        ("step", 2, 1, 4),
        ("save", 2),
        ("step", 3, 1, 5),
        ("validate", 3, 2, 0),
        ("step", 4, 2, 2),
        ("save", 4),
        ("step", 5, 2, 4),
        ("step", 6, 2, 5),
        "last",
        ("validate", 6, 3, 0),
    ]
    assert (state.step, state.epoch, state.utterances) == (6, 3, 20)
    assert state.audio_seconds == 10.0 and state.train_seconds > 0
    assert objective.steps == [0, 1, 2, 3, 4, 5]
    assert planned_steps(few, config, TrainState()) == planned_steps(few, config, state) == 6
    assert planned_steps(few, TrainConfig(epochs=2, steps=99), TrainState()) == 99


def test_a_validation_every_few_steps_and_at_the_end():
    config = TrainConfig(steps=7, accumulate=2, validate_every=3, save_every=1)
    _, _, seen, _ = run([batch(n) for n in range(5)], config)
    between = [event for event in seen.events if event[0] in ("validate", "save")]
    assert between == [
        ("save", 1),
        ("save", 2),
        ("validate", 3, 2, 0),
        ("save", 4),
        ("save", 5),
        ("validate", 6, 3, 0),
        ("validate", 7, 3, 2),
    ]


@pytest.mark.parametrize(("validated", "due"), [(3, False), (-1, True)])
def test_a_validation_that_a_signal_interrupted_is_repeated(validated, due):
    training = Observed(Few([batch(n) for n in range(3)], TrainConfig(epochs=2)))
    training.state, training.validated = TrainState(step=3, epoch=2), validated
    training.loop()
    assert (training.events[0] == ("validate", 3, 2, 0)) == due


def test_a_position_at_the_end_of_an_epoch_is_the_start_of_the_next():
    """Of a run that was saved before its validation."""
    training = Observed(Few([batch(n) for n in range(3)], TrainConfig(epochs=2)))
    training.state.step = training.state.batch = 3
    training.loop()
    assert training.events[:2] == [("validate", 3, 2, 0), ("step", 4, 2, 1)]


def test_the_schedule_sets_the_rate_from_step_1_and_from_progress():
    asked = []

    def schedule(step, progress):
        asked.append((step, progress))
        return step / 100

    *_, seen, _ = run([batch(1), batch(2)], TrainConfig(epochs=2), schedule=schedule)
    assert asked == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert [step.lr for step in seen.steps] == [0.01, 0.02, 0.03, 0.04]
    assert seen.optimizer.param_groups[0]["lr"] == 0.04


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4)])
def test_the_schedule_resumes_at_the_corpus_position_for_any_step_size(before, after):
    """Started with one number of batches per step (or ranks), resumed with another."""
    asked, state, all_batches = [], TrainState(), [batch(n) for n in range(12)]

    def schedule(step, progress):
        asked.append(progress)
        return 0.0

    for epochs, accumulate in ((1, before), (3, after)):
        config = TrainConfig(epochs=epochs, accumulate=accumulate)
        *_, few = run(all_batches, config, state, schedule=schedule)
    first = [n * before / 12 for n in range(1, 12 // before + 1)]
    rest = [1 / 3 + n * after / 36 for n in range(1, 24 // after + 1)]
    assert asked == pytest.approx(first + rest) and asked[-1] == 1.0
    planned = planned_steps(
        few, TrainConfig(epochs=3, accumulate=after), TrainState(12 // before, 2)
    )
    assert planned == state.step == len(asked)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_resuming_anywhere_gives_the_same_weights(stop):
    all_batches = [batch(n) for n in range(5)]
    straight, *_ = run(all_batches, TrainConfig(epochs=2, accumulate=2))
    first, state, _, few = run(all_batches, TrainConfig(epochs=2, accumulate=2, steps=stop))
    again = TrainState(**asdict(state))
    rest, state, _, later = run(all_batches, TrainConfig(epochs=2, accumulate=2), again, first)
    assert torch.equal(rest.model.weight, straight.model.weight)
    assert few.read + later.read == [(e, n) for e in (1, 2) for n in range(5)]
    assert state.utterances == 20


def test_training_time_counts_loading_but_not_validation():
    class Slow(Few):
        def batches(self, epoch, skip=0, every=1):
            for each in super().batches(epoch, skip, every):
                time.sleep(0.05)
                yield each

    training = Observed(Slow([batch(1), batch(2)], TrainConfig(epochs=1, save_every=1)))
    training.save = training.validate_and_save = lambda: time.sleep(0.2)
    training.loop()
    assert 0.1 <= training.state.train_seconds < 0.4


def test_a_finished_run_does_nothing_more():
    _, state, _, _ = run([batch(1)], CONFIG)
    training = Observed(Few([batch(1)]), state)
    training.validated = 1
    training.loop()
    assert state.step == 1 and not training.events and not training.task.read


class TestUnreadable:
    def test_each_is_reported_and_counted(self):
        all_batches = [batch(n, broken=n == 3) for n in range(200)]
        _, state, seen, _ = run(all_batches, TrainConfig(epochs=3))
        assert seen.notes == ["skipped b3.0: no such file"] * 3
        assert (state.utterances, state.broken) == (1200, 3)

    def test_a_share_of_the_corpus_may_be_unreadable_anywhere(self):
        """2 of 200 are 1 %, even as the first two; 3 are more."""
        run([batch(n, size=1 - (n < 2), broken=n < 2) for n in range(200)], CONFIG)
        with pytest.raises(UserError, match=r"3 of 3 training utterances so far cannot be read"):
            run([batch(n, size=1 - (n < 3), broken=n < 3) for n in range(200)], CONFIG)

    def test_one_bad_file_is_allowed_in_a_small_corpus(self):
        run([batch(1), batch(2, size=1, broken=1)], TrainConfig(epochs=3))
        with pytest.raises(UserError, match=r"2 of 4 .* more than the share data.max_unreadable"):
            run([batch(1), batch(2, size=0, broken=2)], CONFIG)

    def test_a_limit_of_0_allows_no_unreadable_file(self):
        with pytest.raises(UserError, match=r"1 of 5 training utterances so far"):
            run([batch(1), batch(2, broken=1), batch(3)], CONFIG, max_unreadable=0.0)

    def test_a_fully_unreadable_group_changes_no_weight(self):
        objective, state, seen, _ = run([batch(1, size=0, broken=1)], CONFIG, max_unreadable=1.0)
        torch.testing.assert_close(objective.state_dict(), Frames().state_dict())
        assert state.step == 1 and seen.steps[0].norm == 0.0


def test_validation_sums_over_all_and_changes_nothing():
    objective = Frames()
    objective.train()
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    parts = [batch(1, size=2), batch(2, size=0, broken=3), batch(3, size=5, broken=1)]
    sums, read = validate(objective, parts, "fp32")
    actual = means(sums)
    assert read.utterances == 7
    assert [broken.id for broken in read.broken] == ["b2.0", "b2.1", "b2.2", "b3.0"]
    features = torch.cat([p.features for p in parts]).flatten(0, 1)
    tokens = torch.cat([p.tokens for p in parts]).flatten()
    expected = nn.functional.cross_entropy(objective.model(features), tokens).item()
    assert actual["nll"] == pytest.approx(expected)
    torch.testing.assert_close(dict(objective.state_dict()), before)
    assert not objective.training


def test_bf16_trains_nearly_as_fp32_and_keeps_fp32_weights(monkeypatch):
    monkeypatch.setattr(distributed, "computes_bf16", lambda device: True)
    all_batches = [batch(n) for n in range(20)]
    exact, *_ = run(all_batches, CONFIG)
    rough, *_ = run(all_batches, TrainConfig(epochs=1, clip=1e9, precision="bf16"))
    assert rough.model.weight.dtype == torch.float32
    assert not torch.equal(rough.model.weight, exact.model.weight)
    torch.testing.assert_close(rough.model.weight, exact.model.weight, atol=0.02, rtol=0.05)

"""The loop on a tiny objective: what one step does, judged by torch, and when it stops."""

import math
import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from asr.data.batch import Batch, Broken
from asr.data.plan import Plan
from asr.errors import UserError
from asr.training.given import Between, Limits
from asr.training.loop import fit, groups, planned_steps, take_step, validate
from asr.training.objective import Sum, means
from asr.training.optim import constant
from asr.training.position import (
    Position,
    position_state,
    random_state,
    restore_random_state,
)

F, V = 5, 7
LIMITS = Limits(epochs=1, clip=1e9)


class Frames(nn.Module):
    """Classifies every frame by its token: an Objective of one linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Linear(F, V)
        self.steps = []

    def set_step(self, step):
        self.steps.append(step)

    def forward(self, batch):
        logits = self.model(batch.features).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, batch.tokens.flatten(), reduction="sum")
        count = torch.tensor(batch.tokens.numel())
        return {"objective": Sum(total, count), "nats": Sum(total.detach(), count)}


def batch(number, size=2, frames=3, broken=0):
    draw = torch.Generator().manual_seed(number)
    ids = tuple(f"u{number}.{i}" for i in range(size))
    features = torch.randn(size, frames, F, generator=draw)
    tokens = torch.randint(0, V, (size, frames), generator=draw)
    lost = tuple(Broken(f"b{number}.{i}", "no such file") for i in range(broken))
    full = torch.full((size,), frames)
    return Batch(ids, features, full, tokens, full, 0.5 * size, lost)


@dataclass
class Few:
    """Stands for Epochs: the same batches every epoch."""

    whole: list
    read: list = field(default_factory=list)

    def plan(self, epoch):
        return Plan([[None] * (len(b) + len(b.broken)) for b in self.whole], 0.0)

    def batches(self, epoch, skip=0, every=1):
        for number in range(skip, len(self.whole), every):
            self.read.append((epoch, number))
            yield self.whole[number]


@dataclass
class Seen:
    """What happened between steps, in order."""

    steps: list = field(default_factory=list)
    events: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    @property
    def between(self):
        return Between(
            lambda position, step: self.steps.append((position.step, step)),
            lambda position: self.events.append(("step", position.step, position.batch)),
            lambda position: self.events.append(("epoch", position.step, position.epoch)),
            self.notes.append,
        )


def run(whole, limits, position=None, objective=None, lr=0.1):
    objective = objective or Frames()
    optimizer = torch.optim.SGD(objective.parameters(), lr=99.0)
    position, seen, few = position or Position(), Seen(), Few(whole)
    fit(objective, few, optimizer, constant(lr, 0), position, limits, seen.between)
    return objective, position, seen, few


def test_accumulated_batches_are_one_large_batch():
    """Micro-batches of unlike size: summed, then divided by all targets of the step."""
    ours, judge = Frames(), Frames()
    parts = [batch(1, size=2), batch(2, size=5), batch(3, size=1)]
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step = take_step(ours, parts, optimizer, 0.3, LIMITS)
    features = torch.cat([part.features for part in parts]).flatten(0, 1)
    tokens = torch.cat([part.tokens for part in parts]).flatten()
    loss = nn.functional.cross_entropy(judge.model(features), tokens)
    loss.backward()
    theirs = torch.optim.SGD(judge.parameters(), lr=0.3)
    norm = nn.utils.get_total_norm([p.grad for p in judge.parameters()])
    theirs.step()
    torch.testing.assert_close(ours.state_dict(), judge.state_dict())
    assert step.norm == pytest.approx(float(norm)) and step.seconds == 4.0 and step.lr == 0.3
    assert means(step.sums)["objective"] == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("clip", [1e-3, 0.2, 1e3])
def test_clipping_is_torchs(clip):
    ours, judge = Frames(), Frames()
    one = batch(1)
    limits = Limits(epochs=1, clip=clip)
    take_step(ours, [one], torch.optim.SGD(ours.parameters(), lr=1.0), 1.0, limits)
    out = judge(one)["objective"]
    (out.total / out.count).backward()
    nn.utils.clip_grad_norm_(judge.parameters(), clip)
    torch.optim.SGD(judge.parameters(), lr=1.0).step()
    torch.testing.assert_close(ours.state_dict(), judge.state_dict())


def test_a_gradient_that_is_not_finite_is_not_used_and_named():
    bad = batch(2)
    bad.features[0, 0, 0] = math.inf
    objective, position, seen, _ = run([bad], LIMITS)
    torch.testing.assert_close(objective.state_dict(), Frames().state_dict())
    assert position.step == 1
    assert seen.notes == ["step 1: loss or gradient not finite, not used; utterances u2.0 u2.1"]


def test_ten_bad_steps_in_a_row_stop_the_run_but_not_nine():
    bad = batch(2)
    bad.features[:] = math.nan
    run([*[bad] * 9, batch(1)] * 2, Limits(epochs=1))
    with pytest.raises(UserError, match=r"step 10: 10 steps in a row without a finite gradient"):
        run([bad] * 12, Limits(epochs=1))


def test_steps_epochs_and_what_lies_between():
    whole = [batch(n) for n in range(5)]
    objective, position, seen, few = run(whole, Limits(epochs=2, accumulate=2))
    assert few.read == [(e, n) for e in (1, 2) for n in range(5)]
    assert seen.events == [
        ("step", 1, 2),
        ("step", 2, 4),
        ("step", 3, 5),
        ("epoch", 3, 2),
        ("step", 4, 2),
        ("step", 5, 4),
        ("step", 6, 5),
        ("epoch", 6, 3),
    ]
    assert (position.step, position.epoch, position.utterances) == (6, 3, 20)
    assert position.audio_seconds == 10.0 and position.train_seconds > 0
    assert objective.steps == [0, 1, 2, 3, 4, 5]
    assert planned_steps(few, Limits(epochs=2, accumulate=2), Position()) == 6
    assert planned_steps(few, Limits(epochs=2, accumulate=2), position) == 6
    assert planned_steps(few, Limits(epochs=2, steps=99), Position()) == 99


def test_steps_override_epochs():
    _, position, seen, _ = run([batch(n) for n in range(3)], Limits(epochs=1, steps=7))
    assert (position.step, position.epoch, position.batch) == (7, 3, 1)
    assert [event[1] for event in seen.events if event[0] == "epoch"] == [3, 6]


def test_the_schedule_sets_the_rate_from_step_1_and_from_progress():
    objective = Frames()
    optimizer = torch.optim.SGD(objective.parameters(), lr=99.0)
    asked, seen = [], Seen()

    def schedule(step, progress):
        asked.append((step, progress))
        return step / 100

    few = Few([batch(1), batch(2)])
    fit(objective, few, optimizer, schedule, Position(), Limits(epochs=2), seen.between)
    assert asked == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert [step.lr for _, step in seen.steps] == [0.01, 0.02, 0.03, 0.04]
    assert optimizer.param_groups[0]["lr"] == 0.04


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4)])
def test_the_schedule_goes_on_where_the_corpus_is_whatever_a_step_takes(before, after):
    """Begun with one number of batches a step (or ranks), gone on with another."""
    asked, seen = [], Seen()
    few, position = Few([batch(n) for n in range(12)]), Position()
    objective = Frames()
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.0)

    def schedule(step, progress):
        asked.append(progress)
        return 0.0

    given = objective, few, optimizer, schedule, position
    fit(*given, Limits(epochs=1, accumulate=before), seen.between)
    fit(*given, Limits(epochs=3, accumulate=after), seen.between)
    first = [n * before / 12 for n in range(1, 12 // before + 1)]
    rest = [1 / 3 + n * after / 36 for n in range(1, 24 // after + 1)]
    assert asked == pytest.approx(first + rest) and asked[-1] == 1.0
    planned = planned_steps(few, Limits(epochs=3, accumulate=after), Position(12 // before, 2))
    assert planned == position.step == len(asked)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_resuming_anywhere_gives_the_same_weights(stop):
    whole = [batch(n) for n in range(5)]
    straight, *_ = run(whole, Limits(epochs=2, accumulate=2))
    first, position, _, few = run(whole, Limits(epochs=2, accumulate=2, steps=stop))
    again = Position(**position_state(position))
    rest, position, _, later = run(whole, Limits(epochs=2, accumulate=2), again, first)
    assert torch.equal(rest.model.weight, straight.model.weight)
    assert few.read + later.read == [(e, n) for e in (1, 2) for n in range(5)]
    assert position.utterances == 20


def test_training_time_counts_loading_but_not_what_lies_between():
    class Slow(Few):
        def batches(self, epoch, skip=0, every=1):
            for each in super().batches(epoch, skip, every):
                time.sleep(0.05)
                yield each

    objective, position = Frames(), Position()
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    between = Between(*[lambda *_: time.sleep(0.2)] * 3, note=print)
    few = Slow([batch(1), batch(2)])
    fit(objective, few, optimizer, constant(0.1, 0), position, LIMITS, between)
    assert 0.1 <= position.train_seconds < 0.4


def test_a_finished_run_does_nothing_more():
    _, position, _, _ = run([batch(1)], LIMITS)
    _, after, seen, few = run([batch(1)], LIMITS, position)
    assert after.step == 1 and not seen.events and not few.read


class TestBroken:
    def test_each_is_named_and_counted(self):
        whole = [batch(n, broken=n == 3) for n in range(200)]
        _, position, seen, _ = run(whole, Limits(epochs=3))
        assert seen.notes == ["left out b3.0: no such file"] * 3
        assert (position.utterances, position.broken) == (1200, 3)

    def test_a_share_of_the_corpus_is_allowed_wherever_it_stands(self):
        """2 of 200 are 1 %, though they are the first two; 3 are more."""
        run([batch(n, size=1 - (n < 2), broken=n < 2) for n in range(200)], LIMITS)
        with pytest.raises(UserError, match=r"3 of 3 training utterances so far cannot be read"):
            run([batch(n, size=1 - (n < 3), broken=n < 3) for n in range(200)], LIMITS)

    def test_one_bad_file_is_forgiven_in_a_small_corpus(self):
        run([batch(1), batch(2, size=1, broken=1)], Limits(epochs=3))
        with pytest.raises(UserError, match=r"2 of 4 .* more than the share data\.broken"):
            run([batch(1), batch(2, size=0, broken=2)], LIMITS)

    def test_none_shall_be_broken(self):
        with pytest.raises(UserError, match=r"1 of 5 training utterances so far"):
            run([batch(1), batch(2, broken=1), batch(3)], Limits(epochs=1, broken=0.0))

    def test_a_wholly_broken_group_changes_no_weight(self):
        objective, position, seen, _ = run([batch(1, size=0, broken=1)], Limits(1, broken=1.0))
        torch.testing.assert_close(objective.state_dict(), Frames().state_dict())
        assert position.step == 1 and seen.steps[0][1].norm == 0.0


def test_groups_leave_nothing_out():
    assert list(groups(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(groups([], 3)) == []


def test_validation_sums_over_all_and_changes_nothing():
    objective = Frames()
    objective.train()
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    parts = [batch(1, size=2), batch(2, size=0, broken=3), batch(3, size=5, broken=1)]
    sums, read = validate(objective, parts, "fp32")
    found = means(sums)
    assert read.utterances == 7
    assert [broken.id for broken in read.broken] == ["b2.0", "b2.1", "b2.2", "b3.0"]
    features = torch.cat([p.features for p in parts]).flatten(0, 1)
    tokens = torch.cat([p.tokens for p in parts]).flatten()
    expected = nn.functional.cross_entropy(objective.model(features), tokens).item()
    assert found["nats"] == pytest.approx(expected)
    torch.testing.assert_close(dict(objective.state_dict()), before)
    assert not objective.training


def test_bf16_trains_nearly_as_fp32_and_keeps_fp32_weights():
    whole = [batch(n) for n in range(20)]
    exact, *_ = run(whole, LIMITS)
    rough, *_ = run(whole, Limits(epochs=1, clip=1e9, precision="bf16"))
    assert rough.model.weight.dtype == torch.float32
    assert not torch.equal(rough.model.weight, exact.model.weight)
    torch.testing.assert_close(rough.model.weight, exact.model.weight, atol=0.02, rtol=0.05)


def test_the_random_state_goes_back():
    state = random_state()
    first = torch.rand(5)
    restore_random_state(state)
    assert torch.equal(torch.rand(5), first)

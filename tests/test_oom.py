"""A batch that does not fit in memory is split in two, once, with the same gradients."""

import weakref
from dataclasses import MISSING, fields, replace

import pytest
import torch
from test_trainer import CONFIG, Frames, batch, run
from torch import nn

from asr.data.text_corpus import SentenceBatch
from asr.errors import UserError, is_out_of_memory
from asr.images.data import ImageBatch
from asr.training.oom import retry_in_halves
from asr.training.trainer import take_step

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to")


class Narrow(Frames):
    """Fits `room` utterances; beyond, the backward pass fails with half of the gradient stored."""

    def __init__(self, room, error=CUDA):
        super().__init__()
        self.room, self.error, self.asked = room, error, []

    def forward(self, batch):
        self.asked.append(len(batch))
        out = super().forward(batch)
        if len(batch) > self.room:
            total = out["objective"].total
            out["objective"] = out["objective"]._replace(total=Burst.apply(total, self.error))
        return out


class Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, error):
        ctx.error = error
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


@pytest.mark.parametrize("error", [CUDA, CPU, MemoryError()])
def test_split_halves_give_the_same_step(error):
    ours, judge, notes = Narrow(3, error), Frames(), []
    parts = [batch(1, size=2), batch(2, size=5)]
    for one, note in ((ours, notes.append), (judge, pytest.fail)):
        take_step(one, parts, torch.optim.SGD(one.parameters(), lr=1.0), 0.3, CONFIG, note)
    torch.testing.assert_close(ours.state_dict(), judge.state_dict())
    assert ours.asked == [2, 5, 1, 1, 3, 2]
    assert notes == [
        "out of memory with a batch of 5 (2.5 s of audio); a batch of 3 (1.5 s of audio) fits and "
        "is used: set train.batch_seconds=1.5 and raise train.accumulate as much"
    ]


def test_splitting_is_tried_once():
    with pytest.raises(UserError, match=r"batch of 5 .* and with a batch of 3 .* too; lower train"):
        run([batch(2, size=5)], CONFIG, objective=Narrow(2))


def test_one_utterance_cannot_be_split():
    with pytest.raises(UserError, match=r"cannot be split further: u2\.0; lower data\.max_seconds"):
        run([batch(2, size=1)], CONFIG, objective=Narrow(0))


@pytest.mark.parametrize(
    ("kind", "size_key", "remedy"),
    [
        (SentenceBatch, "data.batch_bytes", "lower data.max_bytes, or make the model smaller"),
        (ImageBatch, "data.batch", "make the model smaller"),
    ],
)
def test_the_message_names_the_keys_of_each_task(kind, size_key, remedy):
    def room_for(most):
        def work(group):
            if max(map(len, group)) > most:
                raise MemoryError

        return work

    rows = {field.name: torch.zeros(5) for field in fields(kind) if field.default is MISSING}
    group, messages = [kind(**rows | {"ids": tuple("abcde")})], []
    retry_in_halves(room_for(3), group, messages.append)
    assert messages[0].endswith(f"is used: lower {size_key} and raise train.accumulate as much")
    with pytest.raises(UserError, match=f"too; lower {size_key} and raise"):
        retry_in_halves(room_for(2), group, pytest.fail)
    with pytest.raises(UserError, match=f"cannot be split further: a; {remedy}"):
        retry_in_halves(room_for(0), group[0].split()[0].split()[0].split()[:1], pytest.fail)


def test_other_errors_are_not_swallowed():
    for error in (RuntimeError("shapes differ"), ValueError("out of memory")):

        def broken(group, error=error):
            raise error

        assert not is_out_of_memory(error)
        with pytest.raises(type(error), match=str(error)):
            retry_in_halves(broken, [batch(1)], pytest.fail)


@pytest.mark.parametrize("size", [2, 5, 7])
def test_halves_have_all_rows(size):
    full = batch(1, size=size)
    full = replace(full, second_view=torch.randn_like(full.features))
    first, second = full.split()
    assert first.ids + second.ids == full.ids and len(first) - len(second) in (0, 1)
    assert torch.equal(torch.cat([first.features, second.features]), full.features)
    assert torch.equal(torch.cat([first.second_view, second.second_view]), full.second_view)
    assert torch.equal(torch.cat([first.token_lengths, second.token_lengths]), full.token_lengths)
    assert first.seconds + second.seconds == pytest.approx(full.seconds)


@pytest.mark.parametrize("kind", [SentenceBatch, ImageBatch])
def test_batches_of_other_tasks_are_split_too(kind):
    names = [field.name for field in fields(kind) if field.default is MISSING]
    rows = {name: torch.arange(5.0) for name in names} | {"ids": tuple("abcde")}
    first, second = kind(**rows).split()
    for name in names[1:]:
        assert getattr(first, name).tolist() == [0, 1, 2] and getattr(second, name).tolist() == [
            3,
            4,
        ]
    assert first.ids + second.ids == tuple("abcde") and first.seconds == 0.0
    (single,) = kind(**{name: value[:1] for name, value in rows.items()}).split()
    assert len(single) == 1


def test_memory_of_the_failed_try_is_free_at_the_second():
    held = []

    def work(group):
        if not held:
            tensor = nn.Parameter(torch.zeros(3))
            held.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError("CUDA out of memory.")  # the error references this frame
        assert held[0]() is None
        return len(group)

    assert retry_in_halves(work, [batch(1)], lambda line: None) == 2

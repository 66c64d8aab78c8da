"""What does not fit in memory is cut in two, once, without changing the sum."""

import weakref
from dataclasses import MISSING, dataclass, fields, replace

import pytest
import torch
from test_loop import LIMITS, Frames, batch, run
from torch import nn

from asr.data.images import ImageBatch
from asr.data.sentences import SentenceBatch
from asr.errors import UserError
from asr.training.loop import take_step
from asr.training.memory import cut, in_memory, is_out_of_memory

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to")


class Narrow(Frames):
    """Has room for `room` utterances; fails in the backward pass, with half the gradient there."""

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
def test_the_halves_give_the_same_step(error):
    ours, judge, notes = Narrow(3, error), Frames(), []
    parts = [batch(1, size=2), batch(2, size=5)]
    for one, note in ((ours, notes.append), (judge, pytest.fail)):
        take_step(one, parts, torch.optim.SGD(one.parameters(), lr=1.0), 0.3, LIMITS, note)
    torch.testing.assert_close(ours.state_dict(), judge.state_dict())
    assert ours.asked == [2, 5, 1, 1, 3, 2]
    assert notes == [
        "out of memory with a batch of 5 (2.5 s of audio); a batch of 3 (1.5 s of audio) fits and "
        "is used: set train.batch_seconds=1.5 and raise train.accumulate as much"
    ]


def test_it_is_tried_once_only():
    with pytest.raises(UserError, match=r"batch of 5 .* and with a batch of 3 .* too; lower train"):
        run([batch(2, size=5)], LIMITS, objective=Narrow(2))


def test_one_utterance_cannot_be_cut():
    with pytest.raises(UserError, match=r"cannot be cut further: u2\.0; lower data\.max_seconds"):
        run([batch(2, size=1)], LIMITS, objective=Narrow(0))


@pytest.mark.parametrize(
    ("kind", "size_key", "remedy"),
    [
        (SentenceBatch, "data.batch_bytes", "lower data.max_bytes, or make the model smaller"),
        (ImageBatch, "data.batch", "make the model smaller"),
    ],
)
def test_other_tasks_are_told_their_own_keys(kind, size_key, remedy):
    def room_for(most):
        def work(group):
            if max(map(len, group)) > most:
                raise MemoryError

        return work

    rows = {field.name: torch.zeros(5) for field in fields(kind) if field.default is MISSING}
    group, said = [kind(**rows | {"ids": tuple("abcde")})], []
    in_memory(room_for(3), group, said.append)
    assert said[0].endswith(f"is used: lower {size_key} and raise train.accumulate as much")
    with pytest.raises(UserError, match=f"too; lower {size_key} and raise"):
        in_memory(room_for(2), group, pytest.fail)
    with pytest.raises(UserError, match=f"cannot be cut further: a; {remedy}"):
        in_memory(room_for(0), cut(cut(cut(group[0])[0])[0])[:1], pytest.fail)


def test_other_errors_are_not_swallowed():
    for error in (RuntimeError("shapes differ"), ValueError("out of memory")):

        def broken(group, error=error):
            raise error

        assert not is_out_of_memory(error)
        with pytest.raises(type(error), match=str(error)):
            in_memory(broken, [batch(1)], pytest.fail)


@pytest.mark.parametrize("size", [2, 5, 7])
def test_halves_have_all_rows(size):
    whole = batch(1, size=size)
    whole = replace(whole, again=torch.randn_like(whole.features))
    first, second = cut(whole)
    assert first.ids + second.ids == whole.ids and len(first) - len(second) in (0, 1)
    assert torch.equal(torch.cat([first.features, second.features]), whole.features)
    assert torch.equal(torch.cat([first.again, second.again]), whole.again)
    assert torch.equal(torch.cat([first.token_lengths, second.token_lengths]), whole.token_lengths)
    assert first.seconds + second.seconds == pytest.approx(whole.seconds)


def test_a_batch_of_another_task_is_cut_alike():
    @dataclass(frozen=True)
    class Images:
        pixels: torch.Tensor
        temperature: torch.Tensor
        seconds: float = 0.0

        def __len__(self):
            return len(self.pixels)

    first, second = cut(Images(torch.arange(5.0), torch.tensor(1.0)))
    assert first.pixels.tolist() == [0, 1, 2] and second.pixels.tolist() == [3, 4]
    assert float(first.temperature) == 1.0


def test_memory_of_the_failed_try_is_free_at_the_second():
    held = []

    def work(group):
        if not held:
            tensor = nn.Parameter(torch.zeros(3))
            held.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError("CUDA out of memory.")  # the error holds this frame
        assert held[0]() is None
        return len(group)

    assert in_memory(work, [batch(1)], lambda line: None) == 2

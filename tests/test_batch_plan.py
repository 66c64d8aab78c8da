"""Planned epochs against lists built one utterance at a time, and their transfer to workers."""

import math
import pickle

import numpy as np
import pytest

from asr.data import batching
from asr.data.batching import Item, plan_epoch, plan_evaluation

SPEEDS = (0.9, 1.0, 1.1)
SECONDS = np.random.default_rng(2).lognormal(1.5, 0.7, 509).astype(np.float32)


def in_lists(seconds, cap, seed, epoch, speeds, grid=0.0):
    """The same epoch in plain Python: draw, sort, fill batches, shuffle them."""
    random = np.random.default_rng([seed, epoch])
    speed = random.choice(np.array(speeds), size=len(seconds))
    length = seconds / speed
    order = np.argsort(length * random.uniform(0.95, 1.05, len(length)), kind="stable")
    if grid:
        length = [math.ceil(seconds / grid) * grid for seconds in length]
    batches, longest = [[]], 0.0
    for i in order:
        longest = max(longest, length[i])
        if batches[-1] and longest * (len(batches[-1]) + 1) > cap:
            batches.append([])
            longest = length[i]
        batches[-1].append(Item(int(i), epoch, float(speed[i])))
    random.shuffle(batches)
    return batches


@pytest.mark.parametrize("grid", [0.0, 0.5, 1.3])
@pytest.mark.parametrize("chunk", [batching.CHUNK, 7])
@pytest.mark.parametrize(
    ("count", "speeds"), [(509, SPEEDS), (509, (1.0,)), (1, SPEEDS), (2, SPEEDS)]
)
def test_arrays_equal_lists(count, speeds, chunk, grid, monkeypatch):
    monkeypatch.setattr(
        batching, "CHUNK", chunk
    )  # where a batch crosses from one chunk to the next
    made = plan_epoch(SECONDS[:count], 41, 3, 2, speeds, False, grid)
    slow = in_lists(SECONDS[:count], 41, 3, 2, speeds, grid)
    assert [list(batch) for batch in made.batches] == slow


def test_an_empty_corpus_has_no_batches():
    training = plan_epoch(SECONDS[:0], 41, 3, 2, (1.0,), False)
    for made in (training, plan_evaluation(SECONDS[:0], 41)):
        assert len(made.batches) == 0 and list(made.batches) == [] and made.padding == 0


def test_slices_are_those_of_a_list():
    batches = plan_epoch(SECONDS, 41, 3, 2, SPEEDS, False).batches
    listed = list(batches)
    for part in (slice(5, None), slice(1, None, 3), slice(-2, None), slice(9, 4), slice(0, 999)):
        assert list(batches[part]) == listed[part] and len(batches[part]) == len(listed[part])
    assert list(batches[3][1::2]) == list(listed[3])[1::2] and batches[-1] == listed[-1]
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_a_worker_is_sent_one_batch_and_not_the_epoch():
    batch = plan_evaluation(np.ones(100_000, np.float32), 7).batches[2]
    sent = pickle.dumps(batch)
    assert len(sent) < 1000 and pickle.loads(sent) == batch
    assert [item.index for item in batch] == [*range(14, 21)]

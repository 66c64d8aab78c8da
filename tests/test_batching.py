"""Planned epochs in numpy, and the batches that the loader makes of them."""

import math
from itertools import pairwise

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_speech import spec_augment

from asr.data import batching
from asr.data.batching import Broken, Example, Item, collate, plan_epoch, plan_evaluation
from asr.data.corpus import Corpus, Utterance
from asr.data.loader import SpeechEpochs, UtteranceDataset, load_batches, utterance_generator
from asr.data.tokenizer import BLANK, Characters
from asr.features.fbank import Fbank
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm

SPEEDS = (0.9, 1.0, 1.1)
SECONDS = np.random.default_rng(0).uniform(0.3, 17.0, 211).astype(np.float32)


def padded(batch, seconds, grid=0.0):
    longest = max(float(seconds[item.index]) / item.speed for item in batch)
    return len(batch) * (math.ceil(longest / grid) * grid if grid else longest)


lengths = st.lists(st.floats(0.1, 40.0), min_size=1, max_size=60)


grids = st.sampled_from([0.0, 0.5, 1.3])


@given(
    lengths,
    st.floats(1.0, 60.0),
    st.integers(0, 2**31 - 1),
    st.integers(1, 50),
    st.booleans(),
    grids,
)
@settings(max_examples=60, deadline=None)
def test_every_utterance_once_under_the_cap(seconds, cap, seed, epoch, short_first, grid):
    seconds = np.array(seconds, dtype=np.float32)
    plan = plan_epoch(seconds, cap, seed, epoch, SPEEDS, short_first, grid)
    assert sorted(item.index for batch in plan.batches for item in batch) == [*range(len(seconds))]
    for batch in plan.batches:
        assert len(batch) == 1 or padded(batch, seconds, grid) <= cap * (1 + 1e-6)
        assert all(item.epoch == epoch and item.speed in SPEEDS for item in batch)
    every_batch = sum(padded(batch, seconds, grid) for batch in plan.batches)
    real = sum(float(seconds[i.index]) / i.speed for batch in plan.batches for i in batch)
    assert plan.padding == pytest.approx(1 - real / every_batch, abs=1e-6)


def items(plan):
    return [list(batch) for batch in plan.batches]


def test_same_seed_and_epoch_same_plan_and_each_epoch_its_own():
    plan = plan_epoch(SECONDS, 60, 1, 3, SPEEDS, False)
    assert items(plan) == items(plan_epoch(SECONDS, 60, 1, 3, SPEEDS, False))
    assert items(plan) != items(plan_epoch(SECONDS, 60, 2, 3, SPEEDS, False))
    other = plan_epoch(SECONDS, 60, 1, 4, SPEEDS, False)
    mates = [frozenset(i.index for i in b) for b in plan.batches]
    other_mates = [frozenset(i.index for i in b) for b in other.batches]
    assert mates != other_mates  # the order
    assert set(mates) != set(other_mates)  # and the composition of batches


def test_every_speed_is_drawn_about_as_often():
    plan = plan_epoch(np.ones(30_000), 99, 1, 1, SPEEDS, False)
    drawn = [i.speed for b in plan.batches for i in b]
    for speed in SPEEDS:
        share = drawn.count(speed) / len(drawn)
        assert abs(share - 1 / 3) < 4 * (2 / 9 / 30_000) ** 0.5


def test_short_first_sorts_by_length_and_otherwise_shuffles():
    def longest(short_first):
        batches = plan_epoch(SECONDS, 60, 1, 1, SPEEDS, short_first).batches
        return [max(SECONDS[i.index] / i.speed for i in b) for b in batches]

    up, mixed = longest(True), longest(False)
    # The random noise of 5 % may only swap neighbours.
    assert all(later > 0.9 * earlier for earlier, later in pairwise(up))
    assert any(later < 0.9 * earlier for earlier, later in pairwise(mixed))
    assert sorted(up) == sorted(mixed)


def test_bucketing_adds_little_padding():
    random = np.random.default_rng(1).permutation(len(SECONDS))
    every_batch = [random[i : i + 7] for i in range(0, len(random), 7)]
    unsorted = 1 - SECONDS.sum() / sum(len(rows) * SECONDS[rows].max() for rows in every_batch)
    assert plan_epoch(SECONDS, 60, 1, 1, (1.0,), False).padding < 0.12 < unsorted


def test_evaluation_plan_is_complete_longest_first_and_unaugmented():
    plan = plan_evaluation(SECONDS, 60)
    items = [item for batch in plan.batches for item in batch]
    assert sorted(i.index for i in items) == [*range(len(SECONDS))]
    assert {(i.epoch, i.speed) for i in items} == {(0, 1.0)}
    assert [SECONDS[i.index] for i in items] == sorted(SECONDS, reverse=True)
    assert all(len(b) == 1 or padded(b, SECONDS) <= 60 for b in plan.batches)


def test_randomness_depends_on_seed_epoch_and_name_only():
    def draw(*key):
        return torch.rand(3, generator=utterance_generator(*key)).tolist()

    assert draw(1, 2, "a") == draw(1, 2, "a")
    keys = [(1, 2, "a"), (2, 2, "a"), (1, 3, "a"), (1, 2, "b"), (11, 2, "a"), (1, 12, "a")]
    assert len({tuple(draw(*key)) for key in keys}) == len(keys)


def example(name, frames, tokens):
    return Example(name, torch.randn(frames, 5), torch.tensor(tokens, dtype=torch.long))


def test_collate_pads_and_separates_unreadable_utterances():
    a, c = example("a", 3, [4, 5, 6]), example("c", 7, [])
    batch = collate([a, Broken("b", "no such file"), c])
    assert batch.ids == ("a", "c") and len(batch) == 2
    assert batch.features.shape == (2, 7, 5) and not batch.features[0, 3:].any()
    assert torch.equal(batch.features[0, :3], a.features)
    assert batch.lengths.tolist() == [3, 7] and batch.token_lengths.tolist() == [3, 0]
    assert batch.tokens.tolist() == [[4, 5, 6], [BLANK] * 3]
    assert batch.seconds == pytest.approx(0.1)
    assert batch.broken == (Broken("b", "no such file"),)
    moved = batch.to(torch.device("cpu"))
    assert moved.ids == batch.ids and torch.equal(moved.tokens, batch.tokens)


@pytest.mark.parametrize(
    ("frames", "tokens", "shape"), [(99, 7, (100, 8)), (100, 8, (100, 8)), (101, 9, (150, 16))]
)
def test_a_grid_only_adds_padding(frames, tokens, shape):
    some = [example("a", 31, [4] * 5), example("b", frames, [5] * tokens)]
    plain, rounded = collate(some), collate(some, grid=0.5)
    assert (rounded.features.size(1), rounded.tokens.size(1)) == shape
    assert torch.equal(rounded.features[:, :frames], plain.features)
    assert torch.equal(rounded.tokens[:, :tokens], plain.tokens)
    assert not rounded.features[:, frames:].any() and (rounded.tokens[:, tokens:] == BLANK).all()
    for name in ("ids", "seconds", "broken"):
        assert getattr(rounded, name) == getattr(plain, name)
    for name in ("lengths", "token_lengths"):
        assert torch.equal(getattr(rounded, name), getattr(plain, name))


def test_other_speeds_are_padded_separately():
    a, c = (example(name, frames, [4]) for name, frames in (("a", 3), ("c", 7)))
    slow, fast = ([torch.randn(n, 5) for n in lengths] for lengths in ((4, 8), (2, 6)))
    others = list(zip(slow, fast, strict=True))
    batch = collate(
        [a._replace(other_speeds=others[0]), Broken("b", "x"), c._replace(other_speeds=others[1])]
    )
    for own, features in ((slow, batch.other_speeds[0]), (fast, batch.other_speeds[1])):
        padded, lengths = features
        assert lengths.tolist() == [len(x) for x in own] and len(padded) == 2
        for row, x in zip(padded, own, strict=True):
            assert torch.equal(row[: len(x)], x) and not row[len(x) :].any()
    assert collate([a, c]).other_speeds == collate([Broken("b", "x")]).other_speeds == ()


def test_both_views_are_the_rows_of_one_batch():
    a, c = (example(name, frames, [4] * frames) for name, frames in (("a", 3), ("c", 7)))
    views = [torch.randn(n, 5) for n in (3, 7)]
    a, c = (x._replace(second_view=view) for x, view in zip((a, c), views, strict=True))
    batch = collate([a, Broken("b", "x"), c], grid=0.1)
    both = batch.both_views()
    assert both.ids == ("a", "c", "a", "c") and both.seconds == batch.seconds
    for row, x in enumerate((a.features, c.features, *views)):
        assert int(both.lengths[row]) == len(x)
        assert torch.equal(both.features[row, : len(x)], x)
        assert not both.features[row, len(x) :].any() and both.features.size(1) == 10
        assert both.tokens[row].tolist() == batch.tokens[row % 2].tolist()
        assert both.token_lengths[row] == batch.token_lengths[row % 2]
    assert batch.to(torch.device("cpu")).second_view is not None
    assert collate([a._replace(second_view=None)]).second_view is None


def test_a_batch_of_unreadable_utterances_is_empty():
    for grid in (0.0, 0.5):
        batch = collate([Broken("b", "x"), Broken("c", "y")], grid=grid)
        assert len(batch) == 0 and len(batch.broken) == 2 and batch.seconds == 0


@pytest.fixture(scope="module")
def utterances(tmp_path_factory):
    """Eleven seconds of noise in 13 files, one of them broken, one shorter than a frame."""
    folder = tmp_path_factory.mktemp("noise")
    random = np.random.default_rng(0)
    rows = []
    for number in range(13):
        samples = 320 if number == 5 else 8000 + 1601 * number
        path = folder / f"{number}.wav"
        soundfile.write(path, 0.1 * random.standard_normal(samples), 16_000)
        rows.append(Utterance(f"u{number}", "s", path, samples / 16_000, "ab" * (number % 3)))
    (folder / "3.wav").write_bytes(b"RIFF nonsense")
    front_end = FrontEnd(
        Fbank(num_mel_bins=11),
        MeanVarianceNorm("utterance"),
        spec_augment=spec_augment(time_width=20),
        noise=(5.0, 25.0),
    )
    return UtteranceDataset(Corpus(rows), front_end, Characters(["a", "b"]), seed=7)


def epochs(utterances, workers=0):
    return SpeechEpochs(utterances, 3.0, SPEEDS, short_first=True, workers=workers)


def read(batches):
    return [(b.ids, b.features, b.lengths, b.tokens, b.token_lengths, b.broken) for b in batches]


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a[0] == b[0] and a[5] == b[5]
        assert all(torch.equal(x, y) for x, y in zip(a[1:5], b[1:5], strict=True))


def test_workers_change_nothing_and_skip_resumes(utterances):
    every_batch = read(epochs(utterances).batches(2))
    assert_same(every_batch, read(epochs(utterances, workers=2).batches(2)))
    assert_same(every_batch[2:], read(epochs(utterances).batches(2, skip=2)))
    assert_same(every_batch[3:], read(epochs(utterances, workers=1).batches(2, skip=3)))
    assert read(epochs(utterances).batches(2, skip=len(every_batch))) == []


def test_the_loader_draws_nothing_from_the_models_generator(utterances):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(epochs(utterances, workers).batches(1))
        assert torch.equal(torch.get_rng_state(), before)


def test_only_the_first_epoch_is_sorted_by_length(utterances):
    def order(number):
        batches = epochs(utterances).plan(number).batches
        longest = [max(utterances.corpus.seconds[i.index] for i in b) for b in batches]
        return all(a <= 1.3 * b for a, b in pairwise(longest))

    assert order(1) and not all(order(n) for n in range(2, 9))


def test_an_epoch_on_a_grid_reads_the_same_utterances(utterances):
    def of(grid):
        read_now = SpeechEpochs(utterances, 3.0, SPEEDS, False, 0, grid).batches(2)
        batches = [batch for batch in read_now if len(batch)]
        frames = {
            name: (count, row[:count].sum().item())
            for b in batches
            for name, count, row in zip(b.ids, b.lengths.tolist(), b.features, strict=True)
        }
        return frames, {batch.features.size(1) for batch in batches}

    (plain, widths), (rounded, on_grid) = of(0.0), of(0.4)
    assert plain == rounded
    assert all(width % 40 == 0 for width in on_grid) and len(on_grid) < len(widths)


def test_a_second_view_changes_nothing_else(utterances):
    u = utterances
    twice = UtteranceDataset(u.corpus, u.front_end, u.tokenizer, u.seed, views=2)
    batches = list(epochs(twice).batches(2))
    assert_same(read(batches), read(epochs(u).batches(2)))
    batches = [batch for batch in batches if len(batch)]
    again = {name: view for b in batches for name, view in zip(b.ids, b.second_view, strict=True)}
    assert all(batch.second_view.shape == batch.features.shape for batch in batches)
    assert any(not torch.equal(batch.second_view, batch.features) for batch in batches)
    for batch in (b for b in epochs(twice, workers=2).batches(2, skip=1) if len(b)):
        for name, view in zip(batch.ids, batch.second_view, strict=True):
            assert torch.equal(view, again[name])


def test_unreadable_and_too_short_utterances_are_reported(utterances):
    batches = list(
        load_batches(utterances, plan_evaluation(utterances.corpus.seconds, 9).batches, 0)
    )
    broken = {b.id: b.reason for batch in batches for b in batch.broken}
    assert set(broken) == {"u3", "u5"}
    assert "3.wav: not readable as audio" in broken["u3"]
    assert "5.wav: shorter than one frame" in broken["u5"]
    assert sum(len(batch) for batch in batches) == 11


def test_evaluation_uses_the_front_end_without_augmentation(utterances):
    for index in (0, 7):
        utterance = utterances.corpus[index]
        waveform = utterances.front_end.load(utterance.audio)
        bare = utterances.front_end.features(waveform)
        assert torch.equal(utterances[Item(index, 0, 1.0)].features, bare)
        one, same, two = (utterances[Item(index, e, 1.0)].features for e in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, two)
        slow = utterances[Item(index, 1, 0.9)].features
        assert len(slow) == pytest.approx(len(bare) / 0.9, abs=3)
        assert utterances[Item(index, 1, 1.0)].tokens.tolist() == [4, 5] * (index % 3)


# Planned epochs against lists built one utterance at a time, and their transfer to workers.

PLANNED = np.random.default_rng(2).lognormal(1.5, 0.7, 509).astype(np.float32)


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
    made = plan_epoch(PLANNED[:count], 41, 3, 2, speeds, False, grid)
    slow = in_lists(PLANNED[:count], 41, 3, 2, speeds, grid)
    assert [list(batch) for batch in made.batches] == slow


def test_an_empty_corpus_has_no_batches():
    training = plan_epoch(PLANNED[:0], 41, 3, 2, (1.0,), False)
    for made in (training, plan_evaluation(PLANNED[:0], 41)):
        assert len(made.batches) == 0 and list(made.batches) == [] and made.padding == 0

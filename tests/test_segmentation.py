"""Long audio of noise bursts with known pauses is cut at the pauses; each word joins once."""

import itertools
import random

import pytest
import torch

from asr.decoding import segmentation
from asr.decoding.alignment import TimedWord, group_words, join_words
from asr.decoding.segmentation import (
    SILENT,
    Segment,
    loudness,
    merge_words,
    sound_and_silence,
)

RATE = 1000


def split_at_pauses(wave, *settings, **named):
    """The segments of audio in one block."""
    return [segment for segment, _ in segmentation.split_at_pauses([wave], *settings, **named)]


def speech(seconds, pauses, floor=1e-3):
    """Loud noise with near silence in (start, end) seconds."""
    draw = torch.Generator().manual_seed(1)
    wave = torch.randn(int(seconds * RATE), generator=draw) * 0.1
    for start, end in pauses:
        wave[int(start * RATE) : int(end * RATE)] *= floor
    return wave


def test_cuts_fall_into_pauses():
    pauses = [(3.1, 3.5), (7.2, 7.7), (13.0, 13.3), (18.4, 19.0), (24.0, 24.3)]
    wave = speech(29, pauses)
    pieces = split_at_pauses(wave, RATE, max_seconds=8.0, overlap=2.0)
    assert pieces[0].start == 0
    assert pieces[-1].end == len(wave)
    for before, after in itertools.pairwise(pieces):
        assert before.end == after.start
        assert any(start < before.end / RATE < end for start, end in pauses)
    assert all(piece.end - piece.start <= 8 * RATE for piece in pieces)


def test_the_deepest_pause_is_preferred_to_a_dip_inside_a_word():
    wave = speech(11, [(5.4, 5.8)], floor=0.01)
    wave[6500:6550] = 0  # 50 ms of nothing: a stop consonant
    first, _ = split_at_pauses(wave, RATE, max_seconds=8.0, overlap=2.0)
    assert 5.4 < first.end / RATE < 5.8


def test_without_a_pause_segments_overlap():
    wave = speech(20, [])
    pieces = split_at_pauses(wave, RATE, max_seconds=8.0, overlap=1.5)
    assert pieces == [Segment(0, 8000), Segment(6500, 14500), Segment(13000, 20000)]


@pytest.mark.parametrize("floor", [0.0, 1e-3, 10 ** (-42 / 20)])
def test_long_silences_are_parts_of_their_own(floor):
    silences = [(0, 2.3), (4.0, 5.4), (6.0, 8.7), (9.1, 14.0)]  # the second is short
    wave = speech(14, silences, floor)
    parts = sound_and_silence(wave, RATE, 1.5)
    expected = [(0, 2.05), (2.05, 6.25), (6.25, 8.45), (8.45, 9.35), (9.35, 14.0)]
    assert [part for part, _ in parts] == [
        Segment(*(round(RATE * t) for t in one)) for one in expected
    ]
    assert [has_sound for _, has_sound in parts] == [False, True, False, True, False]


def test_neither_noise_nor_a_short_silence_is_a_part():
    whole = [(Segment(0, 9000), True)]
    assert sound_and_silence(speech(9, [(2.0, 7.0)], floor=10 ** (-28 / 20)), RATE, 1.5) == whole
    assert sound_and_silence(speech(9, [(0.0, 1.4), (5.0, 6.4), (7.6, 9.0)]), RATE, 1.5) == whole
    assert sound_and_silence(speech(9, [(2.0, 7.0)]), RATE, None) == whole
    assert sound_and_silence(torch.zeros(3), RATE, 1.5) == [(Segment(0, 3), True)]


def test_a_click_makes_no_speech_a_silence():
    wave = speech(9, [])
    wave[2000:2100] = 100.0 * torch.tensor([1.0, -1.0]).repeat(50)  # 60 dB louder, 0.1 s
    assert sound_and_silence(wave, RATE, 1.5) == [(Segment(0, 9000), True)]


def test_silence_needs_no_overlap():
    pieces = split_at_pauses(torch.zeros(20 * RATE), RATE, max_seconds=8.0, overlap=2.0)
    assert all(a.end == b.start for a, b in itertools.pairwise(pieces))


def test_short_and_empty_audio():
    assert split_at_pauses(torch.zeros(0), RATE, 30.0, 2.0) == []
    assert split_at_pauses(torch.zeros(3), RATE, 30.0, 2.0) == [Segment(0, 3)]
    assert split_at_pauses(torch.zeros(30 * RATE), RATE, max_seconds=30.0, overlap=2.0) == [
        Segment(0, 30 * RATE)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_any_audio_is_covered_within_the_limit(seed):
    draw = torch.Generator().manual_seed(seed)
    length = int(torch.randint(20_000, 40_000, (), generator=draw))
    wave = (
        torch.randn(length, generator=draw)
        * torch.rand(length // 97 + 1, generator=draw).pow(6).repeat_interleave(97)[:length]
    )
    pieces = split_at_pauses(wave, 997, max_seconds=5.0, overlap=1.0)
    assert pieces[0].start == 0 and pieces[-1].end == length
    for before, after in itertools.pairwise(pieces):
        assert before.start < after.start <= before.end < after.end
        assert before.end - after.start in (0, 997)
    assert all(piece.end - piece.start <= 5 * 997 for piece in pieces)


@pytest.mark.parametrize(("gain", "constant"), [(1.0, 0.3), (1e-3, 0.0), (1e-3, 0.1), (1e-4, 0.0)])
def test_cuts_depend_on_neither_level_nor_a_constant(gain, constant):
    pauses = [(3.1, 3.5), (7.2, 7.7), (13.0, 13.3), (18.4, 19.0), (24.0, 24.3)]
    wave = speech(29, pauses, floor=0.05)
    expected = split_at_pauses(wave, RATE, max_seconds=8.0, overlap=2.0)
    assert all(a.end == b.start for a, b in itertools.pairwise(expected))
    assert split_at_pauses(wave * gain + constant, RATE, 8.0, 2.0) == expected


@pytest.mark.parametrize("constant", [0.0, 0.1, -0.9])
def test_loudness_is_that_of_the_loudest_part_without_its_mean(constant):
    wave = torch.full((3 * RATE,), constant, dtype=torch.float32)
    assert loudness(wave, RATE) <= SILENT
    step = 2 * torch.pi * torch.arange(RATE) * 200 / RATE
    wave[RATE : 2 * RATE] += 0.01 * step.sin()
    assert loudness(wave, RATE) == pytest.approx(-43.01, abs=0.02)  # 0.01 / sqrt(2)


@pytest.mark.parametrize("size", [97, 1000, 12_345])
@pytest.mark.parametrize("kind", ["pauses", "none", "silence"])
def test_blocks_have_the_segments_of_the_whole_and_little_is_held(kind, size):
    pauses = [(3.1, 3.5), (7.2, 7.7), (13.0, 13.3), (18.4, 19.0), (24.0, 24.3)]
    wave = speech(57.3, pauses if kind == "pauses" else [])
    wave = torch.zeros(57_300) if kind == "silence" else wave
    read = 0

    def blocks():
        nonlocal read
        for block in wave.split(size):
            read += len(block)
            yield block

    segments = []
    for segment, samples in segmentation.split_at_pauses(blocks(), RATE, 8.0, 1.5):
        segments.append(segment)
        assert torch.equal(samples, wave[segment.start : segment.end])
        assert read - segment.start <= 8 * RATE + size
        assert samples.untyped_storage().nbytes() == 4 * len(samples)  # holds no block
    assert segments == split_at_pauses(wave, RATE, 8.0, 1.5) and len(segments) > 6


def words_of(text, first=0.0, every=1.0):
    """Words of 0.5 s, one every second."""
    return [
        TimedWord(w, first + i * every, first + i * every + 0.5, 1.0)
        for i, w in enumerate(text.split())
    ]


def test_adjacent_segments_are_concatenated():
    words = merge_words(
        [Segment(0, 3000), Segment(3000, 5000)], [words_of("a b c"), words_of("d e")], RATE
    )
    assert [w.text for w in words] == list("abcde")
    assert [w.start for w in words] == [0, 1, 2, 3, 4]


def test_words_of_an_overlap_appear_once():
    """The left segment cuts its last word, the right one its first."""
    pieces = [Segment(0, 6000), Segment(3000, 9000)]
    words = merge_words(pieces, [words_of("a b c d e fff"), words_of("ddd e f g h")], RATE)
    assert [w.text for w in words] == ["a", "b", "c", "d", "e", "f", "g", "h"]
    assert words[5].start == 5.0


def test_letters_without_spaces_appear_once():
    """Text in Chinese letters of 0.25 s; the overlap's edges cut a letter of each segment."""
    text = "他说明天的会议改到下午三点在二楼的大会议室举行请大家准时参加不要迟到"
    letters = [(u, u + 1) for u in range(len(text))]
    left = group_words(text[:24] + "在", letters[:25], [0.0] * 25, 0.25)
    right = group_words("不" + text[17:], letters[: len(text) - 16], [0.0] * 99, 0.25)
    words = merge_words([Segment(0, 6250), Segment(4000, 9000)], [left, right], RATE)
    assert join_words(words) == text
    assert [w.start for w in words] == pytest.approx([0.25 * u for u in range(len(text))])


def placed(text):
    """Words of 0.2 s, unless their ends are given: "THE@28.2 CAT@28.6-29.1"."""
    words = []
    for name, times in (word.split("@") for word in text.split()):
        start, _, end = times.partition("-")
        words.append(TimedWord(name, float(start), float(end or float(start) + 0.2), 1.0))
    return words


def overlapping(left, right):
    """Words of segments up to second 30 and from second 28, merged; times from 0 s."""
    pieces = [Segment(0, 30_000), Segment(28_000, 40_000)]
    shifted = [TimedWord(w.text, w.start - 28, w.end - 28, 1.0) for w in placed(right)]
    return merge_words(pieces, [placed(left), shifted], RATE)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("SAW@28.2 THE@28.9", "THE@28.6 CAT@28.7 SAT@29.5"),
        ("SAW@28.2 THE@28.8", "CAT@28.7-29.4 SAT@29.5"),
    ],
    ids=["agreed", "halves"],
)
def test_no_word_starts_before_the_one_before_it(left, right):
    """Both segments have slightly different word times."""
    words = overlapping(left, right)
    assert " ".join(w.text for w in words) == "SAW THE CAT SAT"
    assert [w.start for w in words] == sorted(w.start for w in words)
    assert all(w.start <= w.end for w in words)


def drawn(draw, start, end):
    """Consecutive words of two letters between those times."""
    starts = sorted(draw.uniform(start, end) for _ in range(9))
    ends = [*starts[1:], end]
    return [
        TimedWord(draw.choice("ab"), a, a + draw.random() * (b - a), 1.0)
        for a, b in zip(starts, ends, strict=True)
    ]


def best_join(left, right, start, end):
    """The joined texts by trying every run of every length; without one, each keeps its half."""
    middles = [[(w.start + w.end) / 2 for w in words] for words in (left, right)]
    difference = {
        (i, j): abs(a - b)
        for (i, a), (j, b) in itertools.product(*map(enumerate, middles))
        if a >= start and b <= end and left[i].text == right[j].text and abs(a - b) <= 0.4
    }
    runs = [
        (n, -sum(difference[i + k, j + k] for k in range(n)), i + n, j + n)
        for (i, j), n in itertools.product(difference, range(1, 10))
        if all((i + k, j + k) in difference for k in range(n))
    ]
    seam = (start + end) / 2
    halves = 0, 0, sum(m < seam for m in middles[0]), sum(m < seam for m in middles[1])
    *_, cut, start_right = max(runs, default=halves)
    return "".join(w.text for w in left[:cut] + right[start_right:])


def test_any_two_segments_join_like_the_best_of_all_runs_and_in_order():
    draw = random.Random(3)
    for _ in range(300):
        left, right = drawn(draw, 0, 6), drawn(draw, 3, 9)
        shifted = [TimedWord(w.text, w.start - 3, w.end - 3, 1.0) for w in right]
        words = merge_words([Segment(0, 6000), Segment(3000, 9000)], [left, shifted], RATE)
        assert "".join(w.text for w in words) == best_join(left, right, 3, 6)
        assert [w.start for w in words] == sorted(w.start for w in words)


def test_empty_segments_join_to_nothing():
    pieces = [Segment(0, 4000), Segment(3000, 7000), Segment(6000, 9000)]
    assert merge_words(pieces, [[], [], []], RATE) == []
    words = merge_words(pieces, [words_of("a b"), [], words_of("c d", 1.5)], RATE)
    assert [w.text for w in words] == ["a", "b", "c", "d"]
    assert merge_words([], [], RATE) == []

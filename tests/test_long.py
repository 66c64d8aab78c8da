"""Long audio of noise bursts and known pauses is cut at the pauses; words join exactly once."""

import itertools
import random

import pytest
import torch

from asr.decoding.long import Piece, cut_at_pauses, join_words
from asr.decoding.times import Word
from asr.errors import UserError

RATE = 1000


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
    pieces = cut_at_pauses(wave, RATE, longest=8.0)
    assert pieces[0].start == 0
    assert pieces[-1].end == len(wave)
    for before, after in itertools.pairwise(pieces):
        assert before.end == after.start
        assert any(start < before.end / RATE < end for start, end in pauses)
    assert all(piece.end - piece.start <= 8 * RATE for piece in pieces)


def test_the_deepest_pause_wins_over_a_dip_inside_a_word():
    wave = speech(11, [(5.4, 5.8)], floor=0.01)
    wave[6500:6550] = 0  # 50 ms of nothing: a stop consonant
    first, _ = cut_at_pauses(wave, RATE, longest=8.0)
    assert 5.4 < first.end / RATE < 5.8


def test_without_a_pause_pieces_overlap():
    wave = speech(20, [])
    pieces = cut_at_pauses(wave, RATE, longest=8.0, overlap=1.5)
    assert pieces == [Piece(0, 8000), Piece(6500, 14500), Piece(13000, 20000)]


def test_silence_needs_no_overlap():
    pieces = cut_at_pauses(torch.zeros(20 * RATE), RATE, longest=8.0)
    assert all(a.end == b.start for a, b in itertools.pairwise(pieces))


def test_short_and_empty_audio():
    assert cut_at_pauses(torch.zeros(0), RATE) == []
    assert cut_at_pauses(torch.zeros(3), RATE) == [Piece(0, 3)]
    assert cut_at_pauses(torch.zeros(30 * RATE), RATE, longest=30.0) == [Piece(0, 30 * RATE)]


@pytest.mark.parametrize("seed", range(5))
def test_any_audio_is_covered_within_the_limit(seed):
    draw = torch.Generator().manual_seed(seed)
    length = int(torch.randint(20_000, 40_000, (), generator=draw))
    wave = (
        torch.randn(length, generator=draw)
        * torch.rand(length // 97 + 1, generator=draw).pow(6).repeat_interleave(97)[:length]
    )
    pieces = cut_at_pauses(wave, 997, longest=5.0, overlap=1.0)
    assert pieces[0].start == 0 and pieces[-1].end == length
    for before, after in itertools.pairwise(pieces):
        assert before.start < after.start <= before.end < after.end
        assert before.end - after.start in (0, 997)
    assert all(piece.end - piece.start <= 5 * 997 for piece in pieces)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"longest": 0.5}, "longest is 0.5 seconds; it must be 1 or more"),
        ({"longest": 8.0, "overlap": 3.0}, "overlap is 3.0 seconds; it must lie between 0 and"),
        ({"overlap": -1.0}, "overlap is -1.0 seconds"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        cut_at_pauses(torch.zeros(9), RATE, **settings)


def said(text, first=0.0, every=1.0):
    """Words of 0.5 s, one every second."""
    return [
        Word(w, first + i * every, first + i * every + 0.5, 1.0) for i, w in enumerate(text.split())
    ]


def test_pieces_that_meet_are_strung_together():
    words = join_words([Piece(0, 3000), Piece(3000, 5000)], [said("a b c"), said("d e")], RATE)
    assert [w.text for w in words] == list("abcde")
    assert [w.start for w in words] == [0, 1, 2, 3, 4]


def test_words_of_an_overlap_come_once():
    """The left piece breaks its last word, the right one its first."""
    pieces = [Piece(0, 6000), Piece(3000, 9000)]
    words = join_words(pieces, [said("a b c d e fff"), said("ddd e f g h")], RATE)
    assert [w.text for w in words] == ["a", "b", "c", "d", "e", "f", "g", "h"]
    assert words[5].start == 5.0


def placed(text):
    """Words of 0.2 s, unless their ends are told: "THE@28.2 CAT@28.6-29.1"."""
    words = []
    for name, times in (word.split("@") for word in text.split()):
        start, _, end = times.partition("-")
        words.append(Word(name, float(start), float(end or float(start) + 0.2), 1.0))
    return words


def overlapping(left, right):
    """What a piece up to second 30 and one from second 28 on say, joined; times from 0 s."""
    pieces = [Piece(0, 30_000), Piece(28_000, 40_000)]
    shifted = [Word(w.text, w.start - 28, w.end - 28, 1.0) for w in placed(right)]
    return join_words(pieces, [placed(left), shifted], RATE)


def test_a_word_said_again_later_is_no_agreement():
    words = overlapping(
        "SAW@27.4 THE@28.2 CAT@28.6 BITE@29.1 THE@29.6",
        "A@28.2 CAP@28.6 BY@29.1 THE@29.6 DOG@30.2 TODAY@30.6",
    )
    assert " ".join(w.text for w in words) == "SAW THE CAT BITE THE DOG TODAY"


def test_a_word_that_both_say_at_times_far_apart_is_no_agreement():
    words = overlapping("SAW@27.4 THE@28.2 CAT@28.6", "BY@29.1 THE@29.6 DOG@30.2")
    assert " ".join(w.text for w in words) == "SAW THE CAT BY THE DOG"


def test_of_two_agreements_alike_the_nearer_in_time_counts():
    words = overlapping("SO@27.4 NO@28.5 NO@28.8 ENT@29.8", "NO@28.8 ENTRY@29.9")
    assert " ".join(w.text for w in words) == "SO NO NO ENTRY"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("SAW@28.2 THE@28.9", "THE@28.6 CAT@28.7 SAT@29.5"),
        ("SAW@28.2 THE@28.8", "CAT@28.7-29.4 SAT@29.5"),
    ],
    ids=["agreed", "halves"],
)
def test_no_word_starts_before_the_one_before_it(left, right):
    """Both pieces time the words a little differently."""
    words = overlapping(left, right)
    assert " ".join(w.text for w in words) == "SAW THE CAT SAT"
    assert [w.start for w in words] == sorted(w.start for w in words)
    assert all(w.start <= w.end for w in words)


def drawn(draw, start, end):
    """Words of two letters that follow each other through those seconds."""
    starts = sorted(draw.uniform(start, end) for _ in range(9))
    ends = [*starts[1:], end]
    return [
        Word(draw.choice("ab"), a, a + draw.random() * (b - a), 1.0)
        for a, b in zip(starts, ends, strict=True)
    ]


def best_join(left, right, start, end):
    """Texts by trying every run of every length; where none fits, each has its half."""
    middles = [[(w.start + w.end) / 2 for w in words] for words in (left, right)]
    apart = {
        (i, j): abs(a - b)
        for (i, a), (j, b) in itertools.product(*map(enumerate, middles))
        if a >= start and b <= end and left[i].text == right[j].text and abs(a - b) <= 0.4
    }
    runs = [
        (n, -sum(apart[i + k, j + k] for k in range(n)), i + n, j + n)
        for (i, j), n in itertools.product(apart, range(1, 10))
        if all((i + k, j + k) in apart for k in range(n))
    ]
    seam = (start + end) / 2
    halves = 0, 0, sum(m < seam for m in middles[0]), sum(m < seam for m in middles[1])
    *_, cut, goes_on = max(runs, default=halves)
    return "".join(w.text for w in left[:cut] + right[goes_on:])


def test_any_two_pieces_join_as_the_best_of_all_runs_and_in_order():
    draw = random.Random(3)
    for _ in range(300):
        left, right = drawn(draw, 0, 6), drawn(draw, 3, 9)
        shifted = [Word(w.text, w.start - 3, w.end - 3, 1.0) for w in right]
        words = join_words([Piece(0, 6000), Piece(3000, 9000)], [left, shifted], RATE)
        assert "".join(w.text for w in words) == best_join(left, right, 3, 6)
        assert [w.start for w in words] == sorted(w.start for w in words)


def test_an_overlap_without_agreement_is_shared_in_halves():
    pieces = [Piece(0, 6000), Piece(2000, 8000)]
    words = join_words(pieces, [said("a b c d e f"), said("p q r s t u")], RATE)
    assert [w.text for w in words] == ["a", "b", "c", "d", "r", "s", "t", "u"]


def test_the_same_word_outside_the_overlap_is_no_agreement():
    pieces = [Piece(0, 4000), Piece(3000, 7000)]
    words = join_words(pieces, [said("no no a b"), said("b c no no")], RATE)
    assert [w.text for w in words] == ["no", "no", "a", "b", "c", "no", "no"]


def test_empty_pieces_are_joined_to_nothing():
    pieces = [Piece(0, 4000), Piece(3000, 7000), Piece(6000, 9000)]
    assert join_words(pieces, [[], [], []], RATE) == []
    words = join_words(pieces, [said("a b"), [], said("c d", 1.5)], RATE)
    assert [w.text for w in words] == ["a", "b", "c", "d"]
    assert join_words([], [], RATE) == []

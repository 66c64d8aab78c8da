"""Long audio of noise bursts and known pauses is cut at the pauses; words join exactly once."""

import itertools

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

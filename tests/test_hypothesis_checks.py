"""Coverage, repetition and length ratio of hypotheses with known faults."""

import pytest
import torch

from asr.decoding.alignment import coverage, hypothesis_health, repetition


def attending(frames, total):
    """One-frame peaks (U, T)."""
    return torch.nn.functional.one_hot(torch.tensor(frames), total).float()


def test_coverage_is_the_share_of_attended_windows():
    assert coverage(attending([1, 6, 11, 16], 20), window=5) == 1.0
    assert coverage(attending([1, 6, 7, 8], 20), window=5) == 0.5  # the second half is skipped
    assert coverage(attending([3] * 9, 20), window=5) == 0.25  # attention that does not advance


def test_a_short_remainder_belongs_to_the_last_window():
    assert coverage(attending([1, 12], 13), window=5) == 1.0  # 0-4, 5-12
    assert coverage(attending([1], 3), window=5) == 1.0
    assert coverage(torch.zeros(2, 0), window=5) == 1.0


def test_half_a_token_of_attention_covers_a_window():
    spread = torch.tensor([[0.05] * 10, [0.05] * 10])  # 0.5 in each window of 5 frames
    assert coverage(spread, window=5) == 1.0
    assert coverage(spread * 0.9, window=5) == 0.0


def test_repetition_is_the_share_of_repeated_ngrams():
    assert repetition([4, 5, 6, 7, 8, 9], n=3) == 0.0
    assert repetition([4, 5, 4, 5, 4, 5], n=2) == pytest.approx(3 / 5)
    assert repetition([4] * 13) == pytest.approx(9 / 10)
    assert repetition([4, 5], n=3) == 0.0


def test_hypothesis_health_without_attention_has_no_coverage():
    figures = hypothesis_health([4, 5, 6], 30, None, 25)
    assert figures.coverage is None
    assert figures.length_ratio == pytest.approx(0.1)
    assert hypothesis_health([], 0, None, 25).length_ratio == 0.0


def test_the_row_of_eos_does_not_count():
    weights = attending([3, 28, 55], 56)  # the last row is EOS, which attends to the last second
    assert hypothesis_health([4, 5], 56, weights, 25).coverage == 1.0
    assert hypothesis_health([4], 56, weights, 25).coverage == 0.5


def test_flags_are_for_hypotheses_that_skip_or_repeat_most():
    skipping = hypothesis_health([4, 5], 125, attending([12, 37], 125), 25)
    looping = hypothesis_health([4] * 13, 50, None, 25)
    assert hypothesis_health([4, 5], 50, attending([12, 37], 50), 25).flags == ()
    assert hypothesis_health([4, 5], 100, attending([12, 37], 100), 25).flags == ()  # exactly half
    assert skipping.flags == ("low coverage",) and looping.flags == ("repetition",)
    assert hypothesis_health([4, 5, 6] * 4, 50, None, 25).flags == ()
    both = hypothesis_health([4] * 13, 125, attending([12] * 13, 125), 25)
    assert both.flags == ("low coverage", "repetition")

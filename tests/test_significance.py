"""asr.analysis.significance on synthetic runs whose difference is known."""

import random
from math import comb, erfc, sqrt

import pytest
from scipy import stats

from asr.analysis.significance import compare_two, matched_pairs, paired_bootstrap
from asr.analysis.wer import score
from asr.errors import UserError


def run(rates, seed, speaker_of=lambda number: str(number % 7), words=11):
    """A run over len(rates) utterances; each word of utterance n fails with rates[n]."""
    draw = random.Random(seed)
    texts = [
        " ".join("no" if draw.random() < rate else "yes" for _ in range(words)) for rate in rates
    ]
    speakers = [speaker_of(number) for number in range(len(rates))]
    return score([" ".join(["yes"] * words)] * len(rates), texts, speakers=speakers, draws=2)


TESTS = [
    pytest.param(lambda a, b: paired_bootstrap(a, b, draws=2000), id="bootstrap"),
    pytest.param(
        lambda a, b: paired_bootstrap(a, b, units="speakers", draws=2000), id="bootstrap-speakers"
    ),
    pytest.param(lambda a, b: matched_pairs(a, b), id="phrases"),
]


@pytest.mark.parametrize("test", TESTS)
def test_identical_runs_do_not_differ(test):
    same = run([0.2] * 53, seed=1)
    actual = test(same, same)
    assert (actual.wer, actual.interval, actual.p) == (0, (0, 0), 1)


@pytest.mark.parametrize("test", TESTS)
def test_a_large_difference_is_found(test):
    actual = test(run([0.3] * 301, seed=1), run([0.2] * 301, seed=2))
    assert actual.wer == pytest.approx(-0.1, abs=0.03)
    assert actual.interval[0] < actual.wer < actual.interval[1] < 0
    assert actual.p < 0.02


@pytest.mark.parametrize("test", TESTS)
def test_order_of_the_runs_changes_the_sign_only(test):
    first, second = run([0.20] * 101, seed=1), run([0.17] * 101, seed=2)
    actual, turned = test(first, second), test(second, first)
    assert 0 < actual.p < 1
    assert turned.p == actual.p
    assert turned.wer == -actual.wer == pytest.approx(first.wer - second.wer)
    assert turned.interval == pytest.approx((-actual.interval[1], -actual.interval[0]))


@pytest.mark.parametrize("test", TESTS)
def test_order_of_the_utterances_changes_nothing(test):
    first, second = run([0.2] * 61, seed=1), run([0.2] * 61, seed=2)
    turned = second.utterances[::-1]
    shuffled = score(
        [u.reference for u in turned],
        [u.hypothesis for u in turned],
        [u.id for u in turned],
        [u.speaker for u in turned],
    )
    assert test(first, shuffled) == test(first, second)


@pytest.fixture(scope="module")
def equal_systems():
    """Hard and easy utterances, the same for all; otherwise the errors are independent."""
    rates = [0.05 + 0.3 * (number % 5 == 0) for number in range(97)]
    return [run(rates, seed, words=5) for seed in range(400)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        lambda a, b: paired_bootstrap(a, b, draws=400),
        lambda a, b: matched_pairs(a, b),
    ],
)
def test_one_in_twenty_equal_systems_is_called_different(test, equal_systems):
    pairs = zip(equal_systems[::2], equal_systems[1::2], strict=True)
    false_alarms = sum(test(a, b).p < 0.05 for a, b in pairs)
    assert 2 <= false_alarms <= 20  # of 200: expected 10, standard deviation 3.1


def test_speakers_who_differ_are_no_proof_over_speakers():
    # Half of the speakers are much better with one system, half with the other.
    speakers, each = 12, 40
    better = [0.1 if number // each < 7 else 0.4 for number in range(speakers * each)]
    worse = [0.4 if number // each < 7 else 0.1 for number in range(speakers * each)]
    runs = [
        run(rates, seed, lambda n: str(n // each)) for seed, rates in enumerate((better, worse))
    ]
    assert paired_bootstrap(*runs).p < 0.01
    assert paired_bootstrap(*runs, units="speakers").p > 0.3


def test_bootstrap_p_is_the_exact_one_of_a_case_small_enough_to_enumerate():
    # Ten one-word utterances: the second system corrects two and breaks one. A resample of ten
    # corrects i and breaks j; p/2 is the probability that it corrects no more than it breaks.
    first = score(["a"] * 10, ["x", "x"] + ["a"] * 8)
    second = score(["a"] * 10, ["a", "a", "x"] + ["a"] * 7)
    exact = sum(
        comb(10, i) * comb(10 - i, j) * 0.2**i * 0.1**j * 0.7 ** (10 - i - j)
        for i in range(11)
        for j in range(11 - i)
        if i <= j
    )
    assert paired_bootstrap(first, second, draws=40_000).p == pytest.approx(2 * exact, abs=0.02)


def test_matched_pairs_by_hand():
    # 9 utterances: the second is 1, 1, 1 and 2 words better, once 1 worse, four times equal.
    wrong = [(1, 0), (1, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 0), (0, 0), (0, 0)]
    texts = [[" ".join(["x"] * w[run] + ["a"] * (5 - w[run])) for w in wrong] for run in (0, 1)]
    first, second = (score(["a a a a a"] * 9, hypotheses) for hypotheses in texts)
    actual = matched_pairs(first, second)
    assert actual.wer == pytest.approx(-4 / 45)
    assert actual.p == pytest.approx(erfc(4 / sqrt(8) / sqrt(2)))
    half = 1.959964 * sqrt(8) / 45
    assert actual.interval == pytest.approx((-4 / 45 - half, -4 / 45 + half))


def test_phrases_end_after_two_good_words():
    reference = "a b c d e f g h"
    # b and e are wrong; c and d between them are right in both, which is enough to cut.
    cut = score([reference], ["a X c d Y f g h"]), score([reference], [reference])
    assert matched_pairs(*cut).units == 2
    joined = score([reference], ["a X c Y e f g h"]), score([reference], [reference])
    assert matched_pairs(*joined).units == 1
    # Both runs must have the two words right, with nothing inserted between them.
    other = score([reference], ["a X c d Y f g h"]), score([reference], ["a b c X e f g h"])
    assert matched_pairs(*other).units == 1
    between = score([reference], ["a X c Z d Y f g h"]), score([reference], [reference])
    assert matched_pairs(*between).units == 1
    assert matched_pairs(*between).wer == -3 / 8
    ends = score([reference], ["Z a b c d e f g h Z"]), score([reference], [reference])
    assert matched_pairs(*ends).units == 2


def test_runs_of_other_utterances_are_refused():
    a, b = score(["x", "y"], ["x", "y"], ["1", "2"]), score(["x", "y"], ["x", "y"], ["1", "3"])
    with pytest.raises(UserError, match=r"^2 utterances are only in one run, such as '2'"):
        paired_bootstrap(a, b)
    c = score(["x", "z"], ["x", "y"], ["1", "2"])
    with pytest.raises(UserError, match="utterance '2' has different references in the two runs"):
        matched_pairs(a, c)
    with pytest.raises(UserError, match="over speakers needs at least two, there is 1"):
        paired_bootstrap(a, a, units="speakers")


def test_few_utterances_are_not_tested():
    """If all of three improve, the bootstrap's p is 0.0002 and that of the exact sign test 0.25."""
    three = [run([rate] * 3, seed=1) for rate in (1.0, 0.0)]
    assert paired_bootstrap(*three).p < 0.001 < stats.binomtest(3, 3).pvalue
    assert not any("bootstrap over utterances" in line for line in compare_two(*three))
    for count, tested in ((19, False), (20, True)):
        lines = compare_two(*(run([0.2] * count, seed) for seed in (1, 2)))
        assert any(f"bootstrap over utterances ({count})" in line for line in lines) is tested
        assert ("  over utterances: not tested, there are fewer than 20" in lines) is not tested


def test_few_speakers_are_not_tested():
    """Of two speakers, a bootstrap would call every second pair of equal systems different."""
    for speakers, tested in ((19, False), (20, True)):
        pair = [
            run([0.2] * 40, seed, lambda number, n=speakers: str(number % n)) for seed in (1, 2)
        ]
        lines = compare_two(*pair)
        assert any(f"bootstrap over speakers ({speakers})" in line for line in lines) is tested
        assert ("  over speakers: not tested, there are fewer than 20" in lines) is not tested

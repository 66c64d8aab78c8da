"""asr.analysis.wer and alignments against a plain Levenshtein loop and hand-made examples."""

import random
import time
import unicodedata
from math import sqrt

import jiwer
import pytest

from asr.analysis.wer import (
    align,
    confusions,
    interval_over_speakers,
    score,
    summarize,
)
from asr.errors import UserError


def levenshtein(reference, hypothesis):
    """Fewest substitutions, deletions and insertions: the textbook table, one row at a time."""
    row = list(range(len(hypothesis) + 1))
    for i, ours in enumerate(reference, 1):
        above, row = row, [i]
        for j, theirs in enumerate(hypothesis, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (ours != theirs)))
    return row[-1]


def random_texts(count, seed):
    draw = random.Random(seed)
    words = ["A", "AB", "BA", "ÉTÉ", "Ж", "A'B", "*", "<b>"]
    return [" ".join(draw.choices(words, k=draw.randrange(7))) for _ in range(count)]


def test_counts_agree_with_a_plain_levenshtein_loop():
    references, hypotheses = random_texts(211, seed=1), random_texts(211, seed=2)
    actual = score(references, hypotheses)
    for utterance, ours, theirs in zip(actual.utterances, references, hypotheses, strict=True):
        words, other = ours.split(), theirs.split()
        assert utterance.errors == levenshtein(words, other)
        assert utterance.character_errors == levenshtein(ours, theirs)
        assert utterance.insertions - utterance.deletions == len(other) - len(words)
        assert (utterance.words, utterance.characters) == (len(words), len(ours))
    assert actual.errors == sum(u.errors for u in actual.utterances)
    assert actual.words == sum(len(text.split()) for text in references)
    assert actual.wer == actual.errors / actual.words
    assert actual.cer == sum(u.character_errors for u in actual.utterances) / actual.characters
    assert actual.sentence_errors == sum(
        a.split() != b.split() for a, b in zip(references, hypotheses, strict=True)
    )


def test_hand_worked_counts():
    actual = score(["THE CAT SAT ON THE MAT", "YES"], ["THE CAT SAD THE MAT NOW", "YES"])
    assert (actual.substitutions, actual.deletions, actual.insertions) == (1, 1, 1)
    assert (actual.words, actual.wer) == (7, 3 / 7)
    # SAT ON -> SAD: T to D and three characters less; " NOW": four more. 22 + 3 characters.
    assert (actual.character_errors, actual.characters) == (8, 25)
    assert (actual.sentences, actual.sentence_errors, actual.sentence_error_rate) == (2, 1, 0.5)


def test_white_space_is_one_space_but_case_and_punctuation_count():
    assert score([" a\tb \n c "], ["a b  c"]).character_errors == 0
    assert score(["a b"], ["A b."]).substitutions == 2


def test_letters_of_scripts_without_spaces_are_words():
    chinese = score(["今天天气很好", "我用python写"], ["今天天汽好", "我 用 pyton 写"])
    assert [(u.words, u.substitutions, u.deletions) for u in chinese.utterances] == [
        (6, 1, 1),
        (4, 1, 0),
    ]
    judge = jiwer.wer(
        ["今 天 天 气 很 好", "我 用 python 写"], ["今 天 天 汽 好", "我 用 pyton 写"]
    )
    assert chinese.wer == judge == 0.3
    assert score(["ที่นี่ครับ"], ["ที่นีครับ"]).substitutions == 1  # a mark belongs to its letter
    segmented = score(["而 对 楼市，love 你"], ["而对楼市， love你"])
    assert (segmented.wer, segmented.cer, segmented.characters) == (0, 0, 10)
    assert score(["안녕 하세요"], ["안녕 하세여"]).wer == 0.5  # Korean has spaces


def test_composed_and_decomposed_letters_are_equal():
    assert score(["đẹp"], [unicodedata.normalize("NFD", "đẹp")]).cer == 0


def test_empty_texts_are_scored():
    silence = score([""], [""])
    assert (silence.wer, silence.cer, silence.sentence_errors, silence.words) == (0, 0, 0, 0)
    missed = score(["one two"], ["  "])
    assert (missed.deletions, missed.wer, missed.cer) == (2, 1, 1)
    invented = score([" "], ["one two"])
    assert (invented.insertions, invented.wer, invented.cer) == (2, 2, 7)
    both = score(["", "one two"], ["three", ""])
    assert (both.insertions, both.deletions, both.wer) == (1, 2, 3 / 2)


def test_speakers_have_their_own_counts():
    actual = score(
        ["a b", "c d e", "f"], ["a x", "c d e", ""], speakers=["zoe", "ann", "zoe"], ids="xyz"
    )
    assert [(s.speaker, s.sentences, s.words, s.errors) for s in actual.speakers] == [
        ("ann", 1, 3, 0),
        ("zoe", 2, 3, 2),
    ]
    assert actual.speakers[1].wer == 2 / 3
    assert [u.id for u in actual.utterances] == ["x", "y", "z"]


def test_interval_is_the_binomial_one_where_words_fail_independently():
    draw = random.Random(5)
    rate, size = 0.3, 2003
    wrong = ["no" if draw.random() < rate else "yes" for _ in range(size)]
    actual = score(["yes"] * size, wrong, draws=4000)
    half = 1.96 * sqrt(actual.wer * (1 - actual.wer) / size)
    assert actual.wer_interval == pytest.approx((actual.wer - half, actual.wer + half), rel=0.02)


def test_an_id_in_place_of_a_speaker_names_none():
    assert score(["a", "b"], ["a", "c"], ids="xy", speakers=["x", "y"]).speakers == ()
    named = score(["a", "b"], ["a", "c"], ids="xy", speakers=["x", "z"])
    assert [s.speaker for s in named.speakers] == ["x", "z"]


def test_interval_over_speakers_is_wider_where_speakers_differ():
    # Either every utterance of a speaker fails or none: the sample size is 41 speakers.
    speakers = [str(number // 23) for number in range(41 * 23)]
    hypotheses = ["no" if int(speaker) % 4 == 0 else "yes" for speaker in speakers]
    arguments = (["yes"] * len(speakers), hypotheses, None, speakers)
    by_utterance = score(*arguments)
    rate = by_utterance.wer
    half = 1.96 * sqrt(rate * (1 - rate) / 41)
    by_speaker = interval_over_speakers(by_utterance, draws=4000)
    assert by_speaker == pytest.approx((rate - half, rate + half), abs=0.02)
    low, high = by_utterance.wer_interval
    assert high - low < half  # a quarter of the truth: 1 / sqrt(23)


def test_interval_covers_the_true_rate_nineteen_times_of_twenty():
    draw, covered, trials = random.Random(7), 0, 150
    for _ in range(trials):
        wrong = [
            " ".join("no" if draw.random() < 0.2 else "yes" for _ in "abcde") for _ in "x" * 83
        ]
        low, high = score(["yes yes yes yes yes"] * 83, wrong, draws=300).wer_interval
        covered += low <= 0.2 <= high
    assert 0.89 <= covered / trials <= 0.99  # 0.95 with a standard error of 0.018


def test_one_unit_has_no_interval():
    assert score(["a"], ["b"]).wer_interval is None
    assert score(["a", "b"], ["a", "c"]).wer_interval == (0, 1)
    assert interval_over_speakers(score(["a", "b"], ["a", "c"])) is None


def test_same_seed_same_interval():
    texts = random_texts(31, seed=3), random_texts(31, seed=4)
    assert score(*texts) == score(*texts)


def test_a_part_can_be_summarized():
    actual = score(["a", "b c", "d"], ["a", "b", "x"], speakers=["p", "q", "p"])
    part = summarize([u for u in actual.utterances if u.speaker == "p"])
    assert part == score(["a", "d"], ["a", "x"], ids=["1", "3"], speakers=["p", "p"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "nothing to score: there are no utterances"),
        ((["a"], ["a", "b"]), "1 references but 2 hypotheses: give one for each utterance"),
        ((["a"], ["a"], ["x", "y"]), "1 references but 2 ids: give one for each utterance"),
        ((["a"], ["a"], ["x"], []), "1 references but 0 speakers: give one for each utterance"),
        ((["a", "b"], ["a", "b"], ["x", "x"]), "utterance id 'x' is not unique"),
        (("the cat", "the bat"), "'the cat' is one text: give a list"),
        ((["the cat"], "the bat"), "'the bat' is one text: give a list"),
    ],
)
def test_wrong_input_is_reported(arguments, message):
    with pytest.raises(UserError, match=message):
        score(*arguments)


@pytest.mark.slow
def test_ten_thousand_utterances_are_quick():
    draw = random.Random(11)
    words = ["".join(draw.choices("ABCDEFGH", k=draw.randrange(1, 9))) for _ in range(997)]
    references = [" ".join(draw.choices(words, k=17)) for _ in range(10_000)]
    hypotheses = [text.replace("A ", "B ").replace(" C", " ") for text in references]
    start = time.process_time()
    actual = score(references, hypotheses)
    assert (
        time.process_time() - start < 6
    )  # 1.2 s on an idle core; a loaded one may take twice that
    assert actual.sentences == 10_000


def test_alignment_is_an_optimal_path_through_both_texts():
    references, hypotheses = random_texts(97, seed=5), random_texts(97, seed=6)
    for ours, theirs, edits in zip(
        references, hypotheses, align(references, hypotheses), strict=True
    ):
        assert [e.reference for e in edits if e.mark != "I"] == ours.split()
        assert [e.hypothesis for e in edits if e.mark != "D"] == theirs.split()
        assert all((e.reference == e.hypothesis) == (e.mark == "C") for e in edits)
        assert sum(e.mark != "C" for e in edits) == levenshtein(ours.split(), theirs.split())


def test_confusions_are_counted_and_ordered():
    alignments = align(["a b c", "a b", "d", "e"], ["x b", "x y", "d d", "e q"])
    actual = confusions(alignments)
    assert actual.substitutions == (("a", "x", 2), ("b", "y", 1))
    assert actual.deletions == (("c", 1),)
    assert actual.insertions == (("d", 1), ("q", 1))
    assert confusions(alignments, most=1).substitutions == (("a", "x", 2),)
    assert confusions([]).deletions == ()

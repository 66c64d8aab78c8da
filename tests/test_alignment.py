"""Token spans on known paths and against brute force; words from tokens."""

import itertools
import math

import pytest
import torch

from asr.decoding.alignment import (
    REACH,
    TimedWord,
    attention_spans,
    coverage,
    ctc_log_probs,
    ctc_spans,
    group_words,
    has_ctc_path,
    hypothesis_health,
    join_words,
    repetition,
    token_spans,
)

VOCABULARY = 7


def peaky(path, chance=0.9):
    """CTC log-probs (T, V) that peak at a path's labels."""
    rest = (1 - chance) / (VOCABULARY - 1)
    probs = torch.full((len(path), VOCABULARY), rest)
    probs[torch.arange(len(path)), torch.tensor(path)] = chance
    return probs.log()


def test_ctc_spans_are_those_of_a_known_path():
    path = [0, 0, 4, 4, 0, 5, 6, 6, 6, 0, 6, 0, 0]
    assert ctc_spans([4, 5, 6, 6], peaky(path)) == [(2, 4), (5, 6), (6, 9), (10, 11)]


def test_ctc_log_probs_are_those_of_the_most_probable_frame():
    log_probs = peaky([0, 4, 4, 0, 6], chance=0.6)
    # The 0.99 of token 6 is outside its span.
    log_probs[2, 4], log_probs[0, 6] = math.log(0.8), math.log(0.99)
    actual = ctc_log_probs([4, 6], [(1, 3), (4, 5)], log_probs)
    assert actual == pytest.approx((math.log(0.8), math.log(0.6)))


def test_ctc_spans_are_the_best_of_all_paths():
    tokens, frames = [4, 5, 5], 7
    draw = torch.Generator().manual_seed(5)
    log_probs = torch.randn(frames, VOCABULARY, generator=draw).mul(2).log_softmax(-1)
    rows = log_probs.tolist()

    def labels_of(path):
        spans = []
        for label, run in itertools.groupby(range(frames), key=lambda t: path[t]):
            run = list(run)
            if label:
                spans.append((label, run[0], run[-1] + 1))
        return spans

    best = max(
        (
            p
            for p in itertools.product((0, 4, 5), repeat=frames)
            if [s[0] for s in labels_of(p)] == tokens
        ),
        key=lambda p: sum(row[label] for row, label in zip(rows, p, strict=True)),
    )
    assert ctc_spans(tokens, log_probs) == [span[1:] for span in labels_of(best)]


def test_a_repeat_has_a_blank_before_it():
    assert ctc_spans([4, 4], peaky([4, 0, 4])) == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("tokens", "frames"), [([], 0), ([4], 1), ([4, 4], 3), ([4, 4, 4], 5), ([4, 5, 4], 3)]
)
def test_tokens_fit_where_ctc_becomes_finite(tokens, frames):
    assert has_ctc_path(tokens, frames) and not has_ctc_path(tokens, frames - 1)

    def loss(count):
        log_probs = torch.full((count, 1, VOCABULARY), 1 / VOCABULARY).log()
        lengths = torch.tensor([count]), torch.tensor([len(tokens)])
        return torch.nn.functional.ctc_loss(log_probs, torch.tensor([tokens]).long(), *lengths)

    if tokens:
        assert loss(frames).isfinite()
        assert frames == 1 or loss(frames - 1).isinf()


def test_attention_spans_join_between_the_peaks():
    attention = torch.full((3, 11), 0.01)
    for token, frame in enumerate([2, 3, 8]):
        attention[token, frame] = 0.9
    assert attention_spans(attention) == [(2, 3), (3, 3 + 1 + REACH), (8 - REACH, 9)]
    assert attention_spans(attention[1:]) == [(3, 3 + 1 + REACH), (8 - REACH, 9)]
    assert attention_spans(attention[:2]) == [(2, 3), (3, 4)]


def test_attention_peaks_are_the_best_monotonic_path():
    draw = torch.Generator().manual_seed(3)
    attention = torch.randn(4, 7, generator=draw).mul(2).softmax(dim=1)
    paths = itertools.combinations_with_replacement(range(7), 4)
    best = max(paths, key=lambda p: sum(math.log(float(attention[u, t])) for u, t in enumerate(p)))
    between = [(a + b + 1) / 2 for a, b in itertools.pairwise(best)]
    edges = [best[0], *between, best[-1] + 1]
    spans = list(itertools.pairwise(edges))
    assert max(end - start for start, end in spans) < 2 * REACH, "none is cut short"
    assert attention_spans(attention) == spans
    assert list(best) != attention.argmax(dim=1).tolist(), "the peaks alone would do"


def test_one_stray_peak_does_not_shift_the_others():
    attention = torch.full((5, 20), 0.002)
    for token, frame in enumerate([2, 19, 8, 11, 15]):
        attention[token, frame] = 0.9
    spans = attention_spans(attention)
    assert 8 <= spans[2][0] < 9  # the cumulative maximum of the peaks would be 19 from here on
    assert spans[4][1] == 16


def test_token_spans_take_ctc_then_attention():
    attention = torch.eye(3, 6)  # a third row for EOS
    ctc = peaky([0, 0, 0, 4, 0, 5])
    assert token_spans([4, 5], ctc) == [(3, 4), (5, 6)]
    assert token_spans([4, 5], ctc, attention) == [(3, 4), (5, 6)]
    assert token_spans([4, 5], None, attention) == attention_spans(attention[:2])
    assert token_spans([4, 4], ctc[:2], attention) == attention_spans(attention[:2])
    assert token_spans([], ctc, attention) == []


def test_characters_become_words_in_seconds():
    pieces = ["a", "b", " ", " ", "c"]
    spans = [(1, 2), (2, 4), (4, 5), (5, 6), (7, 9)]
    log_probs = [math.log(0.5), math.log(0.8), -9.0, -9.0, math.log(0.9), -3.0]
    first, second = group_words(pieces, spans, log_probs, 0.04)
    assert first == TimedWord("ab", 0.04, 0.16, pytest.approx(math.sqrt(0.5 * 0.8)))
    assert second == TimedWord("c", pytest.approx(0.28), pytest.approx(0.36), pytest.approx(0.9))


def test_subwords_may_start_end_or_contain_words():
    pieces = [" th", "e", " of a", "", " b"]
    spans = [(0, 1), (1, 3), (3, 5), (5, 6), (6, 7)]
    words = group_words(pieces, spans, [0.0] * 5, 1.0)
    assert [(w.text, w.start, w.end) for w in words] == [
        ("the", 0, 3),
        ("of", 3, 5),
        ("a", 3, 5),
        ("b", 6, 7),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("今天很好", "今 天 很 好"),
        ("你好，我们。走", "你 好， 我 们。 走"),
        ("用Python３写 code", "用 Python３ 写 code"),
        ("ที่นี่", "ที่ นี่"),
        ("他说「好（吗）」了", "他 说 「好 （吗）」 了"),
        ("人々は二〇年ｶﾅㄅㄆ", "人 々 は 二 〇 年 ｶ ﾅ ㄅ ㄆ"),
        ("don't 그래요 naïve", "don't 그래요 naïve"),
    ],
)
def test_each_letter_is_a_word_in_scripts_without_spaces(text, expected):
    spans = [(u, u + 1) for u in range(len(text))]
    words = group_words(list(text), spans, [0.0] * len(text), 1.0)
    assert [w.text for w in words] == expected.split()
    assert join_words(words) == text
    for w in words:
        assert text[int(w.start) : int(w.end)] == w.text


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("今天", "很好", "今天很好"),
        ("they said", "no", "they said no"),
        ("说 ok", "好 ok", "说 ok好 ok"),
        ("今天我们在", "3月5日去北京", "今天我们在3月5日去北京"),
        ("他问我", "“你好吗”", "他问我“你好吗”"),
        ("我们用", "iPhone拍照", "我们用iPhone拍照"),
        ("我们用", "python 3", "我们用 python 3"),
        ("而 对 楼市", "抑制 作用", "而 对 楼市 抑制 作用"),  # words are separated
    ],
)
def test_a_text_after_another_is_separated_as_its_words_are(left, right, expected):
    words = [
        word
        for text in (left, right)
        for word in group_words(list(text), [(0, 1)] * len(text), [0.0] * len(text), 1.0)
    ]
    assert join_words(words) == expected


def test_no_letters_give_no_words():
    assert group_words([], [], [], 0.04) == []
    assert group_words([" ", ""], [(0, 1), (1, 2)], [0.0, 0.0], 0.04) == []


# Coverage, repetition and length ratio of hypotheses with known faults.


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


def test_the_row_of_eos_does_not_count():
    weights = attending([3, 28, 55], 56)  # the last row is EOS, which attends to the last second
    assert hypothesis_health([4, 5], weights, 25).coverage == 1.0
    assert hypothesis_health([4], weights, 25).coverage == 0.5


def test_flags_are_for_hypotheses_that_skip_or_repeat_most():
    skipping = hypothesis_health([4, 5], attending([12, 37], 125), 25)
    looping = hypothesis_health([4] * 13, attending([12, 37], 50), 25)
    assert hypothesis_health([4, 5], attending([12, 37], 50), 25).flags == ()
    assert hypothesis_health([4, 5], attending([12, 37], 100), 25).flags == ()  # exactly half
    assert skipping.flags == ("low coverage",) and looping.flags == ("repetition",)
    assert hypothesis_health([4, 5, 6] * 4, attending([12, 37], 50), 25).flags == ()
    both = hypothesis_health([4] * 13, attending([12] * 13, 125), 25)
    assert both.flags == ("low coverage", "repetition")

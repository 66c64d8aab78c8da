"""Subtitles parsed back by independent libraries."""

import io
import itertools
import unicodedata
from datetime import timedelta

import pytest
import srt as srt_library
import webvtt as webvtt_library

from asr.decoding.alignment import TimedWord, group_words
from asr.decoding.subtitles import LINE, LONGEST, READABLE, Cue, make_cues, srt, webvtt

CUES = [
    Cue(0.0, 1.2345, "four hundred\nand seven"),
    Cue(59.9996, 61.0, 'R&B <loud> --> "end"'),
    Cue(3725.5, 3726.25, "später, 你好"),
]


def test_srt_is_read_back():
    parsed = list(srt_library.parse(srt(CUES)))
    assert [cue.index for cue in parsed] == [1, 2, 3]
    assert [cue.content for cue in parsed] == [cue.text for cue in CUES]
    for ours, cue in zip(CUES, parsed, strict=True):
        assert abs(cue.start - timedelta(seconds=ours.start)) <= timedelta(milliseconds=0.5)
        assert abs(cue.end - timedelta(seconds=ours.end)) <= timedelta(milliseconds=0.5)


def test_webvtt_is_read_back():
    parsed = webvtt_library.from_buffer(io.StringIO(webvtt(CUES)))
    assert len(parsed) == 3
    assert parsed[0].text == CUES[0].text
    assert parsed[1].raw_text == 'R&amp;B &lt;loud&gt; --&gt; "end"'
    assert parsed[2].text == CUES[2].text
    for ours, cue in zip(CUES, parsed, strict=True):
        assert cue.start_in_seconds == pytest.approx(
            ours.start, abs=1
        )  # it rounds to whole seconds
        assert cue.end_in_seconds == pytest.approx(ours.end, abs=1)
    assert [cue.start for cue in parsed] == ["00:00:00.000", "00:01:00.000", "01:02:05.500"]


def test_an_empty_transcript_gives_valid_empty_files():
    assert make_cues([]) == []
    assert list(srt_library.parse(srt([]))) == []
    assert len(webvtt_library.from_buffer(io.StringIO(webvtt([])))) == 0


def words_at(text, times):
    return [TimedWord(w, s, e, 1.0) for w, (s, e) in zip(text.split(), times, strict=True)]


def test_cues_break_at_pauses():
    words = words_at("a b c d", [(0, 0.4), (0.5, 0.9), (2.5, 2.9), (3.0, 3.3)])
    assert make_cues(words) == [Cue(0, 1.0, "a b"), Cue(2.5, 3.5, "c d")]


def test_cues_fill_two_lines_and_no_more():
    words = [TimedWord("hundred", 0.1 * i, 0.1 * i + 0.1, 1.0) for i in range(23)]
    cues = make_cues(words)
    assert " ".join(" ".join(cue.text.split()) for cue in cues) == " ".join(["hundred"] * 23)
    assert all(len(line) <= LINE for cue in cues for line in cue.text.split("\n"))
    assert [len(cue.text.split("\n")) for cue in cues] == [2, 2, 1]


def test_cues_have_a_maximum_duration():
    words = [TimedWord("a", float(i), i + 0.9, 1.0) for i in range(20)]
    cues = make_cues(words)
    assert all(cue.end - cue.start <= LONGEST for cue in cues)
    assert len(cues) == 3


def test_a_cue_ends_where_the_next_begins():
    words = words_at("a b", [(0.0, 5.0), (4.0, 11.5)])
    assert make_cues(words) == [Cue(0.0, 4.0, "a"), Cue(4.0, 11.0, "b")]


def test_unordered_words_still_give_consecutive_cues():
    words = words_at("a b c", [(0.0, 5.0), (0.0, 9.0), (2.0, 2.0)])
    cues = make_cues(words)
    parsed = list(srt_library.parse(srt(cues)))
    assert all(cue.end > cue.start for cue in parsed)
    assert "".join(cue.text for cue in cues).replace(" ", "") == "abc"


def columns(line):
    """Two for a wide letter, none for a mark."""
    wide = sum(unicodedata.east_asian_width(letter) in ("W", "F") for letter in line)
    return len(line) + wide - sum(unicodedata.category(letter) == "Mn" for letter in line)


TEXTS = {
    "Chinese": "他说明天的会议改到下午三点在二楼的大会议室举行，请大家准时参加不要迟到。" * 4,
    "Thai": "การประชุมวันพรุ่งนี้เลื่อนไปเป็นเวลาบ่ายสามโมงที่ห้องประชุมใหญ่ชั้นสองขอให้ทุกคนมาให้ตรงเวลา" * 2,
    "both": "Meeting室は２階です" * 9,
}


@pytest.mark.parametrize("seconds", [3.0, 29.0, 83.0])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_without_spaces_obeys_the_limits(text, seconds):
    spans = [(i, i + 1) for i in range(len(text))]
    words = group_words(list(text), spans, [0.0] * len(text), seconds / len(text))
    cues = make_cues(words)
    lines = [line for cue in cues for line in cue.text.split("\n")]
    assert "".join(lines) == text
    assert all(columns(line) <= 42 for line in lines)
    assert all(len(cue.text.split("\n")) <= 2 for cue in cues)
    assert all(0 < cue.end - cue.start <= 7.0 + 1e-9 for cue in cues)
    assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(cues))
    assert cues[-1].end == pytest.approx(max(seconds, cues[-1].start + READABLE))
    assert not any(unicodedata.category(line[0]).startswith(("M", "P")) for line in lines)
    shown = 0
    for cue in cues:  # a time is that of its text
        assert cue.start == pytest.approx(seconds * shown / len(text))
        shown += len(cue.text.replace("\n", ""))


def test_text_without_spaces_breaks_at_pauses():
    spans = [(0, 1), (1, 2), (6, 7), (7, 8)]
    words = group_words(list("你好再见"), spans, [0.0] * 4, 0.5)
    assert make_cues(words) == [Cue(0.0, 1.0, "你好"), Cue(3.0, 4.0, "再见")]


def test_a_word_longer_than_a_line_has_its_own():
    words = words_at(f"so {'x' * 199} it is", [(i, i + 1) for i in range(4)])
    assert make_cues(words) == [Cue(0, 2, f"so\n{'x' * 199}"), Cue(2, 4, "it is")]


def test_a_word_that_lasts_too_long():
    cues = make_cues([TimedWord("hello", 0.0, 20.0, 1.0), TimedWord("there", 20.5, 21.0, 1.0)])
    assert cues == [Cue(0.0, 7.0, "hello"), Cue(20.5, 21.5, "there")]

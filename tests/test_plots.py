"""Diagonality of hand-made matrices; figures with arbitrary labels."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from asr.analysis import charts, plots
from asr.analysis.plots import attention_picture, feature_picture
from asr.decoding.alignment import diagonality

pytestmark = pytest.mark.usefixtures("drawn")

U, T = 7, 23


def path(positions, frames=T):
    """(U, T): all weight of token u on frame positions[u]."""
    weights = np.zeros((len(positions), frames))
    weights[np.arange(len(positions)), positions] = 1.0
    return weights


def test_a_diagonal_is_1():
    assert diagonality(path(np.linspace(0, T - 1, U).round().astype(int))) == pytest.approx(
        1, abs=0.01
    )
    assert diagonality(np.eye(5)) == pytest.approx(1)


@pytest.mark.parametrize(
    "weights",
    [
        np.full((U, T), 1 / T),  # everywhere
        path([3] * U),  # always at one frame
        path(np.linspace(T - 1, 0, U).round().astype(int)),  # backwards
        path([0, 22, 0, 22, 0, 22, 0]),  # alternating
    ],
)
def test_attention_that_does_not_advance_is_0(weights):
    assert diagonality(weights) == pytest.approx(0, abs=0.01)


def test_half_a_diagonal_and_a_wandering_path_are_between():
    half = path(np.linspace(0, (T - 1) / 2, U).round().astype(int))
    assert diagonality(half) == pytest.approx(0.5, abs=0.05)
    wandering = path([0, 12, 3, 15, 8, 22, 14])
    token, frame = np.linspace(0, 1, U), np.argmax(wandering, 1) / (T - 1)
    slope, correlation = np.polyfit(token, frame, 1)[0], np.corrcoef(token, frame)[0, 1]
    assert diagonality(wandering) == pytest.approx(min(slope, 1) * correlation)
    assert 0.3 < diagonality(wandering) < 0.8


def test_soft_attention_counts_by_its_mean():
    sharp = path(np.linspace(2, T - 3, U).round().astype(int))
    soft = sum(np.roll(sharp, shift, axis=1) for shift in (-2, -1, 0, 1, 2)) / 5
    assert diagonality(soft) == pytest.approx(diagonality(sharp))


def test_too_short_inputs_raise_no_alarm():
    assert diagonality(np.full((2, T), 1 / T)) == 1.0
    assert diagonality(np.ones((U, 1))) == 1.0


def is_picture(pixels):
    """Pixels with something drawn on them."""
    shape = pixels.ndim == 3 and pixels.shape[2] == 3 and min(pixels.shape[:2]) > 50
    return shape and pixels.dtype == np.uint8 and pixels.std() > 0


def test_attention_is_drawn_where_it_is():
    tokens = [*"seven", " <eos>", "x"]
    first, second = path([0] * U), path([T - 1] * U)
    picture, other = (attention_picture(w, tokens, 1.9, "u1") for w in (first, second))
    assert is_picture(picture) and picture.shape == other.shape
    middle = picture.shape[1] // 2
    dark, light = picture[:, :middle].astype(int), other[:, :middle].astype(int)
    assert (light - dark).max() > 100  # the dark column is on the left in one figure only


@pytest.fixture
def axes(monkeypatch):
    """The axes of the pictures drawn, in their order."""
    drawn = []

    def keep(draw, title, size):
        figure = Figure(figsize=size)
        drawn.append(figure.subplots())
        draw(drawn[-1])
        return np.zeros((1, 1, 3), np.uint8)

    monkeypatch.setattr(plots, "_pixels", keep)
    return drawn


def ticks(axes):
    """Row -> label, the first row on top."""
    assert axes.yaxis_inverted()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    return dict(zip(axes.get_yticks().tolist(), labels, strict=True))


def test_attention_is_labelled_by_tokens_and_seconds(axes):
    attention_picture(path([0, 3, 5, 9, 11]), ["A", " ", "B", " C", " <eos>"], 1.9)
    assert ticks(axes[0]) == {0: "A", 1: "␣", 2: "B", 3: "C", 4: "<eos>"}
    assert axes[0].get_xlim() == (0.0, 1.9) and axes[0].get_xlabel() == "audio (seconds)"


def test_many_tokens_are_labelled_by_words(axes):
    """Characters with separate spaces, and pieces that start with a space: rows of equal words."""
    characters = [*"thirty  three thousand eight hundred", " <eos>"]
    pieces = ["thir", "t", "y", " th", "r", "ee", *(9 * [" x", "y", "z"]), " <eos>"]
    for labels in (characters, pieces):
        attention_picture(np.eye(len(labels), T), labels, 1.9)
    first, second = map(ticks, axes)
    assert list(first.values()) == ["thirty", "three", "thousand", "eight", "hundred", "<eos>"]
    assert list(first)[:2] == [2.5, (6 + 12) / 2]  # two spaces go with the word after them
    # The label of <eos> would touch that of the last word.
    assert second == {1.0: "thirty", 4.0: "three"} | {7.0 + 3 * n: "xyz" for n in range(9)}
    assert axes[0].get_ylabel() == "words" and "not all" in axes[1].get_ylabel()


def test_letters_of_scripts_without_spaces_are_labels(axes):
    attention_picture(np.eye(36, T), [*"今天很好" * 9], 1.9)
    labels = ticks(axes[0])
    assert len(labels) > 9 and set(labels.values()) <= set("今天很好")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["$", "$x$", r"$\frac$", "a_b^c", "%", "<b>", "\\", "", " "])
def test_any_label_is_drawn_literally(text):
    assert is_picture(attention_picture(path([0, 1, 2]), [text, "a", "b"], 1.9, title=text))
    assert is_picture(feature_picture(np.random.default_rng(0).random((T, 5)), 1.9, title=text))


def test_a_letter_missing_from_the_font_gives_no_warning():
    assert is_picture(attention_picture(path([0, 1, 2]), ["数", "字", "b"], 1.9, title="数字"))


def test_features_have_low_frequencies_below():
    features = np.zeros((T, 11))
    features[:, 0] = 1.0
    picture = feature_picture(features, 1.9).astype(int)
    yellow = (picture[..., 0] > 200) & (picture[..., 2] < 100)
    blue = (picture[..., 0] < 100) & (picture[..., 1] < 50)
    assert yellow.any() and yellow.any(1).nonzero()[0].min() > blue.any(1).nonzero()[0].mean()


@pytest.mark.filterwarnings("error")
def test_a_word_without_end_leaves_room_for_the_picture():
    assert is_picture(attention_picture(np.eye(300, 90), ["a"] * 300, 3.0))


def test_one_token_and_one_frame_can_be_drawn():
    assert is_picture(attention_picture(np.ones((1, 1)), [" <eos>"], 0.1))
    assert is_picture(feature_picture(np.ones((1, 3)), 0.1))


def test_a_long_sentence_keeps_a_picture_of_sane_size():
    pixels = attention_picture(np.eye(400, 90), ["a", " "] * 200, 30.0)
    assert pixels.shape[0] <= 1100 and pixels.shape[1] <= 1000


def test_a_strip_has_a_dot_for_each_run_and_a_line_for_each_seed():
    """Settings from the top down; a seed twice in one setting keeps both dots."""
    values = {"a$": [(1, 3.0), (2, 4.0)], "b": [(1, 1.0), (1, 2.0), (3, 6.0)]}
    axes = Figure().subplots()
    charts._draw_strip(axes, charts.Strip("WER", values), ["a$", "b"])
    dots = [tuple(map(tuple, c.get_offsets())) for c in axes.collections if len(c.get_offsets())]
    assert ((3.0, 0.0), (4.0, 0.0)) in dots and ((1.0, 1.0), (2.0, 1.0), (6.0, 1.0)) in dots
    lines = [tuple(zip(*line.get_data(), strict=True)) for line in axes.get_lines()]
    assert lines == [((3.0, 0), (2.0, 1)), ((4.0, 0),), ((6.0, 1),)]
    assert ticks(axes) == {0: "a$", 1: "b"}


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ((0.5, 99.0), 0, 100),
        ((40.0, 60.0), None, None),
        ((0.0, 100.0), 0, 100),
        ((1, 130), 0, None),
    ],
)
def test_an_axis_of_percent_ends_at_0_and_100(values, low, high):
    """Unless a rate is above; other axes have a margin."""
    limits = []
    for percent in (True, False):
        axes = Figure().subplots()
        runs = {"a": list(enumerate(values))}
        charts._draw_strip(axes, charts.Strip("WER", runs, percent), ["a"])
        limits.append(axes.get_xlim())
    margin = 0.08 * (values[1] - values[0])
    assert limits[1] == pytest.approx((values[0] - margin, values[1] + margin))
    expected = [limits[1][0] if low is None else low, limits[1][1] if high is None else high]
    assert limits[0] == pytest.approx(expected)


def test_a_curve_of_rates_ends_at_0_and_1(monkeypatch):
    drawn = []
    monkeypatch.setattr(charts, "_files", lambda figure: drawn.append(figure) or (b"", ""))
    steps = np.array([1, 2])
    band = charts.Band(steps, np.array([0.99, 0.01]), np.array([0.98, 0.0]), np.array([1.0, 0.02]))
    charts.draw_curves([charts.Panel(f"valid/{name}", {"a": band}) for name in ("wer", "nll")])
    wer, nll = (axes.get_ylim() for axes in drawn[0].axes)
    assert wer == (0, 1) and nll[0] < 0 and nll[1] > 1


def test_an_odd_number_of_strips_leaves_an_empty_cell():
    strips = [charts.Strip(title, {"a": [(1, 50.0), (2, 60.0)]}) for title in "xyz"]
    png, svg = charts.draw_seeds(strips, ["a"])
    assert png.startswith(b"\x89PNG") and set(re.findall(r">([^<\s]+)</text>", svg)) >= set("xyza")
    assert ">0.2<" not in svg  # a tick of axes without data


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(0.3, 3.1, [0.3, 0.5, 1, 2, 3]), (0.04, 9.0, [0.05, 0.1, 0.2, 0.5, 1, 2, 5])],
)
def test_a_logarithmic_axis_has_round_ticks(low, high, labels):
    axes = Figure().subplots()
    axes.set_ylim(low, high)
    charts._set_log(axes)
    assert [t for t in axes.get_yticks() if low <= t <= high] == pytest.approx(labels)
    assert len(axes.get_yticks(minor=True)) == 0

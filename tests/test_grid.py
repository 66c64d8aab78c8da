"""asr.sweep: the values of a grid, and the names of its runs."""

import pytest

from asr.sweep import read_grid, split_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a,b,c", ["a", "b", "c"]),
        ("[0.9,1.1]", ["[0.9,1.1]"]),
        ("[0.9,1.1],[1.0]", ["[0.9,1.1]", "[1.0]"]),
        ("{a: 1, b: [2, 3]}, null", ["{a: 1, b: [2, 3]}", "null"]),
        ("'a,[b',c", ["'a,[b'", "c"]),
        ("a,", ["a", ""]),
        ("", [""]),
    ],
)
def test_commas_within_brackets_and_quotes_belong_to_the_value(text, values):
    assert split_values(text) == values


def test_every_combination_is_a_run_named_by_what_varies(tiny):
    runs = read_grid(
        tiny, ["model.listener.norm=none,ba", "features.speed_perturb=[0.9,1.1],[1]", "seed=7"]
    )
    assert [run.name for run in runs] == [
        "listener.norm=none,speed_perturb=[0.9,1.1]",
        "listener.norm=none,speed_perturb=[1]",
        "listener.norm=ba,speed_perturb=[0.9,1.1]",
        "listener.norm=ba,speed_perturb=[1]",
    ]
    assert runs[2].recipe.model.listener.norm == "ba" and runs[2].recipe.seed == 7
    assert runs[2].recipe.features.speed_perturb == (0.9, 1.1)
    assert [run.name for run in read_grid(tiny, [])] == ["run"]


def test_names_are_folders_whatever_the_values(tiny):
    runs = read_grid(tiny, ["data.valid=a/b.tsv,a-b.tsv,../c d.tsv"])
    names = [run.name for run in runs]
    assert len(set(names)) == 3 and not any(set(name) & set("/ ") for name in names)

"""Evaluation files read back as written; damaged or incomplete folders are reported."""

import csv
import json
from pathlib import Path

import pytest

from asr.analysis.score_files import (
    MAX_LINE,
    evaluation_name,
    read_evaluation,
    write_evaluation,
)
from asr.analysis.wer import score
from asr.errors import UserError


def example():
    return score(
        ["THE CAT SAT", "", "Ж É", "YES"],
        ["THE CAP", "UM", "Ж É", "YES"],
        ids=["a-1", "a-2", "<b>", 'q"4'],
        speakers=["ann", "ann", "bob", ""],
    )


def test_evaluation_reads_back(tmp_path):
    folder = tmp_path / "evaluate" / "test"
    metadata = {"checkpoint": "model.safetensors", "decode": {"beam": 8}}
    write_evaluation(folder, example(), metadata, {"coverage": [0.5, 1, None, "x"]})
    actual = read_evaluation(folder)
    assert actual.score == example()
    assert actual.metadata == metadata
    table = (folder / "hypotheses.tsv").read_text().splitlines()
    assert [row.split("\t")[-1] for row in table] == ["coverage", "0.5", "1", "None", "x"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "alignment.txt",
        "hypotheses.tsv",
        "score.json",
    ]


def test_other_programs_can_read_the_files(tmp_path):
    write_evaluation(tmp_path, example())
    rates = json.loads((tmp_path / "score.json").read_text())
    assert rates["wer"] == 3 / 6
    assert rates["cer"] == (5 + 2) / (
        11 + 0 + 3 + 3
    )  # "T" replaced by "P", " SAT" deleted, "UM" inserted
    assert (rates["substitutions"], rates["deletions"], rates["insertions"]) == (1, 1, 1)
    assert rates["wer_interval"] == list(example().wer_interval)
    assert [(s["speaker"], s["errors"]) for s in rates["speakers"]] == [
        ("", 0),
        ("ann", 3),
        ("bob", 0),
    ]
    assert rates["confusions"]["substitutions"] == [["CAT", "CAP", 1]]
    with (tmp_path / "hypotheses.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert [row["hypothesis"] for row in rows] == ["THE CAP", "UM", "Ж É", "YES"]
    assert [row["id"] for row in rows] == ["a-1", "a-2", "<b>", 'q"4']


def test_alignment_file_shows_the_worst_first(tmp_path):
    write_evaluation(tmp_path, example(), worst=1)
    text = (tmp_path / "alignment.txt").read_text(encoding="utf-8")
    assert text.startswith("WER 50.00 % (")
    assert text.endswith(
        "4 utterances, 6 words. The 1 with most errors:\n\n"
        "a-1  ann  2 errors of 3 words, 66.67 %: 1 S, 1 D, 0 I\n"
        "REF: THE CAT SAT\nHYP: THE CAP ***\n           S   D\n"
    )


def test_a_perfect_single_utterance_has_no_interval_and_no_alignments(tmp_path):
    write_evaluation(tmp_path, score(["a"], ["a"]))
    assert read_evaluation(tmp_path).score.wer_interval is None
    text = (tmp_path / "alignment.txt").read_text()
    assert text == "WER 0.00 %, CER 0.00 %\n1 utterances, 1 words. The 0 with most errors:\n"


def test_a_failed_write_leaves_the_old_evaluation(tmp_path, monkeypatch):
    write_evaluation(tmp_path, example())

    open_file = Path.open

    def full(path, mode="r", **options):
        if "x" in mode:
            raise OSError(f"{path}: no space left")
        return open_file(path, mode, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="no space left"):
        write_evaluation(tmp_path, score(["a"], ["b"]))
    assert read_evaluation(tmp_path).score == example()
    assert len(list(tmp_path.iterdir())) == 3


def test_missing_evaluation_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"score.json: missing; run python -m asr.evaluate first"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("score.json", "{", "[", "damaged evaluation"),
        ("score.json", '"words": 6', '"words": 7', "hypotheses.tsv do not agree; evaluate again"),
        ("hypotheses.tsv", "id\t", "name\t", r"\(hypotheses.tsv: unknown header\); evaluate again"),
        ("hypotheses.tsv", "a-2\t", "a-2\t\t", r"hypotheses.tsv:3: 13 of 12 columns"),
        ("hypotheses.tsv", "YES\t1\t0", "YES\tone\t0", "'one'"),
        ("hypotheses.tsv", "a-2\t", "a-1\t", "an id is not unique"),
        ("hypotheses.tsv", "THE CAP", "T " * MAX_LINE, "cut off or longer than"),
    ],
)
def test_damage_is_reported(tmp_path, name, old, new, message):
    write_evaluation(tmp_path, example())
    path = tmp_path / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_evaluation(tmp_path)


@pytest.mark.parametrize(
    ("split", "name"),
    [
        ("test", "test"),
        ("v1.0", "v1.0"),
        ("a/b.x.tsv", "b.x"),
        ("x/../é ü.tsv", "é ü"),
        (".a", ".a"),
    ],
)
def test_the_folder_of_an_evaluation_has_the_split_s_name(split, name):
    assert evaluation_name(split) == name


@pytest.mark.parametrize(
    "split",
    ["..", "", "a\nb"],
)
def test_other_names_are_refused(split):
    with pytest.raises(UserError, match=r"^--split .*: cannot name the folder of an evaluation"):
        evaluation_name(split)

"""What asr.evaluate does beside scoring: tune, rates of groups, and one run against another."""

import csv
import json
import re
import shutil

import jiwer

from asr import evaluate
from asr.recipe import read_recipe


def heard(folder):
    with (folder / "hypotheses.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def errors(commands, run, split, out):
    assert commands(evaluate, run, "--split", split, "--out", out, "--pictures", "0")[0] == 0
    return json.loads((out / "score.json").read_text())["errors"]


def test_tuning_writes_settings_that_are_no_worse(tiny, tiny_run, commands, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    before = errors(commands, run, "valid", tmp_path / "before")
    code, out, _ = commands(evaluate, run, "--split", "valid", "--tune")
    assert code == 0
    told = dict(re.findall(r"decode\.(\w+)=(\S+)", out))
    decode = read_recipe(run / "recipe.yaml").decode
    assert {"beam", "ctc_weight", "length_penalty"} <= told.keys()
    assert all(float(value) == getattr(decode, key) for key, value in told.items())
    assert errors(commands, run, "valid", tmp_path / "after") <= before
    changed = read_recipe(run / "recipe.yaml").model_copy(update={"decode": None})
    assert changed == read_recipe(tiny_run / "recipe.yaml").model_copy(update={"decode": None})


def test_groups_are_scored_as_if_alone(tiny, tiny_run, commands, tmp_path):
    code, out, _ = commands(
        evaluate, tiny_run, "--split", "test", "--by", "speaker", "--out", tmp_path
    )
    rows = heard(tmp_path)
    speakers = sorted({row["speaker"] for row in rows})
    assert code == 0 and speakers == ["s0", "s1"]
    for speaker in speakers:
        mine = [row for row in rows if row["speaker"] == speaker]
        rate = jiwer.wer([r["reference"] for r in mine], [r["hypothesis"] for r in mine])
        line = next(line for line in out.splitlines() if line.startswith(speaker))
        assert f"{100 * rate:.2f} %" in line and f" {len(mine)} " in line


def test_a_column_that_is_not_there_is_one_line(tiny, tiny_run, commands, tmp_path):
    line = commands.refused(
        evaluate, tiny_run, "--split", "test", "--by", "accent", "--out", tmp_path / "no"
    )
    assert "accent" in line and not (tmp_path / "no").exists()


def test_a_run_does_not_beat_itself(tiny, tiny_run, commands, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    assert commands(evaluate, run, "--split", "test")[0] == 0
    code, out, _ = commands(
        evaluate, tiny_run, "--split", "test", "--against", run, "--out", tmp_path / "e"
    )
    assert code == 0
    values = [float(p) for p in re.findall(r"\bp (?:= )?([0-9.]+)", out)]
    assert values and min(values) == 1.0


def test_against_a_run_that_was_not_evaluated(tiny, tiny_run, commands, tmp_path):
    line = commands.refused(
        evaluate, tiny_run, "--split", "test", "--against", tmp_path, "--out", tmp_path / "e"
    )
    assert str(tmp_path) in line

"""Run folders that somebody else made: nothing outside of them is read as theirs, or written."""

import json
import os
import shutil
from pathlib import Path

import pytest

from asr import compare, evaluate, export, prune, train, transcribe


@pytest.fixture
def run(tiny_run, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(tiny_run, tmp_path / "run")


def lines(tiny, run, out):
    """Every command that opens a run folder, and its arguments."""
    audio = tiny.parent / "test-0.flac"
    return {
        "transcribe": (transcribe, run, audio),
        "evaluate": (evaluate, run, "--split", "test"),
        "tune": (evaluate, run, "--split", "valid", "--tune"),
        "against": (evaluate, run, "--split", "test", "--against", run),
        "ensemble": (transcribe, run, audio, f"decode.ensemble=[{run}]"),
        "export": (export, run, "--to", out),
        "prune": (prune, run, "--to", out, "--encoder", "1"),
        "resume": (train, tiny, "--run", run, "--resume"),
        "init": (train, tiny, "--run", out, f"train.init={run}"),
        "compare": (compare, run, "--out", out),
    }


COMMANDS = tuple(lines(Path("tiny"), Path("run"), Path("out")))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("member", ["evaluate", "checkpoints", "events.out.tfevents.7.x"])
def test_no_command_follows_a_link_out_of_a_run(tiny, run, tmp_path, commands, command, member):
    mine = tmp_path / "mine"
    if (run / member).exists():
        (run / member).rename(mine)
    else:
        mine.mkdir()
    (run / member).symlink_to(mine)
    before = sorted(mine.rglob("*"))
    line = commands.refused(*lines(tiny, run, tmp_path / "out")[command])
    assert f"{run / member}: a symbolic link" in line
    assert sorted(mine.rglob("*")) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_waits_for_a_fifo(tiny, run, tmp_path, commands, command):
    path = next(run.glob("checkpoints/*/model.safetensors"))
    path.unlink()
    os.mkfifo(path)
    line = commands.refused(*lines(tiny, run, tmp_path / "out")[command])
    assert f"{path}: not a regular file" in line


@pytest.mark.parametrize("name", ["...tsv", ".tsv", "a\x1b[2J.tsv"])
def test_an_evaluation_is_written_below_its_own_folder(tiny, run, tmp_path, commands, name):
    manifest = shutil.copy(tiny.parent / "test.tsv", tiny.parent / name)
    before = sorted(run.rglob("*"))
    line = commands.refused(evaluate, run, "--split", manifest)
    assert "cannot name the folder of an evaluation; copy the manifest to another name" in line
    assert sorted(run.rglob("*")) == before
    Path(manifest).unlink()


def test_a_key_of_the_recipe_does_not_name_the_run_folder(tiny, run, commands):
    override = f"data.test={{'..': {tiny.parent / 'test.tsv'}}}"
    assert "'..'" in commands.refused(evaluate, run, "--split", "..", override)
    assert not (run / "score.json").exists()


def test_a_folder_whose_name_is_no_text_is_refused(tiny, tiny_run, tmp_path, commands):
    run = shutil.copytree(tiny_run, tmp_path / "a\udcff")
    for command in ("transcribe", "evaluate", "export", "resume"):
        line = commands.refused(*lines(tiny, run, tmp_path / "out")[command])
        assert line == rf"{tmp_path}/a\udcff: its name is not UTF-8; rename it"


def test_control_characters_in_names_are_written_as_escapes(tiny, tiny_run, tmp_path, commands):
    run = shutil.copytree(tiny_run, tmp_path / "<b>\x1b[2J")
    assert commands(evaluate, run, "--split", "test", "--pictures", "0")[0] == 0
    page = (run / "evaluate" / "test" / "page.html").read_bytes().decode()
    assert r"&lt;b&gt;\x1b[2J: test" in page and "\x1b" not in page
    assert commands(export, run, "--to", tmp_path / "to\x1b|")[0] == 0
    assert (tmp_path / "to\x1b|" / "README.md").read_text().count("\n# to" + r"\\x1b\|") == 1


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"groups": {"a|b\n<i>": {"c\x1b": {"wer": 0.5, "words": 3}}}}, None),
        ({"decode": {"beam": [1] * 9999, "ctc_weight": 0, "lm": None}}, None),
        ({"groups": []}, "damaged evaluation"),
        ({"decode": None}, "damaged evaluation"),
        ({"steps": 7}, "damaged evaluation"),
        ({"steps": [7] * 9999}, None),
        (None, "damaged evaluation"),
    ],
)
def test_an_odd_evaluation_does_not_spoil_the_card(tiny, run, tmp_path, commands, about, words):
    assert commands(evaluate, run, "--split", "test", "--pictures", "0")[0] == 0
    path, to = run / "evaluate" / "test" / "score.json", tmp_path / "to"
    rates = json.loads(path.read_text())
    rates["about"] = about and rates["about"] | about
    path.write_text(json.dumps(rates))
    if words:
        assert words in commands.refused(export, run, "--to", to)
        return
    code, out, err = commands(export, run, "--to", to)
    card = (to / "README.md").read_text()
    assert code == 0 and not err and len(out) < 2000
    assert len(card) < 3000 and "\x1b" not in card and "<i>" not in card


def test_a_model_of_gigabytes_is_refused_before_they_are_taken(tiny, run, commands):
    """Its recipe is of a model of 100 GB, of which the weights on the disk are a part."""
    path = run / "recipe.yaml"
    recipe = path.read_text()
    assert "hidden: 5" in recipe
    path.write_text(recipe.replace("hidden: 5", "hidden: 40000"))
    line = commands.refused(transcribe, run, tiny.parent / "test-0.flac")
    assert "weights of another model" in line

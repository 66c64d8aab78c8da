"""Run folders: removed, linked or full during training; links, FIFOs and odd names in them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from torch import nn

from asr import compare, evaluate, export, prune, train, transcribe
from asr.errors import UserError
from asr.io import LOCK, lock_run_folder
from asr.training import trainer
from asr.training.checkpoint import NotSaved, list_checkpoints, save_checkpoint


def before_step(number, monkeypatch, change):
    """Call `change` before that step of a training."""
    take_step, steps = trainer.take_step, []

    def changed(*arguments):
        steps.append(1)
        if len(steps) == number:
            change()
        return take_step(*arguments)

    monkeypatch.setattr(trainer, "take_step", changed)


def test_a_removed_run_folder_ends_the_training_with_one_line(
    tiny, commands, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    before_step(2, monkeypatch, lambda: shutil.rmtree(run))
    line = commands.refused(train, tiny, "--run", run)
    assert line.startswith(f"{run}: removed while training wrote into it; train again")
    assert not run.exists()


def test_removed_checkpoints_are_replaced_by_the_next(tiny, commands, tmp_path, monkeypatch):
    run = tmp_path / "run"
    before_step(2, monkeypatch, lambda: shutil.rmtree(run / "checkpoints"))
    line = ("train.save_every=1", "train.steps=2")
    assert commands(train, tiny, "--run", run, *line)[0] == 0
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [2]


def test_no_checkpoint_is_written_through_a_link(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    save_checkpoint(run, nn.Linear(3, 5), {}, 1, 1.0, {})
    (run / "checkpoints").rename(other)
    (run / "checkpoints").symlink_to(other)
    with pytest.raises(UserError, match=f"^{run}/checkpoints: a symbolic link"):
        save_checkpoint(run, nn.Linear(3, 5), {}, 2, 1.0, {})
    assert [folder.name for folder in other.iterdir()] == ["00000001"]


def test_a_removed_run_folder_is_not_made_again_for_a_checkpoint(tmp_path):
    with pytest.raises(NotSaved, match=r"cannot be saved \(No such file or directory\)$"):
        save_checkpoint(tmp_path / "gone", nn.Linear(3, 5), {}, 1, 1.0, {})
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_before_the_training(tmp_path):
    run = tmp_path / "run"
    with (
        full_disk(0),
        pytest.raises(OSError, match="File too large") as error,
        lock_run_folder(run),
    ):
        pytest.fail("no error was raised")
    assert error.value.filename == str(run / LOCK) and not run.exists()


@pytest.mark.parametrize("size", [10, 1000])
def test_a_disk_that_is_full_in_a_checkpoint(size, tmp_path):
    """In the weights, and in the training state."""
    training = {"moments": torch.zeros(100_000)}
    with full_disk(size), pytest.raises(NotSaved, match="/00000001: cannot be saved "):
        save_checkpoint(tmp_path, nn.Linear(3, 5), training, 1, 1.0, {})
    assert not list((tmp_path / "checkpoints").iterdir())


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
    assert line.startswith("--split ")
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

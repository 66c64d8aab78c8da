"""Run folders: removed, linked or full during training; links, FIFOs and odd names in them."""

import os
import shutil
from pathlib import Path

import pytest
from full_disk import full_disk
from torch import nn

from asr import compare, evaluate, export, prune, train, transcribe
from asr.errors import UserError
from asr.io import LOCK, lock_run_folder
from asr.training import trainer
from asr.training.checkpoint import list_checkpoints, save_checkpoint


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


def test_a_disk_that_is_full_before_the_training(tmp_path):
    run = tmp_path / "run"
    with (
        full_disk(0),
        pytest.raises(OSError, match="File too large") as error,
        lock_run_folder(run),
    ):
        pytest.fail("no error was raised")
    assert error.value.filename == str(run / LOCK) and not run.exists()


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


def test_a_key_of_the_recipe_does_not_name_the_run_folder(tiny, run, commands):
    override = f"data.test={{'..': {tiny.parent / 'test.tsv'}}}"
    assert "'..'" in commands.refused(evaluate, run, "--split", "..", override)
    assert not (run / "score.json").exists()


def test_a_model_of_gigabytes_is_refused_before_they_are_taken(tiny, run, commands):
    """Its recipe is of a model of 100 GB, of which the weights on the disk are a part."""
    path = run / "recipe.yaml"
    recipe = path.read_text()
    assert "hidden: 5" in recipe
    path.write_text(recipe.replace("hidden: 5", "hidden: 40000"))
    line = commands.refused(transcribe, run, tiny.parent / "test-0.flac")
    assert "weights of another model" in line

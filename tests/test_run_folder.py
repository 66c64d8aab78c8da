"""A run folder that training writes into is removed, replaced by a link, or on a full disk."""

import shutil

import pytest
import torch
from full_disk import full_disk
from torch import nn

from asr import train
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

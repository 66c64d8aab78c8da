"""After a crash: the newest undamaged checkpoint is found, no undamaged one is lost."""

import shutil

import pytest
import torch
from torch import nn

from asr.training.checkpoint import list_checkpoints, newest_sound, save_checkpoint, set_aside


def save(run, step):
    torch.manual_seed(step)
    return save_checkpoint(run, nn.Linear(3, 5), {"step": step}, step, float(step), {})


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_the_newest_checkpoint_is_found(tmp_path):
    assert newest_sound(tmp_path) == (None, [])
    save(tmp_path, 3)
    last = save(tmp_path, 7)
    assert newest_sound(tmp_path) == (last, [])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "sha256.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "remove"])
def test_damage_is_detected_and_the_previous_checkpoint_is_used(tmp_path, name, how):
    first, last = save(tmp_path, 3), save(tmp_path, 7)
    path = last.folder / name
    if how == "flip":
        flip(path)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    assert newest_sound(tmp_path) == (first, [last.folder])


def test_all_damaged(tmp_path):
    for step in (3, 7):
        flip(save(tmp_path, step).folder / "training.pt")
    newest, damaged = newest_sound(tmp_path)
    assert newest is None and [path.name[-1] for path in damaged] == ["7", "3"]


def test_a_damaged_checkpoint_set_aside_is_ignored(tmp_path):
    first, last = save(tmp_path, 3), save(tmp_path, 7)
    assert set_aside(last.folder).is_dir() and list_checkpoints(tmp_path) == [first]
    again = save(tmp_path, 7)
    set_aside(again.folder)  # a second one can be set aside as well
    assert names(tmp_path) == ["00000003", "damaged-00000007"]


def test_killed_between_the_two_renames_of_a_replacement(tmp_path):
    """The old one is already renamed, the new one not yet; with keep=1 there is no other."""
    only = save(tmp_path, 7)
    folder = tmp_path / "checkpoints"
    shutil.copytree(only.folder, folder / ".00000007.part")
    only.folder.rename(folder / ".00000007.old")
    assert newest_sound(tmp_path) == (only, [])
    assert names(tmp_path) == ["00000007"]


def test_a_half_removed_checkpoint_stays_removed(tmp_path):
    first, last = save(tmp_path, 3), save(tmp_path, 7)
    old = tmp_path / "checkpoints" / ".00000003.old"
    first.folder.rename(old)
    (old / "training.pt").unlink()
    assert newest_sound(tmp_path) == (last, []) and names(tmp_path) == ["00000007"]

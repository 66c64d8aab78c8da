"""Checkpoints: written atomically, read without running code, chosen and averaged."""

import json
import math
import os
import shutil

import pytest
import torch
from full_disk import full_disk
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_speech import training_state
from torch import nn

from asr.errors import UserError
from asr.training.checkpoint import (
    MemoryLimit,
    best_of,
    choose,
    is_sound,
    list_checkpoints,
    load_weights,
    newest_sound,
    prune,
    read_training,
    save_checkpoint,
    set_aside,
)

ABOUT = {"vocabulary": "abc"}


class Tied(nn.Module):
    """Two names for one tensor, a buffer, and weights of different primes."""

    def __init__(self, size=5):
        super().__init__()
        self.embedding = nn.Embedding(7, size)
        self.out = nn.Linear(size, 7)
        self.out.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(3.0))


def save(run, step, loss=math.inf, module=None, training=None):
    module = module or Tied()
    return save_checkpoint(run, module, training or {"step": step}, step, loss, ABOUT)


def test_a_saved_checkpoint_reads_back_the_same(tmp_path):
    module, optimizer = Tied(), None
    optimizer = torch.optim.Adam(module.parameters())
    module.out(module.embedding(torch.tensor([3]))).sum().backward()
    optimizer.step()
    training = training_state(optimizer=optimizer.state_dict())
    saved = save(tmp_path, 17, 0.25, module, training)
    assert (saved.step, saved.loss) == (17, 0.25) and list_checkpoints(tmp_path) == [saved]
    other = Tied()
    load_weights(other, [saved], ABOUT)
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert other.out.weight is other.embedding.weight
    back = read_training(saved)
    assert back["position"] == training["position"]
    assert torch.equal(back["random"]["cpu"], training["random"]["cpu"])
    assert torch.equal(
        back["optimizer"]["state"][0]["exp_avg"], training["optimizer"]["state"][0]["exp_avg"]
    )
    # safetensors alone can read the weights; the tied tensor is stored once.
    names = load_file(saved.folder / "model.safetensors").keys()
    assert names == {"embedding.weight", "out.bias", "seen"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_of_a_checkpoint_follow_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        folder = save(tmp_path, 1).folder
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [mode] * 3


def test_infinite_loss_means_not_measured(tmp_path):
    for step, loss in [(1, 3.0), (2, math.inf), (3, 1.0), (4, 1.0), (5, math.nan)]:
        save(tmp_path, step, loss)
    present = list_checkpoints(tmp_path)
    assert [c.step for c in present] == [1, 2, 3, 4, 5]
    assert [c.step for c in best_of(present)] == [4, 3, 1]
    assert [c.step for c in choose(tmp_path, "best", 2)] == [4, 3]
    assert [c.step for c in choose(tmp_path, "last", 3)] == [5, 4, 3]
    assert [c.step for c in choose(tmp_path, "last", 99)] == [5, 4, 3, 2, 1]


def test_best_falls_back_to_the_last_where_none_was_measured(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert [c.step for c in choose(tmp_path, "best", 1)] == [2]


def test_prune_keeps_the_last_and_the_best(tmp_path):
    for step, loss in enumerate([5.0, 1.0, 4.0, 2.0, 3.0, math.inf, 9.0], start=1):
        save(tmp_path, step, loss)
    prune(tmp_path, keep=2, keep_best=2)
    assert [c.step for c in list_checkpoints(tmp_path)] == [2, 4, 6, 7]
    prune(tmp_path, keep=1, keep_best=0)
    assert [c.step for c in list_checkpoints(tmp_path)] == [7]


def test_the_mean_of_weights(tmp_path):
    modules = [Tied() for _ in range(3)]
    saved = [save(tmp_path, n, 1.0, module) for n, module in enumerate(modules)]
    mean = Tied()
    load_weights(mean, saved, ABOUT)
    for name in ("embedding.weight", "out.bias", "seen"):
        expected = torch.stack([m.state_dict()[name] for m in modules]).mean(0)
        torch.testing.assert_close(mean.state_dict()[name], expected)


@pytest.mark.parametrize("limit", [10, 200, 1000])
def test_a_real_failure_to_write_is_one_line(tmp_path, limit):
    before = save(tmp_path, 5, 2.0)
    message = r"00000006: cannot be saved \(.+\)$"
    with full_disk(limit), pytest.raises(UserError, match=message) as error:
        save(tmp_path, 6, 1.0)
    assert "\n" not in str(error.value) and is_sound(before)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["00000005"]


def test_files_of_a_killed_process_are_no_checkpoint(tmp_path):
    save(tmp_path, 3, 1.0)
    part = tmp_path / "checkpoints" / ".00000004.part"
    shutil.copytree(tmp_path / "checkpoints" / "00000003", part)
    (tmp_path / "checkpoints" / "00000009").mkdir()
    assert [c.step for c in list_checkpoints(tmp_path)] == [3]
    save(tmp_path, 4)  # in spite of the half-written one
    assert [c.step for c in list_checkpoints(tmp_path)] == [3, 4] and not part.exists()


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 3)
    second = save(tmp_path, 3, 0.5)
    assert list_checkpoints(tmp_path) == [second]


def test_weights_with_a_flipped_bit_are_not_loaded(tmp_path):
    saved = save(tmp_path, 1, 1.0)
    path = saved.folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: damaged, its checksum differs"):
        load_weights(Tied(), [saved], ABOUT)
    (saved.folder / "sha256.json").unlink()  # copied without checksums: accepted
    load_weights(Tied(), [saved], ABOUT)


def test_missing_or_invalid_checksums_are_not_sound(tmp_path):
    saved = save(tmp_path, 1, 1.0)
    for text in ("", "[]", "{}", json.dumps({"model.safetensors": "0", "training.pt": "0"})):
        (saved.folder / "sha256.json").write_text(text)
        assert not is_sound(saved)
    (saved.folder / "sha256.json").unlink()
    assert not is_sound(saved)


def test_another_model_is_refused_and_the_module_is_untouched(tmp_path):
    saved = save(tmp_path, 1)
    for module in (Tied(11), nn.Linear(5, 7)):
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(UserError, match="weights of another model"):
            load_weights(module, [saved], ABOUT)
        torch.testing.assert_close(dict(module.state_dict()), before)


def test_damaged_weights_are_one_line(tmp_path):
    saved = save(tmp_path, 1)
    path = saved.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-11])
    (saved.folder / "sha256.json").unlink()
    with pytest.raises(UserError, match="cannot be read as weights") as error:
        load_weights(Tied(), [saved], ABOUT)
    assert "\n" not in str(error.value)


class Bomb:
    """The content of a hostile training.pt: unpickling it runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_reading_runs_no_code(tmp_path):
    saved = save(tmp_path, 1)
    torch.save({"optimizer": Bomb(tmp_path / "owned")}, saved.folder / "training.pt")
    with pytest.raises(UserError, match="cannot be read as a training state") as error:
        read_training(saved)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "owned").exists()


def test_weights_without_our_metadata_are_no_checkpoint(tmp_path):
    saved = save(tmp_path, 1)
    save_file({"a": torch.zeros(2)}, saved.folder / "model.safetensors")
    assert list_checkpoints(tmp_path) == []


def test_other_folders_are_no_checkpoints(tmp_path):
    saved = save(tmp_path, 1)
    shutil.copytree(saved.folder, saved.folder.with_name("00000001.bak"))
    assert list_checkpoints(tmp_path) == [saved]


def test_weights_are_compared_with_the_model_before_they_are_read(tmp_path):
    """A file of a terabyte without content, and the header of a tensor of that size."""
    saved = save(tmp_path, 1)
    path, size = saved.folder / "model.safetensors", 15 << 30
    with safe_open(path, "pt") as file:
        header = {"__metadata__": file.metadata()}
    header["seen"] = {"dtype": "BOOL", "shape": [size], "data_offsets": [0, size]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)
    with pytest.raises(UserError, match="weights of another model"):
        load_weights(Tied(), [saved], ABOUT)


def test_a_model_larger_than_its_weights_is_not_built(tmp_path, monkeypatch):
    saved, slack = save(tmp_path, 1), 3
    monkeypatch.setattr(MemoryLimit, "SLACK", slack)
    with safe_open(saved.folder / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    for size in (2 * count + slack, (2 * count + slack, 1), torch.Size([2 * count + slack])):
        with MemoryLimit(saved):
            torch.empty(size)
    for make in (torch.empty, torch.zeros, torch.ones, torch.randn):
        with pytest.raises(UserError, match="describes a larger one"), MemoryLimit(saved):
            make(2 * count + slack, 1 << 40)
    with pytest.raises(UserError, match="weights of another model"), MemoryLimit(saved):
        nn.Linear(1 << 20, 1 << 20)
    torch.empty(2 * count + 2 * slack)  # no limit outside


# After a crash the newest undamaged checkpoint is used, and no undamaged one is lost.


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "sha256.json"])
@pytest.mark.parametrize("how", ["flip", "remove"])
def test_damage_is_detected_and_the_previous_checkpoint_is_used(tmp_path, name, how):
    first, last = save(tmp_path, 3), save(tmp_path, 7)
    path = last.folder / name
    if how == "flip":
        flip(path)
    else:
        path.unlink()
    assert newest_sound(tmp_path) == (first, [last.folder])


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

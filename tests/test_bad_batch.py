"""The dump of non-finite batches, with unreadable utterances and on a full disk."""

import math

import pytest
import torch
from full_disk import full_disk
from torch import nn

from asr.data.batching import Broken, Example, collate
from asr.training.debug import dump_bad_batch

F = 7


@pytest.fixture
def objective():
    module = nn.Module()
    module.model = nn.Linear(F, 5)
    return module


def example(name, value=1.0):
    return Example(name, torch.full((3, F), value), torch.tensor([4, 5]))


def test_a_batch_of_unreadable_utterances_is_not_dumped(tmp_path, objective):
    lost = collate([Broken("gone", "no such file")])
    bad = collate([example("fine"), example("bad\x1b", math.nan)])
    folder = tmp_path / "bad_batches" / "00000002"
    line = dump_bad_batch(folder, [lost, bad], objective)
    assert line.startswith(f"Saved for inspection: {folder}/report.txt")
    report = (folder / "report.txt").read_text()
    assert "features of a batch of 2: not finite: bad\\x1b\n" in report
    (kept,) = torch.load(folder / "batch.pt", weights_only=True)
    assert kept["ids"] == ("fine", "bad\x1b")


@pytest.mark.parametrize("limit", [10, 1000])
def test_a_failure_to_write_is_one_line(tmp_path, objective, limit):
    with full_disk(limit):
        line = dump_bad_batch(tmp_path / "bad_batches" / "2", [collate([example("a")])], objective)
    assert line.startswith("The bad batches could not be saved: ") and "\n" not in line
    names = [path.name for path in (tmp_path / "bad_batches" / "2").iterdir()]
    assert names == (["model.safetensors"] if limit == 1000 else [])  # no part of a file


@pytest.mark.parametrize(
    "link", ["bad_batches", "evidence/00000002", "evidence/00000002/report.txt"]
)
def test_nothing_is_written_through_a_link(link, tmp_path, objective):
    other, path = tmp_path / "other", tmp_path / "run" / link
    path.parent.mkdir(parents=True)
    other.mkdir()
    path.symlink_to(other)
    folder = tmp_path / "run" / "bad_batches" / "00000002"
    line = dump_bad_batch(folder, [collate([example("a")])], objective)
    assert line.startswith(f"The bad batches could not be saved: {path}: a symbolic link, ")
    assert not list(other.iterdir())

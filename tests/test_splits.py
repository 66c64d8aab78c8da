"""Where a recipe may make a corpus, and what a missing one is answered with."""

import os
from pathlib import Path

import pytest

from asr.config.schema import DataConfig
from asr.data import splits
from asr.data.corpus import Utterance, read_manifest, write_manifest
from asr.data.importers import spoken_numbers
from asr.errors import UserError


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The folders in which spoken numbers are made, in a working directory of its own."""
    folders = []
    (tmp_path / "work" / "data").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(spoken_numbers, "prepare", folders.append)
    return folders


def load(path, corpus="spoken-numbers"):
    data = DataConfig(corpus=corpus, train=path)
    with pytest.raises(UserError) as caught:  # nothing is really made
        splits.load_split_manifest(data, data.train, "train")
    return str(caught.value)


@pytest.mark.parametrize("path", ["data/a/train.tsv", "data/a/b/train.tsv", "./data/a/train.tsv"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_corpus_is_made_below_data(made, tmp_path, path, absolute):
    folder = (tmp_path / "work" / path if absolute else Path(path)).parent
    load(folder / "train.tsv")
    assert made == [folder]


def test_a_link_within_data_is_followed(made, tmp_path):
    (tmp_path / "work" / "data" / "real").mkdir()
    (tmp_path / "work" / "data" / "link").symlink_to("real")
    load("data/link/a/train.tsv")
    assert len(made) == 1


def test_data_itself_may_be_a_link(made, tmp_path):
    (tmp_path / "work" / "data").rmdir()
    (tmp_path / "work" / "data").symlink_to(tmp_path / "elsewhere")
    load("data/a/train.tsv")
    assert len(made) == 1


@pytest.mark.parametrize(
    "path",
    [
        "{tmp}/elsewhere/train.tsv",
        "{tmp}/elsewhere/new/train.tsv",
        "../elsewhere/train.tsv",
        "data/../../elsewhere/train.tsv",
        "data/a/../b/train.tsv",
        "data/train.tsv",
        "train.tsv",
        "other/train.tsv",
        "data2/a/train.tsv",
        "data/out/train.tsv",
        "data/out/new/train.tsv",
    ],
)
def test_no_corpus_is_made_elsewhere(made, tmp_path, path):
    (tmp_path / "work" / "data" / "out").symlink_to(tmp_path / "elsewhere")
    path = path.format(tmp=tmp_path)
    message = load(path)
    folder = path.rpartition("/")[0] or "."
    command = f"python -m asr.prepare spoken-numbers --to {folder}, which has train.tsv"
    assert made == [] and f"{path} is not there. Make it with: {command}" in message


@pytest.mark.parametrize("corpus", [None, "spoken-numbers", "librispeech"])
def test_the_command_is_quoted_for_a_shell(made, corpus):
    message = load("/x $(rm -rf ~)/'; ls/train.tsv", corpus)
    assert "--to '/x $(rm -rf ~)/'\"'\"'; ls'" in message


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_manifest_that_is_no_file_is_refused_at_once(made, tmp_path, kind):
    path = tmp_path / "train.tsv"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    message = load(path)
    if kind == "fifo":
        assert message.startswith(f"{path}: ") and "not a regular file" in message
    else:
        assert message == f"data.train: {path} is a folder; name a manifest (.tsv)"


def test_recordings_that_validation_cannot_use_are_named_before_training(tmp_path):
    def corpus(*seconds):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.tsv"
        rows = [Utterance(f"u{n}", "s", tmp_path / "a.wav", s, "a") for n, s in enumerate(seconds)]
        write_manifest(path, rows)
        return read_manifest(path)

    assert splits.check_longest(corpus(1.0, 40.0), 40.0) is None
    line = splits.check_longest(corpus(1.0, 40.5, 90.0), 40.0)
    assert "2 of 3 utterances are longer than twice data.max_seconds, 40 s: validation" in line
    with pytest.raises(UserError, match=r"2 of 2 utterances are longer .*cut recordings into"):
        splits.check_longest(corpus(41.0, 90.0), 40.0)

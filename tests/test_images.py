"""Small images: the IDX reader against bytes made by hand, the tasks from recipe to score."""

import dataclasses
import gzip
import hashlib
import json
import re
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from event_files import events
from torch import nn

from asr import prepare, train
from asr.analysis.plots import tiles
from asr.analysis.statistics import confusion
from asr.config.loader import read_recipe
from asr.data.importers import download
from asr.errors import UserError
from asr.images import data as mnist
from asr.images import task
from asr.images.config import RowClassifierConfig
from asr.images.data import ImageEpochs, Images, binary, digits, in_order, read_idx, shifted
from asr.images.models import RowClassifier
from asr.training import trainer


def idx(array, kind=8, sizes=None):
    sizes = array.shape if sizes is None else sizes
    return (
        bytes([0, 0, kind, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + array.tobytes()
    )


def numbers(*shape):
    return (np.arange(np.prod(shape)) * 37 % 251).astype(np.uint8).reshape(shape)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_is_read(tmp_path, pack):
    path = tmp_path / "images"
    path.write_bytes(pack(b"\0\0\x08\x03\0\0\0\x02\0\0\0\x01\0\0\0\x03" + b"abcxyz"))
    assert read_idx(path, 3).tolist() == [[[97, 98, 99]], [[120, 121, 122]]]


ARRAY = numbers(2, 3, 5)
NO_IDX = "not an IDX file of unsigned bytes, 3 dimensions"
HOSTILE = {
    "text": (b"hello there", NO_IDX),
    "a few bytes": (b"\0\0\x08", NO_IDX),
    "floats": (idx(ARRAY, kind=0x0D), NO_IDX),
    "short": (idx(ARRAY)[:-1], NO_IDX),
    "long": (idx(ARRAY) + b"a", NO_IDX),
    "huge": (idx(ARRAY, sizes=(2**32 - 1,) * 3), NO_IDX),
    "labels": (idx(numbers(7)), NO_IDX),
    "cut": (gzip.compress(idx(numbers(99, 9, 9)))[:-30], "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_idx_file_is_one_line(tmp_path, name):
    content, reason = HOSTILE[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as raised:
        read_idx(path, 3)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def write_split(folder, name, images, labels):
    folder.mkdir(parents=True, exist_ok=True)
    for what, array in (("images-idx3", images), ("labels-idx1", np.array(labels, np.uint8))):
        path = folder / f"{name}-{what}-ubyte.gz"
        path.write_bytes(gzip.compress(idx(array), mtime=0))


def write_set(folder, train_labels=(0, 1, 2, 1, 0, 2, 1), test_labels=(2, 0, 1), rows=5):
    write_split(folder, "train", numbers(len(train_labels), rows, 3), train_labels)
    write_split(folder, "t10k", numbers(len(test_labels), 5, 3), test_labels)
    return folder


def test_a_set_with_inconsistent_parts_is_refused(tmp_path):
    assert [len(images) for images in mnist.read(write_set(tmp_path / "good"))] == [7, 3]
    with pytest.raises(UserError, match="differ in size"):
        mnist.read(write_set(tmp_path / "size", rows=7))
    with pytest.raises(UserError, match="a class that the training labels lack"):
        mnist.read(write_set(tmp_path / "class", test_labels=(2, 3, 1)))
    odd = write_set(tmp_path / "odd")
    (odd / "t10k-labels-idx1-ubyte").write_bytes(idx(numbers(4)))
    with pytest.raises(UserError, match="3 t10k images, but 4 labels"):
        mnist.read(odd)
    for path in odd.glob("t10k-labels-*"):
        path.unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte: not found, nor with"):
        mnist.read(odd)


def test_prepare_downloads_and_verifies(tmp_path, commands, monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    source = write_set(tmp_path / "mirror")
    handler = partial(SimpleHTTPRequestHandler, directory=str(source))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    sums = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in source.iterdir()}
    try:
        code, _, err = commands(prepare, "mnist", "--to", tmp_path / "a", "--url", url)
        line = err.splitlines()[-1]  # the lines before it are the progress bar
        assert code == 2 and line.startswith("error: ") and "Traceback" not in err
        assert "MD5" in line and "deleted" in line  # not the published files
        assert list((tmp_path / "a").iterdir()) == []
        monkeypatch.setattr(mnist, "FILES", sums)
        code, out, _ = commands(prepare, "mnist", "--to", tmp_path / "b", "--url", url)
        assert code == 0 and "train: 7 images of 5 x 3" in out
    finally:
        server.shutdown()
        server.server_close()
    assert len(mnist.read(tmp_path / "b")[0]) == 7


def some(count=11, rows=5, columns=3):
    return Images("train", torch.from_numpy(numbers(count, rows, columns)), torch.arange(count) % 3)


def test_an_epoch_reads_every_image_once_and_resumes():
    epochs = ImageEpochs(some(), 4, seed=1, shift=1)
    full = list(epochs.batches(2))
    assert [len(batch) for batch in full] == [4, 4, 3]
    assert sorted(name for b in full for name in b.ids) == sorted(f"train-{i}" for i in range(11))
    assert [b.ids for b in full] != [b.ids for b in epochs.batches(3)]
    for old, again in zip(full[1:], epochs.batches(2, skip=1), strict=True):
        assert old.ids == again.ids and torch.equal(old.images, again.images)
    plain = torch.cat([batch.images for batch in in_order(some(), 4)])
    torch.testing.assert_close(plain, some().pixels / 255)


def test_an_image_is_shifted_as_a_whole():
    image = torch.zeros(40, 5, 7)
    image[:, 2, 3] = 1.0
    actual = shifted(image, 2, np.random.default_rng(1))
    rows, columns = actual.flatten(1).argmax(1) // 7 - 2, actual.flatten(1).argmax(1) % 7 - 3
    assert torch.equal(actual.flatten(1).sum(1), torch.ones(40))
    assert set(rows.tolist()) == set(columns.tolist()) == {-2, -1, 0, 1, 2}
    assert shifted(image, 0, np.random.default_rng(1)) is image


def test_binary_pixels_are_white_by_their_brightness():
    grey = Images("train", torch.full((1000, 3, 3), 51, dtype=torch.uint8), torch.zeros(1000))
    white = binary(grey, 1).pixels
    assert set(white.unique().tolist()) == {0, 255}
    assert abs((white == 255).double().mean() - 0.2) < 0.02  # 5 standard deviations
    assert torch.equal(white, binary(grey, 1).pixels)
    ends = Images("train", torch.tensor([[[0, 255]]], dtype=torch.uint8), torch.zeros(1))
    assert torch.equal(binary(ends, 1).pixels, ends.pixels)


def test_the_built_in_digits():
    train_images, test = digits()
    assert len(train_images) == 1437 and len(test) == 360
    assert train_images.pixels.shape[1:] == (8, 8) and int(train_images.pixels.max()) == 255


def test_row_classifier_without_norm_is_torch_lstm():
    torch.manual_seed(1)
    config = RowClassifierConfig(kind="rows", hidden=5, layers=2, norm="none")
    ours, judge = RowClassifier(3, 7, config), nn.LSTM(3, 5, 2)
    judge.load_state_dict(ours.lstm.state_dict())
    images = torch.randn(2, 11, 3)
    outputs, _ = judge(images.transpose(0, 1))
    torch.testing.assert_close(ours(images), ours.out(outputs[-1]))


def test_confusions():
    counts = confusion(np.array([0, 0, 2, 1]), np.array([0, 2, 2, 1]), 3)
    assert counts.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 1]]


def test_tiles_are_in_rows():
    picture = tiles(np.stack([np.full((2, 3), v) for v in (0.0, 1.0, 0.2)]), 2)
    assert picture.shape == (6, 8, 3)
    assert picture[0, 4, 0] == 255 and picture[3, 0, 0] == 51 and picture[0, 0, 0] == 0


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    rows = {"kind": "rows", "hidden": 6, "norm": "ba", "backend": "reference"}
    cell = {"hidden": 5, "backend": "reference"}
    draw = {"kind": "draw", "encoder": cell, "decoder": cell, "glimpses": 2, "latent": 3}
    for name, model, pixels in (("rows", rows, "grey"), ("draw", draw, "binary")):
        data = {"pixels": pixels, "batch": 256}
        recipe = {"task": "images", "run": name, "data": data, "model": model}
        recipe["train"] = {"epochs": 1, "threads": 1, "device": "cpu", "health": 1}
        (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    return folder


def test_rows_from_recipe_to_score(recipes, tmp_path):
    assert trainer.train(read_recipe(recipes / "rows.yaml"), tmp_path / "run") == 0
    score = json.loads((tmp_path / "run/evaluate/test/score.json").read_text())
    counts = np.array(score["confusion"])
    assert counts.sum() == score["images"] == 360 and counts.trace() == score["right"]
    assert score["accuracy"] == pytest.approx(counts.trace() / 360) == 1 - score["error"]
    low, high = score["accuracy_interval"]
    assert low < score["accuracy"] < high
    health = events(tmp_path / "run").Tags()["scalars"]
    names = ("variance/lstm.l0/forget", "flat/lstm.l0/c", "gradient/out")
    assert {f"valid_health/{name}" for name in names} <= set(health)


def test_images_of_a_folder_are_learned(recipes, tmp_path):
    """The class of an image is its white row."""
    for name, count in (("train", 100), ("t10k", 31)):
        labels = np.arange(count) % 3
        images = np.repeat(np.eye(3, dtype=np.uint8)[labels] * 255, 5, axis=1).reshape(count, 3, 5)
        write_split(tmp_path / "idx", name, images, labels)
    keys = [f"data.folder={tmp_path / 'idx'}", "data.batch=9", "train.epochs=5", "train.health=0"]
    keys += ["train.optimizer.lr=0.03", "train.schedule={kind: constant, warmup: 0}"]
    assert trainer.train(read_recipe(recipes / "rows.yaml", keys), tmp_path / "run") == 0
    score = json.loads((tmp_path / "run/evaluate/test/score.json").read_text())
    assert score["images"] == 31 and score["accuracy"] == 1


def test_changed_images_are_detected_when_resuming(recipes, tmp_path, monkeypatch):
    recipe = read_recipe(recipes / "rows.yaml", ["train.steps=1", "train.health=0"])
    assert trainer.train(recipe, tmp_path / "run") == 0
    assert trainer.train(recipe, tmp_path / "run", resume=True) == 0
    training, test = task.read(recipe.data)
    training.labels[0] = (training.labels[0] + 1) % 10
    monkeypatch.setattr(task, "read", lambda data: (training, test))
    with pytest.raises(UserError, match=r"data\.folder: the same size, but another content"):
        trainer.train(recipe, tmp_path / "run", resume=True)


def test_draw_from_recipe_to_score(recipes, tmp_path):
    assert trainer.train(read_recipe(recipes / "draw.yaml"), tmp_path / "run") == 0
    score = json.loads((tmp_path / "run/evaluate/test/score.json").read_text())
    low, high = score["nll_interval"]
    assert score["images"] == 360 and low < score["nll"] < high


def test_images_in_the_order_of_their_classes_are_refused(recipes, tmp_path, monkeypatch):
    """The last tenth, held out for validation, would contain only classes missing from training."""
    recipe = read_recipe(recipes / "rows.yaml")
    training, test = task.read(recipe.data)
    order = training.labels.argsort()
    training = dataclasses.replace(
        training, pixels=training.pixels[order], labels=training.labels[order]
    )
    monkeypatch.setattr(task, "read", lambda data: (training, test))
    with pytest.raises(UserError, match=r"only have classes 0 to [78], .*; shuffle the training"):
        trainer.train(recipe, tmp_path / "run")


def test_resuming_at_an_epochs_end_validates_once(recipes, tmp_path, capsys):
    for steps in (6, 8):  # an epoch has six
        recipe = read_recipe(recipes / "rows.yaml", [f"train.steps={steps}"])
        assert trainer.train(recipe, tmp_path / "run", resume=steps > 6) == 0
    output = capsys.readouterr().out
    assert "1293 training images" in output  # in batches of 256
    assert re.findall(r"^\S+  step (\d+)  validation", output, re.M) == ["6", "8"]


def test_user_errors(recipes, tmp_path, commands):
    rows, draw = recipes / "rows.yaml", recipes / "draw.yaml"
    run = ["--run", tmp_path / "run"]
    line = commands.refused(train, rows, f"data.folder={tmp_path / 'none'}", *run)
    assert f"asr.prepare mnist --to {tmp_path / 'none'}" in line
    line = commands.refused(train, draw, "data.pixels=grey", *run)
    assert "set data.pixels=binary" in line
    assert "Did you mean model.hidden?" in commands.refused(train, rows, "model.hiden=3", *run)

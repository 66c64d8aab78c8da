"""The fingerprint of training data: equal bytes give equal fingerprints, other bytes do not."""

import hashlib

import torch

from asr.images.task import sha256_of_tensors
from asr.io import sha256_of_files
from asr.training.resume import content_changes


def test_several_files_are_hashed_as_one(tmp_path):
    parts = [b"a" * 1_500_001, b"", b"b" * 7]
    paths = [tmp_path / str(number) for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part)
    assert sha256_of_files(paths) == hashlib.sha256(b"".join(parts)).hexdigest()


def test_tensors_count_element_by_element():
    image = torch.arange(30, dtype=torch.uint8).view(2, 3, 5)
    label = torch.tensor([258, 3])
    expected = hashlib.sha256(bytes(range(30)) + label.numpy().tobytes()).hexdigest()
    assert sha256_of_tensors(image, label) == expected
    turned = image.transpose(1, 2)
    assert sha256_of_tensors(turned) == hashlib.sha256(turned.numpy().tobytes()).hexdigest()


def test_changes_are_reported():
    old = {
        "data.train": {"utterances": 7, "seconds": 3.5, "sha256": "a"},
        "data.valid": {"utterances": 2, "sha256": "b"},
        "data.gone": {"sha256": "c"},
        "objective": {"class": "Mine", "sha256": "d"},
    }
    assert content_changes(old, old) == {} == content_changes({}, old)
    new = {
        "data.train": {"utterances": 5, "seconds": 3.5, "sha256": "x"},
        "data.valid": {"utterances": 2, "sha256": "y"},
        "objective": {"class": "Mine", "sha256": "z"},
    }
    assert content_changes(old, new) == {
        "data.train": "data.train: 7 utterances -> 5",
        "data.valid": "data.valid: the same size, but another content",
        "objective": "objective: the same class, but another content",
    }

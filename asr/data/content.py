"""What a run learns from, in a few bytes, so that a change under the same name shows."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

CHUNK = 1 << 20  # bytes
SHA256 = "sha256"

# Recipe key -> what to say of it ("utterances": 600) and the SHA256 of all of it.
Content = Mapping[str, Mapping[str, int | float | str]]


def sha256_of_files(paths: Iterable[Path]) -> str:
    """Of their bytes, one after another: a second for a gigabyte."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(CHUNK):
                digest.update(block)
    return digest.hexdigest()


def sha256_of_tensors(*tensors: Tensor) -> str:
    """Of the elements of tensors on the CPU."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def changes(old: Content, new: Content) -> dict[str, str]:
    """Key -> a line, for every key of both whose content is another one."""
    found = {}
    for key in sorted(old.keys() & new.keys()):
        before, now = old[key], new[key]
        if before.get(SHA256) == now.get(SHA256):
            continue
        said = [
            f"{before.get(name, 'unknown')} {name} -> {value}"
            for name, value in now.items()
            if name != SHA256 and before.get(name) != value
        ]
        found[key] = f"{key}: {', '.join(said) or 'the same size, but another content'}"
    return found

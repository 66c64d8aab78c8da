"""Labelled images: IDX files (LeCun's MNIST format), scikit-learn's digits, and their batches.

IDX: two zero bytes, the type (0x08: unsigned bytes), the number of dimensions, each dimension's
size as a big-endian 32-bit number, then the elements. A file may be compressed with gzip.

MNIST (LeCun, Cortes & Burges 1998): 60,000 + 10,000 handwritten digits of 28 x 28 pixels, from a
mirror of the original files. A folder may have another data set in this format, such as
Fashion-MNIST.

N images of R rows and C columns, B of them in a batch.
"""

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from asr.data.batching import Broken, EpochPlan, Epochs, TaskBatch
from asr.data.importers.download import fetch
from asr.errors import UserError
from asr.io import open_file

MAX_BYTES = 1 << 30  # of an unpacked file; known sets of small images are smaller

URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
SPLITS = ("train", "t10k")
# MD5 of the published files.
FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


@dataclass(frozen=True)
class Images:
    """pixels (N, R, C) uint8, 0 to 255, labels (N,) int64; ids are NAME-NUMBER."""

    name: str
    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, name: str, rows: slice) -> "Images":
        """A part of the images under another name."""
        return Images(name, self.pixels[rows], self.labels[rows])


@dataclass(frozen=True)
class ImageBatch(TaskBatch):
    """images (B, R, C) float, 0 to 1, labels (B,). Without audio; all images are readable."""

    size_key: ClassVar = "data.batch"
    length_key: ClassVar = None
    moved: ClassVar = ("images", "labels")
    rows: ClassVar = ("ids", "images", "labels")
    ids: tuple[str, ...]
    images: Tensor
    labels: Tensor
    seconds: float = 0.0
    broken: tuple[Broken, ...] = ()


@dataclass
class ImageEpochs(Epochs):
    """The training images in batches; their order depends on seed and epoch."""

    images: Images
    size: int  # images in a batch
    seed: int
    shift: int  # largest shift of an image, in pixels

    def _new_plan(self, epoch: int) -> EpochPlan:
        """The last batch may be smaller."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.images))
        rows = order.tolist()
        return EpochPlan([rows[i : i + self.size] for i in range(0, len(rows), self.size)], 0.0)

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> Iterator[ImageBatch]:
        batches = self.plan(epoch).batches
        for number in range(skip, len(batches), every):
            batch = make_batch(self.images, batches[number])
            generator = np.random.default_rng([self.seed, epoch, number])
            yield replace(batch, images=shifted(batch.images, self.shift, generator))


def in_order(images: Images, size: int) -> Iterator[ImageBatch]:
    """All images once, in batches."""
    for start in range(0, len(images), size):
        yield make_batch(images, range(start, min(start + size, len(images))))


def make_batch(images: Images, rows: Sequence[int]) -> ImageBatch:
    """The images of these rows."""
    index = torch.as_tensor(rows)
    pixels = images.pixels[index].float() / 255
    return ImageBatch(tuple(f"{images.name}-{r}" for r in rows), pixels, images.labels[index])


def shifted(images: Tensor, largest: int, generator: np.random.Generator) -> Tensor:
    """Each image (B, R, C) shifted by -largest to largest rows and columns, filled with black."""
    if not largest:
        return images
    B, R, C = images.shape
    wide = functional.pad(images, (largest,) * 4)
    down, right = (torch.from_numpy(generator.integers(2 * largest + 1, size=(B, 1))) for _ in "yx")
    rows, columns = down + torch.arange(R), right + torch.arange(C)  # (B, R), (B, C)
    return wide[torch.arange(B)[:, None, None], rows[:, :, None], columns[:, None, :]]


def binary(images: Images, seed: int) -> Images:
    """Each pixel white with the probability of its brightness (Salakhutdinov & Murray 2008).

    Drawn once for all epochs; depends on the seed and the name.
    """
    number = zlib.crc32(images.name.encode())
    draw = np.random.default_rng([seed, number]).integers(255, size=images.pixels.shape)
    white = images.pixels > torch.from_numpy(draw)
    return replace(images, pixels=white.to(torch.uint8) * 255)


def read_images(folder: Path, name: str) -> Images:
    """FOLDER/NAME-images-idx3-ubyte and -labels-idx1-ubyte, perhaps with .gz.

    Raises UserError if a file is missing or damaged or their lengths differ.
    """
    arrays = []
    for what, dimensions in (("images", 3), ("labels", 1)):
        path = find(folder, f"{name}-{what}-idx{dimensions}-ubyte")
        arrays.append(read_idx(path, dimensions))
        if not arrays[-1].size:
            raise UserError(f"{path}: is empty")
    pixels, labels = arrays
    if len(pixels) != len(labels):
        raise UserError(f"{folder}: {len(pixels)} {name} images, but {len(labels)} labels")
    return Images(name, torch.from_numpy(pixels), torch.from_numpy(labels).long())


def find(folder: Path, name: str) -> Path:
    """The file of that name, or with .gz. Raises UserError if neither exists."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    remedy = f"download it with python -m asr.prepare mnist --to {folder}"
    raise UserError(f"{folder / name}: not found, nor with .gz; {remedy}")


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes -> uint8 array of the shape in its header.

    Raises UserError for other files.
    """
    try:
        with open_file(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
        with open_file(path) as file, gzip.open(file) if packed else file as stream:
            content = bytearray(stream.read(MAX_BYTES))  # torch warns of arrays of bytes
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or "truncated"
        raise UserError(f"{path}: cannot be read: {reason}") from None
    start = 4 + 4 * dimensions
    sizes = content[4:start]
    shape = struct.unpack(f">{dimensions}I", sizes) if len(sizes) == 4 * dimensions else (0,)
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) != start + math.prod(shape):
        raise UserError(f"{path}: not an IDX file of unsigned bytes, {dimensions} dimensions")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def digits() -> tuple[Images, Images]:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels (part of optdigits), the last fifth as test.

    They are sorted by writer, so other writers wrote the test digits.
    """
    from sklearn.datasets import load_digits  # imported here: it takes a second

    data = load_digits()
    pixels = torch.from_numpy((data.images * 255 / 16).round().astype(np.uint8))
    images = Images("digits", pixels, torch.from_numpy(data.target).long())
    count = len(images) * 4 // 5
    return images.part("train", slice(None, count)), images.part("test", slice(count, None))


def download(to: Path, url: str = URL) -> None:
    """Download the four files of MNIST into the folder `to`. Raises UserError as `fetch`."""
    for name, md5 in FILES.items():
        fetch(f"{url.rstrip('/')}/{name}", to / name, md5)


def read(folder: Path) -> tuple[Images, Images]:
    """Training and test images. Raises UserError if they differ in size or classes."""
    train, test = (read_images(folder, name) for name in SPLITS)
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise UserError(f"{folder}: training and test images differ in size")
    if int(test.labels.max()) > int(train.labels.max()):
        raise UserError(f"{folder}: the test labels name a class that the training labels lack")
    return train, test


def sha256_of_tensors(*tensors: Tensor) -> str:
    """The SHA256 of the concatenated elements of tensors on the CPU."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()

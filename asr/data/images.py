"""Labelled images: IDX files (LeCun's MNIST format), scikit-learn's digits, and their batches.

IDX: two zero bytes, the type (0x08: unsigned bytes), the number of dimensions, each dimension's
size as a big-endian 32-bit number, then the elements. A file may be packed with gzip.

N images of R rows and C columns, B of them in a batch.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from asr.data.batch import Broken
from asr.data.plan import Item, Plan
from asr.errors import UserError

UNSIGNED_BYTES = 0x08
CHUNK = 1 << 20  # bytes
MAX_BYTES = 1 << 30  # no set of small images that we know unpacks to more


@dataclass(frozen=True)
class Images:
    """pixels (N, R, C) uint8, 0 to 255, labels (N,) int64; `name` begins their ids."""

    name: str
    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, name: str, rows: slice) -> "Images":
        """Some of them under another name."""
        return Images(name, self.pixels[rows], self.labels[rows])


@dataclass(frozen=True)
class ImageBatch:
    """images (B, R, C) float, 0 to 1, labels (B,). It holds no audio and nothing is broken."""

    size_key: ClassVar = "data.batch"
    length_key: ClassVar = None
    ids: tuple[str, ...]
    images: Tensor
    labels: Tensor
    seconds: float = 0.0
    broken: tuple[Broken, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> "ImageBatch":
        """The same on another device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass
class ImageEpochs:
    """The training images, in an order that depends on (seed, epoch) alone."""

    images: Images
    size: int  # images in a batch
    seed: int
    shift: int = 0  # each image is moved by up to so many pixels in both directions

    def __post_init__(self) -> None:
        self.plan = lru_cache(maxsize=1)(self.plan)  # asked for several times an epoch

    def plan(self, epoch: int) -> Plan:
        """The batches of an epoch, counted from 1; the last may be smaller."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.images))
        rows = [Item(int(row), epoch, 1.0) for row in order]
        return Plan([rows[i : i + self.size] for i in range(0, len(rows), self.size)], 0.0)

    def batches(self, epoch: int, skip: int = 0, every: int = 1) -> Iterator[ImageBatch]:
        """Every so many of those batches, without the first `skip`."""
        batches = self.plan(epoch).batches
        for number in range(skip, len(batches), every):
            batch = take(self.images, [item.index for item in batches[number]])
            chance = np.random.default_rng([self.seed, epoch, number])
            yield replace(batch, images=moved(batch.images, self.shift, chance))


def in_order(images: Images, size: int) -> Iterator[ImageBatch]:
    """All images once, in batches."""
    for start in range(0, len(images), size):
        yield take(images, range(start, min(start + size, len(images))))


def take(images: Images, rows: Sequence[int]) -> ImageBatch:
    """The images of these numbers as a batch."""
    chosen = torch.as_tensor(rows)
    pixels = images.pixels[chosen].float() / 255
    return ImageBatch(tuple(f"{images.name}-{r}" for r in rows), pixels, images.labels[chosen])


def moved(images: Tensor, most: int, chance: np.random.Generator) -> Tensor:
    """Every image (B, R, C) moved by -most to most rows and columns; black comes in."""
    if not most:
        return images
    B, R, C = images.shape
    wide = functional.pad(images, (most,) * 4)
    down, right = (torch.from_numpy(chance.integers(2 * most + 1, size=(B, 1))) for _ in "yx")
    rows, columns = down + torch.arange(R), right + torch.arange(C)  # (B, R), (B, C)
    return wide[torch.arange(B)[:, None, None], rows[:, :, None], columns[:, None, :]]


def binary(images: Images, seed: int) -> Images:
    """Every pixel white with the probability of its brightness, drawn once for all epochs.

    Salakhutdinov & Murray 2008; which pixels become white depends on the seed and the name alone.
    """
    number = zlib.crc32(images.name.encode())
    draw = np.random.default_rng([seed, number]).integers(255, size=images.pixels.shape)
    white = images.pixels > torch.from_numpy(draw)
    return replace(images, pixels=white.to(torch.uint8) * 255)


def read_images(folder: Path, name: str) -> Images:
    """FOLDER/NAME-images-idx3-ubyte and -labels-idx1-ubyte, packed (.gz) or not.

    Raises UserError where a file is missing or damaged or the two do not belong together.
    """
    pixels, labels = (
        _read_dimensions(find(folder, f"{name}-{what}-idx{d}-ubyte"), d)
        for what, d in (("images", 3), ("labels", 1))
    )
    if len(pixels) != len(labels):
        raise UserError(f"{folder}: {len(pixels)} {name} images, but {len(labels)} labels")
    return Images(name, torch.from_numpy(pixels), torch.from_numpy(labels).long())


def find(folder: Path, name: str) -> Path:
    """The file of that name, or with .gz. UserError where neither is there."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UserError(
        f"{folder / name}: not there, nor with .gz; python -m asr.prepare mnist brings such files"
    )


def _read_dimensions(path: Path, dimensions: int) -> np.ndarray:
    array = read_idx(path)
    if array.ndim != dimensions or array.size == 0:
        raise UserError(f"{path}: holds {array.shape}; {dimensions} sizes above 0 are expected")
    return array


def read_idx(path: Path) -> np.ndarray:
    """An IDX file of unsigned bytes, uint8 in the shape that its header says.

    Never allocates by the header alone. Raises UserError naming the file for anything else.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            shape = _read_header(stream, path)
            content = _read_content(stream, math.prod(shape), path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it ends early"
        raise UserError(f"{path}: cannot be read: {reason}") from None
    return np.frombuffer(content, np.uint8).reshape(shape)


def _read_header(stream: IO[bytes], path: Path) -> tuple[int, ...]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != UNSIGNED_BYTES:
        raise UserError(f"{path}: not an IDX file of unsigned bytes (it begins {magic.hex(' ')})")
    sizes = stream.read(4 * magic[3])
    if not 1 <= magic[3] <= 3 or len(sizes) < 4 * magic[3]:
        raise UserError(f"{path}: {magic[3]} dimensions; IDX files of images have 1 to 3, whole")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if math.prod(shape) > MAX_BYTES:
        raise UserError(f"{path}: its header claims {shape}, more than {MAX_BYTES} bytes")
    return shape


def _read_content(stream: IO[bytes], size: int, path: Path) -> bytearray:
    content = bytearray()
    # One byte more than there should be, to see that nothing follows.
    while chunk := stream.read(min(CHUNK, size + 1 - len(content))):
        content += chunk
    if len(content) != size:
        there = "more" if len(content) > size else len(content)
        raise UserError(f"{path}: its header claims {size} bytes, there are {there}")
    return content


def digits() -> tuple[Images, Images]:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels (part of optdigits), the last fifth as test.

    They stand in the order of their writers, so the test digits are by others.
    """
    from sklearn.datasets import load_digits  # a second, only where it is asked for

    data = load_digits()
    pixels = torch.from_numpy((data.images * 255 / 16).round().astype(np.uint8))
    whole = Images("digits", pixels, torch.from_numpy(data.target).long())
    cut = len(whole) * 4 // 5
    return whole.part("train", slice(None, cut)), whole.part("test", slice(cut, None))

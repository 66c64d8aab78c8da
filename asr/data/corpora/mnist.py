"""MNIST (LeCun, Cortes & Burges 1998): 60,000 + 10,000 handwritten digits of 28 x 28 pixels.

From a mirror that serves the original files, or from a folder of IDX files, which may as well hold
another set of the same form (Fashion-MNIST).
"""

import hashlib
import shutil
from pathlib import Path

from asr.data.download import fetch
from asr.data.images import Images, find, read_images
from asr.errors import UserError

URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
SPLITS = ("train", "t10k")
MAX_BYTES = 20_000_000  # the largest of the files has 10 million

# MD5 of the files as published, packed.
FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}

# SHA-256 of the pixels, by which a set is known however its files are packed.
PIXELS = {
    "train": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
    "t10k": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
}


def download(to: Path, url: str = URL) -> None:
    """Brings the four files to the folder `to`. Raises UserError as asr.data.download.fetch."""
    for name, md5 in FILES.items():
        fetch(f"{url.rstrip('/')}/{name}", to / name, md5, MAX_BYTES)


def copy(source: Path, to: Path) -> None:
    """Copies the four files, packed or not, once they are seen to be whole.

    Raises UserError where one is missing or damaged, or a file of that name is there already and
    another.
    """
    if not source.is_dir():
        raise UserError(f"{source}: no such folder")
    read(source)
    to.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        path = find(source, name.removesuffix(".gz"))
        place = to / path.name
        if not place.exists():
            shutil.copyfile(path, place)
        elif place.read_bytes() != path.read_bytes():
            raise UserError(f"{place}: is there already and another file; move it away")


def read(folder: Path) -> tuple[Images, Images]:
    """Training and test images. UserError where they do not belong together."""
    train, test = (read_images(folder, name) for name in SPLITS)
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise UserError(f"{folder}: training and test images differ in size")
    if int(test.labels.max()) > int(train.labels.max()):
        raise UserError(f"{folder}: the test labels name a class that the training labels lack")
    return train, test


def is_original(images: Images) -> bool:
    """Whether these are MNIST's own pixels."""
    return hashlib.sha256(images.pixels.numpy().tobytes()).hexdigest() == PIXELS.get(images.name)

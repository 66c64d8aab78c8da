"""Keeping memory flat over a run in which hardly two batches have the same shape."""

import ctypes
import gc
import os

# oneDNN compiles code for every shape of a convolution, and in bf16 of a product, some 60 kB and
# some 700 kB, and keeps it for the last 1,024 of them. A step needs a few dozen to a few hundred; a
# step of other lengths needs other ones.
KEPT = 64
# Where lengths are rounded all of them come back: to compile them again takes longer than the step.
KEPT_ROUNDED = 16384
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_caches(rounded: bool = False) -> None:
    """Lets torch keep the code for KEPT (or KEPT_ROUNDED) shapes, unless the environment does.

    To be called before its first convolution: it looks then, and never again.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(KEPT_ROUNDED if rounded else KEPT))


def give_back() -> None:
    """What validation used goes back to the system.

    matplotlib's figures are rings of objects, which Python looks for at long intervals only, and
    what it has freed then, glibc would keep.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)

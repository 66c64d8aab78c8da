"""Keeping memory flat over a run in which hardly two batches have the same shape."""

import ctypes
import gc
import os

# oneDNN compiles code for every shape of a convolution, some 60 kB, and keeps it for the last
# 1,024 of them. A step needs a few dozen; a step of other lengths needs other ones.
KEPT = 64
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_caches() -> None:
    """Lets torch keep the code for KEPT shapes, unless the environment says otherwise.

    To be called before its first convolution: it looks then, and never again.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(KEPT))


def give_back() -> None:
    """What validation used goes back to the system.

    matplotlib's figures are rings of objects, which Python looks for at long intervals only, and
    what it has freed then, glibc would keep.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)

"""Memory: retry a batch that does not fit in halves, and keep memory flat over a long run.

The totals and gradients of an objective are sums over batches, however many. Halves change the
order of a sum, and what is drawn at random during it, such as dropout.
"""

import ctypes
import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from asr.errors import UserError, is_out_of_memory
from asr.kernels import dispatch

Result = TypeVar("Result")

# oneDNN compiles code for every shape of a convolution, and in bf16 of a product, some 60 kB and
# some 700 kB, and keeps it for the last 1,024 shapes. A step needs a few dozen to a few hundred,
# a step of other lengths needs other ones.
SHAPES = 64
# With rounded lengths all shapes recur, and compiling one again takes longer than a step.
SHAPES_ROUNDED = 16384
CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_onednn_cache(shapes: int) -> None:
    """Keep the code of so many shapes, unless the environment sets a number.

    oneDNN and torch read it from the environment once, at the first convolution, so this does one,
    and leaves the environment as it was. After another convolution it has no effect.
    """
    added = {name: str(shapes) for name in CAPACITIES if name not in os.environ}
    os.environ |= added
    with torch.inference_mode():
        torch.nn.functional.conv1d(torch.ones(2, 3, 11), torch.ones(16, 3, 5))
    for name in added:
        del os.environ[name]


def release_memory() -> None:
    """Return unused memory to the system, after a validation."""
    gc.collect()  # matplotlib's figures contain reference cycles, which Python collects rarely
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # glibc keeps what Python has freed


def release_device_memory() -> None:
    """Return unused memory of the GPU, if there is one, after a lack of it."""
    gc.collect()  # the error may be in a reference cycle with frames that hold the batch
    dispatch.release_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def retry_in_halves(
    run: Callable[[Sequence[Any]], Result], group: Sequence[Any], log: Callable[[str], None]
) -> Result:
    """run(group), or run(the halves of its batches) where that is out of memory.

    `run` must start anew at each call. Raises UserError where the halves do not fit either, or
    every batch has a single example.
    """
    try:
        return run(group)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Not in the except clause: there the error still holds the frames and all tensors in them.
    halves = [half for batch in group for half in batch.split()]
    release_device_memory()
    size_key, length_key = group[0].size_key, group[0].length_key
    if len(halves) == len(group):
        ids = " ".join(name for batch in group for name in batch.ids)
        raise UserError(
            f"out of memory with {_size(group)}, which cannot be split further: {ids}; "
            f"{f'lower {length_key}, or ' if length_key else ''}make the model smaller"
        )
    try:
        result = run(halves)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory with {_size(group)}, and with {_size(halves)} too; "
            f"lower {size_key} and raise train.accumulate as much"
        ) from None
    seconds = max(half.seconds for half in halves)
    change = f"set {size_key}={seconds:.3g}" if seconds else f"lower {size_key}"
    log(
        f"out of memory with {_size(group)}; {_size(halves)} fits and is used: "
        f"{change} and raise train.accumulate as much"
    )
    return result


def _size(group: Sequence[Any]) -> str:
    largest = max(group, key=lambda batch: (batch.seconds, len(batch)))
    audio = f" ({largest.seconds:.1f} s of audio)" if largest.seconds else ""
    return f"a batch of {len(largest)}{audio}"

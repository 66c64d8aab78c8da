"""What does not fit in memory is cut in two and tried once more.

An objective's totals and gradients are summed over batches, however many these are: cutting changes
the order of a sum, and what is drawn at random meanwhile, such as dropout, which is drawn anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from asr.errors import UserError

Result = TypeVar("Result")
# How CUDA and the CPU's allocator say it.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory")


def in_memory(
    run: Callable[[Sequence[Any]], Result], group: Sequence[Any], note: Callable[[str], None]
) -> Result:
    """run(group), or run(its batches' halves) where that does not fit; `note` says so.

    `run` must begin anew whenever it is called. Raises UserError where the halves do not fit
    either, or nothing is left to cut.
    """
    try:
        return run(group)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Not in the except clause: there the error still holds the frames and all tensors in them.
    halves = [half for batch in group for half in cut(batch)]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    size_key, length_key = group[0].size_key, group[0].length_key
    if len(halves) == len(group):
        raise UserError(
            f"out of memory with {_sizes(group)}, which cannot be cut further: {_ids(group)}; "
            f"{f'lower {length_key}, or ' if length_key else ''}make the model smaller"
        )
    try:
        result = run(halves)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory with {_sizes(group)}, and with {_sizes(halves)} too; "
            f"lower {size_key} and raise train.accumulate as much"
        ) from None
    note(
        f"out of memory with {_sizes(group)}; {_sizes(halves)} fits and is used: {_advice(halves)}"
    )
    return result


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is what an exception says."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def cut(batch: Any) -> list[Any]:
    """A batch as two of half its size, where it has more than one row.

    Works on any dataclass whose tensors and tuples have one row per example; `seconds` is shared
    out by rows.
    """
    size = len(batch)
    if size < 2:
        return [batch]
    middle = (size + 1) // 2
    return [_rows(batch, slice(0, middle)), _rows(batch, slice(middle, size))]


def _rows(batch: Any, rows: slice) -> Any:
    size = len(batch)
    there = {field.name: getattr(batch, field.name) for field in fields(batch)}
    changed = {name: value[rows] for name, value in there.items() if _count(value) == size}
    if "seconds" in there:
        changed["seconds"] = batch.seconds * (rows.stop - rows.start) / size
    return replace(batch, **changed)


def _count(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    return len(value) if isinstance(value, tuple) else None


def _sizes(group: Sequence[Any]) -> str:
    largest = max(group, key=lambda batch: (batch.seconds, len(batch)))
    audio = f" ({largest.seconds:.1f} s of audio)" if largest.seconds else ""
    return f"a batch of {len(largest)}{audio}"


def _advice(halves: Sequence[Any]) -> str:
    seconds, key = max(half.seconds for half in halves), halves[0].size_key
    change = f"set {key}={seconds:.3g}" if seconds else f"lower {key}"
    return f"{change} and raise train.accumulate as much"


def _ids(group: Sequence[Any]) -> str:
    return " ".join(name for batch in group for name in batch.ids)

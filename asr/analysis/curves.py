"""Scalar curves of a run: read from TensorBoard's event files, and compared between runs.

TensorBoard's EventAccumulator is not used, since it loads records of any length into memory.

R runs (seeds) of one setting, N points on the common grid of steps.
"""

import math
import os
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from asr.errors import UserError
from asr.io import open_file

Values = NDArray[np.float64]
MAX_RECORDS = 5_000_000  # of a run: a million steps logged every ten make 1.2 million
MAX_RECORD = 1 << 16  # bytes of a record with a scalar; pictures and texts are longer
MAX_STEP = 1 << 53  # a float represents all smaller integers
_START = -1  # instead of a curve's number: the run was started or resumed


@dataclass(frozen=True)
class Curve:
    """One scalar's points, sorted by step: (N,) each."""

    steps: NDArray[np.int64]
    values: Values

    def __len__(self) -> int:
        return len(self.steps)


def read_scalars(folder: Path, names: Collection[str] | None = None) -> dict[str, Curve]:
    """The named curves from the event files of a folder, or all; a missing one has no points.

    A run resumed at a step replaces all points from that step on. The last of several points at one
    step counts. A file is read up to its first damaged or incomplete record. Raises UserError for a
    file that is not regular, and for more records than a training writes.
    """
    numbers = {name: number for number, name in enumerate(names or ())}
    rows, records = array("d"), 0
    for path in sorted(folder.glob("*tfevents*")):
        for record in _records(path):
            records += 1
            if records > MAX_RECORDS:
                raise UserError(f"{folder}: more than {MAX_RECORDS} records in its event files")
            try:
                row = _row(record[:-4], numbers, names is None)
            except DecodeError:
                break
            if row and not _is_intact(record):
                break
            rows.extend(row)
    table = np.array(rows).reshape(-1, 3)
    start, step = table[:, 0] == _START, table[:, 1]
    # The lowest step at which the run was started again later.
    ends = np.minimum.accumulate(np.where(start, step, np.inf)[::-1])[::-1]
    table = table[~start & (step < ends)]
    return {name: _curve(table[table[:, 0] == number, 1:]) for name, number in numbers.items()}


def _records(path: Path) -> Iterator[bytes]:
    """The records of an event file with their checksums; empty if too long for a scalar."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(12)) == 12:
            length = int.from_bytes(head[:8], "little")
            if not _is_intact(head) or length > size - file.tell():
                return
            if length > MAX_RECORD:
                file.seek(length + 4, os.SEEK_CUR)
                yield b""
            else:
                yield file.read(length + 4)


def _is_intact(content: bytes) -> bool:
    """Whether the last four bytes are the checksum of the others."""
    return masked_crc32c(content[:-4]) == int.from_bytes(content[-4:], "little")


def _row(record: bytes, numbers: dict[str, int], add: bool) -> Sequence[float]:
    """A point's (number of its name, step, value); (_START, step, 0) for a start.

    add: names that are not in `numbers` are added to it.
    """
    event = Event.FromString(record)
    if not 0 <= event.step <= MAX_STEP:
        return ()
    if event.session_log.status == SessionLog.START:
        return (_START, event.step, 0.0)
    for value in event.summary.value:
        if value.WhichOneof("value") == "simple_value" and (add or value.tag in numbers):
            number = numbers.setdefault(value.tag, len(numbers))
            return (number, event.step, value.simple_value)
    return ()


def _curve(rows: Values) -> Curve:
    """rows (N, 2): steps and values in the order of writing."""
    steps, last = np.unique(rows[::-1, 0], return_index=True)  # the first of the reversed
    return Curve(steps.astype(np.int64), rows[::-1][last, 1])


def start_times(folder: Path) -> list[int]:
    """The creation time in the name of each event file of a folder: seconds since 1970."""
    stamps = (re.search(r"\.tfevents\.(\d+)", path.name) for path in folder.glob("*.tfevents.*"))
    return [int(stamp[1]) for stamp in stamps if stamp]


@dataclass(frozen=True)
class Band:
    """Mean of several runs and the range from the lowest to the highest: (N,) each."""

    steps: NDArray[np.int64]
    mean: Values
    low: Values
    high: Values


def finite(curve: Curve) -> Curve:
    """The curve without NaN and infinities."""
    good = np.isfinite(curve.values)
    return Curve(curve.steps[good], curve.values[good])


def first_below(curve: Curve, level: float) -> int | None:
    """The step of the first point at or below the level, not interpolated; None without one."""
    passed = np.flatnonzero(curve.values <= level)
    return int(curve.steps[passed[0]]) if len(passed) else None


def median_reached(costs: Sequence[float | None]) -> float | None:
    """The median over runs of the step or cost at which each reached a level.

    None stands for a run that never did and ranks last. The result is None if half of the runs or
    more failed: a mean over the others would favour a setting for its failures.
    """
    ranked = [math.inf if cost is None else cost for cost in costs]
    median = float(np.median(ranked)) if ranked else math.inf
    return median if math.isfinite(median) else None


def choose_levels(groups: Sequence[Sequence[Curve]]) -> list[float]:
    """Three losses at which the groups' curves are compared, the highest first.

    half  halfway from the median first loss to `all`
    all   the highest of the groups' median best losses (the upper one of the middle two for an
          even number): the typical run of every group reaches it
    best  the lowest of these medians

    Equal levels are merged; without points there are none.
    """
    curves = [[c for c in map(finite, group) if len(c)] for group in groups]
    medians = [
        sorted(float(c.values.min()) for c in group)[len(group) // 2] for group in curves if group
    ]
    if not medians:
        return []
    first = float(np.median([c.values[0] for group in curves for c in group]))
    worst, best = max(medians), min(medians)
    return sorted({(first + worst) / 2, worst, best}, reverse=True)


def band(curves: Iterable[Curve], points: int = 400) -> Band | None:
    """Mean and range over runs on a common grid of at most `points` steps.

    The grid covers the steps that all runs have, so every mean is over all runs. A run is
    interpolated linearly between its points; if it has more points than the grid, a grid point is
    the mean of its neighbourhood. None if the runs share no step.
    """
    good = [c for c in map(finite, curves) if len(c)]
    if not good:
        return None
    first, last = max(c.steps[0] for c in good), min(c.steps[-1] for c in good)
    steps = np.unique(np.concatenate([c.steps for c in good]))
    steps = steps[(steps >= first) & (steps <= last)]
    if not len(steps):
        return None
    rows = np.stack([np.interp(steps, c.steps, c.values) for c in good])  # (R, N)
    edges = np.unique(np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int))
    sizes = np.diff(edges)
    rows = np.add.reduceat(rows, edges[:-1], axis=1) / sizes
    middle = np.add.reduceat(steps, edges[:-1]) // sizes
    return Band(middle, rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0))

"""TensorBoard event files: scalar curves read fast, and the few records a report writes.

A file is a row of TFRecords: length (8 bytes), its checksum (4), an Event, its checksum (4). A
scalar's Event as torch's SummaryWriter writes it always has the same few fields in the same order,
so one regular expression finds all points of the wanted curves at once. TensorBoard's own
EventAccumulator parses every record, pictures and all, and computes every checksum in Python.
"""

import re
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_STAMP = re.compile(r"\.tfevents\.(\d+)")
# Event: wall_time = 1 (double), step = 2 (varint, left out where 0), then either
# session_log = 7 {status = 1: START} or summary = 5 {value = 1 {tag = 1, simple_value = 2}}.
# Before it stands a frame of a length below 256, without which bytes of a picture might look alike.
_POINT = (
    rb"\x09(?<=.\x00{7}.{4}\x09)(.{8})(?:\x10([\x80-\xff]*[\x00-\x7f]))?"
    rb"(?:(\x3a\x02\x08\x01)|\x2a.\x0a.\x0a.(%s)\x15(.{4}))"
)
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_Row = tuple[int, float, float]


@dataclass(frozen=True)
class Curve:
    """One scalar's points in the order of their steps: steps, values and clock times, (N,)."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    times: NDArray[np.float64]  # seconds since 1970

    def __len__(self) -> int:
        return len(self.steps)


def read_scalars(folder: Path, names: Collection[str]) -> dict[str, Curve]:
    """The named curves from the event files of a folder, without points where there are none.

    As in TensorBoard, a run that was resumed at a step replaces what was written beyond it, and of
    several points at one step the last counts. Half a record at a file's end is left out.
    """
    rows: dict[bytes, list[_Row]] = {name.encode(): [] for name in names}
    any_name = b"|".join(map(re.escape, rows))
    pattern = re.compile(_POINT % any_name, re.DOTALL)
    for path in event_files(folder):
        _read(path.read_bytes(), pattern, rows)
    return {name.decode(): _curve(points) for name, points in rows.items()}


def event_files(folder: Path) -> list[Path]:
    """A folder's event files, the oldest first (by the second in their names)."""
    found = [path for path in folder.glob("*.tfevents.*") if _STAMP.search(path.name)]
    return sorted(found, key=lambda path: (begun(path), path))


def begun(path: Path) -> int:
    """When an event file was begun, by its name: seconds since 1970."""
    stamp = _STAMP.search(path.name)
    assert stamp, path
    return int(stamp[1])


def write_events(path: Path, events: Iterable[Event]) -> None:
    """A new event file that TensorBoard reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for event in events:
            writer.write(event.SerializeToString())


def scalar_event(name: str, step: int, value: float, time: float = 1.0) -> Event:
    """One point of a curve; time in seconds since 1970."""
    summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
    return Event(step=step, wall_time=time, summary=summary)


def _read(data: bytes, pattern: re.Pattern[bytes], rows: dict[bytes, list[_Row]]) -> None:
    for clock, varint, begins, name, value in pattern.findall(data):
        step = _varint(varint)
        if begins:
            for points in rows.values():
                points[:] = [row for row in points if row[0] < step]
        else:
            rows[name].append((step, _FLOAT.unpack(value)[0], _DOUBLE.unpack(clock)[0]))


@lru_cache(1 << 20)  # the curves of a run, and often all runs, have their points at the same steps
def _varint(data: bytes) -> int:
    """A protocol buffer's integer: seven bits a byte, the lowest first."""
    return sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(data))


def _curve(rows: list[_Row]) -> Curve:
    steps, values, times = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    order = np.argsort(steps, kind="stable")
    last = np.diff(steps[order], append=np.inf) > 0
    chosen = order[last]
    return Curve(steps[chosen].astype(np.int64), values[chosen], times[chosen])

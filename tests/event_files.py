"""Event files written record by record, as TensorBoard reads them."""

from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


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

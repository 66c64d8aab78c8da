"""Event files: written record by record, and read by TensorBoard."""

from collections.abc import Iterable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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


def events(run: Path) -> EventAccumulator:
    """All that TensorBoard reads of a run."""
    everything = {"scalars": 0, "images": 0, "tensors": 0}
    return EventAccumulator(str(run), size_guidance=everything).Reload()


def curve(run: Path, name: str) -> list[tuple[int, float]]:
    """The steps and values of one scalar."""
    return [(point.step, point.value) for point in events(run).Scalars(name)]

"""Curves of groups for TensorBoard's custom scalars page: every group's mean with its band.

tensorboard --logdir FOLDER     then the tab "Custom Scalars"
"""

import re
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)

from asr.scoring.curves import Band
from asr.scoring.events import Curve, scalar_event, write_events

_FILE = "events.out.tfevents.0000000001.compare"
_PARTS = ("mean", "lowest", "highest")


def write_board(
    folder: Path,
    bands: Mapping[str, Mapping[str, Band]],
    runs: Mapping[str, Mapping[str, Curve]],
) -> None:
    """Write bands[group][curve] and runs[run][curve] with a layout that overlays them.

    What an earlier report wrote into the folder is removed: its curves would be overlaid too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.rglob(_FILE):
        old.unlink()
    curves = list(dict.fromkeys(name for group in bands.values() for name in group))
    write_events(folder / _FILE, [_layout_event(curves)])
    for group, by_name in bands.items():
        points = [
            scalar_event(f"{name}/{part}", int(step), float(value))
            for name, band in by_name.items()
            for part, values in zip(_PARTS, (band.mean, band.low, band.high), strict=True)
            for step, value in zip(band.steps, values, strict=True)
        ]
        write_events(folder / "groups" / _safe(group) / _FILE, points)
    for run, by_name in runs.items():
        points = [
            scalar_event(name, int(step), float(value), float(time))
            for name, c in by_name.items()
            for step, value, time in zip(c.steps, c.values, c.times, strict=True)
        ]
        write_events(folder / "runs" / _safe(run) / _FILE, points)


def _layout_event(curves: list[str]) -> Event:
    margin = [
        Chart(title=name, margin=MarginChartContent(series=[_series(name)])) for name in curves
    ]
    lines = [
        Chart(title=name, multiline=MultilineChartContent(tag=[f"^{re.escape(name)}$"]))
        for name in curves
    ]
    layout = Layout(
        category=[
            Category(title="groups: mean and range over seeds", chart=margin),
            Category(title="runs", chart=lines),
        ]
    )
    plugin = SummaryMetadata.PluginData(plugin_name="custom_scalars")
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[layout.SerializeToString()],
        tensor_shape=TensorShapeProto(),
    )
    value = Summary.Value(
        tag="custom_scalars__config__",
        tensor=tensor,
        metadata=SummaryMetadata(plugin_data=plugin),
    )
    return Event(wall_time=1.0, summary=Summary(value=[value]))


def _series(name: str) -> MarginChartContent.Series:
    value, lower, upper = (f"{name}/{part}" for part in _PARTS)
    return MarginChartContent.Series(value=value, lower=lower, upper=upper)


def _safe(name: str) -> str:
    """A name as a folder that TensorBoard lists as one run."""
    return re.sub(r"[^\w.,+=\[\] -]", "-", name).strip(".")[:200] or "runs"

"""Experiment trackers, read back by their own libraries: the scalars of TensorBoard."""

import importlib.util
import json
import struct
import threading
import time
from contextlib import suppress

import pytest
from event_files import events
from tiny_speech import age

from asr import train
from asr.config.loader import flat, read_recipe
from asr.errors import UserError
from asr.io import check_run_folder
from asr.training import trackers
from asr.training.trackers import Trackers, check_installed
from asr.training.trainer import train as train_run

ours = pytest.mark.filterwarnings("ignore")  # those of the trackers' own libraries


@pytest.fixture
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return tmp_path


def tensorboard_points(run):
    age(run)
    board = events(run)
    names = board.Tags()["scalars"]
    return {name: {p.step: p.value for p in board.Scalars(name)} for name in names}


def mlflow_run():
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("layernorm-asr")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def mlflow_points():
    client, run = mlflow_run()
    histories = {n: client.get_metric_history(run.info.run_id, n) for n in run.data.metrics}
    return {name: {p.step: p.value for p in points} for name, points in histories.items()}


def wandb_records(folder):
    """The records of all offline runs, the oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        yield from map(Record.FromString, leveldb_records(path.read_bytes()))


def leveldb_records(content):
    """The records of a LevelDB log, in blocks of 32 kB, after wandb's seven bytes.

    Without one at the end that wandb's process, which goes on after a run, has not written whole.
    """
    assert content.startswith(b":W&B")
    place, parts = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)  # checksum, length, kind
        if place + 7 + size > len(content):
            return
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_points(records):
    points: dict[str, dict[int, float]] = {}
    for record in records:
        row = {
            item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
        }
        for name, value in row.items():
            if not name.startswith("_"):
                points.setdefault(name, {})[int(row["_step"])] = json.loads(value)
    return points


@pytest.mark.slow
@ours
def test_both_have_the_points_of_tensorboard_also_after_a_resume(tiny, places):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    pytest.importorskip("wandb", reason="needs the extra wandb")
    run = places / "run"
    both = "train.trackers=[wandb,mlflow]"
    train_run(read_recipe(tiny, [both, "train.epochs=1"]), run)
    recipe = read_recipe(tiny, [both, "train.epochs=2"])
    train_run(recipe, run, resume=True)

    expected = tensorboard_points(run)
    assert {"train/nll", "valid/wer", "train/learning_rate"} < expected.keys()
    assert [len(expected[name]) for name in ("train/nll", "valid/nll")] == [6, 2]
    near = {n: pytest.approx(points, rel=1e-6) for n, points in expected.items()}
    assert mlflow_points() == near
    records = list(wandb_records(places))
    assert wandb_points(records) == near
    runs = [record.run for record in records if record.run.run_id]
    assert len({one.run_id for one in runs}) == 1  # one run, continued

    _, stored = mlflow_run()
    assert stored.info.run_name == "run" and stored.info.status == "FINISHED"
    assert {one.display_name for one in runs} == {"run"}
    settings = {u.key: json.loads(u.value_json) for u in runs[0].config.update}
    for key, value in flat(recipe).items():
        if key != "train.epochs":
            assert settings[key] == value, key
            assert stored.data.params[key] == str(value), key
    log = (run / "train.log").read_text()
    assert log.count(" wandb: ") == log.count(" mlflow: ") == 2
    check_run_folder(run)  # wandb makes links, but not in here


@ours
def test_mlflow_keeps_a_repeated_step_once(places):
    """A killed run repeats the steps after its last checkpoint, and may lack one of its curves."""
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow.tracking import MlflowClient

    for names, steps in (("a", range(1, 6)), ("ab", range(4, 8))):
        tracker = trackers.MLflowTracker("run", {"seed": 3}, "a1")
        for step in steps:
            tracker.log({name: float(step) for name in names}, step)
        tracker.close("finished")
    for name, expected in (("a", range(1, 8)), ("b", range(4, 8))):
        points = MlflowClient().get_metric_history(tracker.id, name)
        assert [(p.step, p.value) for p in points] == [(step, step) for step in expected]


@pytest.mark.slow
@ours
def test_a_server_that_is_gone_is_reported_once(places, monkeypatch):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    lines = []
    with Trackers({"mlflow": "a1"}, "run", {"seed": 1}, lines.append) as tracking:
        for step in range(5):
            tracking.log({"train/nll": 1.0}, step)
        tracking.feeds[0].thread.join(60)
        for step in range(5, 10):
            tracking.log({"train/nll": 1.0}, step)
    (line,) = lines
    assert line.startswith("mlflow: ") and line.endswith("; the run continues without it")


@pytest.mark.slow
@ours
def test_wandb_without_a_login_is_reported(places, monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="needs the extra wandb").teardown()
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    lines = []
    with Trackers({"wandb": "a1"}, "run", {}, lines.append) as tracking:
        tracking.feeds[0].thread.join(60)
    (line,) = lines
    assert line.startswith("wandb: not logged in")
    import wandb

    wandb.teardown()


class Recorder:
    """A tracker of this test: json is a module that any Python can import."""

    location = "here"

    def __init__(self, *arguments):
        self.arguments, self.points, self.closed = arguments, [], None
        Recorder.last = self

    def log(self, values, step):
        self.points.append((step, values))

    def close(self, status):
        self.closed = status


def tracking_with(monkeypatch, kind, lines):
    monkeypatch.setattr(trackers, "OPEN", {"json": kind})
    return Trackers({"json": "old"}, "name", {"seed": 3}, lines.append)


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_calls_come_in_order_and_the_end_has_its_status(monkeypatch, status):
    lines = []
    with suppress(ZeroDivisionError), tracking_with(monkeypatch, Recorder, lines) as own:
        own.log({"a": 1.0}, 1)
        own.log({"b": 2.0}, 1)
        if status == "finished":
            own.finished = True
        if status == "failed":
            raise ZeroDivisionError
    assert Recorder.last.arguments == ("name", {"seed": 3}, "old")
    assert Recorder.last.points == [(1, {"a": 1.0}), (1, {"b": 2.0})]
    assert Recorder.last.closed == status
    assert lines == ["json: here"]


def test_a_tracker_that_hangs_slows_nothing(monkeypatch):
    hold = threading.Event()

    class Hanging(Recorder):
        def log(self, values, step):
            hold.wait(30)

    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    monkeypatch.setattr(trackers, "CLOSING", 0.2)
    lines, begin = [], time.monotonic()
    with tracking_with(monkeypatch, Hanging, lines) as tracking:
        for step in range(100):
            tracking.log({"a": 1.0}, step)
    assert time.monotonic() - begin < 5
    hold.set()
    behind = "json: more than 5 points behind; the run continues without it"
    assert lines.count(behind) == 1
    assert lines[-1] == "json: not closed within 0.2 s; the end is missing"


def test_a_failure_at_any_call_is_one_line(monkeypatch):
    class Failing(Recorder):
        def log(self, values, step):
            raise SystemExit("quota\nexceeded")

    lines = []
    with tracking_with(monkeypatch, Failing, lines) as tracking:
        for step in range(3):
            tracking.log({"a": 1.0}, step)
            tracking.feeds[0].thread.join(5)
    assert lines == ["json: here", "json: quota exceeded; the run continues without it"]


def test_a_missing_tracker_is_one_line_before_anything_starts(
    tiny, commands, monkeypatch, tmp_path
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "mlflow" else find(n))
    run = tmp_path / "run"
    line = commands.refused(train, tiny, "train.trackers=[mlflow]", "--run", run)
    assert "in the checkout pip install '.[mlflow]'" in line
    assert not run.exists()


def test_the_folder_that_wandb_writes_is_no_package(monkeypatch, tmp_path):
    """./wandb/ is found by import where the package is not installed."""
    (tmp_path / "folder_of_wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="folder_of_wandb is not installed"):
        check_installed(["folder_of_wandb"])
    check_installed(["json"])

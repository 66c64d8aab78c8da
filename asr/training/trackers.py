"""Experiment trackers beside TensorBoard: Weights & Biases and MLflow (train.trackers).

Each gets the recipe as its parameters and the scalars of TensorBoard under the same names and
steps. A resumed run continues the tracker's run, whose id is in the checkpoint.

A server may be slow or gone, so each tracker has a thread, which takes its work from a queue. A
tracker that fails is reported once and then not used any more; training continues.

Where the data go is set as usual for each: WANDB_MODE, WANDB_PROJECT, WANDB_DIR, ...;
MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...
"""

import importlib
import importlib.util
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from asr.errors import UserError, missing_package

PROJECT = "layernorm-asr"
TAG = "layernorm_asr_id"  # of a run of MLflow, which chooses ids itself
MAX_WAITING = 10_000  # calls; later ones are dropped
CLOSING = 30.0  # seconds to send what is left at the end of a run
MAX_KEY, MAX_PARAM = 250, 500  # characters of a parameter's name and value in MLflow
MAX_BATCH = 100  # parameters in one call of MLflow


def check_installed(names: Iterable[str]) -> None:
    """Raise UserError for a tracker that is not installed."""
    for name in names:
        spec = importlib.util.find_spec(name)
        # wandb writes into a folder ./wandb, which Python finds as a package without a file.
        if spec is None or spec.origin is None:
            reason = missing_package(name, name)
            raise UserError(f"train.trackers: {reason}; or set train.trackers=[]")


class WandbTracker:
    """A run of Weights & Biases: project WANDB_PROJECT, written in WANDB_DIR or ./wandb."""

    def __init__(self, name: str, params: Mapping[str, Any], id: str) -> None:
        import wandb

        online = wandb.setup().settings.mode == "online"
        if online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("not logged in: use `wandb login` or WANDB_MODE=offline")
        # Standard output has a progress bar, and our escapes. At the end of the process
        # wandb waits for an answer that is still due.
        settings = wandb.Settings(console="off", silent=True, init_timeout=CLOSING)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            id=id,
            resume="allow",
            config=dict(params),
            allow_val_change=True,
            settings=settings,
        )
        self.location = self.run.url or f"{Path(self.run.dir).parent} (wandb sync uploads it)"

    def log(self, values: Mapping[str, float], step: int) -> None:
        # A resumed run repeats some steps, with equal values, which wandb drops.
        self.run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        self.run.finish(exit_code=int(status == "failed"))


class MLflowTracker:
    """A run of MLflow: experiment MLFLOW_EXPERIMENT_NAME at MLFLOW_TRACKING_URI."""

    STATUS: ClassVar = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self, name: str, params: Mapping[str, Any], id: str) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.metric, self.client = Metric, MlflowClient()
        where = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(where)
        number = experiment.experiment_id if experiment else self.client.create_experiment(where)
        known = next(iter(self.client.search_runs([number], f"tags.{TAG} = '{id}'")), None)
        if known is None:
            known = self.client.create_run(number, run_name=name, tags={TAG: id})
        self.id = known.info.run_id
        self.client.update_run(self.id, status="RUNNING")
        self.location = f"run {self.id} in experiment {where}"
        # A killed run repeats the steps after its checkpoint, which MLflow would keep twice.
        histories = (self.client.get_metric_history(self.id, key) for key in known.data.metrics)
        self.logged = {(point.key, point.step) for points in histories for point in points}
        # MLflow refuses other values: a resumed run keeps the parameters of its start.
        keys = {re.sub(r"[^\w./ -]", "_", key)[:MAX_KEY]: key for key in params}
        new = keys.keys() - known.data.params.keys()
        rows = [Param(name, str(params[keys[name]])[:MAX_PARAM]) for name in sorted(new)]
        for begin in range(0, len(rows), MAX_BATCH):
            self.client.log_batch(self.id, params=rows[begin : begin + MAX_BATCH])

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        new = [name for name in values if (name, step) not in self.logged]
        rows = [self.metric(name, values[name], now, step) for name in new]
        self.client.log_batch(self.id, metrics=rows)

    def close(self, status: str) -> None:
        self.client.set_terminated(self.id, self.STATUS[status])


OPEN = {"wandb": WandbTracker, "mlflow": MLflowTracker}


class Trackers:
    """The trackers of a run, each with its thread. A context, which opens and closes them.

    ids: tracker -> the id of its run. report: prints a line, from the thread that calls log.
    """

    def __init__(
        self,
        ids: Mapping[str, str],
        run: str,
        params: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self.report = report
        self.feeds = [_Feed(name, run, params, id) for name, id in ids.items()]
        self.finished = False  # whether the run has reached its end

    def __enter__(self) -> "Trackers":
        for feed in self.feeds:
            feed.start()
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        status = "failed" if kind else "finished" if self.finished else "stopped"
        for feed in self.feeds:
            feed.put(status)
        end = time.monotonic() + CLOSING
        for feed in self.feeds:
            feed.thread.join(max(0.0, end - time.monotonic()))
            if feed.thread.is_alive():
                feed.lines.put(f"{feed.name}: not closed within {CLOSING:g} s; the end is missing")
        self._report()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Points of curves at a step."""
        for feed in self.feeds:
            feed.put((dict(values), step))
        self._report()

    def _report(self) -> None:
        for feed in self.feeds:
            while not feed.lines.empty():
                self.report(feed.lines.get())


class _Feed:
    """A tracker and the thread that calls it."""

    def __init__(self, name: str, run: str, params: Mapping[str, Any], id: str) -> None:
        self.name = name
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # for the log
        # The points of a step, or the status at the end.
        self.calls: queue.Queue[tuple[dict[str, float], int] | str] = queue.Queue(MAX_WAITING)
        self.failed = False
        # A daemon: the process must not wait at its end for a server.
        arguments = (run, dict(params), id)
        self.thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)

    def start(self) -> None:
        """Import the library, in this thread: a process must not fork during an import."""
        try:
            importlib.import_module(self.name)
        except Exception as error:  # a broken installation
            self._fail(f"cannot be imported ({error})")
        self.thread.start()

    def put(self, call: tuple[dict[str, float], int] | str) -> None:
        """Pass a call on; drop it where the tracker has failed or is far behind."""
        try:
            if not self.failed:
                self.calls.put_nowait(call)
        except queue.Full:
            self._fail(f"more than {MAX_WAITING} points behind")

    def _run(self, *arguments: Any) -> None:
        if self.failed:
            return
        try:
            tracker = OPEN[self.name](*arguments)
            self.lines.put(f"{self.name}: {tracker.location}")
            while not self.failed:
                call = self.calls.get()
                if isinstance(call, str):
                    tracker.close(call)
                    return
                tracker.log(*call)
        except BaseException as error:  # the libraries raise many kinds, SystemExit too
            self._fail(" ".join(str(error).split())[:300] or type(error).__name__)

    def _fail(self, reason: str) -> None:
        if not self.failed:
            self.lines.put(f"{self.name}: {reason}; the run continues without it")
        self.failed = True

"""The lock of a run folder, and signals, with real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from asr.errors import WorkerKilled
from asr.training.signals import SIGNALS, Stop, Stopped

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "signal_trainings.py"
NAMES = ("SIGTERM", "SIGINT", "SIGHUP")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The results of signal_trainings.py."""
    folder = tmp_path_factory.mktemp("held")
    line = [sys.executable, str(SCRIPT), str(folder)]
    ended = subprocess.run(
        line, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout) | {"folder": str(folder)}


def test_two_trainings_do_not_share_a_run_folder(seen):
    lock = seen["lock"]
    assert lock["second"] == [2, 2]
    for line in lock["messages"]:
        assert line.startswith(f"error: {seen['folder']}/shared: process {lock['holder']} on ")
        assert "is training in it; wait until it ends, stop it" in line
    assert len(lock["messages"]) == 2


def test_a_run_in_training_can_be_read(seen):
    assert seen["lock"]["transcribe"] == 0


def test_the_lock_ends_with_its_process(seen):
    assert seen["lock"]["resumed"] == 0 and not seen["lock"]["left"]


def test_a_refused_training_leaves_no_folder(seen):
    assert seen["lock"]["refused"] == [2, False]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_signal_saves_after_the_step(name, seen):
    assert seen[name] == [True, 3, [1, 2]]


@pytest.mark.parametrize("name", NAMES)
def test_after_the_first_signal_the_default_handlers_are_back(name):
    """A Python handler would wait until torch's current operation ends."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop() as stop:
        os.kill(os.getpid(), signal.Signals[name])
        assert stop.signal == name
        assert [signal.getsignal(signal.Signals[each]) for each in NAMES[:2]] == [
            signal.SIG_DFL
        ] * 2
        os.kill(os.getpid(), signal.SIGHUP)  # the terminal's SIGHUP, after the shell's
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_worker_of_torchrun_survives_the_cluster_s_sigterm_and_torchrun_s(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


class Signals:
    """Sends a signal as it is deleted, where Python ignores what a handler raises."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_work_ends_at_its_next_call_of_a_module(recwarn):
    module = nn.Linear(3, 2)
    with Stop() as stop, pytest.raises(Stopped), stop.interruptible():
        module(torch.ones(3))
        Signals()
        module(torch.ones(3))
        pytest.fail("the work continued")
    assert not recwarn.list  # no handler's exception was lost
    module(torch.ones(3))  # outside of such work, modules can be called


def test_a_loader_s_processes_end_by_the_same_signal():
    for gone in (WorkerKilled("gone"), RuntimeError("DataLoader worker exited")):
        with Stop() as stop, pytest.raises(Stopped), stop.interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            raise gone
        with Stop() as stop, pytest.raises(type(gone)), stop.interruptible():
            raise gone


def test_nohup_ignores_sighup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGTERM", "SIGINT"), ("SIGINT", "SIGINT")]
)
def test_a_second_signal_ends_the_run_at_once(first, second, seen):
    """The step is aborted, earlier checkpoints stay intact, and there is no traceback."""
    assert seen[f"{first} {second}"] == [True, -signal.Signals[second], [1], []]

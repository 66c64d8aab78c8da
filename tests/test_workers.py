"""Worker processes of the loader: signals, the trainer's sudden end, and what they print."""

import multiprocessing
import os
import select
import signal
import socket
import time
from multiprocessing import resource_sharer
from multiprocessing.connection import Client
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.utils.data import DataLoader

from asr.data.corpus import read_manifest
from asr.data.loader import measure_statistics, read_batches, start_worker
from asr.errors import WorkerKilled
from asr.features.fbank import Fbank
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm

fork = multiprocessing.get_context("fork")


def interrupted(worker):
    """Ctrl-C before the worker ignores it."""
    os.kill(os.getpid(), signal.SIGINT)
    start_worker(worker)


def test_a_signal_before_a_worker_handles_it(capfd):
    batches = read_batches(DataLoader(range(3), num_workers=2, worker_init_fn=interrupted))
    assert [int(batch) for batch in batches] == [0, 1, 2]
    assert capfd.readouterr().err == ""
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())  # none is left blocked here


def test_ctrl_c_while_statistics_are_measured(tiny, monkeypatch, capfd):
    """It is for the trainer, though the terminal sends it to the workers, too."""
    load = FrontEnd.load

    def interrupted_load(self, *args):
        if multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGINT)
        return load(self, *args)

    monkeypatch.setattr(FrontEnd, "load", interrupted_load)
    front_end = FrontEnd(Fbank(8000), MeanVarianceNorm("global"))
    measure_statistics(read_manifest(tiny.parent / "valid.tsv"), front_end, 1, (1.0,))
    assert front_end.norm.groups and capfd.readouterr().err == ""


class NoSpace:
    """Cannot be passed to another process, as where /dev/shm is full."""

    def __reduce__(self):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")


def test_a_batch_that_cannot_be_passed(capfd):
    lost = DataLoader(range(3), num_workers=1, collate_fn=lambda batch: NoSpace())
    lost.worker_init_fn = start_worker
    with pytest.raises(WorkerKilled, match="or /dev/shm is full"):
        next(read_batches(lost))
    assert capfd.readouterr().err == ""


def ends_with(write, parent):
    """What a worker writes before it ends, if its parent is killed at that moment."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        fork.Process(target=write, args=(writer, os.getpid()), daemon=True).start()
        parent(reader)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as file:
        return file.read()  # to the end of the last process that can write


def test_a_worker_ends_with_its_parent():
    def work(writer, parent):
        start_worker(0)
        os.write(writer, b"started ")
        time.sleep(10)
        os.write(writer, b"continued")

    begin = time.monotonic()
    assert ends_with(work, lambda reader: select.select([reader], [], [])) == b"started "
    assert time.monotonic() - begin < 5


def test_a_worker_whose_parent_ended_before_it_started():
    """torch's own check compares the parent with the one that it has found at the start."""

    def work(writer, parent):
        while os.getppid() == parent:
            time.sleep(0.001)
        start_worker(0)
        os.write(writer, b"continued")

    assert ends_with(work, lambda reader: None) == b""


@pytest.mark.parametrize("fault", ["the trainer ends", "another"])
def test_what_the_thread_that_passes_tensors_prints(fault, capfd):
    def work(connection):
        start_worker(0)
        connection.send_bytes(ForkingPickler.dumps(torch.arange(5)))
        connection.send(resource_sharer._resource_sharer._address)
        connection.recv()

    ours, theirs = fork.Pipe()
    worker = fork.Process(target=work, args=(theirs,))
    worker.start()
    passed, address = ours.recv_bytes(), ours.recv()
    if fault == "another":
        with Client(address, authkey=worker.authkey) as client:
            client.send(("no such key", os.getpid()))
    else:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
    assert torch.equal(ForkingPickler.loads(passed), torch.arange(5))  # it still serves others
    ours.send(None)
    worker.join()
    printed = capfd.readouterr().err
    assert "KeyError: 'no such key'" in printed if fault == "another" else printed == ""

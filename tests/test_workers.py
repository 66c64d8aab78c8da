"""Worker processes of the loader: signals, the trainer's sudden end, and what they print."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from asr.data.corpus import read_manifest
from asr.data.loader import measure_statistics, read_batches, start_worker
from asr.errors import WorkerKilled
from asr.features.fbank import Fbank
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm

fork = multiprocessing.get_context("fork")


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


def test_workers_of_a_forkserver_go_on(tmp_path):
    """Python 3.14 starts processes by one, which is the parent that the system names."""
    script = tmp_path / "script.py"
    script.write_text(FORKSERVER)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2]\n", "")


FORKSERVER = """
import multiprocessing
from torch.utils.data import DataLoader
from asr.data.loader import start_worker

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    print([int(x) for x in DataLoader(range(3), num_workers=1, worker_init_fn=start_worker)])
"""


class NoSpace:
    """Cannot be passed to another process, as where /dev/shm is full."""

    def __reduce__(self):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")


def test_a_batch_that_cannot_be_passed(capfd):
    lost = read_batches(range(3), 1, collate_fn=lambda batch: NoSpace())
    with pytest.raises(WorkerKilled, match="or /dev/shm is full"):
        next(lost)
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

"""Fixtures that several files share: a tiny corpus, a run trained on it, and the commands."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_speech import Commands, make_corpus, make_recipe


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell starts background jobs with Ctrl-C ignored, nohup SIGHUP; tests send both."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Names a file or folder of real data, or skips the test where there is none."""
    folder = Path(os.environ.get("ASR_SHARED", Path(__file__).parents[2] / "shared"))

    def part(name: str) -> Path:
        if not (folder / name).exists():
            pytest.skip(f"no {name} in {folder}; ASR_SHARED names such a folder")
        return folder / name

    return part


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A recipe with its manifests in the same folder."""
    folder = tmp_path_factory.mktemp("tiny")
    make_corpus(folder)
    return make_recipe(folder)


@pytest.fixture(scope="session")
def tiny_run(tiny, tmp_path_factory) -> Path:
    """The finished training of that recipe; tests only read it."""
    from asr.config.loader import read_recipe
    from asr.training.run import train  # imported here because it takes seconds

    run = tmp_path_factory.mktemp("runs") / "tiny"
    train(read_recipe(tiny), run)
    return run


@pytest.fixture
def commands(monkeypatch, capsys) -> Commands:
    """Runs a command's main in this process."""
    return Commands(monkeypatch, capsys)


@pytest.fixture
def asr_prepare(monkeypatch, capsys):
    """Runs asr.prepare: (exit code, standard output, lines of standard error)."""
    from asr import errors, prepare

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prepare", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            errors.run_command(prepare.main)
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return caught.value.code, output.out, output.err.splitlines()

    return run


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """Keep what is imported by now from later collections of garbage: each validation has one."""
    gc.collect()
    gc.freeze()

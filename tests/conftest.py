"""Fixtures that several files share: a tiny corpus, a run trained on it, and the commands."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # torch takes seconds, and the process that distributes the tests needs none
    from tiny_speech import Commands

# Files of few tests that take long, which would otherwise run last, on one core alone.
SLOW = (
    "test_distributed", "test_quickstart", "test_onnx_export", "test_train", "test_norm_settings",
    "test_evaluate", "test_lstm_tracing", "test_lstm_cluster", "test_lstm_triton", "test_notebook",
    "test_pretrained", "test_trackers", "test_processes", "test_crash_safety",
)  # fmt: skip


# Variables by which a user chooses backends, servers, accounts and ranks; with an underscore at
# the end, all that begin so. CUDA_, OMP_ and the compiler's say which machine the tests run on.
SETTINGS = (
    "LAYERNORM_LSTM_BACKEND", "ASR_", "HF_", "HUGGING_", "MLFLOW_", "WANDB_", "TORCHELASTIC_",
    "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "XDG_", "LANG", "LANGUAGE", "LC_", "COLUMNS",
    "PYTHONPATH", "PYTHONWARNINGS",
)  # fmt: skip
KEPT = ("ASR_SHARED",)


def pytest_configure(config: pytest.Config) -> None:
    """Give tests an empty home folder and no settings of the person who runs them.

    Else a login or a matplotlibrc would change results. Compiled kernels stay in that person's
    cache, since compiling them takes a minute.
    """
    from asr.io import user_cache

    os.environ.setdefault("LAYERNORM_LSTM_CACHE", str(user_cache()))
    if shared := os.environ.get("ASR_SHARED"):
        os.environ["ASR_SHARED"] = str(Path(shared).absolute())
    for name in set(os.environ) - set(KEPT):
        if any(name == key or (key.endswith("_") and name.startswith(key)) for key in SETTINGS):
            del os.environ[name]
    home = TemporaryDirectory(prefix="asr-home-")
    os.environ["HOME"] = home.name
    config.add_cleanup(home.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow files first; each file's tests keep their order."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory) -> None:
    """Tests start in an empty folder: what lies in the checkout's runs/ and data/ changes none."""
    os.chdir(tmp_path_factory.mktemp("work"))


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
    from tiny_speech import make_corpus, make_recipe

    folder = tmp_path_factory.mktemp("tiny")
    make_corpus(folder)
    return make_recipe(folder)


@pytest.fixture(scope="session")
def tiny_run(tiny, tmp_path_factory) -> Path:
    """The finished training of that recipe; tests only read it."""
    from asr.config.loader import read_recipe
    from asr.training.trainer import train  # imported here because it takes seconds

    run = tmp_path_factory.mktemp("runs") / "tiny"
    train(read_recipe(tiny), run)
    return run


@pytest.fixture
def run(tiny_run, tmp_path) -> Path:
    """A copy of that run, which a test may change."""
    return shutil.copytree(tiny_run, tmp_path / "run")


@pytest.fixture
def large_manifests(tmp_path, monkeypatch) -> None:
    """Every manifest counts as large: it is read in blocks of a few rows and has an index."""
    from asr.data import line_index, manifest

    monkeypatch.setattr(line_index, "SMALL", 0)
    monkeypatch.setattr(manifest, "BLOCK", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def commands(monkeypatch, capsys) -> "Commands":
    """Runs a command's main in this process."""
    from tiny_speech import Commands

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


@pytest.fixture
def drawn() -> None:
    """For tests of pictures."""


@pytest.fixture(autouse=True)
def empty_pictures(request, monkeypatch) -> None:
    """Drawing is slow: without the fixture `drawn` a picture is a black pixel, a chart empty."""
    if "drawn" in request.fixturenames:
        return
    if plots := sys.modules.get("asr.analysis.plots"):
        pixel = plots.np.zeros((1, 1, 3), plots.np.uint8)
        monkeypatch.setattr(plots, "_pixels", lambda *_: pixel)
    if comparison := sys.modules.get("asr.analysis.comparison_report"):
        for name in ("draw_curves", "draw_seeds"):
            monkeypatch.setattr(comparison, name, lambda *_: (b"", "<svg></svg>"))


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """Keep what is imported by now from later collections of garbage: each validation has one."""
    gc.collect()
    gc.freeze()

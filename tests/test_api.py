"""The Python interface: one import, runs, comparisons, errors of one line."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from event_files import events
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import asr
from asr.analysis.significance import paired_bootstrap
from asr.training.oom import CAPACITIES


@pytest.fixture(scope="module")
def two_runs(tiny, tmp_path_factory):
    """Runs of two norms, trained and evaluated through the interface."""
    folder = tmp_path_factory.mktemp("api")
    before = dict(os.environ)
    runs = []
    for norm in ("none", "ba"):
        keys = [f"model.listener.norm={norm}", "train.steps=3", "train.log_every=1"]
        runs.append(asr.api.train(tiny, keys, folder / norm))
    scores = [run.evaluate("test") for run in runs]
    added = dict(os.environ).items() - before.items()
    # torch sets the first itself.
    assert {name for name, _ in added} <= {"TORCHINDUCTOR_CACHE_DIR", *CAPACITIES}
    assert before.keys() <= os.environ.keys()
    return runs, scores


def test_importing_the_package_imports_nothing_else():
    code = "import sys, asr; dir(asr); asr.__version__\n"
    code += "print({'torch', 'numpy', 'pydantic', 'asr.api'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_history_is_what_tensorboard_has(two_runs):
    (run, _), _ = two_runs
    board = events(run.folder)
    rows = run.history()
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    names = set().union(*rows) - {"step"}
    assert names == set(board.Tags()["scalars"]) and "train/nll" in names
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        assert points == [(point.step, point.value) for point in board.Scalars(name)]
        assert run.metrics[name] == points[-1][1]


def test_a_run(two_runs, tmp_path):
    (run, _), _ = two_runs
    assert run.finished and run.recipe.train.steps == 3
    assert repr(run) == f"Run({str(run.folder)!r})" and os.fspath(run) == str(run.folder)
    assert f"train.init={run}" == f"train.init={run.folder}"
    assert asr.Run(str(run.folder)).metrics == run.metrics
    recognizer = run.load()
    assert isinstance(recognizer, asr.Recognizer)
    assert asr.load(run, beam=3, device="cpu").decode.beam == 3
    with pytest.raises(asr.UserError, match=f"{tmp_path}/missing: there is no such run"):
        asr.Run(tmp_path / "missing")


def test_evaluate_writes_what_the_command_writes(two_runs):
    (run, _), (score, _) = two_runs
    folder = run.folder / "evaluate" / "test"
    files = {path.name for path in folder.iterdir()}
    assert {"score.json", "hypotheses.tsv", "alignment.txt", "page.html"} <= files
    errors = score.substitutions + score.deletions + score.insertions
    assert score.wer == errors / score.words and len(score.utterances) == 4


def test_compare_has_the_difference_interval_and_p(two_runs, monkeypatch):
    runs, scores = two_runs
    (untested,) = (r for r in asr.api.compare(runs).rows() if r["figure"] == "WER of test")
    assert untested["p"] is untested["low"] is None  # of four utterances
    monkeypatch.setattr("asr.analysis.comparison.MIN_UNITS", 4)
    comparison = asr.api.compare(runs)
    row = next(row for row in comparison.rows() if row["figure"] == "WER of test")
    expected = paired_bootstrap(*scores)
    assert (row["first"], row["second"]) == ("listener.norm=none", "listener.norm=ba")
    assert row["difference"] == expected.wer and (row["low"], row["high"]) == expected.interval
    assert row["p"] == expected.p and row["tested_over"] == "utterances" and row["seeds"] == 1
    np.testing.assert_allclose(row["second_value"] - row["first_value"], row["difference"])
    results = comparison.results()
    assert [(r["figure"], r["listener.norm"]) for r in results[:2]] == [
        ("WER of test", "none"), ("WER of test", "ba"),
    ]  # fmt: skip
    assert [row["mean"] for row in results[:2]] == [score.wer for score in scores]
    assert all(row["runs"] == 1 and row["low"] is row["sd"] is None for row in results)
    assert f"none & ${100 * scores[0].wer:.2f}$ & " in comparison.to_latex()
    assert comparison.to_csv().count("\n") == 1 + len(results) == 5


def test_a_finished_run_logs_what_was_chosen_and_its_best_figures(two_runs):
    """Read from the events by TensorBoard; the first run has the norm that is no default."""
    runs, _ = two_runs
    for run, norm in zip(runs, ("none", "ba"), strict=True):
        board = events(run.folder)
        content = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        settings = HParamsPluginData.FromString(content).session_start_info.hparams
        assert settings["model.listener.norm"].string_value == norm  # set in both
        assert {"seed", "train.steps", "data.train", "model.kind"} <= set(settings)
        assert not {"run", "decode.beam", "model.speller.norm"} & set(settings)
        assert run.metrics["best/nll"] == min(point.value for point in board.Scalars("valid/nll"))


def test_nothing_is_synthesised_for_a_training_that_cannot_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(asr.UserError, match="this machine has no such GPU"):
        asr.api.train("demo", ["train.device=cuda:99"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call",
    [
        lambda run: asr.api.train("recipes/missing.yaml"),
        lambda run: asr.api.train("demo", ["train.stepz=3"]),
        lambda run: asr.api.train("demo", "train.steps=3"),
        lambda run: asr.api.compare(run),
        lambda run: asr.api.compare(["missing"]),
        lambda run: asr.api.compare([]),
        lambda run: asr.load("missing"),
        lambda run: asr.load(run, device="gpu"),
        lambda run: run.evaluate("missing"),
        lambda run: run.evaluate("test", out=os.devnull),
    ],
)
def test_a_mistake_is_one_line(two_runs, call):
    (run, _), _ = two_runs
    with pytest.raises(asr.UserError) as caught:
        call(run)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_interrupted_training_is_saved_and_resumes(tiny, tmp_path):
    """As a notebook's stop button does: SIGINT to a training that runs."""
    code = (
        "import os, signal, sys, asr\n"
        "from asr.training import trainer\n"
        "take, taken = trainer.take_step, []\n"
        "def step(*args, **kwargs):\n"
        "    taken.append(1)\n"
        "    if len(taken) == 2:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return take(*args, **kwargs)\n"
        "trainer.take_step = step\n"
        "call = lambda: asr.api.train(sys.argv[1], ['train.steps=4'], sys.argv[2], resume=True)\n"
        "try:\n"
        "    call()\n"
        "except KeyboardInterrupt as error:\n"
        "    print(error)\n"
        "print(call().finished, len(taken))\n"
    )
    line = [sys.executable, "-c", code, str(tiny), str(tmp_path / "run")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resume=True continues" in done.stdout and done.stdout.endswith("True 4\n")


@pytest.mark.parametrize("name", ["google", "torchaudio", "yaml"])
def test_a_package_of_an_extra_that_is_not_installed(name):
    code = f"import sys; sys.modules[{name!r}] = None; import asr; asr.load"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"ImportError: the package \w+ is not installed: pip install .*", last)

"""asr.sweep: the grid, resuming, failures, and processes that end when it is stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asr import sweep
from asr.cost import duration, pace
from asr.errors import UserError
from asr.grid import read_grid, split_values
from asr.recipe import read_recipe, write_recipe
from asr.runs import expand, finished, last_error
from asr.training.checkpoint import list_checkpoints

ROOT = Path(__file__).parent.parent
QUICK = ["train.steps=1", "train.wer_utterances=1", "train.samples=0"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a,b,c", ["a", "b", "c"]),
        ("[0.9,1.1]", ["[0.9,1.1]"]),
        ("[0.9,1.1],[1.0]", ["[0.9,1.1]", "[1.0]"]),
        ("{a: 1, b: [2, 3]}, null", ["{a: 1, b: [2, 3]}", "null"]),
        ("'a,[b',c", ["'a,[b'", "c"]),
        ("a,", ["a", ""]),
        ("", [""]),
    ],
)
def test_commas_within_brackets_and_quotes_belong_to_the_value(text, values):
    assert split_values(text) == values


def test_every_combination_is_a_run_named_by_what_varies(tiny):
    trials = read_grid(
        tiny, ["model.listener.norm=none,ba", "features.speed=[0.9,1.1],[1]", "seed=7"]
    )
    assert [trial.name for trial in trials] == [
        "listener.norm=none,speed=[0.9,1.1]",
        "listener.norm=none,speed=[1]",
        "listener.norm=ba,speed=[0.9,1.1]",
        "listener.norm=ba,speed=[1]",
    ]
    assert trials[2].recipe.model.listener.norm == "ba" and trials[2].recipe.seed == 7
    assert trials[2].recipe.features.speed == (0.9, 1.1)
    assert [t.name for t in read_grid(tiny, [])] == ["run"]


def test_names_are_folders_whatever_the_values(tiny):
    trials = read_grid(tiny, ["data.valid=a/b.tsv,a-b.tsv,../c d.tsv"])
    names = [trial.name for trial in trials]
    assert len(set(names)) == 3 and not any(set(name) & set("/ ") for name in names)


@pytest.mark.parametrize(
    ("grid", "line"),
    [
        (["model.listener.nrom=ba"], "listener.nrom is not a recipe key. Did you mean 'norm'"),
        (["seed="], "'seed=' has an empty value"),
        (["seed=1,,2"], "'seed=1,,2' has an empty value"),
        (["seed"], "'seed' is not of the form"),
        (["seed=1,1"], "'seed=1,1' has a value twice"),
        (["seed=1", "seed=2"], "seed stands twice"),
        (["run=a,b"], "names its runs itself"),
        (["seed=1,2", "model.listener.hidden=5,-3"], "(of seed=1 model.listener.hidden=-3)"),
        (["seed=1", "--jobs", "0"], "--jobs 0: must be a whole number"),
        (["seed=" + ",".join(map(str, range(101))), "train.steps="
          + ",".join(map(str, range(1, 101)))], "a grid of 10100 runs"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_start_nothing(grid, line, tiny, commands, tmp_path):
    assert line in commands.refused(sweep, tiny, *grid, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_recipe_is_refused(tiny, commands, tmp_path):
    (tmp_path / "seed=1").mkdir()
    write_recipe(read_recipe(tiny, ["train.steps=3"]), tmp_path / "seed=1" / "recipe.yaml")
    line = commands.refused(sweep, tiny, "seed=1,2", "train.steps=4", "--out", tmp_path)
    assert "holds a run of another recipe (train.steps = 3, now 4)" in line


def test_a_sweep_trains_evaluates_skips_what_is_done_and_names_what_failed(
    tiny, commands, tmp_path
):
    """One of two fails by itself: its manifest is not there."""
    missing = tiny.parent / "gone.tsv"
    grid = [f"data.train={tiny.parent / 'train.tsv'},{missing}", *QUICK]
    out = tmp_path / "s"
    begin = (sweep, tiny, *grid, "--out", out, "--jobs", "2", "--evaluate", "test")
    code, said, _ = commands(*begin)
    good, bad = sorted(out.iterdir(), key=lambda run: "gone" in run.name)
    assert code == 1 and "1 of 2 runs are done" in said
    assert f"failed: {bad.name}: data.train: {missing} is not there" in said
    assert finished(good) == 1 and (good / "evaluate" / "test" / "score.json").exists()
    before = (good / "train.log").read_text()
    (good / "evaluate" / "test" / "score.json").unlink()
    missing.write_text((tiny.parent / "train.tsv").read_text())
    try:
        code, said, _ = commands(*begin)
    finally:
        missing.unlink()
    assert code == 0 and "0 of them done already" in said and "2 of 2 runs are done" in said
    assert (good / "train.log").read_text() == before  # only its evaluation was made anew
    assert commands(*begin)[1].startswith("2 runs in") and finished(bad) == 1


def test_a_killed_sweep_goes_on_where_it_stopped(tiny, tmp_path):
    """SIGTERM stops the training process too; the same command resumes from its checkpoint."""
    command = [sys.executable, "-m", "asr.sweep", str(tiny), "--out", str(tmp_path)]
    command += ["train.save_every=1", "train.log_every=1", "train.validate_every=100000"]
    many = subprocess.Popen([*command, "train.epochs=100000"], cwd=ROOT, stdout=subprocess.PIPE)
    run = tmp_path / "run"
    wait_for(lambda: len(list_checkpoints(run)) > 0)
    many.send_signal(signal.SIGTERM)
    said, _ = many.communicate(timeout=60)
    assert many.returncode == 130 and b"the same command goes on" in said
    step = list_checkpoints(run)[-1].step
    time.sleep(0.5)
    assert list_checkpoints(run)[-1].step == step and finished(run) is None  # nobody writes there
    again = subprocess.Popen([*command, "train.epochs=100000"], cwd=ROOT, stdout=subprocess.PIPE)
    wait_for(lambda: list_checkpoints(run)[-1].step > step)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert "resuming tiny" in (run / "train.log").read_text()
    points = EventAccumulator(str(run)).Reload().Scalars("train/nats")
    assert [p.step for p in points] == sorted({p.step for p in points})


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def sleepers(folder, count, monkeypatch, code="import time; time.sleep(60)"):
    """Jobs whose command sleeps instead of training."""
    monkeypatch.setattr(
        sweep.Job, "next_command", lambda job: [sys.executable, "-c", code], raising=True
    )
    return [
        sweep.Job(Path("r"), type("T", (), {"name": str(n)}), folder / str(n)) for n in range(count)
    ]


def test_a_folder_in_use_is_left_alone(tmp_path, monkeypatch):
    first, second = sleepers(tmp_path, 2, monkeypatch)
    second.folder = first.folder
    assert first.start(1)
    try:
        with pytest.raises(UserError, match="another process is training in its folder"):
            second.start(1)
    finally:
        sweep.stop([first.process])
    assert first.process.returncode == -signal.SIGTERM
    assert second.start(1)  # the lock ended with its process
    second.process.kill()
    second.process.wait()


def test_jobs_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (job,) = sleepers(tmp_path, 1, monkeypatch, "import os; print(os.environ['OMP_NUM_THREADS'])")
    job.start(3)
    job.process.wait()
    assert (job.folder / "console.log").read_text().endswith("\n3\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # what the user says stands
    job.start(3)
    job.process.wait()
    assert (job.folder / "console.log").read_text().endswith("\n7\n")


LOG = """2026-01-02 03:04:00,000 training x: 1 M parameters
2026-01-02 03:04:10,000 step 10/100  epoch 1  objective 3.0  nats 2.0  12x real time
2026-01-02 03:04:15,000 step 20/100  epoch 1  objective 3.0  nats 2.0  12x real time
2026-01-02 03:04:55,000 step 20  validation: nats 2.0
2026-01-02 03:05:00,000 step 30/100  epoch 1  objective 3.0  nats 2.0  12x real time
"""


def test_a_run_that_exists_tells_the_pace(tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    found = pace(tmp_path)
    assert (found.total, found.step, found.seconds, found.audio) == (100, 30, 0.5, 6.0)
    assert pace(tmp_path / "none") is None
    assert [duration(s) for s in (45, 600, 7500)] == ["45 s", "10 min", "2 h 05 min"]


def test_a_dry_run_prints_the_grid_and_what_is_left(tiny, commands, tmp_path):
    for seed, text in ((1, LOG), (2, LOG + "2026-01-02 03:06:00,000 finished at step 100; x\n")):
        run = tmp_path / f"seed={seed}"
        run.mkdir()
        (run / "train.log").write_text(text)
    code, out, _ = commands(
        sweep, tiny, "seed=1,2,3", "--dry-run", "--out", tmp_path, "--jobs", "2"
    )
    lines = {line.split()[0]: " ".join(line.split()) for line in out.splitlines()}
    assert code == 0 and lines["seed=1"] == "seed=1 100 0.17 50 s stopped at step 30"
    assert lines["seed=2"].endswith("50 s done")
    assert lines["seed=3"] == "seed=3 100 0.17 50 s to do"
    # 70 and 100 steps of 0.5 s and 6 s of audio, two at a time
    assert out.splitlines()[-1].startswith("3 runs; left: 0.28 audio-hours, about 42 s with 2")
    assert not (tmp_path / "seed=3").exists()


def test_folders_of_runs(tmp_path):
    for name in ("seed=10", "seed=2", "other"):
        (tmp_path / name).mkdir()
    for name in ("seed=10", "seed=2"):
        (tmp_path / name / "console.log").write_text("$ a\nerror: old\n\n$ b\nOSError: new\n")
    assert [run.name for run in expand([tmp_path, tmp_path / "seed=2"])] == ["seed=2", "seed=10"]
    assert last_error(tmp_path / "seed=2") == " (OSError: new)"
    assert os.fspath(tmp_path) and last_error(tmp_path) == ""

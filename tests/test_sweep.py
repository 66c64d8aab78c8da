"""asr.sweep: the grid, resuming, failures, and processes that end when it is stopped."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asr import sweep
from asr.errors import UserError
from asr.recipe import read_recipe, write_recipe
from asr.runs import cost
from asr.runs.cost import duration, pace
from asr.runs.folder import expand, finished, last_error
from asr.runs.grid import read_grid
from asr.runs.reading import HOURS, SECONDS, VALID
from asr.scoring.events import scalar_event, write_events
from asr.training.checkpoint import list_checkpoints


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
        (["seed=1,2", "--evaluate", "tset"], "--split tset: neither a manifest"),
        (["decode.beam=1,4"], "would train the same model 2 times"),
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


def test_a_run_that_was_tuned_is_still_the_grids(tiny, commands, tmp_path):
    (tmp_path / "seed=1").mkdir()
    write_recipe(read_recipe(tiny, ["decode.beam=3"]), tmp_path / "seed=1" / "recipe.yaml")
    (trial, _) = read_grid(tiny, ["seed=1,2"])
    sweep.check_folder(trial, tmp_path / "seed=1")
    (trial, _) = read_grid(tiny, ["seed=1,2", "decode.beam=2"])
    with pytest.raises(UserError, match=r"decode\.beam = 3, now 2"):
        sweep.check_folder(trial, tmp_path / "seed=1")


def test_a_killed_training_goes_on_and_is_evaluated(tiny, commands, tmp_path):
    """The one test whose processes are ours: killed, resumed, evaluated, then nothing is left."""
    run, splits = tmp_path / "run", ["--evaluate", "test"]
    quick = ["train.steps=20", "train.save_every=1", "train.samples=0", "train.validate_every=1000"]
    begin = (sweep, tiny, *quick, "--out", tmp_path, *splits)
    with once(lambda: list_checkpoints(run), lambda: kill_trainer(run)):
        code, said, _ = commands(*begin)
    assert code == 1 and "run: exit code -9; see " in said and finished(run) is None
    code, said, _ = commands(*begin)
    assert code == 0 and "1 of 1 runs are done" in said and finished(run) == 20
    assert "resuming tiny" in (run / "train.log").read_text()
    points = EventAccumulator(str(run)).Reload().Scalars("train/nats")
    assert [p.step for p in points] == list(range(1, 21))
    assert (run / "evaluate" / "test" / "score.json").exists()
    assert "1 of them done already" in commands(*begin)[1]


@contextmanager
def once(condition, act):
    """Meanwhile: act as soon as the condition holds."""

    def watch():
        wait_for(condition)
        act()

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    watcher.join()


def kill_trainer(run):
    """SIGKILL to the one process that was started with this folder."""
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    (pid,) = (p for p in mine if f"\0{run}\0" in Path(f"/proc/{p}/cmdline").read_text())
    os.kill(int(pid), signal.SIGKILL)


STAND_IN = """
import pathlib, sys, time
module, *line = sys.argv[1:]
if module == "asr.evaluate":
    run, (_, split) = pathlib.Path(line[0]), line[1:]
    (run / "evaluate" / split).mkdir(parents=True)
    (run / "evaluate" / split / "score.json").touch()
    sys.exit(2 if (run / "broken").exists() else 0)
assert module == "asr.train" and line[-3] == "--run" and line[-1] == "--resume"
run, settings = pathlib.Path(line[-2]), dict(pair.split("=", 1) for pair in line[1:-3])
if not pathlib.Path(settings["data.train"]).exists():
    sys.exit(f"error: data.train: {settings['data.train']} is not there")
step = len((run / "steps").read_text()) if (run / "steps").exists() else 0
for number in range(step, int(settings["train.steps"])):
    with (run / "steps").open("a") as file:
        file.write(".")
    time.sleep(0.01)
with (run / "train.log").open("a") as file:
    file.write(f"finished at step {settings['train.steps']}\\n")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """In place of asr.train and asr.evaluate: what they leave in a folder, without torch."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(sweep, "PYTHON", (sys.executable, str(script)))


def test_a_sweep_skips_what_is_done_and_names_what_failed(tiny, commands, tmp_path, stand_in):
    """One of two fails by itself: its manifest is not there."""
    there, missing, out = tiny.parent / "train.tsv", tmp_path / "gone.tsv", tmp_path / "s"
    grid = [f"data.train={there},{missing}", "train.steps=2"]
    begin = (sweep, tiny, *grid, "--out", out, "--jobs", "2", "--evaluate", "test")
    code, said, _ = commands(*begin)
    runs = filter(Path.is_dir, out.iterdir())
    good, bad = sorted(runs, key=lambda run: "gone" in run.name)
    assert code == 1 and "1 of 2 runs are done" in said
    assert f"failed: {bad.name}: data.train: {missing} is not there" in said
    assert finished(good) == 2 and (good / "evaluate" / "test" / "score.json").exists()
    shutil.rmtree(good / "evaluate")
    missing.touch()
    code, said, _ = commands(*begin)
    assert code == 0 and "0 of them done already" in said and "2 of 2 runs are done" in said
    assert (good / "train.log").read_text().count("finished") == 1  # only evaluated anew
    assert finished(bad) == 2 and (bad / "evaluate" / "test" / "score.json").exists()
    consoles = [(run / "console.log").read_text() for run in (good, bad)]
    assert commands(*begin)[1].startswith(f"2 runs in {out}, 2 of them done already\n2 of 2 runs")
    assert [(run / "console.log").read_text() for run in (good, bad)] == consoles
    shutil.rmtree(good / "evaluate")
    (good / "broken").touch()  # audio that cannot be read: scored as empty, and exit code 2
    code, said, _ = commands(*begin)
    assert code == 0 and "not all could be decoded" in said and "2 of 2 runs are done" in said


def test_a_sweep_goes_on_without_its_console(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as console:
        monkeypatch.setattr("sys.stdout", console)
        assert sweep.sweep([], 1, tmp_path) == 0
        monkeypatch.undo()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_sweep_stops_its_trainings(
    number, tiny, commands, tmp_path, stand_in, monkeypatch
):
    """The same command goes on from there."""
    monkeypatch.setattr(sweep, "_PATIENCE", 0.2)
    steps, train = tmp_path / "run" / "steps", tiny.parent / "train.tsv"
    begin = (sweep, tiny, f"data.train={train}", "train.steps=1000", "--out", tmp_path)
    with once(steps.exists, lambda: os.kill(os.getpid(), number)):
        code, said, _ = commands(*begin)
    assert code == 130 and said.endswith("stopped; the same command goes on from here\n")
    begun = len(steps.read_text())
    assert 0 < begun < 1000 and finished(steps.parent) is None
    time.sleep(0.1)
    assert len(steps.read_text()) == begun  # nobody writes there
    steps.write_text("." * 990)
    assert commands(*begin)[0] == 0 and len(steps.read_text()) == 1000


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def sleepers(folder, count, monkeypatch, code="import time; time.sleep(60)"):
    """Jobs whose command sleeps instead of training."""
    monkeypatch.setattr(
        sweep.Job, "next_command", lambda job: [sys.executable, "-c", code], raising=True
    )
    return [
        sweep.Job(Path("r"), type("T", (), {"name": str(n)}), folder / str(n)) for n in range(count)
    ]


def test_a_folder_in_use_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "_PATIENCE", 0.2)
    first, second = sleepers(tmp_path, 2, monkeypatch)
    second.folder = first.folder
    assert first.start(1)
    try:
        with pytest.raises(UserError, match="another process is training in its folder"):
            second.start(1)
    finally:
        sweep.stop([first.process], told=False)
    assert first.process.returncode == -signal.SIGTERM
    assert second.start(1)  # the lock ended with its process
    second.process.kill()
    second.process.wait()


# As a training answers (asr/training/signals.py): the first signal is waited for, the second ends.
LONG_STEP = """
import signal, sys, time
asked = []
def take(number, frame):
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    asked.append(number)
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, take)
print("works", flush=True)
while not asked:
    time.sleep(0.01)
time.sleep(1.0)  # the step that is under way
sys.exit(3)  # saved
"""


def test_a_training_that_ctrl_c_has_reached_is_left_to_end_its_step(tmp_path, monkeypatch):
    (job,) = sleepers(tmp_path, 1, monkeypatch, LONG_STEP)
    assert job.start(1)
    wait_for(lambda: "works" in (job.folder / "console.log").read_text().splitlines())
    job.process.send_signal(signal.SIGINT)
    sweep.stop([job.process], told=True)
    assert job.process.returncode == 3


def test_whoever_does_not_want_to_wait_asks_again(tmp_path, monkeypatch):
    (job,) = sleepers(tmp_path, 1, monkeypatch, LONG_STEP.replace("1.0", "500"))
    assert job.start(1)
    wait_for(lambda: "works" in (job.folder / "console.log").read_text().splitlines())
    again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    again.start()
    with pytest.raises(KeyboardInterrupt):
        sweep.stop([job.process], told=False)
    assert job.process.wait() == -signal.SIGKILL


def test_two_sweeps_in_one_folder_are_refused(tiny, commands, tmp_path, stand_in, monkeypatch):
    """Whatever the grid of the second; and the folder is free again once the first has ended."""
    monkeypatch.setattr(sweep, "_PATIENCE", 0.2)
    steps, train = tmp_path / "run" / "steps", tiny.parent / "train.tsv"
    first = (sweep, tiny, f"data.train={train}", "train.steps=100000", "--out", tmp_path)
    refused = []

    def second():
        command = [sys.executable, "-m", "asr.sweep", str(tiny), "seed=8", "--out", str(tmp_path)]
        refused.append(subprocess.run(command, capture_output=True, text=True, check=False))
        os.kill(os.getpid(), signal.SIGTERM)  # the first works on until the second has answered

    with once(steps.exists, second):
        assert commands(*first)[0] == 130
    assert refused[0].returncode == 2 and not refused[0].stdout
    assert f"error: {tmp_path}: another sweep is at work in it" in refused[0].stderr
    assert not (tmp_path / "seed=8").exists()
    steps.write_text("." * 99_990)
    assert commands(*first)[0] == 0


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


def make_curves(run, tiny, step, *, done=False, seed=1):
    """A run at `step` of 100: 0.5 s and 6 s of audio a step, a validation of 40 s every 25.

    Killed after step 10, and begun again an hour later.
    """
    run.mkdir()
    overrides = [f"seed={seed}", "train.validate_every=25", "train.steps=100"]
    write_recipe(read_recipe(tiny, overrides), run / "recipe.yaml")
    end = f"2026-01-02 03:06:00,000 finished at step {step}; x\n" if done else ""
    (run / "train.log").write_text(f"now step 10/100  epoch 1  nats 2.0\n{end}")
    points, clock = [], 1e9
    for now in range(1, step + 1):
        clock += 0.5 + 3600 * (now == 11)
        if now % 10 == 0:
            points.append(scalar_event(HOURS, now, now * 6 / 3600, clock))
            points.append(scalar_event(SECONDS, now, now * 0.5, clock))
        if now % 25 == 0:
            clock += 40
            points.append(scalar_event(VALID, now, 2.0, clock))
    write_events(run / "events.out.tfevents.0000000001.x", points)


def test_a_run_that_exists_tells_the_pace(tmp_path, tiny):
    make_curves(tmp_path / "run", tiny, 60)
    found = pace(tmp_path / "run")
    assert (found.total, found.step, found.validations) == (100, 60, 4)
    assert (found.seconds, found.audio) == pytest.approx((0.5, 6.0))
    assert found.validation == pytest.approx(40)
    assert found.left(60) == pytest.approx((40 * 0.5 + 1.6 * 40, 40 * 6 / 3600))
    assert pace(tmp_path / "none") is None
    (tmp_path / "run" / "recipe.yaml").write_text("run: x\ntr")
    assert pace(tmp_path / "run") is None
    assert [duration(s) for s in (45, 600, 7500)] == ["45 s", "10 min", "2 h 05 min"]


@pytest.mark.parametrize(
    ("more", "ranks", "validations"),
    [
        ([], "", 20),  # the recipe's epochs
        (["train.steps=100", "train.accumulate=1"], "", 4),  # of 29 steps an epoch
        (["train.steps=100", "train.accumulate=2"], "", 7),  # of 15
        (["train.steps=100", "train.accumulate=1"], ", 8 ranks", 25),  # of 4
    ],
)
def test_validations_are_those_of_the_epochs_that_the_steps_make(
    more, ranks, validations, tmp_path, tiny
):
    make_curves(tmp_path / "run", tiny, 60)
    overrides = ["train.validate_every=null", "train.epochs=20", "train.steps=null", *more]
    write_recipe(read_recipe(tiny, overrides), tmp_path / "run" / "recipe.yaml")
    log = tmp_path / "run" / "train.log"
    said = f"now training tiny: 1.00 M parameters, 29 batches an epoch, 3.1 % padding{ranks}\n"
    log.write_text(said + log.read_text())
    assert pace(tmp_path / "run").validations == validations


def test_a_dry_run_prints_the_grid_and_what_is_left(tiny, commands, tmp_path):
    grid = [tiny, "seed=1,2,3", "train.validate_every=25", "train.steps=100"]
    make_curves(tmp_path / "seed=1", tiny, 60)
    make_curves(tmp_path / "seed=2", tiny, 100, done=True, seed=2)
    code, out, _ = commands(sweep, *grid, "--dry-run", "--out", tmp_path, "--jobs", "2")
    lines = {line.split()[0]: " ".join(line.split()) for line in out.splitlines()}
    assert code == 0 and lines["seed=1"] == "seed=1 100 0.17 4 min stopped at step 60"
    assert lines["seed=2"].endswith("4 min done")
    assert lines["seed=3"] == "seed=3 100 0.17 4 min to do"
    # 40 and 100 steps of 0.5 s, 5.6 validations of 40 s, two at a time; 6 s of audio a step
    assert "3 runs; left: 0.23 audio-hours, about 2 min with 2 at a time" in out
    assert out.splitlines()[-1].startswith("measured on: the curves of 2 of these runs")
    assert not (tmp_path / "seed=3").exists()


def test_settings_without_a_run_are_probed_once(tiny, commands, tmp_path, monkeypatch):
    """Each setting, not each seed; one whose probe fails is not tried again."""
    tried = []

    def stand_in(recipe, trial):
        tried.append(trial.name)
        return None if "ba" in trial.name else cost.Pace(100, 12, 0.5, 6.0, 40.0, 4)

    monkeypatch.setattr(cost, "probe", stand_in)
    grid = [tiny, "model.speller.norm=none,ba", "seed=1,2"]
    code, out, _ = commands(sweep, *grid, "--dry-run", "--out", tmp_path)
    assert code == 0 and tried == ["speller.norm=none,seed=1", "speller.norm=ba,seed=1"]
    assert out.count("; the probe failed") == 2 and "about 7 min with 1 at a time" in out
    assert out.splitlines()[-1].startswith("measured on: 12 steps and one validation of 1 settings")


def test_a_probe_measures_and_leaves_nothing(tiny, tmp_path, monkeypatch):
    """A training of its own, in a process of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (trial,) = read_grid(tiny, ["train.steps=1000", "train.validate_every=100"])
    found = cost.probe(tiny, trial)
    assert (found.total, found.validations) == (1000, 10) and found.step >= 12
    assert 0 < found.seconds < 60 and found.audio > 0 and found.validation > 0
    assert not list(tmp_path.iterdir())


def test_folders_of_runs(tmp_path):
    for name in ("seed=10", "seed=2", "other"):
        (tmp_path / name).mkdir()
    for name in ("seed=10", "seed=2"):
        (tmp_path / name / "console.log").write_text("$ a\nerror: old\n\n$ b\nOSError: new\n")
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "lost").mkdir()
    names = [run.name for run in expand([tmp_path, tmp_path / "seed=2"])]
    assert names == ["seed=2", "seed=10", "lost"]
    for second, name in enumerate(("seed=10", "seed=2")):  # begun in this order
        (tmp_path / name / f"events.out.tfevents.{second}.x").touch()
    assert [run.name for run in expand([tmp_path])] == ["seed=10", "seed=2", "lost"]
    assert last_error(tmp_path / "seed=2") == " (OSError: new)"
    assert os.fspath(tmp_path) and last_error(tmp_path) == ""

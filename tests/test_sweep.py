"""asr.sweep: the grid, resuming, failures, and ending its processes when it is stopped."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from event_files import curve
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from asr import sweep
from asr.analysis.runs import expand_runs, finished, last_error
from asr.config.loader import read_recipe, write_recipe
from asr.errors import UserError
from asr.sweep import read_grid, split_values


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
    runs = read_grid(
        tiny, ["model.listener.norm=none,ba", "features.speed_perturb=[0.9,1.1],[1]", "seed=7"]
    )
    assert [run.name for run in runs] == [
        "listener.norm=none,speed_perturb=[0.9,1.1]",
        "listener.norm=none,speed_perturb=[1]",
        "listener.norm=ba,speed_perturb=[0.9,1.1]",
        "listener.norm=ba,speed_perturb=[1]",
    ]
    assert runs[2].recipe.model.listener.norm == "ba" and runs[2].recipe.seed == 7
    assert runs[2].recipe.features.speed_perturb == (0.9, 1.1)
    assert [run.name for run in read_grid(tiny, ["seed=7"])] == ["run"]


def test_joined_keys_have_equal_values(tiny):
    runs = read_grid(tiny, ["model.listener.norm+model.speller.norm=none,ba", "seed=1,2"])
    assert [run.name for run in runs][:2] == [
        "listener.norm+speller.norm=none,seed=1",
        "listener.norm+speller.norm=none,seed=2",
    ]
    norms = [(r.recipe.model.listener.norm, r.recipe.model.speller.norm) for r in runs]
    assert norms == [("none", "none")] * 2 + [("ba", "ba")] * 2


def test_names_are_folders_whatever_the_values(tiny):
    runs = read_grid(tiny, ["data.valid=a/b.tsv,a-b.tsv,../c d.tsv"])
    names = [run.name for run in runs]
    assert len(set(names)) == 3 and not any(set(name) & set("/ ") for name in names)


@pytest.mark.parametrize(
    ("grid", "line"),
    [
        (["model.listener.nrom=ba"], "is not a recipe key. Did you mean model.listener.norm?"),
        (["seed="], "'seed=' has an empty value"),
        (["seed=1,,2"], "'seed=1,,2' has an empty value"),
        (["seed"], "'seed' is not of the form"),
        (["seed=1,1"], "'seed=1,1' has a value twice"),
        (["seed=1", "seed=2"], "seed: given twice"),
        (["run=a,b"], "a sweep names its runs"),
        (["seed=1", "model.listener.norm+seed=2"], "seed: given twice"),
        (["model.listener.norm+=ba"], "'=ba' is not of the form key.path=value"),
        (["seed=1,2", "model.listener.hidden=5,-3"], "(of seed=1 model.listener.hidden=-3)"),
        (["seed=1,2", "--evaluate", "tset"], "--split tset: the run has train, valid"),
        (["decode.beam=1,4"], "would train the same model 2 times"),
        ([], "no grid: name keys with several values, e.g. python -m asr.sweep"),
        (["data.train=train.tsv,gone.tsv"], "data.train: gone.tsv is not there ("),
        (["seed=1,2", "data.valid=gone.tsv"], "data.valid: gone.tsv is not there ("),
        (["seed=1,2", "train.device=cuda:99"], "train.device = cuda:99: this machine has no such"),
        (["seed=1,2", "train.init=gone"], "gone: no checkpoint in it; train it first"),
        (["seed=1", "--jobs", "0"], "argument --jobs: '0' is not a whole number from 1 up"),
        (["seed=1", "--jobs", "-0"], "argument --jobs: '-0' is not a whole number from 1 up"),
        (["seed=1", "--jobs=1", "--jobs=2"], "argument --jobs: given twice"),
        (["seed=" + ",".join(map(str, range(101))), "train.steps="
          + ",".join(map(str, range(1, 101)))], "a grid of 10100 runs"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_start_nothing(grid, line, tiny, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.parent)
    assert line in commands.refused(sweep, tiny, *grid, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "key", "line"),
    [
        ("demo_lm", "data.train=[gone.txt]", "data.train: gone.txt is missing"),
        ("mnist_rows", "data.folder=gone", "data.folder: gone is missing. Make it with: python -m"),
    ],
)
def test_missing_data_of_other_tasks_start_nothing(recipe, key, line, commands, tmp_path):
    out = tmp_path / "out"
    assert commands.refused(sweep, recipe, key, "seed=1,2", "--out", out).startswith(line)
    assert not out.exists()


def test_a_folder_of_another_recipe_is_refused(tiny, commands, tmp_path):
    (tmp_path / "seed=1").mkdir()
    write_recipe(read_recipe(tiny, ["train.steps=3"]), tmp_path / "seed=1" / "recipe.yaml")
    line = commands.refused(sweep, tiny, "seed=1,2", "train.steps=4", "--out", tmp_path)
    assert "has a run of another recipe (train.steps = 3, now 4)" in line


def test_keys_that_change_nothing_learned_may_differ(tiny, commands, tmp_path):
    (tmp_path / "seed=1").mkdir()
    write_recipe(read_recipe(tiny, ["train.threads=2"]), tmp_path / "seed=1" / "recipe.yaml")
    for change in ("train.threads=1", "train.log_every=7", "data.workers=0"):
        command = (sweep, tiny, "seed=1,2", change, "--out", tmp_path, "--dry-run")
        assert commands(*command)[1] == "seed=1\nseed=2\n"


def test_runs_of_a_smaller_grid_are_taken_over(tiny, commands, tmp_path):
    """Their names lack the keys that did not vary."""
    for norm in ("ba", "none"):
        folder = tmp_path / f"norm={norm}"
        folder.mkdir()
        recipe = read_recipe(tiny, [f"model.listener.norm={norm}", "seed=2", "decode.beam=3"])
        write_recipe(recipe, folder / "recipe.yaml")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.yaml").write_text("task: none\n")
    grid = ("model.listener.norm=ba,none", "seed=1,2", "--out", tmp_path, "--dry-run")
    names = commands(sweep, tiny, *grid)[1].splitlines()
    assert [name.rpartition("norm=")[2] for name in names] == [
        "ba,seed=1", "ba", "none,seed=1", "none"
    ]  # fmt: skip


def test_a_run_with_a_smaller_vocabulary_than_asked_is_taken_over(tiny, tiny_run, tmp_path):
    """RUN/recipe.yaml has what is used, the checkpoint what was asked for."""
    run = shutil.copytree(tiny_run, tmp_path / "norm=ba")
    recipe = read_recipe(run, ["decode.beam=3"])
    used = recipe.text.model_copy(update={"kind": "bpe", "size": 77})
    write_recipe(recipe.model_copy(update={"text": used}), run / "recipe.yaml")
    (trial,) = read_grid(tiny, [f"seed={recipe.seed}"])
    assert [found.name for found in sweep.find_folders([trial], tmp_path)] == ["norm=ba"]
    sweep.check_folder(trial, run)
    for other, change in (
        ("text={kind: bpe, size: 78}", r"text\.kind = characters, now bpe"),
        ("decode.beam=2", r"decode\.beam = 3, now 2"),
    ):
        (trial,) = read_grid(tiny, [f"seed={recipe.seed}", other])
        with pytest.raises(UserError, match=change):
            sweep.check_folder(trial, run)


def test_a_tuned_run_still_belongs_to_the_grid(tiny, commands, tmp_path):
    (tmp_path / "seed=1").mkdir()
    write_recipe(read_recipe(tiny, ["decode.beam=3"]), tmp_path / "seed=1" / "recipe.yaml")
    (trial, _) = read_grid(tiny, ["seed=1,2"])
    sweep.check_folder(trial, tmp_path / "seed=1")
    (trial, _) = read_grid(tiny, ["seed=1,2", "decode.beam=2"])
    with pytest.raises(UserError, match=r"decode\.beam = 3, now 2"):
        sweep.check_folder(trial, tmp_path / "seed=1")


@pytest.mark.slow
def test_a_training_is_evaluated(tiny, commands, tmp_path):
    """The only test with a real training."""
    run = tmp_path / "run"
    command = (sweep, tiny, "train.steps=3", "--out", tmp_path, "--evaluate", "test")
    code, output, _ = commands(*command)
    assert code == 0 and "1 of 1 runs are done" in output and finished(run) == 3
    assert [step for step, _ in curve(run, "train/nll")] == [1, 2, 3]
    assert (run / "evaluate" / "test" / "score.json").exists()
    board = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    assert list(board.Runs()) == ["run"]  # TensorBoard lists it once
    assert "1 of them done already" in commands(*command)[1]


@contextmanager
def once(condition, act):
    """Call `act` in a thread as soon as the condition holds."""

    def watch():
        wait_for(condition)
        act()

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    watcher.join()


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
name = pathlib.Path(settings["data.train"]).name
if pathlib.Path(__file__).with_name(f"{name}.broken").exists():
    sys.exit(f"error: {name} is broken")
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
    """Replacement of asr.train and asr.evaluate that writes their files without torch."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(sweep, "PYTHON", (sys.executable, str(script)))


def test_a_sweep_skips_finished_runs_and_reports_failed_ones(tiny, commands, tmp_path, stand_in):
    """One of two fails at first, and then succeeds."""
    folder, out = tiny.parent, tmp_path / "s"
    (tmp_path / "valid.tsv.broken").touch()
    grid = [f"data.train={folder / 'train.tsv'},{folder / 'valid.tsv'}", "train.steps=2"]
    command = (sweep, tiny, *grid, "--out", out, "--jobs", "2", "--evaluate", "test")
    code, output, _ = commands(*command)
    runs = filter(Path.is_dir, out.iterdir())
    good, bad = sorted(runs, key=lambda run: "valid" in run.name)
    assert code == 1 and "1 of 2 runs are done" in output
    assert f"failed: {bad.name}: valid.tsv is broken" in output
    assert finished(good) == 2 and (good / "evaluate" / "test" / "score.json").exists()
    shutil.rmtree(good / "evaluate")
    (tmp_path / "valid.tsv.broken").unlink()
    code, output, _ = commands(*command)
    assert code == 0 and "0 of them done already" in output and "2 of 2 runs are done" in output
    assert (good / "train.log").read_text().count("finished") == 1  # only evaluated again
    assert finished(bad) == 2 and (bad / "evaluate" / "test" / "score.json").exists()
    consoles = [(run / "console.log").read_text() for run in (good, bad)]
    assert commands(*command)[1].startswith(f"2 runs in {out}, 2 of them done already\n2 of 2 runs")
    assert [(run / "console.log").read_text() for run in (good, bad)] == consoles
    shutil.rmtree(good / "evaluate")
    (good / "broken").touch()  # unreadable audio: scored as empty, and exit code 2
    code, output, _ = commands(*command)
    assert code == 0 and "not all could be decoded" in output and "2 of 2 runs are done" in output


def test_a_sweep_continues_without_its_console(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as console:
        monkeypatch.setattr("sys.stdout", console)
        assert sweep.sweep([], 1, tmp_path) == 0
        monkeypatch.undo()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_sweep_stops_its_trainings(number, tiny, commands, tmp_path, stand_in):
    """Without waiting for their ends. The same command resumes them."""
    steps, train = tmp_path / "run" / "steps", tiny.parent / "train.tsv"
    command = (sweep, tiny, f"data.train={train}", "train.steps=1000", "--out", tmp_path)
    with once(lambda: steps.exists() and steps.read_text(), lambda: os.kill(os.getpid(), number)):
        code, output, _ = commands(*command)
    assert code == 130 and output.endswith("stopped; the same command resumes it\n")
    started = len(steps.read_text())
    assert 0 < started < 1000 and finished(steps.parent) is None
    time.sleep(0.1)
    assert len(steps.read_text()) == started  # no process writes there
    steps.write_text("." * 990)
    assert commands(*command)[0] == 0 and len(steps.read_text()) == 1000


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def sleepers(folder, count, monkeypatch, code="import time; time.sleep(60)"):
    """Jobs whose command sleeps instead of training."""
    monkeypatch.setattr(
        sweep.SweepProcess, "next_command", lambda job: [sys.executable, "-c", code], raising=True
    )
    return [
        sweep.SweepProcess(Path("r"), type("T", (), {"name": str(n)}), folder / str(n))
        for n in range(count)
    ]


def test_a_folder_in_use_is_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "_PATIENCE", 0.2)
    first, second = sleepers(tmp_path, 2, monkeypatch)
    second.folder = first.folder
    assert first.start(1)
    try:
        assert second.start(1) and second.start(1) and second.process is None
        assert capsys.readouterr().out == "1: waiting for the process that uses its folder\n"
    finally:
        sweep.stop([first.process])
    assert first.process.returncode == -signal.SIGTERM
    assert second.start(1) and second.process  # the lock ended with its process
    second.process.kill()
    second.process.wait()


# Like a training (asr/training/signals.py): the first signal ends the step, the second the process.
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lack PR_SET_PDEATHSIG")
def test_the_trainings_of_a_killed_sweep_save_and_end(tmp_path, monkeypatch):
    """The next sweep waits for them."""
    code = LONG_STEP.replace("1.0", "0.3").replace(
        "sys.exit", 'print("saved", flush=True); sys.exit'
    )
    first, second = sleepers(tmp_path, 2, monkeypatch, code)
    second.folder = first.folder
    console = first.console  # imports torch before the fork
    if not (killed := os.fork()):
        try:
            first.start(1)
            signal.pause()
        finally:
            os._exit(1)
    try:
        wait_for(lambda: console.exists() and "works\n" in console.read_text(), 20)
    finally:
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
    assert second.start(1) and second.process is None
    wait_for(lambda: second.start(1) and second.process, 20)
    second.process.kill()
    second.process.wait()
    lines = console.read_text().splitlines()
    assert lines.index("saved") < max(n for n, line in enumerate(lines) if line.startswith("$ "))


@pytest.mark.parametrize(
    "name", [".lock", "console.log", "train.log", "recipe.yaml", "checkpoints"]
)
def test_links_in_the_folder_of_a_run_are_refused(name, tiny, commands, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "out" / "seed=2").mkdir(parents=True)
    (tmp_path / "out" / "seed=2" / name).symlink_to(outside)
    line = commands.refused(sweep, tiny, "seed=1,2", "--out", tmp_path / "out")
    assert line.startswith(f"{tmp_path}/out/seed=2/{name}: a symbolic link")
    assert outside.read_text() == "kept" and not (tmp_path / "out" / "seed=1").exists()


def test_a_link_in_place_of_a_run_or_of_the_lock_is_refused(tiny, commands, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "seed=2").symlink_to(tmp_path / "elsewhere")
    line = commands.refused(sweep, tiny, "seed=1,2", "--out", tmp_path / "out")
    assert line.startswith(f"{tmp_path}/out/seed=2: a symbolic link")
    (tmp_path / "out" / "seed=2").unlink()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "made")
    line = commands.refused(sweep, tiny, "seed=1,2", "--out", tmp_path / "out")
    assert line.startswith(f"{tmp_path}/out/.lock: a symbolic link")
    assert not (tmp_path / "made").exists() and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_a_stopped_training_may_end_its_step(tmp_path, monkeypatch):
    (job,) = sleepers(tmp_path, 1, monkeypatch, LONG_STEP)
    assert job.start(1)
    wait_for(lambda: "works" in (job.folder / "console.log").read_text().splitlines())
    sweep.stop([job.process])
    assert job.process.returncode == 3


def test_a_second_ctrl_c_kills_the_training(tmp_path, monkeypatch):
    (job,) = sleepers(tmp_path, 1, monkeypatch, LONG_STEP.replace("1.0", "500"))
    assert job.start(1)
    wait_for(lambda: "works" in (job.folder / "console.log").read_text().splitlines())
    again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    again.start()
    with pytest.raises(KeyboardInterrupt):
        sweep.stop([job.process])
    assert job.process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_two_sweeps_in_one_folder_are_refused(tiny, commands, tmp_path, stand_in, monkeypatch):
    """Whatever the grid of the second; the folder is free again after the first has ended."""
    monkeypatch.setattr(sweep, "_PATIENCE", 0.2)
    steps, train = tmp_path / "run" / "steps", tiny.parent / "train.tsv"
    first = (sweep, tiny, f"data.train={train}", "train.steps=100000", "--out", tmp_path)
    refused = []

    def second():
        command = [sys.executable, "-m", "asr.sweep", str(tiny), "seed=8", "--out", str(tmp_path)]
        refused.append(subprocess.run(command, capture_output=True, text=True, check=False))
        os.kill(os.getpid(), signal.SIGTERM)  # the first runs until the second has ended

    with once(steps.exists, second):
        assert commands(*first)[0] == 130
    assert refused[0].returncode == 2 and not refused[0].stdout
    assert f"error: {tmp_path}: another sweep uses it" in refused[0].stderr
    assert not (tmp_path / "seed=8").exists()
    steps.write_text("." * 99_990)
    assert commands(*first)[0] == 0


def test_jobs_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (job,) = sleepers(tmp_path, 1, monkeypatch, "import os; print(os.environ['OMP_NUM_THREADS'])")
    job.start(3)
    job.process.wait()
    assert (job.folder / "console.log").read_text().endswith("\n3\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # the user's choice is kept
    job.start(3)
    job.process.wait()
    assert (job.folder / "console.log").read_text().endswith("\n7\n")


@pytest.mark.parametrize(
    ("visible", "device", "parallel", "expected"),
    [
        (None, "auto", 3, ["0", "1", "0"]),
        ("5, GPU-7", "cuda", 2, ["5", "GPU-7", None]),  # the third has what ends first
        ("", "auto", 3, [""] * 3),
        (None, "cuda:1", 3, ["all"] * 3),
        (None, "auto", 1, ["all"] * 3),
    ],
)
def test_jobs_share_the_gpus(visible, device, parallel, expected, tmp_path, monkeypatch, commands):
    code = "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all')); time.sleep(0.5)"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    jobs = sleepers(tmp_path, 3, monkeypatch, code)
    for job in jobs:
        job.run.recipe = SimpleNamespace(train=SimpleNamespace(device=device))
    sweep.sweep(jobs, parallel, tmp_path)
    found = [(job.folder / "console.log").read_text().split("\n")[1] for job in jobs]
    assert all(b in (a, None) for a, b in zip(found, expected, strict=True)), found
    assert set(found) == set(filter(lambda gpu: gpu is not None, expected))


def test_a_dry_run_prints_the_names_of_the_runs(tiny, commands, tmp_path):
    code, out, _ = commands(sweep, tiny, "seed=1,2,3", "--dry-run", "--out", tmp_path)
    assert code == 0 and out.splitlines() == ["seed=1", "seed=2", "seed=3"]
    assert not list(tmp_path.iterdir())


def test_folders_of_runs(tmp_path):
    for name in ("seed=10", "seed=2", "other"):
        (tmp_path / name).mkdir()
    for name in ("seed=10", "seed=2"):
        (tmp_path / name / "console.log").write_text("$ a\nerror: old\n\n$ b\nOSError: new\n")
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "lost").mkdir()
    names = [run.name for run in expand_runs([tmp_path, tmp_path / "seed=2"])]
    assert names == ["seed=2", "seed=10", "lost"]
    for second, name in enumerate(("seed=10", "seed=2")):  # started in this order
        (tmp_path / name / f"events.out.tfevents.{second}.x").touch()
    assert [run.name for run in expand_runs([tmp_path])] == ["seed=10", "seed=2", "lost"]
    assert last_error(tmp_path / "seed=2") == " (OSError: new)"
    assert os.fspath(tmp_path) and last_error(tmp_path) == ""

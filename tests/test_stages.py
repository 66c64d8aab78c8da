"""`stages:` of a recipe: keys that change in the course of a run."""

import json
import re
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from test_train import Killed, assert_same_state, last_state

from asr import train
from asr.config.loader import RecipeError, at_stage, flat, read_recipe
from asr.config.schema import STAGE_KEYS, TrainConfig
from asr.inference.load import STATISTICS
from asr.training.state import TrainState, due_stage
from asr.training.trainer import Training

CHANGES = {
    "features": {"speed_perturb": [1.0], "spec_augment": None},
    "model": {"listener": {"dropout": 0.0, "recurrent_dropout": 0.3}},
    "train": {"guided_attention": None, "optimizer": {"lr": 0.003}},
}


def flags(tree, prefix=""):
    """key.path=value for every leaf."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flags(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}"


def staged(start, **changes):
    stages = [{"start": start, **(changes or CHANGES)}]
    return "stages=" + yaml.safe_dump(stages, default_flow_style=True, width=10_000).strip()


def kill_at(patch, epoch, batch):
    """End the process once the run has reached this position."""
    write = Training.write_checkpoint

    def killer(self):
        write(self)
        if (self.state.epoch, self.state.batch) == (epoch, batch):
            raise Killed

    patch.setattr(Training, "write_checkpoint", killer)


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 1])
def test_a_stage_equals_a_resume_with_other_values(every, tiny, commands, tmp_path, monkeypatch):
    options = [tiny, "train.save_every=1", f"train.validate_every={every or 'null'}"]
    assert commands(train, *options, staged(0.5), "--run", tmp_path / "staged")[0] == 0
    with monkeypatch.context() as patch:
        kill_at(patch, 2, 0)
        code, *_ = commands(train, *options, staged(0.5), "--run", tmp_path / "by_hand")
    assert code == 130
    resumed = ["--run", tmp_path / "by_hand", "--resume", "--force"]
    assert commands(train, *options, *flags(CHANGES), *resumed)[0] == 0
    (tensors, place), (expected, by_hand) = map(last_state, (tmp_path / "staged", resumed[1]))
    assert place.pop("stage") == 1 and by_hand.pop("stage") == 0
    assert place == by_hand
    for name, tensor in tensors.items():
        assert tensor.equal(expected[name]), name


@pytest.mark.slow
def test_a_run_killed_in_its_second_stage_resumes_there(tiny, commands, tmp_path, monkeypatch):
    options = [tiny, staged(0.5), "train.save_every=1"]
    code, out, _ = commands(train, *options, "--run", tmp_path / "whole")
    assert code == 0
    assert "stage 2 of 2, from epoch 2 on: features.spec_augment.freq_masks 2 -> missing" in out
    assert out.count("training ") == 1 and "resuming" not in out
    assert len(list((tmp_path / "whole").glob("events.*"))) == 1  # one log for all stages
    with monkeypatch.context() as patch:
        kill_at(patch, 2, 4)
        assert commands(train, *options, "--run", tmp_path / "killed")[0] == 130
    code, out, _ = commands(train, *options, "--run", tmp_path / "killed", "--resume")
    assert code == 0 and "stage 2 of 2" not in out
    assert_same_state(tmp_path / "killed", tmp_path / "whole")
    assert read_recipe(tmp_path / "killed" / "recipe.yaml").stages[0].start == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "start", "reached"),
    [("epochs=2", 0.5, True), ("epochs=2", 0.51, False), ("steps=2", 0.5, False)],
)
def test_a_stage_that_never_begins_is_named(end, start, reached, tiny, commands, tmp_path):
    options = [f"train.{end}", "train.wer_utterances=0", staged(start), "--run", tmp_path / "run"]
    code, out, _ = commands(train, tiny, *options)
    assert code == 0
    assert last_state(tmp_path / "run")[1]["stage"] == int(reached)
    line = f"stages[0].start = {start} is never reached: a stage begins with an epoch"
    assert (line in out) is not reached


def test_stages_add_up(tiny):
    stages = [
        {
            "start": 0.2,
            "features": {"spec_augment": {"freq_width": 7}},
            "model": {"speller": {"dropout": 0.4}},
        },
        {"start": 0.6, "features": {"spec_augment": {"time_width": 9}}},
    ]
    recipe = read_recipe(
        tiny, [f"stages={yaml.safe_dump(stages, default_flow_style=True, width=999)}"]
    )
    widths = [
        (masks.freq_width, masks.time_width, at.model.speller.dropout)
        for at in (at_stage(recipe, n) for n in range(3))
        for masks in [at.features.spec_augment]
    ]
    assert widths == [(3, 5, 0.1), (7, 5, 0.4), (7, 9, 0.4)]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            "[{start: 0.5, model: {listener: {hidden: 9}}}]",
            "model.listener.hidden cannot change in a run",
        ),
        ("[{start: 0.5, features: {mel_bins: 40}}]", "features.mel_bins cannot change in a run"),
        ("[{start: 0.5, train: {optimizer: {kind: adam}}}]", "train.optimizer.kind cannot change"),
        (
            "[{start: 0.5, features: {spec_augment: {width: 2}}}]",
            "stages[0]: features.spec_augment.width is not a recipe key",
        ),
        (
            "[{start: 0.5, model: {dropout: 0.2}}]",
            "command line: stages[0]: model.dropout is not a recipe key",
        ),
        ("[{start: 0.5, features: {speed_perturb: [9.0]}}]", "stages[0]: features.speed_perturb"),
        ("[{start: 0.5}, {start: 0.5}]", "each stage must start after the one before it"),
        ("[{start: 0}]", "stages.0.start = 0"),
        ("[{start: 1.0}]", "stages.0.start = 1.0"),
        ("[{begin: 0.3}]", "stages.0.begin is not a recipe key"),
        ("[{start: 0.5, data: {train: x.tsv}}]", "stages.0.data is not a recipe key"),
        ("[{start: 0.5, features: 3}]", "stages.0.features"),
        ("{start: 0.5}", "stages"),
    ],
)
def test_a_stage_that_does_not_fit_is_refused(stages, words, tiny):
    with pytest.raises(RecipeError) as error:
        read_recipe(tiny, [f"stages={stages}"])
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("demo_lm", "model: {dropout: 0.3}", "model.dropout"),
        ("mnist_rows", "train: {optimizer: {lr: 0.01}}", "train.optimizer.lr"),
    ],
)
def test_other_tasks_have_stages_too(name, change, key):
    recipe = read_recipe(name, [f"stages=[{{start: 0.5, {change}}}]"])
    before, now = (at_stage(recipe, number) for number in (0, 1))
    changed = {key for key, value in flat(now).items() if flat(before)[key] != value}
    assert changed == {key}


@pytest.mark.slow
def test_speeds_of_every_stage_are_measured_and_checked_at_the_start(tiny, commands, tmp_path):
    faster = staged(0.5, features={"speed_perturb": [1.0, 1.3]})
    run = tmp_path / "run"
    options = [tiny, "features.mvn=speaker", "train.epochs=2"]
    assert commands(train, *options, faster, "--run", run)[0] == 0
    with safe_open(run / STATISTICS, "pt") as saved:
        groups = json.loads(saved.metadata()["groups"])
    assert {group.partition("\t")[2] for group in groups} == {"", "0.9", "1.1", "1.3"}
    fast = staged(0.5, features={"speed_perturb": [2.0]})
    line = commands.refused(train, tiny, "model.listener.convolution=4", fast, "--run", tmp_path)
    assert "have more CTC labels than frames" in line


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        (TrainState(epoch=1), 0),
        (TrainState(epoch=5), 0),  # 0.4 of the run is finished
        (TrainState(epoch=6), 1),
        (TrainState(epoch=6, batch=1), 0),  # began before the stages of the recipe changed
        (TrainState(epoch=9), 2),
        (TrainState(epoch=7, batch=1, stage=1), 1),
        (TrainState(epoch=2, stage=1), 1),  # train.epochs was raised
        (TrainState(epoch=11, stage=1), 1),  # finished
    ],
)
def test_a_stage_begins_with_the_first_epoch_after_its_share(state, stage):
    assert due_stage(state, TrainConfig(epochs=10), (0.5, 0.75)) == stage


def test_with_steps_the_share_is_of_the_steps():
    config = TrainConfig(steps=100)
    assert [due_stage(TrainState(step=n), config, (0.5,)) for n in (0, 49, 50, 99)] == [0, 0, 1, 1]


def test_the_reference_lists_what_a_stage_may_change():
    rows = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text().splitlines()
    for section, keys in STAGE_KEYS.items():
        (row,) = [row for row in rows if row.startswith(f"| `stages.{section}` |")]
        assert set(keys) <= set(re.findall(r"[\w.]+", row))

"""A training state from somebody else, with right checksums: checked before anything uses it."""

import json
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asr import train
from asr.config.loader import as_yaml, read_recipe, write_recipe
from asr.config.schema import EarlyStoppingConfig, OptimizerConfig, TrainConfig
from asr.errors import UserError
from asr.io import sha256_of_files
from asr.training.checkpoint import TRAINING, WEIGHTS, list_checkpoints, read_training
from asr.training.optim import load_moments, make_optimizer
from asr.training.resume import find_resume_point
from asr.training.state import TrainState, check_training, count_validation, is_finished


@pytest.fixture(scope="module")
def state(tiny_run) -> dict[str, Any]:
    """What a training wrote."""
    return torch.load(list_checkpoints(tiny_run)[-1].folder / TRAINING, weights_only=True)


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return pickle.loads(pickle.dumps(state))


def change(*keys: Any, to: Any) -> Callable[[dict], None]:
    """Replaces the value at a path of keys, or removes it."""

    def apply(state: dict) -> None:
        for key in keys[:-1]:
            state = state[key]
        if to is None:
            del state[keys[-1]]
        else:
            state[keys[-1]] = to

    return apply


CHANGES = {
    "optimizer.state.0": change("optimizer", "state", 0, to=3),
    "step": change("position", "step", to=-1),
    "audio_seconds": change("position", "audio_seconds", to=math.nan),
    "unknown": change("position", "unknown", to=1),
    "random.cpu": change("random", "cpu", to=None),
    "ranks.0": change("ranks", to=[1]),
    "trained.0": change("trained", to=[{1: 2}]),
    "recipe": change("recipe", to=3),
    "content.data.valid.sha256": change("content", "data.valid", "sha256", to=[]),
    "validated": change("validated", to=-2),
    "trackers.mlflow": change("trackers", to={"mlflow": "../other"}),
    "metrics.valid/nll": change("metrics", "valid/nll", to="low"),
}


TENSORS = [  # checked as they are loaded
    change("optimizer", "state", 0, "exp_avg", to=torch.zeros(1)),
    change("optimizer", "state", 0, "step", to=torch.tensor(math.nan)),
    change("optimizer", "param_groups", 0, "params", to=[0]),
    change("trained", to=[{"model.speller.out.bias": torch.zeros(1)}]),
    change("random", "cpu", to=torch.zeros(7, dtype=torch.uint8)),
]


def write(folder: Path, state: Any) -> None:
    """Replace the training state of a checkpoint, with its checksum."""
    torch.save(state, folder / TRAINING)
    sums = {name: sha256_of_files([folder / name]) for name in (TRAINING, WEIGHTS)}
    (folder / "sha256.json").write_text(json.dumps(sums))


def test_what_a_training_writes_is_accepted(tiny_run, state):
    check_training(copy_of(state))
    saved = read_training(list_checkpoints(tiny_run)[-1])
    assert saved["position"] == state["position"]
    for key in state:
        with pytest.raises(ValueError, match=f"^{key}: Field required$"):
            check_training({name: value for name, value in state.items() if name != key})


def test_values_that_no_training_writes_are_one_line(state, run):
    folder = list_checkpoints(run)[-1].folder
    for key, apply in CHANGES.items():
        changed = copy_of(state)
        apply(changed)
        write(folder, changed)
        with pytest.raises(UserError) as error:
            find_resume_point(run, resume=True)
        reason = f"{folder / TRAINING}: cannot be read as a training state ({key}"
        assert str(error.value).startswith(reason) and "\n" not in str(error.value)


def test_tensors_of_another_model_are_one_line(tiny, state, run, commands):
    folder = list_checkpoints(run)[-1].folder
    before = sorted(path.name for path in run.rglob("*"))
    for apply in TENSORS:
        changed = copy_of(state)
        apply(changed)
        write(folder, changed)
        line = commands.refused(train, tiny, "--run", run, "--resume")
        assert line.startswith(f"{folder / TRAINING}: cannot be read as a training state (")
        assert sorted(path.name for path in run.rglob("*")) == before


@pytest.mark.parametrize(
    ("metric", "values", "best_step", "not_improved"),
    [
        ("nll", [3.0, 2.0, 2.1, 1.95, 1.85], 5, 0),  # 1.95 is better by less than min_delta
        ("nll", [3.0, 2.0, 2.1, 1.95, 1.91], 2, 3),
        ("accuracy", [0.3, 0.6, 0.5, 0.65], 2, 2),
        ("accuracy", [0.3, 0.6, 0.5, 0.75], 4, 0),
        ("nll", [math.inf, math.nan, 4.0, math.nan], 3, 1),
    ],
)
@pytest.mark.parametrize("first", [0, 1])  # the step; a fine-tuning validates its beginning
def test_validations_without_improvement_are_counted(
    first, metric, values, best_step, not_improved
):
    state, config = TrainState(), EarlyStoppingConfig(metric=metric, min_delta=0.1, patience=3)
    for state.step, value in enumerate(values, start=first):
        count_validation(state, config, value)
    assert (state.best, state.best_step) == (values[best_step - 1], best_step - 1 + first)
    assert state.not_improved == not_improved
    stopped = is_finished(state, TrainConfig(steps=99, early_stopping=config))
    assert stopped == (not_improved >= 3)


@pytest.mark.parametrize("kind", ["adam", "muon", "schedule_free"])
def test_moments_of_another_optimizer_are_refused(kind):
    def make(kind):
        module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
        optimizer = make_optimizer(OptimizerConfig(kind=kind), module)
        module(torch.ones(7, 2)).sum().backward()
        optimizer.step()
        return optimizer

    load_moments(make(kind), make(kind).state_dict())
    for other in {"adam", "muon", "schedule_free"} - {kind}:
        with pytest.raises(ValueError, match="optimizer: "):
            load_moments(make(kind), make(other).state_dict())


def test_a_run_keeps_the_commit_of_its_encoder(tiny, state, run):
    name, keys = "owner/encoder", ["features.kind=encoder", "features.sample_rate=16000"]
    asked, used = (
        read_recipe(tiny, [*keys, f"features.encoder={encoder}"])
        for encoder in (name, f"{name}@{'7' * 40}")
    )
    write(list_checkpoints(run)[-1].folder, {**state, "recipe": as_yaml(asked)})
    for again in (asked, used):  # by the command that began it, and by its folder
        write_recipe(used, run / "recipe.yaml")
        start = find_resume_point(run, resume=True)
        recipe = start.as_asked(again)
        assert recipe.features.encoder == name
        stored, lines = start.check_recipe(recipe, overridden=set(), force=False)
        assert stored.features.encoder == used.features.encoder and lines == []


@pytest.mark.parametrize("text", ["run: [", "run: &a x", "x"])
def test_a_stored_recipe_that_is_none_is_one_line(tiny, state, run, text):
    write(list_checkpoints(run)[-1].folder, {**state, "recipe": text})
    start = find_resume_point(run, resume=True)
    with pytest.raises(UserError, match="--force ignores it"):
        start.check_recipe(read_recipe(tiny), overridden=set(), force=False)
    _, lines = start.check_recipe(read_recipe(tiny), overridden=set(), force=True)
    assert "the old one cannot be read" in lines[-1]


def deflated(folder: Path, state: Any) -> None:
    """The same archive, compressed."""
    write(folder, state | {"more": torch.zeros(1 << 20)})
    with zipfile.ZipFile(folder / TRAINING) as archive:
        contents = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(folder / TRAINING, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def legacy(folder: Path, state: Any) -> None:
    torch.save(state, folder / TRAINING, _use_new_zipfile_serialization=False)


def long(folder: Path, state: Any) -> None:
    write(folder, state | {"more": list(range(1 << 14))})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (deflated, "it is compressed"),
        (legacy, "File is not a zip file"),
        (long, "larger than"),
    ],
)
def test_files_that_torch_would_expand_or_wait_for_are_refused(
    run, state, damage, reason, monkeypatch
):
    monkeypatch.setattr("asr.training.state.MAX_PICKLE", 30_000)
    checkpoint = list_checkpoints(run)[-1]
    damage(checkpoint.folder, state)
    with pytest.raises(UserError, match=rf"cannot be read as a training state \(.*{reason}"):
        read_training(checkpoint)

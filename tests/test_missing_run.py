"""A run that is not there: the error names the command that makes it."""

from pathlib import Path

import pytest
import yaml

from asr.config.loader import read_recipe
from asr.config.missing_run import missing_run, train_command

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_each_predecessor_of_a_recipe_has_its_command(recipe):
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    named = [content.get("train", {}).get("init"), content.get("text", {}).get("run")]
    for run in filter(None, named):
        command = train_command(Path(run)).split()
        assert command[:3] == ["python", "-m", "asr.train"] and len(command) == 4
        assert f"runs/{read_recipe(command[3]).run}" == run


def test_a_run_of_that_name_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert str(missing_run(Path("mine"))) == "mine: there is no such run. Did you mean runs/mine?"


def test_other_folders_and_recipes(tmp_path):
    assert train_command(Path("runs/demo")) == "python -m asr.train demo"
    assert train_command(Path("my runs/demo")) == "python -m asr.train demo --run 'my runs/demo'"
    assert train_command(Path("runs/x y")) == "python -m asr.train RECIPE.yaml --run 'runs/x y'"
    run = tmp_path / "begun"
    run.mkdir()
    (run / "recipe.yaml").touch()
    assert train_command(run) == f"python -m asr.train {run}/recipe.yaml --run {run} --resume"
    line = str(missing_run(Path("runs/demo"), "text.run"))
    assert line.startswith("text.run = runs/demo: there is no such run. Make it with: python -m")

"""Recipes and runs that are found by name, and what a wheel has of them."""

import re
from configparser import ConfigParser
from pathlib import Path

import pytest
from setuptools import find_packages

from asr import evaluate, recipe, shipped
from asr.config.loader import RecipeError, read_recipe
from asr.inference.recognition import Recognizer
from asr.shipped import find_recipe, find_run, is_installed
from asr.training.checkpoint import list_checkpoints

ROOT = Path(__file__).parent.parent


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_have_names_in_any_folder(empty, commands):
    assert read_recipe("demo") == read_recipe(ROOT / "recipes" / "demo.yaml")
    code, out, _ = commands(recipe, "--list")
    assert code == 0
    assert out.split() == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    (empty / "own.yaml").write_text("base: demo\nseed: 7\n")
    assert read_recipe("own.yaml", ["seed=1"]) == read_recipe("demo")


def test_a_file_of_the_user_comes_before_a_shipped_recipe(empty):
    (empty / "demo").mkdir()  # a folder is no recipe
    assert read_recipe("demo").run == "demo"
    (empty / "demo").rmdir()
    (empty / "demo").write_text("base: demo_transformer\nrun: mine\n")
    assert read_recipe("demo").run == "mine"
    (empty / "conformer").mkdir()
    assert find_run(Path("conformer")) == Path("conformer")


@pytest.mark.parametrize("name", ["demoo", "recipes/demo.yaml", "demo.yaml"])
def test_an_unknown_recipe_is_refused_with_the_name_that_was_meant(name, empty):
    with pytest.raises(RecipeError, match=rf"^{name}: there is no such recipe\. Did you mean demo"):
        read_recipe(name)


@pytest.mark.parametrize("name", ["../setup", "recipes/../demo", "x" * 300, "däm", ""])
def test_only_a_plain_name_is_looked_up(name):
    assert find_recipe(Path(name), Path()) == Path(name) and find_run(Path(name)) == Path(name)


def test_a_run_has_a_name(empty):
    assert list_checkpoints(find_run(Path("conformer")))
    assert Recognizer.load("conformer").tokenizer.size == 100
    assert (
        read_recipe("conformer").model
        == read_recipe(ROOT / "pretrained/conformer/recipe.yaml").model
    )


def test_an_installed_run_is_not_written_to(empty, tiny, monkeypatch, commands):
    monkeypatch.setattr(shipped, "PACKAGE", ROOT)  # as if pretrained/ were within the package
    assert is_installed(find_run(Path("conformer"))) and not is_installed(empty)
    split = "--split", tiny.parent / "test.tsv"
    assert "add --out" in commands.refused(evaluate, "conformer", *split)
    assert "to a folder, and tune that" in commands.refused(evaluate, "conformer", *split, "--tune")


def test_the_wheel_has_all_packages_and_data():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packages = setup["options"]["packages"].split()
    folders = dict(re.findall(r"(\S+) = (\S+)", setup["options"]["package_dir"]))
    outside = ("features", "recipes", "pretrained")
    assert folders == {f"asr.{folder}": folder for folder in outside}
    code = find_packages(str(ROOT), include=["asr*"])
    assert sorted(packages) == sorted([*code, *folders]), "list them in setup.cfg"
    patterns = setup["options.package_data"]
    files = {
        path.relative_to(ROOT / folder)
        for package, folder in folders.items()
        if package in patterns
        for pattern in patterns[package].split(", ")
        for path in (ROOT / folder).glob(pattern)
        if path.is_file()
    }
    here = {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").iterdir()}
    model = {
        path.relative_to(ROOT / "pretrained")
        for name in ("conformer", "lm")
        for path in (ROOT / "pretrained" / name).rglob("*")
        if path.is_file() and "evaluate" not in path.parts
    }
    assert files == here | model

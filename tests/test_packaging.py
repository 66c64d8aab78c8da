"""What an installation has: LayerNormLSTM with torch alone, the commands with the extra `asr`."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import asr
from asr.errors import ASR_PACKAGES
from asr.shipped import RUNS

ROOT = Path(__file__).parent.parent
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
WITHOUT = f"import sys; sys.modules |= dict.fromkeys({list(ASR_PACKAGES)})\n"


def run(code, *arguments):
    line = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_the_layer_needs_torch_alone():
    code = "import torch\nfrom asr.nn.lstm import LayerNormLSTM\n"
    code += "LayerNormLSTM(3, 7, bidirectional=True)(torch.randn(5, 2, 3))[0].sum().backward()\n"
    code += "print('torch._dynamo' in sys.modules, 'triton' in sys.modules)"
    done = run(code)
    assert done.returncode == 0 and done.stdout == "False False\n", done.stderr


@pytest.mark.parametrize("command", ["train recipes/demo.yaml", "compare runs"])
def test_a_command_names_the_extra_that_it_lacks(command):
    name, argument = command.split()
    done = run(f"import runpy; runpy.run_module('asr.{name}', run_name='__main__')", argument)
    assert done.returncode == 2
    pattern = r"error: the package \w+ is not installed: pip install \S+, or in the checkout .+\n"
    assert re.fullmatch(pattern, done.stderr), done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import runpy; runpy.run_module('asr', run_name='__main__')",
        "import runpy; runpy.run_module('asr.transcribe', run_name='__main__')",
        "import asr; asr.LayerNormLSTM",
    ],
)
def test_windows_is_refused_in_one_line(code):
    # What the standard library does on Windows cannot be done here: its modules are imported first.
    windows = "import argparse, difflib, sys, tempfile; sys.platform = 'win32'\n"
    windows += "sys.modules['fcntl'] = None\n"
    line = [sys.executable, "-c", windows + code, "conformer", "my.wav"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode
    assert re.fullmatch("error: Windows is not supported: .+\n", done.stderr), done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder with what a wheel installs."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in ROOT.iterdir():
        if path.name in ("asr", "features", "recipes", "pretrained"):
            shutil.copytree(path, source / path.name)
        elif path.is_file():
            shutil.copy(path, source)
    code = "from setuptools import setup; setup()"
    line = [sys.executable, "-c", code, "--quiet", "build", "--build-lib", str(target)]
    subprocess.run(line, cwd=source, check=True, capture_output=True)
    return target


@pytest.mark.slow
def test_a_package_features_of_the_user_changes_nothing(wheel, tmp_path):
    """As a module beside a notebook, or a folder where a command is run."""
    (tmp_path / "features.py").write_text("raise SystemExit('the features of the user')")
    code = "from asr import features; features.Fbank, features.read_audio; print(features.__file__)"
    env = os.environ | {"PYTHONPATH": str(wheel)}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == wheel / "asr" / "features" / "__init__.py", done.stderr
    assert not (wheel / "features").exists()
    (tmp_path / "features.py").unlink()
    (tmp_path / "features").mkdir()
    line = [sys.executable, "-m", "asr.recipe", "demo"]
    subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, check=True)


# The lines that a wheel gives for the first argument of each command.
INSTALLED = """
import json, sys
from pathlib import Path
from asr.arguments import EXAMPLES
from asr.config.loader import read_recipe
from asr.errors import UserError
from asr.shipped import find_run, missing_run
found = {}
for command, example in [pair for group in EXAMPLES.values() for pair in group.items()]:
    name = example.split()[0]
    if command in ("train", "sweep", "recipe"):
        found[command] = read_recipe(name).run
    elif command != "prepare":
        run = find_run(Path(name))
        found[command] = str(run) if run.is_dir() else str(missing_run(run))
for name in ("las", "transformer", "conformer"):
    found[name] = str(missing_run(find_run(Path(name))))
try:
    read_recipe("las")
except UserError as error:
    found["recipe las"] = str(error)
print(json.dumps(found))
"""


def test_the_examples_of_the_help_are_in_a_wheel(wheel, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["train"] == found["sweep"] == found["recipe"] == "demo"
    assert found["transcribe"] == str(wheel / "asr" / "pretrained" / "conformer")
    trained = {"evaluate": "demo", "compare": None, "export": "demo", "prune": "demo_transformer"}
    for command, recipe in trained.items():  # of a run that a shipped recipe makes, or a sweep
        made = (
            f"python -m asr.train {recipe}" if recipe else "asr.train RECIPE.yaml --run runs/norms"
        )
        assert found[command].endswith(made)
    for name, key in (("las", "las"), ("transformer", "transformer"), ("las", "recipe las")):
        assert found[key].rstrip(".") == (
            f"{name}: this installation only has conformer and lm; {name} is in pretrained/ of the "
            "project's repository: give the path of that folder"
        )


def test_each_trained_run_is_listed():
    assert sorted(path.name for path in (ROOT / "pretrained").iterdir()) == sorted(RUNS)


def names(requirements):
    return {
        re.split(r"[><=\[ ]", line)[0] for line in requirements.split("\n") if line[:1] not in "#"
    }


def test_the_extra_has_what_the_commands_import():
    extra = names(SETUP["options.extras_require"]["asr"])
    assert extra == set(ASR_PACKAGES.values()) - {"protobuf"}
    assert names(SETUP["options"]["install_requires"]) == {"torch", "numpy"}
    for path in [*(ROOT / "asr").rglob("*.py"), *(ROOT / "features").rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                found = [node.module]
            own = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
            assert own <= {"asr", "torch", "numpy", "triton", *ASR_PACKAGES}, path


def test_the_version_is_that_of_setup_cfg(monkeypatch):
    version = SETUP["metadata"]["version"]
    assert asr.__version__ == version == importlib.metadata.version("layernorm-asr")

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert asr.__version__ == version
    with pytest.raises(AttributeError, match="no attribute '__versions__'"):
        asr.__versions__  # noqa: B018

"""What an installation has: LayerNormLSTM with torch alone, the commands with the extra `asr`."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import asr
from asr.errors import ASR_PACKAGES

ROOT = Path(__file__).parent.parent
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
WITHOUT = f"import sys; sys.modules |= dict.fromkeys({list(ASR_PACKAGES)})\n"


def run(code, *arguments):
    line = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT)


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
            assert own <= {"asr", "features", "torch", "numpy", "triton", *ASR_PACKAGES}, path


def test_the_version_is_that_of_setup_cfg(monkeypatch):
    version = SETUP["metadata"]["version"]
    assert asr.__version__ == version == importlib.metadata.version("layernorm-asr")

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert asr.__version__ == version
    with pytest.raises(AttributeError, match="no attribute '__versions__'"):
        asr.__versions__  # noqa: B018

"""Which package imports which, read from the source of every module, commands included."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for top in ("asr", "features") for path in (ROOT / top).rglob("*.py"))

COMMANDS = ("compare", "evaluate", "export", "prepare", "prune", "recipe", "sweep", "train")
COMMANDS += ("transcribe", "completion", "__main__")
# Lowest first: a package imports those before it, and itself; exceptions are listed below.
ORDER = [
    "asr.features",
    "asr.errors",
    "asr.io",
    "asr.shipped",
    "asr.hub",
    "asr.words",
    "asr.config",
    "asr.kernels",
    "asr.nn",
]
ORDER += ["asr.data", "asr.models", "asr.decoding", "asr.training", "asr.analysis", "asr.inference"]
ORDER += ["asr.tasks", "asr.images", "asr.arguments", "asr.api"]
ORDER += [f"asr.{name}" for name in COMMANDS]
NOT_IMPORTED = {
    "asr.errors": set(ORDER) - {"asr.features"},
    "asr.io": set(ORDER) - {"asr.errors"},
    "asr.shipped": set(ORDER) - {"asr.errors"},
    "asr.hub": set(ORDER) - {"asr.errors", "asr.io", "asr.shipped"},
    "asr.words": set(ORDER),
    "asr.config": set(ORDER) - {"asr.errors", "asr.io", "asr.shipped"},
    "asr.kernels": set(ORDER) - {"asr.errors", "asr.io", "asr.config"},
    "asr.nn": {"asr.features", "asr.io"},
    "asr.data": {"asr.kernels", "asr.nn"},
    "asr.decoding": {"asr.features", "asr.io", "asr.kernels", "asr.models"},
    "asr.analysis": {"asr.features", "asr.kernels", "asr.nn", "asr.data", "asr.models"},
    "asr.images": {"asr.models", "asr.decoding", "asr.inference", "asr.tasks"},
    "asr.arguments": set(ORDER) - {"asr.errors", "asr.shipped"},
    **{
        f"asr.{name}": {"asr.api", *(f"asr.{other}" for other in COMMANDS if other != name)}
        for name in COMMANDS
    },
    "asr.__main__": set(ORDER) - {"asr.arguments", "asr.completion", "asr.errors"},
}
NO_BACKEND = {"asr.kernels.dispatch", "asr.kernels.types", "asr.kernels.deferred"}
NO_BACKEND |= {"asr.kernels.double_backward"}
# Modules whose only import from a package is this module.
ONLY = {
    ("asr.decoding", "asr.data"): {"asr.data.tokenizer"},  # the special tokens
    ("asr.models", "asr.data"): {"asr.data.tokenizer"},
    ("asr.kernels", "asr.config"): {"asr.config.cell", "asr.config.registered"},  # not the recipe
    ("asr.models", "asr.kernels"): NO_BACKEND,
    ("asr.nn", "asr.kernels"): NO_BACKEND,
    ("asr.errors", "asr.features"): {"asr.features"},
}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("asr", *parts) if parts[0] == "features" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def package_of(module):
    """asr.nn.lstm -> asr.nn, asr.train -> asr.train."""
    return ".".join(module.split(".")[:2])


def imported(source):
    """The modules of this project that a source imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            for alias in node.names:  # a module, or a name in one
                full = f"{node.module}.{alias.name}"
                names.add(full if full in MODULES else node.module)
    return {name for name in names if name.split(".")[0] == "asr"}


def forbidden(module, names):
    """Those of the imported modules that the table does not allow."""
    own = package_of(module)
    if own not in ORDER:
        return names
    # The package itself has the version, and imports nothing of this project.
    allowed = set(ORDER[: ORDER.index(own)]) - NOT_IMPORTED.get(own, set()) | {own, "asr"}
    wrong = set()
    for name in names:
        package = package_of(name)
        only = ONLY.get((own, package))
        if package not in allowed or (only is not None and name not in only):
            wrong.add(name)
    return wrong


def imports_of(module):
    return imported(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    assert not forbidden(module, imports_of(module)), f"{module} must not import these"


def test_every_package_is_in_the_table():
    assert {package_of(module) for module in MODULES} - {"asr"} == set(ORDER)


def test_modules_form_no_cycle():
    graph = {module: imports_of(module) - {module} for module in MODULES}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_a_forbidden_import_is_found():
    source = "from asr.kernels import dispatch, reference\ndef f():\n    import asr.models.las"
    assert forbidden("asr.nn.lstm", imported(source)) == {"asr.kernels.reference", "asr.models.las"}


# Every module that a command loads beyond its task slows every start and worker process.
TRAIN = """
import sys
from asr.config.loader import read_recipe
from asr.training.trainer import train
from pathlib import Path
train(read_recipe(sys.argv[1], ["train.steps=1", "data.workers=0"]), Path(sys.argv[2]))
print("MODULES", *sys.modules)
"""


@pytest.mark.slow
def test_training_speech_loads_speech_alone(tiny, tmp_path):
    line = [sys.executable, "-c", TRAIN, str(tiny), str(tmp_path / "run")]
    result = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    (loaded,) = [text for text in result.stdout.splitlines() if text.startswith("MODULES")]
    modules = set(loaded.split())
    other = {"asr.images.task", "asr.images.models", "asr.models.language_model"}
    assert not modules & {*other, "asr.tasks.language", "sklearn", "librosa", "asr.compare"}


@pytest.mark.parametrize("command", COMMANDS[:-2])
def test_help_needs_no_torch(command):
    """--help is quick: commands parse their arguments before they import torch and pydantic."""
    code = f"import sys, runpy; sys.argv = ['asr.{command}', '--help']\n"
    code += f"try: runpy.run_module('asr.{command}', run_name='__main__')\n"
    code += "except SystemExit as end: print('EXIT', end.code)\nprint('MODULES', *sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "EXIT 0" in result.stdout and "usage: python -m asr." in result.stdout
    heavy = {"torch", "pydantic", "numpy", "matplotlib", "asr.config.schema"}
    assert not heavy & set(result.stdout.partition("MODULES")[2].split())

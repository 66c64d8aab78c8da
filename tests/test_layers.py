"""Who may import whom, and how long a file and a function may be: read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for top in ("asr", "features") for path in (ROOT / top).rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 250, 40  # lines

LEAVES = {"asr.tokens", "asr.errors", "asr.console"}  # importable everywhere in asr
# Room -> the rooms of ours that it may import beside itself and the leaves.
TABLE = {
    "features": set(),
    "asr.tokens": set(),
    "asr.errors": set(),
    "asr.console": set(),
    "asr.settings": set(),
    "asr.recipe": {"asr.settings"},
    "asr.nn": set(),
    "asr.scoring": set(),
    "asr.data": {"features"},
    "asr.models": {"asr.nn"},
    "asr.decoding": {"asr.nn"},
    "asr.training": {"asr.data"},
}
# These see the recipe, as the commands do, but neither a command nor each other.
ALL = set(TABLE) | {"asr.build"}
TABLE["asr.runs"] = ALL
TABLE["asr.tasks"] = ALL | {"asr.corpora", "asr.recognizer", "asr.search", "asr.trained"}
TABLE["asr.bulk"] = ALL | {"asr.recognizer", "asr.transcript"}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    """features.audio -> features, asr.nn.lstm -> asr.nn, asr.train -> asr.train."""
    parts = module.split(".")
    return parts[0] if parts[0] == "features" else ".".join(parts[:2])


def imported(source, module, is_package):
    """The modules of ours that a source names in imports, wherever they stand in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *filter(None, [node.module])])
            # `from asr import build` names a module, `from asr.build import las` a thing in one.
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "asr" else {base}
    return {name for name in found if name.split(".")[0] in ("asr", "features")}


def forbidden(module, names):
    room = room_of(module)
    if room not in TABLE:  # build, the commands and what they share see everything
        return set()
    allowed = TABLE[room] | {room} | (LEAVES if room.startswith("asr") else set())
    return {name for name in names if room_of(name) not in allowed}


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_imports_point_one_way(path):
    module = module_of(path)
    names = imported(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    assert not forbidden(module, names), f"{module} must not import these"


def test_every_room_is_in_the_table():
    rooms = {room_of(module_of(path)) for path in FILES if len(module_of(path).split(".")) > 2}
    assert rooms <= set(TABLE)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("asr.nn.lstm", "from asr.errors import UserError", set()),
        ("asr.nn.lstm", "def f():\n    import asr.models.las", {"asr.models.las"}),
        ("asr.models.las", "from asr.nn import lstm\nfrom asr import recipe", {"asr.recipe"}),
        ("asr.models.las", "from ..recipe import Recipe", {"asr.recipe"}),
        ("asr.models.las", "from .listener import Listener", set()),
        ("asr.decoding.beam", "from asr.models.las import LAS", {"asr.models.las"}),
        ("features.audio", "import asr.errors", {"asr.errors"}),
        ("asr.build", "from asr.recipe import Recipe", set()),
    ],
)
def test_the_reader_of_imports_sees_them(module, source, wrong):
    assert forbidden(module, imported(source, module, False)) == wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_files_and_functions_are_short(path):
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= MAX_FILE
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION
    ]
    assert not long

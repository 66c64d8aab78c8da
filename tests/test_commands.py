"""All commands through one entry: their list, examples, dispatch and completion in the shell."""

import importlib
import os
import shlex
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import asr.__main__ as entry
from asr.arguments import EXAMPLES, CommandParser

PACKAGE = Path(entry.__file__).parent
NAMES = [name for group in EXAMPLES.values() for name in group]
CONSOLE = Path(sys.executable).with_name("layernorm-asr")


def test_every_file_that_can_be_called_is_listed():
    files = {
        path.stem
        for path in PACKAGE.glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    }
    assert set(NAMES) == files - {"__main__"} and len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize(
    ("call", "train"),
    [
        ([sys.executable, "-m", "asr"], "python -m asr.train"),
        ([CONSOLE, "--help"], "layernorm-asr train"),
    ],
)
def test_the_list_has_each_purpose_and_example_as_it_is_called(call, train, tmp_path):
    shown = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"Training:\n  train       Train a recipe\n              {train} demo" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_command_has_its_options(name, monkeypatch, capsys):
    (example,) = [group[name] for group in EXAMPLES.values() if name in group]
    assert entry.purpose(name)
    monkeypatch.setattr("sys.argv", [str(CONSOLE), name, "--help"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: layernorm-asr {name} ")
    assert shown.endswith(f"\nexample:\n  layernorm-asr {name} {example}\n")
    assert parser_of(name, monkeypatch).parse_args(shlex.split(example))


def test_the_version_is_that_of_setup_cfg(monkeypatch, capsys):
    setup = ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    monkeypatch.setattr("sys.argv", [str(CONSOLE), "--version"])
    assert entry.main() == 0
    assert capsys.readouterr().out == f"layernorm-asr {setup['metadata']['version']}\n"


def parser_of(name, monkeypatch):
    """The parser of a command, which its main makes."""
    monkeypatch.setattr(CommandParser, "completing", True)
    try:
        importlib.import_module(f"asr.{name}").main()
    except Exception as ended:
        monkeypatch.undo()
        return ended.parser
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("trian", "did you mean train?"), ("qq", "they are "), ("\x1b[2J" * 99, "they are prepare, ")],
)
def test_an_unknown_command_is_one_line(name, remedy, commands):
    assert remedy in (line := commands.refused(entry, name, "recipes/demo.yaml"))
    assert line.isprintable() and len(line) < 500


def test_a_mistake_names_the_command_as_it_was_called(commands, monkeypatch):
    assert "python -m asr.train --help" in commands.refused(entry, "train", "--no")
    monkeypatch.setattr(entry, "__name__", "layernorm-asr")  # sys.argv[0] of the fixture
    assert "layernorm-asr train --help" in commands.refused(entry, "train", "--no")


def completions(line, folder):
    """What argcomplete prints for the shell, on descriptor 8 as its shell function has it."""
    pytest.importorskip("argcomplete")
    words = {"LINE": line, "POINT": str(len(line)), "TYPE": "9"}
    env = {f"COMP_{key}": value for key, value in words.items()}
    env |= {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_COMP_WORDBREAKS": " =:"}
    script = f"exec '{CONSOLE}' 8>found 9>errors >/dev/null"
    subprocess.run(["bash", "-c", script], cwd=folder, env=os.environ | env, check=False)
    return (folder / "found").read_text().split("\n")


@pytest.mark.slow
def test_the_shell_completes_commands_keys_and_values(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: demo_transformer\nrun: mine\n")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "recipe.yaml").write_text(
        "data: {test: {mine: a.tsv}}\nmodel: {kind: las}\nrun: x\n"
    )
    expected = {
        "layernorm-asr tra": {"train", "transcribe"},
        "layernorm-asr train m": {"mine.yaml", "mini_librispeech", "mnist_rows"},
        "layernorm-asr train mine.yaml model.norm_p": {"model.norm_position="},
        "layernorm-asr sweep mine.yaml seed=1 model.convolution_norm=b": {"bias", "batch"},
        "layernorm-asr evaluate las decode.search=": {"beam", "ctc"},
        "layernorm-asr evaluate runs/x --split ": {"train", "valid", "mine"},
        "layernorm-asr transcribe r": {"runs/x", "runs/"},
        "layernorm-asr compare c": {"conformer"},
        "layernorm-asr train missing.yaml model.n": {""},
    }
    for line, words in expected.items():
        assert {word.strip() for word in completions(line, tmp_path)} == words, line

"""The notebook runs from its first cell to its last, and is stored with its results."""

import json
import re
from pathlib import Path

import pytest

from asr.data.importers import spoken_numbers

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_experiment.ipynb"
SMALL = {"EPOCHS": 1, "SEEDS": (1,)}


@pytest.fixture(scope="module")
def cells():
    return [
        cell
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


def test_it_runs_at_a_small_size(cells, tmp_path, monkeypatch, capsys):
    pytest.importorskip("espeakng_loader", reason="needs the extra demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    spoken_numbers.prepare(tmp_path / "data" / "spoken_numbers", train=24, valid=3, test=20)
    names = {}
    sizes, *rest = ["".join(cell["source"]) for cell in cells]
    exec(compile(sizes, "sizes", "exec"), names)
    assert names.keys() >= SMALL.keys()
    names |= SMALL
    for number, source in enumerate(rest, start=2):
        exec(compile(source, f"cell {number}", "exec"), names)
    names["plt"].close("all")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "runs"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"none_seed1", "ba_seed1"}
    printed = capsys.readouterr().out
    assert (
        "WER of test, second minus first: " in printed
        and r"\toprule" in names["comparison"].to_latex()
    )


def test_it_imports_little_more_than_the_entry(cells):
    code = "\n".join("".join(cell["source"]) for cell in cells)
    modules = {line.split()[1] for line in code.splitlines() if re.match(r"(import|from) ", line)}
    assert modules == {"asr", "asr.data.tokenizer", "contextlib", "matplotlib.pyplot", "torch"}


def test_it_is_stored_with_the_results_of_one_run(cells):
    assert NOTEBOOK.stat().st_size < 300_000
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert "/home/" not in json.dumps(outputs) and "/tmp/" not in json.dumps(outputs)

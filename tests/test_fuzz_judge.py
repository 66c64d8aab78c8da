"""The judge of benchmarks/fuzz.py finds planted faults, and none in commands that are right."""

import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from asr.errors import UserError

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import fuzz_judge
from fuzz_judge import Case, fault_of


def raises():
    raise KeyError("x")


def refuses():
    raise UserError("x.yaml: is no recipe")


def refuses_in_two_lines():
    print("error: one", file=sys.stderr)
    raise UserError("two")


def warns():
    print("/x/y.py:3: UserWarning: old", file=sys.stderr)


def exits_with_1():
    return 1


def exits_with_2():
    return 2


def writes_through_a_link():
    Path("../out/link.txt").write_text("y")


def writes_into_the_current_folder():
    Path("new.txt").write_text("y")


def removes_a_file():
    Path("../home/victim.txt").unlink()


def changes_a_file_and_its_time_back():
    path = Path("../home/victim.txt")
    times = path.stat()
    path.write_text("z")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def leaves_a_hidden_file():
    Path("../out/.x.part").write_text("y")


def prints_an_escape():
    os.write(1, b"\x1b[2J")


def prints_without_end():
    while True:
        os.write(1, b"x" * 9999)


def sleeps():
    time.sleep(60)


def computes():
    while True:
        pass


def leaves_a_process():
    if not os.fork():
        time.sleep(60)


def prints_nothing():
    pass


def writes_where_it_may():
    Path("../out/x.txt").write_text("good\n")
    print("good")


@pytest.fixture
def place(tmp_path):
    """The folder of a case, with a link from out/ to a file that must not change."""
    for name in ("work", "tmp", "home", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "home/victim.txt").write_text("x")
    (tmp_path / "out/link.txt").symlink_to(tmp_path / "home/victim.txt")
    return tmp_path


def judge(main, place, **more):
    module = SimpleNamespace(main=main, __name__=main.__name__)
    # A command forked here prints to these, which are not pytest's.
    with redirect_stdout(sys.__stdout__), redirect_stderr(sys.__stderr__):
        return fault_of(Case(module, [], ("out",), **more), place, ())[0]


@pytest.mark.parametrize("main", [refuses, prints_nothing, writes_where_it_may])
def test_a_command_that_is_right_has_no_fault(main, place):
    assert judge(main, place) is None


@pytest.mark.parametrize(
    ("main", "fault"),
    [
        (raises, "traceback"),
        (refuses_in_two_lines, "2 lines of error"),
        (warns, "a warning"),
        (exits_with_1, "exit code 1"),
        (exits_with_2, "no error line"),
        (writes_through_a_link, "victim.txt"),
        (writes_into_the_current_folder, "work/new.txt"),
        (removes_a_file, "victim.txt"),
        (changes_a_file_and_its_time_back, "victim.txt"),
        (leaves_a_hidden_file, "leaves"),
        (prints_an_escape, "control character"),
    ],
)
def test_a_planted_fault_is_found(main, fault, place):
    assert fault in judge(main, place)


def test_a_hang_is_found(place, monkeypatch):
    monkeypatch.setattr(fuzz_judge, "CLOCK", 0.2)
    assert "runs for more than" in judge(sleeps, place)


def test_an_endless_computation_is_found(place):
    assert "s of the processor" in judge(computes, place, cpu=1)


def test_endless_output_is_found(place, monkeypatch):
    monkeypatch.setattr(fuzz_judge, "LARGEST", 1 << 16)
    assert judge(prints_without_end, place) == "endless output"


def test_a_process_left_behind_is_found_and_ended(place, monkeypatch):
    monkeypatch.setattr(fuzz_judge, "PATIENCE", 0.2)
    assert judge(leaves_a_process, place) == "leaves processes behind"


def test_a_missing_result_is_found(place):
    assert "lacks 'good'" in judge(prints_nothing, place, expected=(("stdout", "good"),))
    assert "lacks 'good'" in judge(prints_nothing, place, expected=(("out/x.txt", "good"),))
    expected = (("stdout", "good"), ("out/x.txt", "good"))
    assert judge(writes_where_it_may, place, expected=expected) is None


def test_the_next_command_must_succeed(place):
    again = Case(SimpleNamespace(main=refuses, __name__="refuses"), [], ("out",))
    assert "x.yaml: is no recipe" in judge(refuses, place, again=again)
    assert judge(prints_nothing, place, again=again) is None

"""Files: whole or not at all, of bounded size, and never something that blocks."""

import os
import subprocess
import sys

import pytest

from asr.errors import UserError
from asr.io import atomic_writer, lock_file, read_small_file, try_lock, write_files


def test_a_small_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("é" * 50)
    assert read_small_file(path, 100) == "é" * 50
    with pytest.raises(UserError, match=r"a\.json: larger than 99 bytes"):
        read_small_file(path, 99)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(UserError, match="not a regular file"):
            read_small_file(path)
    with pytest.raises(IsADirectoryError):
        read_small_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_small_file(tmp_path / "missing")


def test_a_sparse_giant_is_not_read_whole(tmp_path):
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="larger than 16777216 bytes"):
        read_small_file(tmp_path / "giant")


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path):
    write_files(tmp_path, {"a": "old", "b": "old"})
    with pytest.raises(RuntimeError), atomic_writer(tmp_path / "a") as file:
        file.write(b"new")
        raise RuntimeError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path):
    code = "import sys; from asr.io import lock_file; from pathlib import Path\n"
    code += "with lock_file(Path(sys.argv[1]), 'in use'): print('held')"
    line = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with lock_file(tmp_path / "lock", "in use"):
        refused = subprocess.run(line, capture_output=True, text=True)
        assert refused.returncode and "UserError: in use" in refused.stderr
    assert subprocess.run(line, capture_output=True, text=True).stdout == "held\n"


def test_byte_ranges_are_locked_apart(tmp_path):
    path = tmp_path / "ranges"
    code = "import sys; from asr.io import try_lock\n"
    code += "file = open(sys.argv[1], 'r+b'); print(try_lock(file, 3, 1), try_lock(file, 5, 1))"
    with path.open("w+b") as file:
        assert try_lock(file, 3, 1)
        other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True)
    assert other.stdout.decode() == "False True\n"

"""Files: whole or not at all, of bounded size, and never something that blocks."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest

from asr import io as asr_io
from asr.errors import UserError
from asr.io import (
    atomic_writer,
    check_run_folder,
    lock_file,
    lock_run_folder,
    open_append,
    open_file,
    parse_json,
    read_json,
    read_small_file,
    try_lock,
    write_files,
)


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))


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


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o775), (0o022, 0o755), (0o077, 0o700)])
def test_permissions_of_a_new_folder_follow_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with asr_io.new_folder(tmp_path / "a") as part:
            part.rename(tmp_path / "a")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


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


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('["\\ud800"]', "lone surrogate"),
        ("1" * 5000, "Exceeds the limit"),
        (b'"\xff"', "can't decode"),
    ],
)
def test_json_that_cannot_be_used_is_a_value_error(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse_json(text)


def test_json_is_read_as_python_reads_it(tmp_path):
    value = {"a": [1, 2.5, None, True, "é\u2028\x1b😀"]}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "a.json") == value


class TestFilesInAFolderOfAnotherUser:
    """Nothing outside a run folder is written through one of its members."""

    @pytest.fixture
    def victim(self, tmp_path):
        path = tmp_path / "victim"
        path.write_text("precious")
        return path

    @pytest.fixture
    def run(self, tmp_path):
        (tmp_path / "run").mkdir()
        return tmp_path / "run"

    @staticmethod
    def lock(path):
        with lock_file(path, "in use"):
            pass

    @pytest.mark.parametrize("open_for_writing", [open_append, lock])
    def test_links_are_refused_and_their_targets_unchanged(self, open_for_writing, victim, run):
        (run / "soft").symlink_to(victim)
        (run / "hard").hardlink_to(victim)
        (run / "dangling").symlink_to(victim.with_name("new"))
        (run / "loop").symlink_to(run / "loop")
        for name, fault in {
            "soft": "a symbolic link",
            "hard": "hard links",
            "dangling": "a symbolic link",
            "loop": "a symbolic link",
        }.items():
            with pytest.raises(UserError, match=f"{name}: .*{fault}"):
                open_for_writing(run / name)
        assert victim.read_text() == "precious" and not victim.with_name("new").exists()

    @pytest.mark.parametrize("make", [os.mkfifo, bound_socket])
    def test_what_is_no_file_is_refused_at_once(self, make, run):
        make(run / "odd")
        for work in (open_append, self.lock, open_file):
            with pytest.raises(UserError, match="odd: not a regular file"):
                work(run / "odd")
        with pytest.raises(UserError, match="odd: not a regular file; remove it"):
            check_run_folder(run)

    def test_appending_keeps_the_content_and_the_mode_of_the_user(self, run):
        for word in (b"one ", b"two"):
            with open_append(run / "log") as file:
                file.write(word)
        assert (run / "log").read_bytes() == b"one two"
        (run / "plain").touch()
        assert (run / "log").stat().st_mode == (run / "plain").stat().st_mode

    @pytest.mark.parametrize("refusal", ["in use", None])
    def test_a_file_system_without_locks(self, run, monkeypatch, refusal):
        def refuse(*arguments):
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", refuse)
        with lock_file(run / "lock", refusal) as locked:
            assert not locked

    def test_a_lock_that_is_held_keeps_its_content(self, run):
        (run / "lock").write_text("process 7")
        with lock_file(run / "lock", "in use"), pytest.raises(UserError, match="in use"):
            self.lock(run / "lock")
        assert (run / "lock").read_text() == "process 7"

    @pytest.mark.parametrize("member", ["train.lock", "checkpoints", "evaluate/test/score.json"])
    def test_training_refuses_a_folder_with_a_link_before_it_writes(self, member, victim, run):
        (run / member).parent.mkdir(parents=True, exist_ok=True)
        (run / member).symlink_to(victim)
        before = sorted(run.rglob("*"))
        with pytest.raises(UserError, match=f"{member}: a symbolic link"), lock_run_folder(run):
            pass
        assert sorted(run.rglob("*")) == before and victim.read_text() == "precious"

    def test_a_run_folder_may_itself_be_reached_by_a_link(self, tmp_path, run):
        (run / "train.log").touch()
        (tmp_path / "link").symlink_to(run)
        with lock_run_folder(tmp_path / "link"):
            assert (run / "train.lock").exists()
        assert (run / "train.log").exists()

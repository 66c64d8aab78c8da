"""Tables and texts from elsewhere: one line, at once, in bounded memory."""

import gzip
import os
import tracemalloc

import pytest

from asr.data.corpus import read_manifest
from asr.data.manifest import LONGEST, write_rows
from asr.data.text_corpus import read_lines
from asr.errors import UserError

HEADER = "id\tspeaker\taudio\tseconds\ttext\n"
SPARSE = 20 << 30  # bytes


def refusal(read, path):
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def row(number, **fields):
    known = {"id": f"u{number}", "speaker": "s", "audio": f"{number}.wav", "seconds": "1.5"}
    return "\t".join((known | {"text": f"T {number}"} | fields).values()) + "\n"


def table(path, *rows):
    path.write_text(HEADER + "".join(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("read", [read_manifest, read_lines])
@pytest.mark.parametrize("suffix", [".tsv", ".txt", ".txt.gz"])
def test_only_regular_files_are_read(tmp_path, read, suffix):
    fifo = tmp_path / f"a{suffix}"
    os.mkfifo(fifo)
    assert refusal(read, fifo) == f"{fifo}: not a regular file"
    device = tmp_path / f"b{suffix}"
    device.symlink_to("/dev/zero")
    assert refusal(read, device) == f"{device}: not a regular file"
    assert "Is a directory" in refusal(read, tmp_path)


@pytest.mark.parametrize("beginning", ["", HEADER, HEADER + row(1)])
@pytest.mark.parametrize("read", [read_manifest, read_lines])
def test_a_table_without_line_breaks_is_refused_soon(tmp_path, read, beginning):
    path = tmp_path / "a.tsv"
    path.write_text(beginning)
    os.truncate(path, SPARSE)
    tracemalloc.start()
    message = refusal(read, path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    line = beginning.count("\n") + 1
    assert message == f"{path}:{line}: longer than {LONGEST} bytes; is this a table or text?"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tsv"]


def test_a_packed_text_without_line_breaks_is_refused_soon(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    tracemalloc.start()
    assert "a.txt.gz:1: longer than 1048576 bytes" in refusal(read_lines, path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("mark", ["\0", "\x9b"])
@pytest.mark.parametrize("field", ["id", "speaker"])
def test_control_characters_in_names_are_refused(tmp_path, mark, field):
    path = table(tmp_path / "a.tsv", row(1), row(2, **{field: f"a{mark}b"}), row(3))
    message = refusal(read_manifest, path)
    assert message.startswith(f"{path}:3: {field} 'a") and "has a control character" in message
    assert message.isprintable()


def test_control_characters_in_texts_are_data(tmp_path):
    path = table(tmp_path / "a.tsv", row(1, id="naïve 名", text="A\x1b[2JB"))
    assert read_manifest(path).texts == ["A\x1b[2JB"]


@pytest.mark.parametrize("field", ["a\udcffb", "\ud800"])
def test_bytes_that_are_not_text_are_not_written(tmp_path, field):
    with pytest.raises(UserError, match="has a field with bytes or surrogates that are not text"):
        write_rows(tmp_path / "a.tsv", ("id",), [("fine",), (field,)])
    with pytest.raises(UserError, match="makes a line longer than"):
        write_rows(tmp_path / "a.tsv", ("id",), [("a" * LONGEST,)])
    assert list(tmp_path.iterdir()) == []

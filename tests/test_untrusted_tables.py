"""Tables, texts and their indexes from elsewhere: one line, at once, in bounded memory."""

import gzip
import json
import os
import tracemalloc

import numpy as np
import pytest

from asr.data import line_index
from asr.data.corpus import read_manifest
from asr.data.manifest import LONGEST, write_rows
from asr.data.text_corpus import Sentences, read_lines
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
    assert f"{path}: the line at byte {len(beginning)} is longer than {LONGEST} bytes" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tsv"]


def test_a_packed_text_without_line_breaks_is_refused_soon(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    tracemalloc.start()
    assert "a.txt.gz:1: over 1048576 bytes long" in refusal(read_lines, path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("mark", ["\0", "\x9b"])
@pytest.mark.parametrize("field", ["id", "speaker"])
@pytest.mark.parametrize("other", ["", "ü"])  # checked in another way than plain ASCII
def test_control_characters_in_names_are_refused(tmp_path, mark, field, other):
    path = table(tmp_path / "a.tsv", row(1), row(2, **{field: f"a{other}{mark}b"}), row(3))
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


@pytest.fixture
def indexed(tmp_path, large_manifests):
    """A manifest with an index beside it; -> both paths."""
    (tmp_path / "data").mkdir()
    path = table(tmp_path / "data" / "a.tsv", *(row(n) for n in range(41)))
    read_manifest(path)
    return path, tmp_path / "data" / "a.tsv.index"


def parts(index):
    """The text, ends, seconds and description of an index."""
    content = index.read_bytes()
    length = int.from_bytes(content[-16:-8], "little")
    about = json.loads(content[-16 - length : -16])
    size = about["bytes"] + -about["bytes"] % 8
    ends = np.frombuffer(content, np.int64, about["lines"], size).copy()
    seconds = np.frombuffer(content, np.float32, about["lines"], size + 8 * about["lines"]).copy()
    return content[:size], ends, seconds, about


def assemble(index, text, ends, seconds, about):
    about = json.dumps(about).encode()
    tail = about + len(about).to_bytes(8, "little") + b"asrindex"
    index.write_bytes(text + ends.tobytes() + seconds.tobytes() + tail)


DESCRIPTIONS = [
    {"lines": 10**30},
    {"lines": 0},
    {"bytes": 10**18},
    {"source": 7},
]


@pytest.mark.parametrize("change", DESCRIPTIONS)
def test_a_false_description_is_written_again(indexed, change):
    path, index = indexed
    *content, about = parts(index)
    good = index.read_bytes()
    assemble(index, *content, about | change)
    assert len(list(read_manifest(path))) == 41
    assert index.read_bytes() == good


@pytest.mark.parametrize("seconds", [np.nan, -1.0, 0.0])
def test_impossible_durations_in_an_index_are_written_again(indexed, seconds):
    path, index = indexed
    content = parts(index)
    content[2][17] = seconds
    assemble(index, *content)
    assert (read_manifest(path).seconds == 1.5).all()


@pytest.mark.parametrize("end", [-1, 2**63 - 1])
def test_a_false_place_in_an_index_is_reported(indexed, end):
    path, index = indexed
    content = parts(index)
    content[1][17] = end
    assemble(index, *content)
    corpus = read_manifest(path)
    assert f"{index}: damaged; remove it" in refusal(lambda number: corpus[number], 17)


@pytest.mark.parametrize("kind", ["foreign", "link", "fifo", "folder"])
def test_an_index_replaces_no_other_file(indexed, tmp_path, kind):
    path, index = indexed
    index.unlink()
    other = tmp_path / "other"
    other.write_bytes(b"my own" * 999)
    if kind == "foreign":
        other.rename(index)
        other = index
    elif kind == "link":
        index.symlink_to(other)
    else:
        os.mkfifo(index) if kind == "fifo" else index.mkdir()
    assert len(list(read_manifest(path))) == 41
    assert other.read_bytes() == b"my own" * 999 and index.is_symlink() == (kind == "link")
    assert len(list(tmp_path.glob("cache/layernorm-asr/a-*.index"))) == 1


@pytest.mark.parametrize(("row", "end"), [(0, -1), (17, 2**63 - 1)])
def test_a_false_place_in_an_index_has_no_length(tmp_path, monkeypatch, row, end):
    """Batches of sentences are planned by lengths alone."""
    monkeypatch.setattr(line_index, "SMALL", 0)
    path = tmp_path / "a.txt"
    path.write_text("".join(f"LINE {n}\n" for n in range(41)))
    index = read_lines(path).file
    size = len(path.read_bytes())
    place, content = size + -size % 8 + 8 * row, index.read_bytes()
    index.write_bytes(content[:place] + np.int64(end).tobytes() + content[place + 8 :])
    with pytest.raises(UserError, match=f"{index}: damaged; remove it"):
        sentences = Sentences([read_lines(path)])
        [sentences.line(n) for n in np.flatnonzero(sentences.lengths >= 0).tolist()]

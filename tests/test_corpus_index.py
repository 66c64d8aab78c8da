"""Manifests too large for memory: the same rows and errors from an index as from memory."""

import multiprocessing
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.data import corpus as corpora
from asr.data import line_index, loader, manifest, splits
from asr.data.corpus import Utterance, read_manifest
from asr.data.line_index import Lines, open_lines
from asr.data.manifest import COLUMNS, read_blocks, read_rows
from asr.errors import UserError

HEADER = "id\tspeaker\taudio\tseconds\ttext\n"


def table(count):
    rows = (f"u{n}\ts{n % 3}\tclips/{n}.wav\t{n / 8 + 0.3}\tTEXT Ç{n}\n" for n in range(count))
    return HEADER + "".join(rows)


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A manifest that counts as large, read in blocks of a few lines, with its own cache folder."""
    monkeypatch.setattr(line_index, "SMALL", 0)
    monkeypatch.setattr(manifest, "BLOCK", 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "train.tsv"
    path.write_text(table(41), encoding="utf-8")
    return path


def one_by_one(path):
    """Every row as the plain table reader returns it."""
    return [
        Utterance(
            row["id"],
            row["speaker"],
            path.parent / row["audio"],
            float(row["seconds"]),
            row["text"],
        )
        for _, row in read_rows(path, COLUMNS)
    ]


def test_an_index_equals_its_table(large):
    corpus = read_manifest(large)
    assert list(corpus) == one_by_one(large) and corpus[-1].id == "u40"
    assert isinstance(corpus.seconds, np.memmap) and corpus.seconds.dtype == np.float32
    np.testing.assert_array_equal(corpus.seconds, np.arange(41, dtype=np.float32) / 8 + 0.3)
    assert sorted(p.name for p in large.parent.iterdir()) == ["train.tsv", "train.tsv.index"]
    with pytest.raises(IndexError):
        corpus[41]


def test_a_second_opening_reads_no_table(large, capsys, monkeypatch):
    first = list(read_manifest(large))
    assert "writing" in capsys.readouterr().out
    monkeypatch.setattr(corpora, "read_blocks", lambda *arguments: pytest.fail("read again"))
    assert list(read_manifest(large)) == first
    assert capsys.readouterr().out == ""


def test_a_small_manifest_needs_no_index(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text(table(5), encoding="utf-8")
    assert list(read_manifest(path)) == one_by_one(path)
    assert [p.name for p in tmp_path.iterdir()] == ["train.tsv"]


def test_a_changed_table_is_read_again(large):
    read_manifest(large)
    about = large.stat()
    large.write_text(table(41).replace("TEXT", "WORD"), encoding="utf-8")
    os.utime(large, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert read_manifest(large)[3].text == "WORD Ç3"


@pytest.mark.parametrize(
    "damage", [b"", b"asrindex", bytes(40), b"{}" + bytes(6) + b"asrindex"], ids="abcd"
)
def test_a_damaged_index_is_rebuilt(large, damage):
    read_manifest(large)
    file = large.with_name("train.tsv.index")
    for content in (damage, file.read_bytes()[:-1], file.read_bytes()[9:]):
        file.write_bytes(content)
        assert list(read_manifest(large)) == one_by_one(large)


def test_damage_inside_an_index_is_reported(large):
    corpus = read_manifest(large)
    file = large.with_name("train.tsv.index")
    file.write_bytes(file.read_bytes().replace(b"\ts1\t", b" s1\xff"))
    with pytest.raises(UserError, match=r"train.tsv.index: damaged; remove it"):
        list(corpus)


@pytest.mark.parametrize("cache", [True, False])
def test_a_folder_that_cannot_be_written(large, cache, monkeypatch, tmp_path, capsys):
    open_file = Path.open

    def refuse(path, mode="r", **options):
        if "x" in mode and (path.parent == large.parent or not cache):
            raise PermissionError(13, "Permission denied", str(path.parent))
        return open_file(path, mode, **options)

    monkeypatch.setattr(Path, "open", refuse)
    for _ in range(2):
        assert list(read_manifest(large)) == one_by_one(large)
    assert [p.name for p in large.parent.iterdir()] == ["train.tsv"]
    assert len([*tmp_path.glob("cache/*/train-*.index")]) == cache
    assert ("cannot be written, so" in capsys.readouterr().out) != cache


def test_a_user_without_a_home_folder(large, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert list(read_manifest(large)) == one_by_one(large)


def test_an_interrupted_write_leaves_nothing(large, monkeypatch):
    def break_off(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(line_index, "_gather", break_off)
    with pytest.raises(KeyboardInterrupt):
        read_manifest(large)
    assert [p.name for p in large.parent.iterdir()] == ["train.tsv"]


def test_processes_share_the_file(large, monkeypatch):
    def opened():
        return open_lines(large, ".index", lambda: read_blocks(large, False), timed=True)

    rows = opened()
    sent = pickle.dumps(rows)
    assert len(sent) < 1000 and pickle.loads(sent)[7] == rows[7]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(rows.__getitem__, [7, 40]) == [rows[7], rows[40]]
    os.utime(large, ns=(0, 0))
    opened()  # another file replaces it
    with pytest.raises(UserError, match="no longer the index that was opened"):
        pickle.loads(sent)
    monkeypatch.setattr(line_index, "SMALL", 1 << 20)
    small = opened()
    assert small.file is None
    assert list(pickle.loads(pickle.dumps(small))) == list(small)


def test_a_forged_index_cannot_name_files_outside_the_folder(large):
    large.write_text(table(41).replace("clips/7.wav", "/etc/passwd"), encoding="utf-8")
    trusting = read_manifest(large, allow_outside=True)
    assert trusting[7].audio == Path("/etc/passwd")
    file = large.with_name("train.tsv.index")
    file.write_bytes(file.read_bytes().replace(b'"outside", 1', b'"outside", 0'))
    with pytest.raises(UserError, match="'/etc/passwd' is outside"):
        read_manifest(large)[7]
    file.unlink()
    with pytest.raises(UserError, match=r"train.tsv:9: audio '/etc/passwd' is outside"):
        read_manifest(large)


FIELDS = st.sampled_from(["a", " b ", "", "ü", "x/../y", "..", "/etc/x", "3", "2.5", "-1", "nan"])
LINES = st.lists(
    st.one_of(
        st.lists(FIELDS, min_size=4, max_size=6).map("\t".join),
        st.integers(0, 9).map(lambda n: f"u{n}\ts\tclips/{n}.wav\t{n}.5 \t"),
        st.sampled_from(["", "  ", "\t\t\t\t", "a\rb"]),
    ),
    max_size=7,
)


@given(LINES, st.booleans(), st.booleans(), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_blocks_and_single_rows_agree(tmp_path_factory, lines, outside, ends, block):
    """The fast check accepts the same rows, with the same errors, as the row-by-row check."""
    path = tmp_path_factory.mktemp("t") / "t.tsv"
    path.write_text(HEADER + "\n".join(lines) + "\n" * ends, encoding="utf-8", newline="")

    def read():
        try:
            return b"".join(block.text for block in read_blocks(path, outside))
        except UserError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", block)
        quick = read()
        patch.setattr(manifest, "_valid_columns", lambda *arguments: None)
        assert quick == read()


def test_duplicates_are_found_across_blocks(large):
    large.write_text(table(41) + "\nu5\ts\ta.wav\t1\tX\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"train.tsv:44: id 'u5' is already in line 7"):
        read_manifest(large)


def test_parts_of_a_corpus_are_read_on_request(large):
    corpus, rows_read = read_manifest(large), one_by_one(large)
    assert list(corpus[3:17:5]) == rows_read[3:17:5] and corpus[:2].ids == ["u0", "u1"]
    np.testing.assert_array_equal(corpus[3:17:5].seconds, corpus.seconds[3:17:5])
    part = corpus.take(np.array([40, 2, 7]))
    assert part.ids == ["u40", "u2", "u7"] and part[1:].ids == ["u2", "u7"]
    assert part.path == large and pickle.loads(pickle.dumps(part)).ids == part.ids
    assert corpus.sample(5).ids == ["u0", "u10", "u20", "u30", "u40"]
    assert corpus.sample(41) is corpus


class Counted:
    """Replaces an extractor and its norm; records which utterances are measured."""

    needs_statistics = True

    def __init__(self, kind):
        self.kind, self.norm, self.seen = kind, self, []

    def load(self, path):
        return path.stem

    def features_for_statistics(self, name, speaker, speeds):
        return [(name, speaker)] * len(speeds)

    def add(self, features, speaker):
        self.seen.append(features)


@pytest.mark.parametrize(("kind", "seen"), [("global", ["0", "20", "40"]), ("speaker", None)])
def test_a_large_corpus_is_measured_by_a_sample(kind, seen, large, monkeypatch):
    monkeypatch.setattr(loader, "MEASURED", 3)
    front_end = Counted(kind)
    loader.measure_statistics(read_manifest(large), front_end, workers=0, speeds=(1.0,))
    assert front_end.seen == (seen or [str(n) for n in range(41)])  # every speaker needs statistics


@pytest.mark.parametrize(("kind", "times"), [("global", 1), ("speaker", 2)])
def test_only_speakers_are_measured_at_every_speed(kind, times, large):
    front_end = Counted(kind)
    loader.measure_statistics(read_manifest(large), front_end, workers=0, speeds=(0.9, 1.0))
    assert front_end.seen == [str(n) for n in range(41) for _ in range(times)]


def test_lengths_choose_utterances_without_reading_them(large, monkeypatch):
    corpus = read_manifest(large)
    monkeypatch.setattr(Lines, "__getitem__", lambda *arguments: pytest.fail("read"))
    kept, note = splits.filter_by_duration(corpus, 0.1, 35.0)
    assert kept is corpus and note is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert splits.filter_by_duration(corpus, 0.1, 1e300) == (kept, note)
    kept, note = splits.filter_by_duration(corpus, 0.3, 1.3)
    assert len(kept) == 9  # both limits included
    assert note.startswith(f"{large}: 32 of 41 utterances (")
    with pytest.raises(UserError, match="no utterance between"):
        splits.filter_by_duration(corpus, 7, 7.1)

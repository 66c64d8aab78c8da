"""Manifests: what is read, what is refused with which message, and what is written."""

import multiprocessing
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

from asr.data import corpus as corpora
from asr.data import line_index, loader, splits
from asr.data.corpus import Corpus, Utterance, link_audio, read_manifest, write_manifest
from asr.data.line_index import Lines, open_lines
from asr.data.manifest import COLUMNS, is_outside, read_blocks, read_rows, write_rows
from asr.errors import UserError

HEADER = "id\tspeaker\taudio\tseconds\ttext\n"
ROW = "a1\tanna\tclips/a1.flac\t2.5\tHELLO THERE\n"


def manifest(folder: Path, content: str) -> Path:
    path = folder / "train.tsv"
    path.write_bytes(content.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_manifest(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_rows_become_utterances(tmp_path):
    path = manifest(tmp_path, HEADER + ROW + "\nb2\tbert\tb2.wav\t7\tÇA VA?\n")
    corpus = read_manifest(path)
    assert len(corpus) == 2 and corpus.path == path
    assert corpus[0] == Utterance("a1", "anna", tmp_path / "clips/a1.flac", 2.5, "HELLO THERE")
    assert list(corpus)[1].text == "ÇA VA?"
    assert corpus.ids == ["a1", "b2"] and corpus.speakers == ["anna", "bert"]
    np.testing.assert_array_equal(corpus.seconds, np.array([2.5, 7], np.float32))
    assert corpus.seconds.dtype == np.float32


def test_columns_are_found_by_name_and_more_are_allowed(tmp_path):
    path = manifest(
        tmp_path, "text\tsource\tseconds\taudio\tspeaker\tid\nHI\tx\t1\ta.wav\tanna\ta1\n"
    )
    assert read_manifest(path)[0] == Utterance("a1", "anna", tmp_path / "a.wav", 1.0, "HI")


def test_without_a_speaker_every_utterance_has_its_own(tmp_path):
    rows = "".join(f"{name}\t{who}\t{name}.wav\t1\tHI\n" for name, who in (("a", ""), ("b", " ")))
    assert read_manifest(manifest(tmp_path, HEADER + rows)).speakers == ["a", "b"]


def test_spreadsheet_marks_and_line_ends_are_read(tmp_path):
    path = manifest(tmp_path, "\ufeff" + (HEADER + ROW).replace("\n", "\r\n"))
    assert read_manifest(path)[0].text == "HELLO THERE"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no column id, speaker, audio, seconds, text"),
        (HEADER, "empty"),
        (HEADER + "\n  \n", "empty"),
        ("id\taudio\ttext\na\tb\tc\n", "no column speaker, seconds"),
        ("id\taudio\ttext\na\tb\tc\n", "train.tsv --to FOLDER adds what is missing"),
        ("text\t" + HEADER, "column text appears twice; rename or remove one of them"),
        (HEADER + ROW + "b2\tbert\tb2.wav\t7\n", ":3: 4 fields where the header has 5"),
        (HEADER + ROW + "b2\tbert\tb2.wav\t7\tA\tB\n", ":3: 6 fields where the header has 5"),
        (HEADER + ROW + "\n" + ROW, ":4: id 'a1' is already in line 2"),
        (HEADER + ROW.replace("a1\ta", "\ta"), ":2: every row needs an id"),
        (HEADER + ROW.replace("clips/a1.flac", ""), ":2: every row needs an id and an audio file"),
        *(
            (HEADER + ROW.replace("2.5", seconds), f":2: seconds is {seconds!r}")
            for seconds in ("-1", "0", "nan", "inf", "two", "", "1e999", "2,5")
        ),
    ],
)
def test_bad_manifests_are_refused_with_file_and_line(tmp_path, content, words):
    path = manifest(tmp_path, content)
    message = refusal(path)
    assert str(path) in message and words in message


def test_a_file_that_is_not_text_is_refused(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "none.tsv")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    path = tmp_path / "latin.tsv"
    path.write_bytes((HEADER + ROW).encode() + "Ça".encode("latin-1"))
    assert "not UTF-8" in refusal(path)
    path.write_text(HEADER + ROW, "utf-16")
    assert f"{path}:1: not UTF-8 text (it is UTF-16); save it as UTF-8" in refusal(path)


@pytest.mark.parametrize("audio", ["/etc/passwd", "../b.wav", "x/../../b.wav", "x/../b.wav"])
def test_audio_outside_the_folder_is_refused_unless_allowed(tmp_path, audio):
    path = manifest(tmp_path, HEADER + ROW.replace("clips/a1.flac", audio))
    message = refusal(path)
    assert ":2:" in message and repr(audio) in message and "asr.prepare table" in message
    assert read_manifest(path, allow_outside=True)[0].audio == tmp_path / audio


def test_an_absolute_path_below_the_folder_is_inside(tmp_path):
    inside = tmp_path / "clips" / "a1.flac"
    path = manifest(tmp_path, HEADER + ROW.replace("clips/a1.flac", str(inside)))
    assert read_manifest(path)[0].audio == inside
    assert not is_outside("a.wav", Path(os.curdir))
    # A path that shares only a prefix with the folder is outside.
    assert is_outside(str(tmp_path) + "2/a.wav", tmp_path)


def test_a_written_manifest_is_read_back(tmp_path):
    utterances = [
        Utterance(f"u{i}", "s", tmp_path / f"x/{i}.wav", i + 0.25, f"T {i}") for i in range(3)
    ]
    path = tmp_path / "new.tsv"
    write_manifest(path, utterances)
    assert list(read_manifest(path)) == utterances
    assert path.read_text().splitlines()[1] == "u0\ts\tx/0.wav\t0.250\tT 0"
    assert [p.name for p in tmp_path.iterdir()] == ["new.tsv"]


def test_a_failed_write_leaves_the_old_manifest(tmp_path):
    path = manifest(tmp_path, HEADER + ROW)
    bad = Utterance("b", "s", tmp_path / "b.wav", 1.0, "TAB\tIN TEXT")
    with pytest.raises(UserError, match="'b' has a tab"):
        write_manifest(path, [bad])
    outside = Utterance("b", "s", tmp_path.parent / "b.wav", 1.0, "TEXT")
    with pytest.raises(UserError, match="outside"):
        write_manifest(path, [outside])
    assert path.read_text() == HEADER + ROW
    assert [p.name for p in tmp_path.iterdir()] == ["train.tsv"]


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def rows():
        yield ("a",)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(tmp_path / "x.tsv", ("id",), rows())
    assert list(tmp_path.iterdir()) == []


def test_outside_audio_is_reached_by_a_link(tmp_path):
    audio, to = tmp_path / "audio", tmp_path / "to"
    audio.mkdir()
    (audio / "a.wav").write_bytes(b"sound")
    path = to / "train.tsv"
    shown = link_audio(path, audio)
    assert shown == to / "train.audio" and (shown / "a.wav").read_bytes() == b"sound"
    write_manifest(path, [Utterance("a", "s", shown / "a.wav", 1.0, "A")])
    assert read_manifest(path)[0].audio.read_bytes() == b"sound"
    other = tmp_path / "other"
    other.mkdir()
    assert link_audio(path, other).resolve() == other  # our own link may be replaced
    assert sorted(p.name for p in to.iterdir()) == ["train.audio", "train.tsv"]


def test_a_link_never_replaces_a_folder(tmp_path):
    (tmp_path / "to" / "train.audio").mkdir(parents=True)
    (tmp_path / "audio").mkdir()
    with pytest.raises(UserError, match="in the way"):
        link_audio(tmp_path / "to" / "train.tsv", tmp_path / "audio")


def test_a_corpus_may_be_empty():
    assert len(Corpus([])) == 0 and Corpus([]).seconds.shape == (0,)


# Manifests too large for memory: the same rows and errors from an index as from memory.


def table(count):
    rows = (f"u{n}\ts{n % 3}\tclips/{n}.wav\t{n / 8 + 0.3}\tTEXT Ç{n}\n" for n in range(count))
    return HEADER + "".join(rows)


@pytest.fixture
def large(tmp_path, large_manifests):
    """A manifest that counts as large."""
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


def test_an_incomplete_index_is_rebuilt(large):
    read_manifest(large)
    file = large.with_name("train.tsv.index")
    for size in (99, file.stat().st_size - 1):
        os.truncate(file, size)
        assert list(read_manifest(large)) == one_by_one(large)


def test_an_index_replaces_no_other_file(large):
    index = large.with_name("train.tsv.index")
    index.write_bytes(b"not an index" * 99)
    assert list(read_manifest(large)) == one_by_one(large)
    assert index.read_bytes() == b"not an index" * 99


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


def test_an_interrupted_write_of_an_index_leaves_nothing(large, monkeypatch):
    def break_off(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(line_index, "_gather", break_off)
    with pytest.raises(KeyboardInterrupt):
        read_manifest(large)
    assert [p.name for p in large.parent.iterdir()] == ["train.tsv"]


def test_processes_share_the_file(large, monkeypatch):
    def opened():
        return open_lines(large, ".index", lambda: read_blocks(large, False))

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
    content = file.read_bytes()
    file.write_bytes(content[:32] + bytes(8) + content[40:])  # as of a manifest without such files
    with pytest.raises(UserError, match="'/etc/passwd' is outside"):
        read_manifest(large)[7]
    file.unlink()
    with pytest.raises(UserError, match=r"train.tsv:9: .* audio '/etc/passwd' is outside"):
        read_manifest(large)


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

"""Manifests: what is read, what is refused with which message, and what is written."""

import os
from pathlib import Path

import numpy as np
import pytest

from asr.data.corpus import Corpus, Utterance, link_audio, read_manifest, write_manifest
from asr.data.manifest import is_outside, write_rows
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


@pytest.mark.parametrize("audio", ["/etc/passwd", "../b.wav", "x/../../b.wav", "x/../b.wav"])
def test_audio_outside_the_folder_is_refused_unless_allowed(tmp_path, audio):
    path = manifest(tmp_path, HEADER + ROW.replace("clips/a1.flac", audio))
    message = refusal(path)
    assert ":2:" in message and repr(audio) in message and "asr.prepare tsv" in message
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


def test_audio_below_the_manifest_needs_no_link(tmp_path):
    (tmp_path / "clips").mkdir()
    assert link_audio(tmp_path / "train.tsv", tmp_path / "clips") == tmp_path / "clips"
    assert [p.name for p in tmp_path.iterdir()] == ["clips"]


def test_a_link_never_replaces_a_folder(tmp_path):
    (tmp_path / "to" / "train.audio").mkdir(parents=True)
    (tmp_path / "audio").mkdir()
    with pytest.raises(UserError, match="in the way"):
        link_audio(tmp_path / "to" / "train.tsv", tmp_path / "audio")


def test_a_corpus_may_be_empty():
    assert len(Corpus([])) == 0 and Corpus([]).seconds.shape == (0,)

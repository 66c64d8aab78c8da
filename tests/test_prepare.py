"""The command asr.prepare: tables, LibriSpeech from a folder and from a server, exit codes."""

import hashlib
import os
import shutil
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import soundfile

from asr import prepare
from asr.data.corpus import Utterance, read_manifest, write_manifest
from asr.data.importers import convert, download, librispeech, spoken_numbers
from asr.io import usable_cores


def record(path, seconds=1.0, rate=16000):
    path.parent.mkdir(parents=True, exist_ok=True)
    wave = 0.1 * np.sin(np.arange(round(seconds * rate)) / 7)
    soundfile.write(path, wave, rate)
    return path


@pytest.fixture
def table(tmp_path):
    """A table of three good rows, with an additional column."""
    folder = tmp_path / "own"
    for name, seconds, rate in (
        ("a.wav", 1.0, 16000),
        ("x/b.flac", 0.7, 44100),
        ("c.ogg", 1.3, 8000),
    ):
        record(folder / name, seconds, rate)
    table = folder / "mine.tsv"
    table.write_text(
        "id\taudio\ttext\tseconds\tspeaker\troom\n"
        "a\ta.wav\tHello there\t1.0\tanna\tkitchen\n"
        "b\tx/b.flac\tÇa va\t\t\tcellar\n"
        "c\t./x/../c.ogg\tGood bye\t1.35\tanna\troof\n"
    )
    return table


def test_texts_faster_than_speech_and_long_recordings_are_named(table, tmp_path, asr_prepare):
    """Rows whose texts moved to another recording, and minutes instead of utterances."""
    fast = "a text of so many letters that nobody can say it in a second"
    table.write_text(table.read_text().replace("Ça va", fast))
    code, out, _ = asr_prepare("table", table, "--to", tmp_path / "to")
    line = "warning: 1 of 3 utterances have over 25 letters a second, faster than speech: b. Listen"
    assert code == 0 and line in out and "data.max_seconds" not in out
    record(table.parent / "a.wav", 30.0)
    table.write_text(table.read_text().replace("\t1.0\t", "\t30.0\t").replace(fast, "so"))
    code, out, _ = asr_prepare("table", table, "--to", tmp_path / "again", "--valid", "0.3")
    assert code == 0 and "in recordings over 20 s, which recipes skip (data.max_seconds)" in out
    assert "letters a second" not in out


def test_good_rows_become_a_manifest(table, tmp_path, asr_prepare):
    code, out, err = asr_prepare("table", table, "--to", tmp_path / "to")
    manifest = tmp_path / "to" / "mine.tsv"
    assert code == 0 and err == []
    assert f"{manifest}: 3 utterances, 0.00 hours\n" in out
    assert "error rates count 3 transcripts with capital letters; --text lower removes them" in out
    corpus = read_manifest(manifest)
    assert corpus.ids == ["a", "b", "c"] and corpus.speakers == ["anna", "b", "anna"]
    assert corpus.texts == ["Hello there", "Ça va", "Good bye"]
    np.testing.assert_allclose(corpus.seconds, [1.0, 0.7, 1.3], atol=2e-3)  # as measured
    assert all(u.audio.is_file() for u in corpus)
    assert [line.split("\t")[-1] for line in manifest.read_text().splitlines()] == [
        "room",
        "kitchen",
        "cellar",
        "roof",
    ]


def test_a_relative_call_gives_the_same(table, tmp_path, asr_prepare, monkeypatch):
    monkeypatch.chdir(table.parent)
    assert asr_prepare("table", table.name, "--to", "../to")[0] == 0
    assert asr_prepare("table", table.name, "--to", "sub", "--audio", ".")[0] == 0
    for folder in (tmp_path / "to", table.parent / "sub"):
        assert all(u.audio.is_file() for u in read_manifest(folder / "mine.tsv"))


@pytest.mark.parametrize(("case", "text"), [("upper-az", "CA VA"), ("lower", "ça va")])
def test_text_is_converted_only_on_request(table, tmp_path, asr_prepare, case, text):
    assert asr_prepare("table", table, "--to", tmp_path, "--text", case)[0] == 0
    assert read_manifest(tmp_path / "mine.tsv")[1].text == text


def test_audio_below_the_target_needs_no_link(table, tmp_path, asr_prepare):
    assert asr_prepare("table", table, "--to", tmp_path)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.tsv", "own"]
    assert "\town/x/b.flac\t" in (tmp_path / "mine.tsv").read_text()


FAULTS = [
    ("d1\tnone.wav\tText\t1\ts\tr", "none.wav: no such file"),
    ("d2\ttext.wav\tText\t1\ts\tr", "text.wav: not readable as audio"),
    ("d3\tcut.flac\tText\t\ts\tr", "cut.flac: broken, or shorter than its header claims"),
    ("d4\tzero.wav\tText\t\ts\tr", "zero.wav: no audio, 0 samples"),
    ("d5\tnan.wav\tText\t\ts\tr", "nan.wav: holds samples that are NaN"),
    ("d6\tshort.wav\tText\t\ts\tr", "0.31 milliseconds long, too short for a manifest"),
    ("d7\ta.wav\t\t1\ts\tr", "the text is empty"),
    ("d8\ta.wav\t  \t1\ts\tr", "the text is empty"),
    ("\ta.wav\tText\t1\ts\tr", "the id is empty"),
    ("a\ta.wav\tText\t1\ts\tr", "id 'a' is already in line 2"),
    ("d9\t\tText\t1\ts\tr", "no audio file is given"),
    ("d10\ta.wav\tText\t-1\ts\tr", "seconds is '-1'; a length must be above 0"),
    ("d11\ta.wav\tText\tnan\ts\tr", "seconds is 'nan'; a length must be above 0"),
    ("d12\ta.wav\tText\tlong\ts\tr", "seconds is 'long', not a number"),
    ("d13\ta.wav\tText\t1.2\ts\tr", "seconds is 1.2, but the file has 1.000"),
    ("d14\t../other.wav\tText\t1\ts\tr", "'../other.wav' is outside"),
    ("d15\t/dev/zero\tText\t1\ts\tr", "'/dev/zero' is outside"),
    ("d16\ta.wav\tText", "3 fields where the header has 6"),
    ("d17\ta.wav\tText\t1\ts\tr\tmore", "7 fields where the header has 6"),
]


def spoil(folder):
    record(folder.parent / "other.wav")
    (folder / "text.wav").write_text("this is no sound" * 99)
    intact = record(folder / "whole.flac", 3.0).read_bytes()
    (folder / "cut.flac").write_bytes(intact[: len(intact) // 2])
    soundfile.write(folder / "zero.wav", np.zeros(0), 16000)
    soundfile.write(folder / "short.wav", np.zeros(5), 16000)
    soundfile.write(folder / "nan.wav", np.full(99, np.nan), 16000, subtype="FLOAT")


def test_all_faults_are_counted_and_listed_in_a_file(table, tmp_path, asr_prepare):
    spoil(table.parent)
    table.write_text(table.read_text() + "".join(f"{row}\n" for row, _ in FAULTS))
    code, out, err = asr_prepare("table", table, "--to", tmp_path / "to")
    file = tmp_path / "to" / "mine.faults.txt"
    assert code == 2 and out == "" and list((tmp_path / "to").iterdir()) == [file]
    messages = file.read_text().splitlines()
    for line, (message, (_, words)) in enumerate(zip(messages, FAULTS, strict=True), start=5):
        assert message.startswith(f"{table}:{line}: ") and words in message
    assert err[0] == f"{len(FAULTS)} rows are faulty:"
    assert "        2  the text is empty" in err
    start = err.index("the first 10:")
    assert sum(int(line.split()[0].replace(",", "")) for line in err[1:start]) == len(FAULTS)
    assert err[start + 1 : start + 12] == [*messages[:10], f"all of them: {file}"]
    assert err[-1].startswith(f"error: {table}: --audio / accepts its audio, if you trust")
    assert f"; {len(FAULTS)} of {len(FAULTS) + 3} rows are faulty" in err[-1]
    assert "--skip-bad" in err[-1] and len(err) == start + 13


def test_a_list_of_faults_is_removed_once_they_are_few(table, tmp_path, asr_prepare):
    good = table.read_text()
    table.write_text(good + "".join(f"d{n}\tnone.wav\tText\t1\ts\tr\n" for n in range(11)))
    code, _, err = asr_prepare("table", table, "--to", tmp_path / "to", "--skip-bad")
    assert code == 0 and err[:2] == ["11 rows are skipped:", "       11  no such file"]
    assert (tmp_path / "to" / "mine.faults.txt").is_file()
    table.write_text(good)
    assert asr_prepare("table", table, "--to", tmp_path / "to")[0] == 0
    assert not (tmp_path / "to" / "mine.faults.txt").exists()


def test_relative_paths_start_from_the_named_folder(table, tmp_path, asr_prepare):
    table.rename(tmp_path / "mine.tsv")
    code, _, err = asr_prepare("table", tmp_path / "mine.tsv", "--to", tmp_path / "to")
    assert code == 2 and f"relative paths start from {tmp_path}" in err[-1] and "--audio" in err[-1]
    call = ("table", tmp_path / "mine.tsv", "--to", tmp_path / "to", "--audio", table.parent)
    assert asr_prepare(*call)[0] == 0
    audio = [u.audio for u in read_manifest(tmp_path / "to" / "mine.tsv")]
    assert [path.resolve() for path in audio] == [
        table.parent / name for name in ("a.wav", "x/b.flac", "c.ogg")
    ]


def test_a_faulty_row_can_be_skipped(table, tmp_path, asr_prepare):
    row, words = FAULTS[0]
    table.write_text(table.read_text() + f"{row}\n")
    code, _, err = asr_prepare("table", table, "--to", tmp_path / "to")
    assert code == 2 and not (tmp_path / "to").exists()
    assert err[0].startswith(f"{table}:5: ") and words in err[0] and len(err) == 2
    code, out, err = asr_prepare("table", table, "--to", tmp_path / "to", "--skip-bad")
    assert code == 0 and "3 utterances" in out
    assert len(err) == 1 and err[0].startswith(f"skipped: {table}:5: ") and words in err[0]
    assert read_manifest(tmp_path / "to" / "mine.tsv").ids == ["a", "b", "c"]


def test_audio_without_content_is_a_fault(table, tmp_path, asr_prepare):
    """As the features see it: channels averaged, the mean removed."""
    folder, draw = table.parent, np.random.default_rng(0)
    speech = 0.3 * np.sin(np.arange(16000) / 7) * np.hanning(16000)
    silent = {
        "zero.wav": np.zeros(16000),
        "high.flac": np.full(16000, 0.1),
        "low.wav": np.full(16000, 0.001),
        "dither.wav": draw.integers(-1, 2, 16000).astype(np.int16),
        "zero.mp3": np.zeros(16000),
        "stereo.wav": np.full((16000, 2), [0.1, -0.2]),
    }
    opposite = {
        "exact.wav": np.stack([speech, -speech], 1),
        "noisy.flac": np.stack([speech, 4e-4 * draw.standard_normal(16000) - speech], 1),
        "mean.wav": np.stack([speech + 0.2, 0.1 - speech], 1),
    }
    good = {
        "quiet.wav": 1e-3 * speech,
        "left.wav": np.stack([speech, 0 * speech], 1),
        "weaker.wav": np.stack([speech, -0.9 * speech], 1),
        "late.wav": np.concatenate([np.zeros(50_000), speech]),
    }
    for name, samples in (silent | opposite | good).items():
        soundfile.write(folder / name, samples, 16000)
    rows = "".join(f"{name}\t{name}\tText\n" for name in (silent | opposite | good))
    table.write_text("id\taudio\ttext\n" + rows)
    code, _, err = asr_prepare("table", table, "--to", tmp_path / "to")
    assert code == 2 and f"{table}: 9 of 13 rows are faulty" in err[-1]
    for name, line in zip(silent | opposite, err[:-1], strict=True):
        words = "holds no sound: all samples" if name in silent else "channels have opposite phase"
        assert line.startswith(f"{table}:") and words in line
    assert asr_prepare("table", table, "--to", tmp_path / "to", "--skip-bad")[0] == 0
    assert read_manifest(tmp_path / "to" / "mine.tsv").ids == list(good)
    assert asr_prepare("table", table, "--to", tmp_path / "to", "--headers-only")[0] == 0


def test_headers_alone_do_not_show_a_truncated_file(table, tmp_path, asr_prepare):
    spoil(table.parent)
    table.write_text(table.read_text() + "d\tcut.flac\tText\t\ts\tr\n")
    assert asr_prepare("table", table, "--to", tmp_path, "--headers-only")[0] == 0


def test_long_recordings_are_a_fault_where_a_limit_is_set(table, tmp_path, asr_prepare):
    for more in ([], ["--headers-only"]):
        code, _, err = asr_prepare("table", table, "--to", tmp_path, "--max-seconds", 1.2, *more)
        assert code == 2 and f"{table}:4: " in err[0] and "limit of 1.2" in err[0]


def test_a_random_part_does_not_depend_on_the_order(tmp_path, asr_prepare):
    lengths = {f"u{n}": 0.3 + 0.01 * n for n in range(23)}
    for name, seconds in lengths.items():
        record(tmp_path / "own" / f"{name}.wav", seconds)
    table = tmp_path / "own" / "all.tsv"
    parts = []
    for order, seconds in ((1, 3.7), (-1, 3.7), (1, 1.9)):
        rows = (f"{name}\t{name}.wav\tText\n" for name in list(lengths)[::order])
        table.write_text("id\taudio\ttext\n" + "".join(rows))
        code, _, _ = asr_prepare("table", table, "--to", tmp_path, "--hours", seconds / 3600)
        kept = read_manifest(tmp_path / "all.tsv").ids
        assert code == 0 and kept == [name for name in list(lengths)[::order] if name in kept]
        total = sum(lengths[name] for name in kept)
        assert seconds - max(lengths.values()) < total <= seconds
        parts.append(set(kept))
    assert parts[0] == parts[1] > parts[2]
    assert parts[0] != set(list(lengths)[: len(parts[0])])


@pytest.mark.parametrize(
    ("hours", "words"),
    [
        (0, "must be above 0"),
        (float("nan"), "must be above 0"),
        (1, "the good rows have 0.00"),
        (0.3 / 3600, "too short for one row"),
    ],
)
def test_an_impossible_part(table, tmp_path, asr_prepare, hours, words):
    code, _, err = asr_prepare("table", table, "--to", tmp_path / "to", "--hours", hours)
    assert code == 2 and len(err) == 1 and words in err[0] and not (tmp_path / "to").exists()


def test_a_part_reads_no_other_audio(tmp_path, asr_prepare, monkeypatch):
    """Of 500 rows those are opened that fill the part, and a few ahead."""
    record(tmp_path / "own" / "a.wav", 1.0)
    table = tmp_path / "own" / "all.tsv"
    table.write_text("id\taudio\ttext\n" + "".join(f"u{n}\ta.wav\tText\n" for n in range(500)))
    opened = []
    measure = convert.decoded_seconds
    monkeypatch.setattr(convert, "decoded_seconds", lambda *a: opened.append(a) or measure(*a))
    assert asr_prepare("table", table, "--to", tmp_path, "--hours", 5 / 3600)[0] == 0
    assert len(read_manifest(tmp_path / "all.tsv")) == 5
    assert 5 < len(opened) <= 6 + convert.IN_FLIGHT * usable_cores()


def test_the_remedy_for_audio_outside_is_one_that_works(table, tmp_path, asr_prepare):
    other = record(tmp_path / "wav" / "d.wav")
    table.write_text(f"id\taudio\ttext\nd\t../wav/d.wav\tText\ne\t{other}\tText\n")
    call = ("table", table, "--to", tmp_path / "to")
    code, _, err = asr_prepare(*call)
    assert code == 2 and err[-1].startswith(f"error: {table}: --audio {other.parent} accepts its")
    assert "2 of 2 rows are faulty" in err[-1]
    assert asr_prepare(*call, "--audio", other.parent)[0] == 0
    found = [u.audio.resolve() for u in read_manifest(tmp_path / "to" / "mine.tsv")]
    assert found == [other, other]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "mine.tsv: no such file or folder"),
        ("", "not a table with a first line"),
        ("id\taudio\n", "none of the columns transcription, text"),
        ("id\taudio\ttext\n", "no row is good, nothing is written: it has none"),
        ("id\taudio\ttext\nd\tnone.wav\tText\n", "no row is good"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path, asr_prepare, content, words):
    table = tmp_path / "mine.tsv"
    if content is not None:
        table.write_text(content)
    code, _, err = asr_prepare("table", table, "--to", tmp_path / "to", "--skip-bad")
    assert code == 2 and words in err[-1] and not (tmp_path / "to").exists()


def test_the_table_itself_is_never_overwritten(table, asr_prepare):
    before = table.read_text()
    code, _, err = asr_prepare("table", table, "--to", table.parent)
    assert code == 2 and "is the table itself" in err[0] and table.read_text() == before


@pytest.mark.parametrize(
    "arguments", [[], ["table"], ["librispeech", "--to", "x", "--subsets", "y"]]
)
def test_a_wrong_command_line_has_exit_code_2(asr_prepare, arguments):
    code, _, err = asr_prepare(*arguments)
    assert code == 2 and "error" in err[-1]


def libri_speech(folder, subset, speakers=(19, 26)):
    """A small tree in the layout of the corpus."""
    for speaker in speakers:
        chapter = folder / "LibriSpeech" / subset / str(speaker) / "198"
        lines = []
        for number in range(3):
            name = f"{speaker}-198-{number:04d}"
            record(chapter / f"{name}.flac", 0.5 + 0.25 * number)
            lines.append(f"{name} NUMBER {number} OF {speaker}\n")
        (chapter / f"{speaker}-198.trans.txt").write_text("".join(lines))
    (folder / "LibriSpeech" / "LICENSE.TXT").write_text("CC BY 4.0")
    return folder / "LibriSpeech"


@pytest.mark.parametrize("level", ["", "LibriSpeech", "LibriSpeech/dev-clean"])
def test_an_unpacked_tree_is_listed_in_place(tmp_path, asr_prepare, level):
    tree = libri_speech(tmp_path / "from", "dev-clean")
    code, out, err = asr_prepare(
        "librispeech",
        "--to",
        tmp_path / "to",
        "--subsets",
        "dev-clean",
        "--from",
        tree.parent / level,
    )
    assert code == 0 and err == [] and "6 utterances" in out
    corpus = read_manifest(tmp_path / "to" / "dev-clean.tsv")
    assert corpus.ids == [f"{s}-198-{n:04d}" for s in (19, 26) for n in range(3)]
    assert corpus.speakers == ["19"] * 3 + ["26"] * 3 and corpus.texts[5] == "NUMBER 2 OF 26"
    np.testing.assert_allclose(corpus.seconds, [0.5, 0.75, 1.0] * 2)
    first = tree / "dev-clean/19/198/19-198-0000.flac"
    assert corpus[0].audio.resolve() == first.resolve()


def test_without_subsets_those_of_the_tree_are_listed(tmp_path, asr_prepare):
    for subset in ("dev-clean", "train-clean-5"):
        tree = libri_speech(tmp_path / "from", subset)
    code, _, err = asr_prepare("librispeech", "--to", tmp_path / "to", "--from", tree.parent)
    assert code == 0 and err == []
    found = sorted(path.name for path in (tmp_path / "to").glob("*.tsv"))
    assert found == ["dev-clean.tsv", "train-clean-5.tsv"]
    code, _, err = asr_prepare("librispeech", "--to", tmp_path / "to")
    assert code == 2 and "--subsets is missing: name some of train-clean-5, " in err[0]
    (tmp_path / "none").mkdir()
    call = ("librispeech", "--to", tmp_path / "to", "--from", tmp_path / "none")
    code, _, err = asr_prepare(*call)
    assert code == 2 and len(err) == 1 and "neither a subset of LibriSpeech" in err[0]


def test_a_missing_subset_stops_everything(tmp_path, asr_prepare):
    tree = libri_speech(tmp_path / "from", "dev-clean")
    both = ("--subsets", "dev-clean", "test-clean", "--from")
    code, _, err = asr_prepare("librispeech", "--to", tmp_path / "to", *both, tree)
    assert code == 2 and err == [f"error: {tree}: no subset test-clean; it has dev-clean"]
    assert not (tmp_path / "to").exists()
    code, _, err = asr_prepare("librispeech", "--to", tmp_path / "to", *both, tmp_path / "no")
    assert code == 2 and "no such folder" in err[0]


def test_an_earlier_training_manifest_has_its_hours(tmp_path, asr_prepare, monkeypatch):
    monkeypatch.setattr(prepare, "FEW_HOURS", 1e-5)
    for name in ("train", "valid"):
        record(tmp_path / "own" / f"{name}.wav")
        (tmp_path / "own" / f"{name}.tsv").write_text(f"audio\ttext\n{name}.wav\tTEXT\n")
        _, out, _ = asr_prepare("table", tmp_path / "own" / f"{name}.tsv", "--to", tmp_path / "to")
    assert "next: python -m asr.train small_corpus_conformer data.train=" in out
    assert "hours are few" not in out


def _remove_audio(chapter):
    (chapter / "19-198-0001.flac").unlink()


def _add_audio(chapter):
    record(chapter / "19-198-0009.flac")


def _break_audio(chapter):
    (chapter / "19-198-0001.flac").write_text("no sound")


def _break_line(chapter):
    (chapter / "19-198.trans.txt").write_text("19-198-0000 FINE\n20-198-0001 OF ANOTHER\n")


def _empty_line(chapter):
    (chapter / "19-198.trans.txt").write_text("19-198-0000\n")


@pytest.mark.parametrize(
    ("spoil_tree", "words"),
    [
        (_remove_audio, "19-198-0001.flac: is missing"),
        (_add_audio, "19-198-0009.flac: has no transcript"),
        (_break_audio, "19-198-0001.flac: not readable as audio"),
        (_break_line, "19-198.trans.txt:2: not a line '19-198-NUMBER TEXT'"),
        (_empty_line, "19-198.trans.txt:1: not a line"),
        (lambda chapter: shutil.rmtree(chapter.parents[1]), "no subset dev-clean; it has nothing"),
        (lambda chapter: shutil.rmtree(chapter.parent), "no SPEAKER/CHAPTER"),
    ],
)
def test_an_incomplete_tree_is_refused(tmp_path, asr_prepare, spoil_tree, words):
    tree = libri_speech(tmp_path / "from", "dev-clean", speakers=[19])
    spoil_tree(tree / "dev-clean" / "19" / "198")
    code, _, err = asr_prepare(
        "librispeech", "--to", tmp_path / "to", "--subsets", "dev-clean", "--from", tree
    )
    assert code == 2 and len(err) == 1 and words in err[0]
    assert not (tmp_path / "to" / "dev-clean.tsv").exists()


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A server with NUMBER/SUBSET.tar.gz of two subsets, whose checksums replace the published."""
    root = tmp_path / "mirror"
    for subset, number in (("dev-clean", 12), ("dev-clean-2", 31)):
        tree = libri_speech(tmp_path / "source" / subset, subset)
        archive = root / str(number) / f"{subset}.tar.gz"
        archive.parent.mkdir(parents=True)
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(tree, "LibriSpeech")
        md5 = hashlib.md5(archive.read_bytes()).hexdigest()
        monkeypatch.setitem(librispeech.SUBSETS, subset, librispeech.Archive(number, md5))
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    handler = partial(SimpleHTTPRequestHandler, directory=root)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", root
        server.shutdown()
        thread.join()


def test_subsets_are_downloaded_unpacked_and_listed(mirror, tmp_path, asr_prepare):
    url, root = mirror
    to = tmp_path / "to"
    call = ("librispeech", "--to", to, "--subsets", "dev-clean", "dev-clean-2", "--url", url)
    code, out, _ = asr_prepare(*call)
    assert code == 0 and len(out.splitlines()) == 2
    for subset in ("dev-clean", "dev-clean-2"):
        corpus = read_manifest(to / f"{subset}.tsv")
        assert len(corpus) == 6 and all(u.audio.is_file() for u in corpus)
        assert corpus[0].audio == to / f"LibriSpeech/{subset}/19/198/19-198-0000.flac"
    assert sorted(p.name for p in to.glob("[!d]*")) == ["LibriSpeech"]
    assert sorted(p.name for p in to.glob("*.tsv")) == ["dev-clean-2.tsv", "dev-clean.tsv"]
    assert (to / "LibriSpeech/LICENSE.TXT").is_file()
    shutil.rmtree(root)  # a second call needs no server
    assert asr_prepare(*call)[0] == 0


def test_the_text_for_language_models_is_downloaded(mirror, tmp_path, asr_prepare, monkeypatch):
    url, root = mirror
    (root / "11").mkdir()
    text = root / "11" / "librispeech-lm-norm.txt.gz"
    text.write_bytes(b"a few books")
    call = ("librispeech-lm", "--to", tmp_path / "to", "--url", url)
    code, _, err = asr_prepare(*call)
    assert code == 2 and "published is c83c64c726a1aedfe65f80aa311de402" in err[-1]
    monkeypatch.setattr(librispeech, "LM_MD5", hashlib.md5(text.read_bytes()).hexdigest())
    assert asr_prepare(*call)[0] == 0
    assert (tmp_path / "to" / text.name).read_bytes() == b"a few books"


def test_a_download_of_another_content_leaves_no_corpus(mirror, tmp_path, asr_prepare):
    url, root = mirror
    with (root / "12/dev-clean.tar.gz").open("ab") as file:
        file.write(b"more")
    code, _, err = asr_prepare(
        "librispeech", "--to", tmp_path / "to", "--subsets", "dev-clean", "--url", url
    )
    assert code == 2 and "published is" in err[-1]
    assert list((tmp_path / "to").iterdir()) == []


def test_an_archive_without_its_subset_is_refused(mirror, tmp_path, asr_prepare, monkeypatch):
    url, root = mirror
    shutil.copy(root / "31/dev-clean-2.tar.gz", root / "12/dev-clean.tar.gz")
    other = librispeech.SUBSETS["dev-clean-2"].md5
    monkeypatch.setitem(librispeech.SUBSETS, "dev-clean", librispeech.Archive(12, other))
    code, _, err = asr_prepare(
        "librispeech", "--to", tmp_path / "to", "--subsets", "dev-clean", "--url", url
    )
    assert code == 2 and "holds no LibriSpeech/dev-clean" in err[-1]
    assert [p.name for p in (tmp_path / "to").iterdir()] == ["dev-clean.tar.gz"]


def test_real_librispeech_folders(tmp_path, asr_prepare, shared):
    sample = shared("librispeech-sample/LibriSpeech")
    subsets = ["train-clean-100", "dev-clean"]
    code, *_ = asr_prepare("librispeech", "--to", tmp_path, "--subsets", *subsets, "--from", sample)
    assert code == 0
    for subset in subsets:
        corpus = read_manifest(tmp_path / f"{subset}.tsv")
        assert len(corpus) == len(list((sample / subset).rglob("*.flac"))) > 0
        info = soundfile.info(str(corpus[0].audio))
        assert info.frames / info.samplerate == pytest.approx(corpus[0].seconds, abs=1e-3)
        assert all(text == text.upper() and text for text in corpus.texts)


def test_spoken_numbers_are_made_by_the_command(tmp_path, asr_prepare, monkeypatch):
    def two_of_each(folder, seed):
        for split in ("train", "valid", "test"):
            output = [Utterance(f"{seed}-{n}", "s", folder / "a.flac", 1800, "ONE") for n in (1, 2)]
            write_manifest(folder / f"{split}.tsv", output)

    monkeypatch.setattr(spoken_numbers, "prepare", two_of_each)
    to = tmp_path / "numbers"
    code, out, _ = asr_prepare("spoken-numbers", "--to", to, "--seed", 5)
    assert code == 0 and read_manifest(to / "test.tsv").ids == ["5-1", "5-2"]
    assert out.splitlines()[0] == f"{to / 'train.tsv'}: 2 utterances, 1.00 hours"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spoken-numbers", "--to", ""], "argument --to: must not be empty"),
        (["spoken-numbers", "--to="], "argument --to: "),
        (["table", "", "--to", "a"], "argument SOURCE: must not be empty"),
        (["table", "t", "--to", "a", "--valid", "1"], "argument --valid: '1': must be below 1"),
        (["table", "t", "--to", "a", "--audio", ""], "argument --audio: must not be empty"),
        (["mnist", "--to", "a", "--url", ""], "argument --url: must not be empty"),
        (["table", "t", "--to", "a", "--hours", "nan"], "argument --hours: 'nan'"),
        (["table", "t", "--to", "a", "--hours", "inf"], "argument --hours: 'inf'"),
        (["table", "t", "--to", "a", "--hours", "-0"], "argument --hours: '-0'"),
        (["table", "t", "--to", "a", "--hours", "x"], "argument --hours: 'x'"),
        (["table", "t", "--to", "a", "--max-seconds", "nan"], "argument --max-seconds: 'nan'"),
        (["table", "t", "--to", "a", "--max-seconds=-1"], "argument --max-seconds: '-1'"),
        (["shards", "t", "--to", "a", "--megabytes", "0"], "argument --megabytes: '0'"),
        (["shards", "t", "--to", "a", "--megabytes", "nan"], "argument --megabytes: 'nan'"),
        (["shards", "t", "--to", "a", "--megabytes=-1"], "argument --megabytes: '-1'"),
        (["shards", "t", "--to", "a", "--megabytes", "1e-300"], "--megabytes 1e-300: must be"),
        (["spoken-numbers", "--to", "a", "--seed=-1"], "argument --seed: '-1'"),
        (["spoken-numbers", "--to", "a", "--seed", "9" * 5000], "argument --seed: '999"),
        (["spoken-numbers", "--to", "a", "--seed", "1.5"], "argument --seed: '1.5'"),
    ],
)
def test_impossible_arguments_are_one_line(tmp_path, asr_prepare, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = asr_prepare(*arguments)
    assert code == 2 and out == "" and len(err) == 1 and err[0].startswith("error: ")
    assert message in err[0] and len(err[0]) < 300
    assert list(tmp_path.iterdir()) == []


def test_a_transcript_that_is_no_small_file_is_refused(tmp_path, asr_prepare):
    tree = libri_speech(tmp_path / "from", "dev-clean", speakers=[19])
    path = tree / "dev-clean" / "19" / "198" / "19-198.trans.txt"
    call = ("librispeech", "--to", tmp_path / "to", "--subsets", "dev-clean", "--from", tree)
    for make, words in (
        (os.mkfifo, "not a regular file"),
        (lambda p: (p.touch(), os.truncate(p, 20 << 30)), "larger than"),
        (lambda p: p.write_bytes(b"19-198-0000 caf\xe9"), "not UTF-8 text"),
    ):
        path.unlink()
        make(path)
        code, _, err = asr_prepare(*call)
        assert code == 2 and len(err) == 1 and str(path) in err[0] and words in err[0]

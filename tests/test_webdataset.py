"""Tars in webdataset's layout become a manifest whose audio is read from the tars."""

import contextlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import soundfile
import torch

from asr import prepare
from asr.data.corpus import read_manifest
from asr.data.importers import webdataset
from asr.data.importers.convert import Options, convert
from asr.data.importers.text_normalization import TextNormalizer
from asr.data.shards import pack
from asr.errors import UserError
from asr.features.audio import read_audio

LONG = "d" * 120 + "/" + "n" * 120  # longer than a single header's limit


class Written(NamedTuple):
    manifest: Path
    skipped: list[str]


def write(folder, to):
    """Import the tars, with faulty samples skipped."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        normalize = TextNormalizer("keep")
        (manifest,) = convert(webdataset.read(folder), to, Options(skip_bad=True), normalize)
    lines = shown.getvalue().splitlines()
    assert all(line.startswith(f"skipped: {folder}/") for line in lines)
    return Written(manifest, [line.removeprefix(f"skipped: {folder}/") for line in lines])


def flac(count, seed):
    file = io.BytesIO()
    noise = 0.1 * np.random.default_rng(seed).standard_normal(count)
    soundfile.write(file, noise, 16_000, format="FLAC")
    return file.getvalue()


def write_tar(path, files, kind=tarfile.PAX_FORMAT):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1234.5  # a fractional time needs an extra header
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path):
    """Two tars: long names, dots in names, texts of both kinds, incomplete samples."""
    about = {"text": "from json", "id": "mine", "speaker": "ann", "duration": 0.75}
    files = {
        "a/0.flac": flac(8000, 0),
        "a/0.txt": b"hello\n there ",
        "1.json": json.dumps(about).encode(),
        "1.seg.flac": flac(12_000, 1),
        f"{LONG}.txt": "Ü long".encode(),
        f"{LONG}.flac": flac(9000, 2),
        "3.flac": flac(8000, 3),
        "4.txt": b"no sound",
        "5.flac": b"no flac",
        "5.txt": b"text",
        "6.json": b"[1",
        "6.flac": flac(8000, 6),
    }
    write_tar(tmp_path / "set" / "x-0.tar", files)
    write_tar(tmp_path / "set" / "x-1.tar", {"a/0.flac": flac(7000, 9), "a/0.txt": b"again"})
    return tmp_path / "set"


@pytest.mark.parametrize("inside", [True, False])
def test_samples_become_utterances(folder, tmp_path, inside):
    actual = write(folder, folder if inside else tmp_path / "to")
    corpus = read_manifest(actual.manifest)
    assert corpus.ids == ["x-0-a/0", "mine", f"x-0-{LONG}", "x-1-a/0"]
    assert corpus.texts == ["hello there", "from json", "Ü long", "again"]
    assert corpus.speakers[1] == "ann" and len(set(corpus.speakers)) == 4
    np.testing.assert_allclose(corpus.seconds, [0.5, 0.75, 0.562, 0.438], atol=1e-3)
    for utterance, (count, seed) in zip(
        corpus, [(8000, 0), (12_000, 1), (9000, 2), (7000, 9)], strict=True
    ):
        judge, _ = soundfile.read(io.BytesIO(flac(count, seed)), dtype="float32")
        assert torch.equal(read_audio(utterance.audio, 16_000), torch.from_numpy(judge))
    assert [m for m in actual.skipped if "readable as audio" not in m] == [
        "x-0.tar:4: sample '3': has no text",
        "x-0.tar:5: sample '4': has no audio",
        "x-0.tar:7: sample '6': its .json cannot be read as JSON",
    ]
    (message,) = (m for m in actual.skipped if "not readable as audio" in m)
    assert message.startswith("x-0.tar:6: ")


def test_recordings_that_share_a_name_are_not_given_each_others_texts(tmp_path):
    files = {}
    for number, times in enumerate(("0.00-1.00", "0.50-2.50", "4.00-4.50")):
        files[f"rec_{times}.flac"] = flac(8000, number)
        files[f"rec_{times}.txt"] = f"text {number}".encode()
    write_tar(tmp_path / "set" / "x.tar", files)
    actual = write(tmp_path / "set", tmp_path / "to")
    assert read_manifest(actual.manifest).texts == ["text 2"]
    (messages,) = actual.skipped  # neither the first nor the second
    assert messages.startswith("x.tar:1: sample 'rec_0': 2 files of one kind")


@pytest.mark.parametrize(
    ("kind", "content", "fault"),
    [
        ("txt", "café".encode("latin-1"), "its .txt is not UTF-8 text (unexpected end of data)"),
        ("json", '{"text": "ü"}'.encode("utf-16"), "its .json is not UTF-8 text"),
        ("json", b"[" * 200_000, "its .json cannot be read as JSON"),
        ("json", b'{"text": null}', "has no text"),
        ("json", b'{"text": ["A", "B"]}', "has no text"),
        ("json", b'{"text": "A", "seconds": "long"}', "seconds is 'long', not a number"),
        ("json", b'{"text": "A", "seconds": 0.0001}', "seconds is 0.0001, but the file has 0.5"),
        ("json", b'{"text": "A", "id": "good"}', "id 'good' is already in line 1"),
    ],
)
def test_an_odd_sample_is_skipped_and_costs_no_other(tmp_path, kind, content, fault):
    files = {
        "1.flac": flac(8000, 0),
        "1.json": b'\xef\xbb\xbf{"text": "HI", "id": "good", "speaker": null}',
        "2.flac": flac(8000, 1),
        f"2.{kind}": content,
    }
    write_tar(tmp_path / "set" / "x.tar", files)
    actual = write(tmp_path / "set", tmp_path / "to")
    (utterance,) = read_manifest(actual.manifest)
    assert (utterance.id, utterance.speaker, utterance.text) == ("good", "good", "HI")
    (messages,) = actual.skipped
    assert fault in messages


def test_a_null_id_is_no_id_and_a_byte_order_mark_no_text(tmp_path):
    files = {"1.flac": flac(8000, 0), "1.json": b'{"text": "A", "id": null}'}
    files |= {"2.flac": flac(8000, 1), "2.txt": b"\xef\xbb\xbfHI"}
    files |= {"4.flac": flac(8000, 3), "4.json": b'{"text": "D", "id": "a\\tb"}'}
    files |= {"3.flac": flac(8000, 2), "3.json": b'{"text": "C", "id": null}'}
    write_tar(tmp_path / "set" / "x.tar", files)
    corpus = read_manifest(write(tmp_path / "set", tmp_path / "to").manifest)
    assert corpus.ids == ["x-1", "x-2", "a b", "x-3"] and corpus.texts == ["A", "HI", "D", "C"]


def test_tars_named_after_splits(tmp_path):
    sample = {"a.flac": flac(8000, 0), "a.txt": b"hello"}
    for name in ("train-00000", "train-00001", "dev-00000", "test-00000"):
        write_tar(tmp_path / "set" / f"{name}.tar", sample)
    normalize = TextNormalizer("keep")
    manifests = convert(webdataset.read(tmp_path / "set"), tmp_path / "to", Options(), normalize)
    sizes = {path.stem: len(read_manifest(path)) for path in manifests}
    assert sizes == {"train": 2, "valid": 1, "test": 1}


def test_our_shards_are_webdataset_tars(folder, tmp_path):
    manifest = write(folder, tmp_path / "to").manifest
    packed = pack(manifest, tmp_path / "packed")
    again = read_manifest(write(packed.parent, tmp_path / "again").manifest)
    for one, other in zip(read_manifest(manifest), again, strict=True):
        assert (one.id, one.speaker, one.text) == (other.id, other.speaker, other.text)
        assert one.seconds == other.seconds
        assert torch.equal(read_audio(one.audio, 16_000), read_audio(other.audio, 16_000))


def test_tars_of_a_folder_itself_are_read(tmp_path):
    """`tar -cf x.tar .` names its files ./a.wav; a given duration is trusted."""
    about = json.dumps({"text": "given", "duration": 0.5}).encode()
    files = {
        "./a.flac": flac(8000, 0),
        "./a.json": about,
        "./b.flac": flac(9000, 1),
        "./b.txt": b"b",
    }
    write_tar(tmp_path / "set" / "x.tar", files)
    actual = write(tmp_path / "set", tmp_path / "to")
    corpus = read_manifest(actual.manifest)
    assert corpus.texts == ["given", "b"] and not actual.skipped
    assert [len(read_audio(u.audio, 16_000)) for u in corpus] == [8000, 9000]


def refusal(folder, to):
    with pytest.raises(UserError) as caught:
        write(folder, to)
    assert "\n" not in str(caught.value) and not (to / f"{folder.name}.tsv").exists()
    return str(caught.value)


def test_a_damaged_tar_costs_no_other_one(folder, tmp_path):
    to = tmp_path / "to"
    tar = folder / "x-1.tar"
    content = tar.read_bytes()
    for damaged in (content[:3000], b"nonsense" * 999, content[:512] + b"x" * 5000, b""):
        tar.write_bytes(damaged)
        actual = write(folder, to)
        assert "x-1.tar: damaged, or no uncompressed tar" in "".join(actual.skipped)
        assert len(read_manifest(actual.manifest)) == 3
    actual.manifest.unlink()
    write_tar(folder / "x-0.tar", {"4.txt": b"no sound"})
    tar.unlink()
    assert "x-0.tar:1: sample '4': has no audio" in refusal(folder, to)
    (folder / "x-0.tar").unlink()
    assert refusal(folder, to) == f"{folder}: there is no .tar in it"


def test_the_command_lists_skipped_samples(folder, tmp_path, commands):
    call = ("webdataset", folder, "--to", tmp_path / "to")
    code, _, err = commands(prepare, *call)
    assert code == 2 and f"{folder}: 4 of 8 rows are faulty" in err
    code, out, err = commands(prepare, *call, "--skip-bad")
    assert code == 0 and f"{tmp_path / 'to' / 'set.tsv'}: 4 utterances" in out
    assert err.count(f"skipped: {folder}/x-0.tar:") == 4


def test_a_tar_that_is_no_regular_file_is_refused(folder, tmp_path):
    os.mkfifo(folder / "y.tar")
    assert refusal(folder, tmp_path / "to") == f"{folder / 'y.tar'}: not a regular file"


def test_a_damaged_header_is_not_the_end_of_a_tar(folder, tmp_path):
    content = bytearray((folder / "x-1.tar").read_bytes())
    first = content.index(b"././@PaxHeader", 512)  # of the second file
    content[first : first + 512] = b"\1" * 512
    (folder / "x-1.tar").write_bytes(content)
    skipped = "".join(write(folder, tmp_path).skipped)
    assert "x-1.tar: damaged, or no uncompressed tar: has no valid" in skipped


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("caf\udce9", "has a field with bytes or surrogates that are not text"),
        ("a\x1b[2J", "has a control character"),
        ("a\tb", "has a control character"),
        ("a\nb", "has a control character"),
        ("d" * 5000, "its name is longer than 4096 characters"),
    ],
)
@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_an_odd_name_costs_no_other_sample(tmp_path, name, fault, kind):
    files = {f"{name}.flac": flac(8000, 0), f"{name}.txt": b"odd"}
    write_tar(tmp_path / "set" / "x.tar", files | {"b.flac": flac(8000, 1), "b.txt": b"B"}, kind)
    actual = write(tmp_path / "set", tmp_path / "to")
    assert read_manifest(actual.manifest).texts == ["B"]
    (message,) = actual.skipped
    assert fault in message and len(message) < 400

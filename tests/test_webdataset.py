"""Tars in webdataset's layout become a manifest whose audio is read where it lies."""

import io
import json
import tarfile

import numpy as np
import pytest
import soundfile
import torch

from asr import prepare
from asr.data.corpora import webdataset
from asr.data.corpus import read_manifest
from asr.data.shards import pack
from asr.errors import UserError
from features.audio import read_audio

LONG = "d" * 120 + "/" + "n" * 120  # longer than any single header holds


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
            info.size, info.mtime = len(content), 1234.5  # a fraction needs a header of its own
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path):
    """Two tars: long names, points in names, texts of both kinds, samples that lack something."""
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
    found = webdataset.write(folder, folder if inside else tmp_path / "to")
    corpus = read_manifest(found.manifest)
    assert corpus.ids == ["x-0-a/0", "mine", f"x-0-{LONG}", "x-1-a/0"]
    assert corpus.texts == ["hello there", "from json", "Ü long", "again"]
    assert corpus.speakers[1] == "ann" and len(set(corpus.speakers)) == 4
    np.testing.assert_allclose(corpus.seconds, [0.5, 0.75, 0.562, 0.438], atol=1e-3)
    for utterance, (count, seed) in zip(
        corpus, [(8000, 0), (12_000, 1), (9000, 2), (7000, 9)], strict=True
    ):
        judge, _ = soundfile.read(io.BytesIO(flac(count, seed)), dtype="float32")
        assert torch.equal(read_audio(utterance.audio), torch.from_numpy(judge))
    said = [line.partition(":")[2][1:] for line in found.left_out]
    assert said[:2] == ["3 has no text", "4 has no audio"]
    assert said[2].startswith("5: ") and "not readable as audio" in said[2]
    assert said[3:] == ["6 has no text"]


def test_what_we_pack_is_such_a_tar(folder, tmp_path):
    manifest = webdataset.write(folder, tmp_path / "to").manifest
    packed = pack(manifest, tmp_path / "packed")
    again = read_manifest(webdataset.write(packed.parent, tmp_path / "again").manifest)
    for one, other in zip(read_manifest(manifest), again, strict=True):
        assert (one.id, one.speaker, one.text) == (other.id, other.speaker, other.text)
        assert one.seconds == other.seconds
        assert torch.equal(read_audio(one.audio), read_audio(other.audio))


def test_tars_of_a_folder_itself_are_read(tmp_path):
    """`tar -cf x.tar .` calls its files ./a.wav; a length that is told spares no look at them."""
    about = json.dumps({"text": "told", "duration": 0.5}).encode()
    files = {
        "./a.flac": flac(8000, 0),
        "./a.json": about,
        "./b.flac": flac(9000, 1),
        "./b.txt": b"b",
    }
    write_tar(tmp_path / "set" / "x.tar", files)
    found = webdataset.write(tmp_path / "set", tmp_path / "to")
    corpus = read_manifest(found.manifest)
    assert corpus.texts == ["told", "b"] and not found.left_out
    assert [len(read_audio(u.audio)) for u in corpus] == [8000, 9000]


def refusal(folder, to):
    with pytest.raises(UserError) as caught:
        webdataset.write(folder, to)
    assert "\n" not in str(caught.value) and not (to / f"{folder.name}.tsv").exists()
    return str(caught.value)


def test_bad_tars_are_one_line(folder, tmp_path):
    to = tmp_path / "to"
    tar = folder / "x-1.tar"
    content = tar.read_bytes()
    for damaged in (content[:3000], b"nonsense" * 999, content[:512] + b"x" * 5000, b""):
        tar.write_bytes(damaged)
        assert f"{tar}: damaged, or no uncompressed tar" in refusal(folder, to)
    write_tar(folder / "x-0.tar", {"4.txt": b"no sound"})
    tar.unlink()
    assert "no sample has both audio and text: x-0.tar: 4 has no audio" in refusal(folder, to)
    (folder / "x-0.tar").unlink()
    assert refusal(folder, to) == f"{folder}: there is no .tar in it"


def test_the_command_says_what_is_left_out(folder, tmp_path, commands):
    code, out, err = commands(prepare, "webdataset", folder, "--to", tmp_path / "to")
    assert code == 0 and f"{tmp_path / 'to' / 'set.tsv'}: 4 utterances" in out
    assert err.count("left out: x-0.tar: ") == 4

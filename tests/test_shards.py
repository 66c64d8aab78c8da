"""Audio packed into tars: the same features in the same order, and errors of damaged tars."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from full_disk import full_disk
from tiny_speech import make_corpus, make_recipe, spec_augment

from asr import evaluate, prepare, train, transcribe
from asr.data.corpus import read_manifest
from asr.data.loader import SpeechEpochs, UtteranceDataset
from asr.data.shards import pack
from asr.data.tokenizer import Characters
from asr.errors import UserError
from asr.features import AudioError
from asr.features.audio import audio_seconds, read_audio
from asr.features.fbank import Fbank
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm
from asr.features.tar import TarMember, member_of


@pytest.fixture
def loose(tmp_path):
    """Thirteen recordings of several formats, with an extra column, in their own folder."""
    folder, random = tmp_path / "loose", np.random.default_rng(0)
    folder.mkdir()
    rows = ["id\troom\tspeaker\taudio\tseconds\ttext"]
    for number in range(13):
        name = f"{number}.{('wav', 'flac', 'ogg', 'mp3')[number % 4]}"
        count = 8000 + 1601 * number
        soundfile.write(folder / name, 0.1 * random.standard_normal(count), 16_000)
        seconds = count / 16_000
        rows.append(f"u{number}\tr{number % 5}\ts\t{name}\t{seconds!r}\tü{'ab' * (number % 3)}")
    path = folder / "train.tsv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def packed(loose, tmp_path):
    """The same recordings in tars of at most 60 kB."""
    return pack(loose, tmp_path / "packed", megabytes=0.06)


def epochs(manifest):
    front_end = FrontEnd(
        Fbank(num_mel_bins=11),
        MeanVarianceNorm("utterance"),
        spec_augment=spec_augment(),
        noise=(5, 9),
    )
    utterances = UtteranceDataset(
        read_manifest(manifest), front_end, Characters(["a", "b"]), seed=7
    )
    return SpeechEpochs(utterances, 3.0, (0.9, 1.0, 1.1), short_first=False, workers=0)


def test_batches_are_those_of_single_files(loose, packed):
    for epoch in (1, 2):
        first, second = epochs(loose).batches(epoch), epochs(packed).batches(epoch)
        for one, other in zip(first, second, strict=True):
            assert one.ids == other.ids and one.broken == other.broken == ()
            assert torch.equal(one.features, other.features)
            assert torch.equal(one.tokens, other.tokens)
    later = list(epochs(packed).batches(2))[3:]
    for one, other in zip(later, epochs(packed).batches(2, skip=3), strict=True):
        assert torch.equal(one.features, other.features)


def test_the_manifest_keeps_everything_but_the_audio_path(loose, packed):
    before, after = (
        [line.split("\t") for line in p.read_text().splitlines()] for p in (loose, packed)
    )
    place = before[0].index("audio")
    for old, new in zip(before, after, strict=True):
        assert old[:place] + old[place + 1 :] == new[:place] + new[place + 1 :]
    tars = sorted(path.name for path in packed.parent.glob("*.tar"))
    assert len(tars) > 2 and {row[place].split("/")[0] for row in after[1:]} == set(tars)
    assert sorted(p.name for p in packed.parent.iterdir()) == [*tars, "train.tsv"]
    sizes = [path.stat().st_size for path in packed.parent.glob("*.tar")]
    assert max(sizes) < 60_000 + 2 * 10_240 + 2048  # the end of a tar is padded to 10 kB


def test_tarfile_and_webdataset_read_the_same(loose, packed):
    """Members are pairs with one base name without a dot, as webdataset groups them."""
    original, pairs = {u.id: u for u in read_manifest(loose)}, {}
    for path in sorted(packed.parent.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                stem, suffix = member.name.split(".")
                pairs.setdefault(stem, {})[suffix] = tar.extractfile(member).read()
    assert len(pairs) == 13
    for content in pairs.values():
        about = json.loads(content.pop("json"))
        utterance = original[about["id"]]
        assert (about["text"], about["seconds"]) == (utterance.text, utterance.seconds)
        assert content == {utterance.audio.suffix[1:]: utterance.audio.read_bytes()}


def test_a_packed_manifest_can_be_packed_again(loose, packed, tmp_path):
    again = pack(packed, tmp_path / "again", megabytes=1)
    assert [p.name for p in again.parent.glob("*.tar")] == ["train-00000.tar"]
    for one, other in zip(read_manifest(loose), read_manifest(again), strict=True):
        assert torch.equal(read_audio(one.audio, 16_000), read_audio(other.audio, 16_000))
        assert audio_seconds(other.audio) == audio_seconds(one.audio)


def test_outside_audio_is_packed_where_allowed(loose, commands, tmp_path):
    table = tmp_path / "own" / "train.tsv"
    table.parent.mkdir()
    table.write_text(f"id\tspeaker\taudio\tseconds\ttext\nu\ts\t{loose.parent / '0.wav'}\t0.5\ta\n")
    line = ("shards", table, "--to", tmp_path / "out")
    assert "reads it (asr.prepare shards: --outside);" in commands.refused(prepare, *line)
    assert commands(prepare, *line, "--outside")[0] == 0
    audio = read_manifest(tmp_path / "out" / "train.tsv")[0].audio
    assert len(read_audio(audio, 16_000)) == 8000


def error(path):
    with pytest.raises(AudioError) as caught:
        read_audio(path, 16_000)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def test_a_damaged_tar_is_one_clear_line(packed, tmp_path):
    first, *_, last = read_manifest(packed)
    tar = Path(member_of(last.audio).tar)
    content = tar.read_bytes()
    member = member_of(last.audio)
    tar.write_bytes(content[: member.offset + member.size - 1])
    assert f"the tar ends before it, at {member.offset + member.size - 1} bytes" in error(
        last.audio
    )
    tar.write_bytes(content[: member.offset - 9] + b"XXXX" + content[member.offset - 5 :])
    assert "the tar is damaged: no file begins there" in error(last.audio)
    tar.write_bytes(b"not a tar" * 200_000)
    assert "the tar is damaged" in error(last.audio)
    tar.unlink()
    assert "the tar cannot be read: No such file or directory" in error(last.audio)
    tar.mkdir()
    assert "the tar cannot be read" in error(last.audio)
    place = member_of(first.audio)
    other = f"{place.tar}/x.wav@{place.offset}+{place.size}"
    assert f"has another file there, {place.name!r}; was it packed anew?" in error(other)
    assert "another file" in error(f"{place.tar}/{place.name}@{place.offset}+{place.size - 1}")
    for offset, size in ((0, 5), (10**17, 5), (512, 10**17)):
        assert "the tar ends before it" in error(f"{place.tar}/{place.name}@{offset}+{size}")


def test_damage_within_a_file_is_reported_for_that_file(packed):
    audio = read_manifest(packed)[1].audio
    member = member_of(audio)
    content = bytearray(Path(member.tar).read_bytes())
    content[member.offset : member.offset + 4] = b"what"
    Path(member.tar).write_bytes(content)
    assert "not readable as audio" in error(audio)


def test_only_paths_of_tar_members_are_parsed():
    assert member_of("a/x.tar/1.wav@512+9") == TarMember("a/x.tar", "1.wav", 512, 9)
    for path in (
        "a.wav",
        "x.tar",
        "x.tar/1.wav",
        "me@512+9",
        "x.tar/1.wav@-1+9",
        "x.tar/@1+",
        "x.tar/1@2+",
    ):
        assert member_of(path) is None


def test_packing_refuses_invalid_input(loose, packed, tmp_path):
    with pytest.raises(UserError, match=r"train.tsv: already exists; remove it"):
        pack(loose, packed.parent)
    with pytest.raises(UserError, match=r"must be 0\.01 or more"):
        pack(loose, tmp_path / "b", megabytes=0)
    (loose.parent / "8.wav").unlink()
    with pytest.raises(UserError, match=r"train.tsv:10: .*8.wav: No such file or directory"):
        pack(loose, tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def test_the_commands_take_packed_manifests(commands, tmp_path):
    make_corpus(tmp_path)
    to = tmp_path / "packed"
    for split in ("train", "valid", "test"):
        code, out, _ = commands(prepare, "shards", tmp_path / f"{split}.tsv", "--to", to)
        assert code == 0 and str(to / f"{split}.tsv") in out
    for flac in tmp_path.glob("*.flac"):
        flac.unlink()
    names = {"train": "train", "valid": "valid", "test": "test.test"}
    splits = [f"data.{key}={to}/{name}.tsv" for name, key in names.items()]
    line = [make_recipe(tmp_path), "--run", tmp_path / "run", *splits, "train.steps=2"]
    code, out, err = commands(train, *line)
    assert code == 0 and "skipped" not in out, out + err
    assert commands(evaluate, tmp_path / "run", "--split", "test")[0] == 0
    page = (tmp_path / "run" / "evaluate" / "test" / "page.html").read_text()
    assert "test-2" in page and ".tar/" not in page  # a browser cannot play audio from a tar
    audio = read_manifest(to / "test.tsv")[0].audio
    assert commands(transcribe, tmp_path / "run", audio)[0] == 0


@pytest.mark.parametrize("limit", [0, 30_000])
def test_a_full_disk_leaves_nothing(loose, tmp_path, limit):
    """No file may become larger than the limit; the tars are of at most 60 kB."""
    to = tmp_path / "packed"
    to.mkdir()
    with full_disk(limit), pytest.raises(OSError, match="File too large") as caught:
        pack(loose, to, megabytes=0.06)
    assert str(caught.value.filename).startswith(str(to / "train"))
    assert list(to.iterdir()) == []


def test_packing_replaces_no_file(loose, tmp_path):
    for name in ("train-00000.tar", "train-00002.tar"):
        to = tmp_path / name
        to.mkdir()
        (to / name).write_bytes(b"mine")
        with pytest.raises(UserError, match=f"{name}: already exists; remove it"):
            pack(loose, to, megabytes=0.06)
        assert [p.name for p in to.iterdir()] == [name] and (to / name).read_bytes() == b"mine"

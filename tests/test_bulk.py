"""Long lists of files: complete, in order, none twice, however the processes end."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile
from tiny_speech import RATE
from tone_model import spoken, tone_recognizer

from asr import io
from asr import transcribe as asr_transcribe
from asr.errors import UserError
from asr.inference import bulk
from asr.inference import recognition as transcribe
from asr.inference.bulk import BulkJob, ShardLocks, identity, open_folder, read_list
from asr.inference.load import load_run_recipe

WORDS = ["abc", "cab", "bca", "a", "b", "acb", "ab", "ba", "c", "bac", "cb"]


@pytest.fixture
def archive(tmp_path):
    """Eleven recordings of one word each, and three unreadable paths: paths -> words."""
    texts = {}
    for number, word in enumerate(WORDS):
        path = tmp_path / f"{number}.wav"
        soundfile.write(path, spoken([word], 0.3)[0], RATE)
        texts[str(path)] = word
    (tmp_path / "bad.wav").write_bytes(b"RIFF nonsense")
    texts |= {str(tmp_path / name): None for name in ("bad.wav", "gone.wav", "odd\tname.wav")}
    (tmp_path / "list.txt").write_text("\n".join([*texts, "", *texts]) + "\n")
    return texts


@pytest.fixture
def decoded_files(monkeypatch, tiny_run):
    """The command decodes with an error-free model; -> the files decoded so far."""
    recognizer, decoded = tone_recognizer(), []
    files = recognizer.transcribe_files

    def recorded(paths, faults):
        paths = list(paths)
        decoded.extend(map(str, paths))
        return files(paths, faults)

    recognizer.transcribe_files = recorded
    monkeypatch.setattr(transcribe.Recognizer, "load", staticmethod(lambda *arguments: recognizer))
    return decoded


def arguments(tiny_run, tmp_path, *more):
    return [tiny_run, "--list", tmp_path / "list.txt", "--out", tmp_path / "out", *more]


def table(path):
    return [line.split("\t") for line in path.read_text().splitlines()[1:]]


def test_all_files_are_transcribed_once_in_the_order_of_the_list(
    archive, decoded_files, commands, tiny_run, tmp_path
):
    line = arguments(tiny_run, tmp_path, "--shard-files", 3)
    code, out, err = commands(asr_transcribe, *line)
    assert code == 2 and sorted(decoded_files) == sorted(archive)
    good = [(name, word) for name, word in archive.items() if word]
    rows = table(tmp_path / "out" / "transcripts.tsv")
    assert [(name, text) for name, _, text in rows] == good
    for name, seconds, _ in rows:
        assert float(seconds) == pytest.approx(soundfile.info(name).duration, abs=1e-3)
    failures = dict(table(tmp_path / "out" / "failures.tsv"))
    assert failures[str(tmp_path / "gone.wav")] == "no such file"
    assert len(failures) == 3 and repr(str(tmp_path / "odd\tname.wav")) in failures
    assert f"failed: {tmp_path / 'gone.wav'}: no such file" in err
    hours = sum(float(seconds) for _, seconds, _ in rows) / 3600
    assert f"14 files, {hours:.2f} hours of audio, 3 failures" in out and "per hour" in out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["files"] == 14 and summary["failures"] == 3
    assert summary["audio_hours"] == pytest.approx(hours, abs=1e-4)
    code, out, _ = commands(asr_transcribe, *line)
    assert code == 2 and len(decoded_files) == 14 and "everything is done already" in out


def test_failures_are_retried_on_request_and_once_over_all_ranks(
    archive, decoded_files, commands, tiny_run, tmp_path, monkeypatch
):
    line = arguments(tiny_run, tmp_path, "--shard-files", 3)
    _, _, err = commands(asr_transcribe, *line)
    hint = f"3 of 14 files failed, see {tmp_path / 'out' / 'failures.tsv'}; once the causes"
    assert hint in err and "--attempt 2 tries them again" in err
    soundfile.write(tmp_path / "gone.wav", spoken(["ac"], 0.3)[0], RATE)
    assert hint in commands(asr_transcribe, *line)[2] and len(decoded_files) == 14
    code, _, err = commands(asr_transcribe, *line, "--attempt", 2)
    assert code == 2 and len(decoded_files) == 14 + 3 + 2  # the shards (9, 10, bad) and (gone, odd)
    assert "2 of 14 files failed" in err and "--attempt 3 tries" in err
    decoded = [text for _, _, text in table(tmp_path / "out" / "transcripts.tsv")]
    assert decoded == [*WORDS, "ac"]
    monkeypatch.setenv("RANK", "1")  # starts when the other rank has finished
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert commands(asr_transcribe, *line, "--attempt", 2)[0] == 2 and len(decoded_files) == 19


def test_json_has_the_times(archive, decoded_files, commands, tiny_run, tmp_path):
    commands(asr_transcribe, *arguments(tiny_run, tmp_path, "--json"))
    lines = (tmp_path / "out" / "transcripts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["words"][0]["text"] for row in rows] == WORDS
    assert [row["audio"] for row in rows] == [name for name in archive if archive[name]]


def test_good_files_alone_are_a_success(archive, decoded_files, commands, tiny_run, tmp_path):
    (tmp_path / "list.txt").write_text("\n".join(n for n in archive if archive[n]))
    assert commands(asr_transcribe, *arguments(tiny_run, tmp_path))[0] == 0
    assert table(tmp_path / "out" / "failures.tsv") == []


@pytest.mark.parametrize("ranks", [(0, 2, 3), (1, 2, 1), (0, 1, 5)])
def test_other_ranks_take_over_from_a_killed_one(
    ranks, archive, decoded_files, commands, tiny_run, tmp_path, monkeypatch
):
    """A rank is killed in the middle of a shard; another number of ranks finishes the list."""
    rank, before, after = ranks
    line = arguments(tiny_run, tmp_path, "--shard-files", 2)
    write = io.write_files

    def crash(folder, contents):
        if len(list(folder.glob("*.jsonl"))) == 3:
            raise KeyboardInterrupt
        write(folder, contents)

    monkeypatch.setattr(bulk, "write_files", crash)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(before))
    assert commands(asr_transcribe, *line)[0] == 130 and len(decoded_files) == 8
    shards = sorted(path.stem for path in (tmp_path / "out" / "shards").iterdir())
    assert shards == [f"{n:08d}" for n in range(7) if n % before == rank][:3]
    monkeypatch.setattr(bulk, "write_files", write)
    monkeypatch.setenv("RANK", str(rank % after))
    monkeypatch.setenv("WORLD_SIZE", str(after))
    assert commands(asr_transcribe, *line)[0] == 2
    assert len(decoded_files) == 16 and set(decoded_files) == set(
        archive
    )  # the two files of the lost shard again
    decoded = [text for _, _, text in table(tmp_path / "out" / "transcripts.tsv")]
    assert decoded == WORDS


def claimed_by_another(path, pieces):
    """A process that claims shards until its input ends."""
    script = (
        "import sys; from pathlib import Path; from asr.inference.bulk import ShardLocks\n"
        f"c = ShardLocks(Path({str(path)!r})).__enter__()\n"
        f"held = [c.lock(n) for n in {pieces}]\n"
        "print([one.__enter__() for one in held], flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", script], **pipes)
    assert process.stdout.readline() == f"{[True] * len(pieces)}\n"
    return process


@pytest.mark.slow
def test_a_claim_ends_with_its_process(tmp_path):
    other = claimed_by_another(tmp_path / "shards.lock", [2, 5])
    with ShardLocks(tmp_path / "shards.lock") as locks:
        for piece, free in ((1, True), (2, False), (3, True), (5, False)):
            with locks.lock(piece) as mine:
                assert mine is free
        assert locks.supported
        other.kill()
        other.communicate()
        with locks.lock(2) as mine:
            assert mine


def test_without_locks_a_rank_transcribes_its_own_shards(
    archive, decoded_files, commands, tiny_run, tmp_path, monkeypatch
):
    def refuse(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = arguments(tiny_run, tmp_path, "--shard-files", 2)
    for rank, code in ((1, 0), (0, 2)):
        monkeypatch.setenv("RANK", str(rank))
        assert commands(asr_transcribe, *line)[0] == code
    assert sorted(decoded_files) == sorted(archive)
    assert [text for _, _, text in table(tmp_path / "out" / "transcripts.tsv")] == WORDS


REFUSALS = [
    (["decode.beam=3"], "{out}: holds transcripts of another run, list or settings (decode.beam d"),
    (["features.mvn=speaker"], "(features.mvn differ); choose another --out"),
    (["--shard-files", 5], "(files in a shard differ); choose another --out"),
    (["--format", "json"], "(format differ); choose another --out"),
    (["--format", "srt"], "--format srt makes a file of each recording"),
    (["x.wav"], "x.wav and --list: name files or give a list of them, not both"),
]


@pytest.mark.parametrize(("more", "words"), REFUSALS)
def test_incompatible_options(more, words, archive, decoded_files, commands, tiny_run, tmp_path):
    commands(asr_transcribe, *arguments(tiny_run, tmp_path))
    before = (tmp_path / "out" / "about.json").read_text()
    line = commands.refused(asr_transcribe, *arguments(tiny_run, tmp_path, *more))
    assert words.format(out=tmp_path / "out") in line
    assert (tmp_path / "out" / "about.json").read_text() == before and len(decoded_files) == 14


def test_another_list_needs_another_folder(archive, decoded_files, commands, tiny_run, tmp_path):
    commands(asr_transcribe, *arguments(tiny_run, tmp_path))
    with (tmp_path / "list.txt").open("a") as file:
        file.write("more.wav\n")
    line = commands.refused(asr_transcribe, *arguments(tiny_run, tmp_path))
    assert "(list differ)" in line


def test_another_run_needs_another_folder(
    archive, decoded_files, commands, tiny_run, run, tmp_path
):
    commands(asr_transcribe, *arguments(tiny_run, tmp_path))
    assert commands(asr_transcribe, *arguments(run, tmp_path))[0] == 2 and len(decoded_files) == 14
    for path in run.glob("checkpoints/*/model.safetensors"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    line = commands.refused(asr_transcribe, *arguments(run, tmp_path))
    assert "holds transcripts of another run" in line and "(weights differ)" in line


def test_a_language_model_counts_by_its_content(tiny_run, tmp_path):
    recipe = load_run_recipe(tiny_run, [f"decode.lm={tmp_path / 'a.arpa'}"])
    (tmp_path / "a.arpa").write_text("one")
    before = identity(tiny_run, recipe)
    (tmp_path / "a.arpa").write_text("two")
    other = identity(tiny_run, recipe)
    assert [key for key in before if before[key] != other[key]] == ["decode.lm"]
    (tmp_path / "a.arpa").rename(tmp_path / "b.arpa")
    moved = load_run_recipe(tiny_run, [f"decode.lm={tmp_path / 'b.arpa'}"])
    assert identity(tiny_run, moved) == other
    trained = load_run_recipe(tiny_run, [f"decode.lm={tiny_run}"])  # a run's folder
    assert [identity(tiny_run, trained)["decode.lm"]] == before["weights"]
    for key in ("decode.lm=away", "decode.ensemble=[away]"):
        with pytest.raises(UserError, match=f"^{key.partition('=')[0]}.*away"):
            identity(tiny_run, load_run_recipe(tiny_run, [key]))


def test_an_invalid_list(commands, tiny_run, tmp_path):
    out = ["--out", tmp_path / "out"]
    line = commands.refused(asr_transcribe, tiny_run, "--list", tmp_path / "none.txt", *out)
    assert line == f"{tmp_path / 'none.txt'}: cannot be read: No such file or directory"
    (tmp_path / "none.txt").write_text("\n\n")
    line = commands.refused(asr_transcribe, tiny_run, "--list", tmp_path / "none.txt", *out)
    assert "the list is empty" in line and not (tmp_path / "out").exists()
    (tmp_path / "a.wav").write_bytes(b"RIFF\0\0\0\0WAVE")
    line = commands.refused(asr_transcribe, tiny_run, "--list", tmp_path / "a.wav", *out)
    assert "a.wav: no list of files; name audio without --list" in line
    line = commands.refused(asr_transcribe, tiny_run, "--list", tmp_path / "none.txt")
    assert line == "--list needs a folder for the transcripts: --out FOLDER"


def test_a_list_that_is_no_small_file_is_refused_unread(commands, tiny_run, tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")  # opening one would block
    with (tmp_path / "sparse.txt").open("wb") as file:
        file.truncate(1 << 33)
    for name, reason in (("pipe.txt", "not a regular file"), ("sparse.txt", "larger than ")):
        line = commands.refused(
            asr_transcribe, tiny_run, "--list", tmp_path / name, "--out", tmp_path / "out"
        )
        assert line.startswith(f"{tmp_path / name}: {reason}") and not (tmp_path / "out").exists()


DAMAGES = {
    "shards/00000000.jsonl": [
        b"",
        b"[]",
        b"null\n",
        b'{"audio": "other.wav", "text": "", "seconds": 1}',
        b'{"audio": "a.wa',
        b"\xff",
        b"[" * 100_000,
    ],
    "summary.json": [b"", b"[]", b"[" * 99_999],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_the_job_is_named_in_one_line(
    name, archive, decoded_files, commands, tiny_run, tmp_path
):
    line = arguments(tiny_run, tmp_path, "--shard-files", 20)
    commands(asr_transcribe, *line)
    good = (tmp_path / "out" / name).read_bytes()
    for content in DAMAGES[name]:
        (tmp_path / "out" / name).write_bytes(content)
        if name != "summary.json":
            (tmp_path / "out" / "summary.json").unlink(missing_ok=True)
        message = commands.refused(asr_transcribe, *line)
        assert message == (
            f"{tmp_path / 'out' / name}: damaged; remove it and start the same command again"
        )
    (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "shards" / "0copy.jsonl").write_text("not a shard")
    assert commands(asr_transcribe, *line)[0] == 2
    if name != "summary.json":  # which has the time of the last session
        assert (tmp_path / "out" / name).read_bytes() == good


def test_links_in_the_folder_are_not_followed(archive, decoded_files, commands, tiny_run, tmp_path):
    """The folder itself may be a link, which the user has made."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "mine")
    line = arguments(tiny_run, tmp_path)
    assert commands(asr_transcribe, *line)[0] == 2 and (tmp_path / "mine" / "shards.lock").exists()
    (tmp_path / "precious").write_text("precious")
    for name in ("shards.lock", "summary.json", "about.json", "shards/00000000.jsonl"):
        path = tmp_path / "mine" / name
        content = path.read_bytes()
        path.unlink()
        path.symlink_to(tmp_path / "precious")
        assert f"{name}: a symbolic link" in commands.refused(asr_transcribe, *line)
        path.unlink()
        path.write_bytes(content)
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_list_is_split_at_line_feeds_only(tmp_path):
    names = ["one.wav", "form\ffeed.wav", "line\u2028break.wav", " space.wav", os.fsdecode(b"\xe9")]
    content = b"\n".join(map(os.fsencode, names)) + b"\n"
    for variant in (content, b"\xef\xbb\xbf" + content, content.replace(b"\n", b"\r\n")):
        (tmp_path / "list.txt").write_bytes(variant)
        assert read_list(tmp_path / "list.txt") == names


def test_an_unrelated_folder_is_not_changed(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"holds thesis.tex, but no transcripts; choose another"):
        open_folder(BulkJob(tmp_path, ["a.wav"], 1, "text"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_manifest_is_accepted_as_a_list(tiny):
    names = [f"test-{n}.flac" for n in range(4)]
    assert read_list(tiny.parent / "test.tsv") == [str(tiny.parent / name) for name in names]


def test_a_manifest_with_outside_audio_is_accepted_where_allowed(
    archive, decoded_files, commands, tiny_run, tmp_path
):
    own = tmp_path / "own"
    own.mkdir()
    row = f"u\ts\t{tmp_path / '3.wav'}\t0.5\ta\n"
    (own / "list.tsv").write_text(f"id\tspeaker\taudio\tseconds\ttext\n{row}")
    line = [tiny_run, "--list", own / "list.tsv", "--out", own / "out"]
    assert "data.allow_outside_audio=true" in commands.refused(asr_transcribe, *line)
    assert commands(asr_transcribe, *line, "data.allow_outside_audio=true")[0] == 0
    assert [text for _, _, text in table(own / "out" / "transcripts.tsv")] == ["a"]


def start(line, rank, ranks):
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "asr.transcribe", *map(str, line)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed(tiny, tiny_run, tmp_path):
    """They share the work; the other process takes over the killed one's files and rank."""
    names = [tmp_path / f"{n}.flac" for n in range(40)]
    for name in names:
        name.symlink_to(tiny.parent / "test-1.flac")
    names.insert(7, tmp_path / "gone.flac")
    (tmp_path / "list.txt").write_text("\n".join(map(str, names)))
    line = arguments(tiny_run, tmp_path, "--shard-files", 1, "decode.beam=2")
    both = [start(line, rank, 2) for rank in (0, 1)]
    shards = tmp_path / "out" / "shards"
    while not list(shards.glob("*1.jsonl")):  # an odd number: a shard of rank 1
        assert both[1].poll() is None
        time.sleep(0.01)
    both[1].send_signal(signal.SIGKILL)
    (out, err), _ = (process.communicate(timeout=60) for process in both)
    assert both[0].returncode == 2, out + err
    assert "Traceback" not in err and "failed: " in err and "41 files" in out
    rows = table(tmp_path / "out" / "transcripts.tsv")
    assert [name for name, _, _ in rows] == [str(name) for name in names if name.exists()]
    assert len({text for _, _, text in rows}) == 1
    assert not np.any([path.name.startswith(".") for path in shards.iterdir()])

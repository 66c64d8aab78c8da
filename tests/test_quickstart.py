"""The shell blocks of docs/quickstart.md run, in their order, on corpora of a few utterances."""

import csv
import gzip
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr.data.importers import spoken_numbers

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
NOT_RUN = {
    "make .venv": "installs",
    "source .venv/bin/activate": "is for the user's shell",
    "tensorboard --logdir runs": "serves until it is stopped",
}
# Every training is of one step, and what is not the demo's is smaller than its recipe says.
SHORT = {"train": ["train.steps=1"], "sweep": ["train.steps=1"]}
SMALL = ["text.kind=characters", "model.listener.hidden=8", "model.speller.hidden=8"]
RATE = 16_000
ROWS = [("train", f"t{n}", f"s{n % 2}", text) for n, text in enumerate(["ONE", "TWO SIX", "TEN"])]
ROWS += [("valid", "v1", "s3", "SIX"), ("valid", "v2", "s3", "TWO")]


def blocks_of(section: str, indent: int = 4) -> list[list[str]]:
    """Its indented blocks, each as a list of commands."""
    found = re.findall(
        rf"^\n((?: {{{indent}}}\S.*\n(?: {{{indent}}}.*\n)*)+)", section, re.MULTILINE
    )
    return [[*map(str.strip, block.replace("\\\n", " ").splitlines())] for block in found]


def section_of(title: str) -> str:
    (section,) = (text for text in SECTIONS if title in text.partition("\n")[0])
    return section


def audio_of(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = np.arange(int(0.9 * RATE)) / RATE
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * 300 * seconds**2), RATE)


def run(line: str, commands, more=()) -> None:
    """One command: ours in this process, any other by the shell."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["python", "-m"]:
        name = words[2].removeprefix("asr.")
        module = importlib.import_module(f"asr.{name}")
        code, out, err = commands(module, *words[3:], *SHORT.get(name, ()), *more)
        assert code == 0, f"{line}\n{out}\n{err}"
    elif line not in NOT_RUN:
        where = str(Path(sys.executable).parent)
        env = {**os.environ, "PATH": f"{where}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        subprocess.run(["bash", "-ec", line], check=True, env=env, capture_output=True)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where the user stands: recipes and models of the project, and a folder of audio."""
    for name in ("pretrained", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for _, name, _, _ in ROWS:
        audio_of(tmp_path / "wav" / f"{name}.wav")
    return tmp_path


def test_the_tour_from_training_to_transcripts(folder, commands):
    """Sections 2 to 6 and 9 up to the images, whose corpus is a download."""
    pytest.importorskip("espeakng_loader", reason="needs the extra demo")
    spoken_numbers.prepare(folder / "data" / "spoken_numbers", train=12, valid=2, test=3)
    audio_of(folder / "my.wav")
    audio_of(folder / "recordings" / "first.wav")
    titles = (
        "Train\n",
        "TensorBoard",
        "Change a norm",
        "Evaluate",
        "Transcribe",
        "Language models",
    )
    lines = [
        line
        for section in SECTIONS
        if any(title in section.partition("\n")[0] + "\n" for title in titles)
        for block in blocks_of(section)
        for line in block
        if "mnist" not in line
    ]
    assert len(lines) > 17
    for line in lines:
        if "asr.sweep" in line:  # finds its runs finished, and starts no process for each
            line = line.replace("seed=1,2,3", "seed=1")
            for norm in ("none", "ba"):
                one = f"runs/norms/listener.norm={norm}"
                train = f"asr.train recipes/demo.yaml model.listener.norm={norm} seed=1"
                run(f"python -m {train} --run {one}", commands)
                run(f"python -m asr.evaluate {one} --split test", commands)
        run(line, commands)
    for page in (
        "runs/comparison/compare.html",
        "runs/demo/evaluate/test/page.html",
        "texts/first.txt",
    ):
        assert (folder / page).stat().st_size > 0
    assert (folder / "runs" / "demo_lm").is_dir()
    norms = {path.name for path in (folder / "runs" / "norms").iterdir()}
    assert norms >= {"listener.norm=none", "listener.norm=ba", "compare"}


def test_training_on_own_recordings(folder, commands):
    (header, *_), *rest = blocks_of(section_of("your own recordings"))
    (folder / "my").mkdir()
    (folder / "wav").rename(folder / "my" / "audio")
    for split in ("train", "valid"):
        rows = [f"{r[1]}\t{r[2]}\taudio/{r[1]}.wav\t0.9\t{r[3]}" for r in ROWS if r[0] == split]
        (folder / "my" / f"{split}.tsv").write_text("\n".join([header, *rows]) + "\n")
    lines = [line for block in rest for line in block]
    assert len(lines) == 5
    for line in lines:
        keeps_its_size = "asr.prepare" in line or "train.init" in line
        run(line, commands, [] if keeps_its_size else SMALL)


def kaldi(folder: Path) -> None:
    for split, part in (("train", "train"), ("valid", "dev")):
        rows = [row for row in ROWS if row[0] == split]
        (folder / "data" / part).mkdir(parents=True)
        for file, place in (("wav.scp", None), ("text", 3), ("utt2spk", 2)):
            lines = [f"{r[1]} {r[place] if place else folder / 'wav' / r[1]}" for r in rows]
            suffix = "" if place else ".wav"
            (folder / "data" / part / file).write_text("".join(f"{x}{suffix}\n" for x in lines))


def common_voice(folder: Path) -> None:
    for split, part in (("train", "train"), ("valid", "dev")):
        rows = [f"{r[2]}\t{r[1]}.mp3\t{r[3]}\n" for r in ROWS if r[0] == split]
        table = folder / "cv-corpus" / "cy" / f"{part}.tsv"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("client_id\tpath\tsentence\n" + "".join(rows))
        for row in rows:
            audio_of(table.parent / "clips" / row.split("\t")[1])


def ljspeech(folder: Path) -> None:
    names = [f"LJ{n:03}-0001" for n in range(60)]  # of which --valid 0.02 holds out one
    for name in names:
        audio_of(folder / "LJSpeech-1.1" / "wavs" / f"{name}.wav")
    lines = [f"{name}|no. 1|number one\n" for name in names]
    (folder / "LJSpeech-1.1" / "metadata.csv").write_text("".join(lines))


def json_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def nemo(folder: Path) -> None:
    for split in ("train", "valid"):
        rows = [
            {"audio_filepath": str(folder / "wav" / f"{r[1]}.wav"), "duration": 0.9, "text": r[3]}
            for r in ROWS
            if r[0] == split
        ]
        json_lines(folder / "manifests" / f"{split}.json", rows)


def wenet(folder: Path) -> None:
    for split, part in (("train", "train"), ("valid", "dev")):
        rows = [
            {"key": r[1], "wav": str(folder / "wav" / f"{r[1]}.wav"), "txt": r[3]}
            for r in ROWS
            if r[0] == split
        ]
        json_lines(folder / "data" / part / "data.list", rows)


def audiofolder(folder: Path) -> None:
    path = folder / "my" / "folder" / "metadata.csv"
    path.parent.mkdir(parents=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file_name", "sentence"])
        for split, name, _, text in ROWS:
            part = {"train": "train", "valid": "validation"}[split]
            audio_of(path.parent / part / f"{name}.wav")
            table.writerow([f"{part}/{name}.wav", text])


def datasets(folder: Path) -> None:
    library = pytest.importorskip("datasets", reason="200 MB: pip install '.[datasets]'")
    parts = {}
    for split, part in (("train", "train"), ("valid", "validation")):
        rows = [row for row in ROWS if row[0] == split]
        table = {"audio": [str(folder / "wav" / f"{r[1]}.wav") for r in rows]}
        table |= {"sentence": [r[3] for r in rows]}
        parts[part] = library.Dataset.from_dict(table).cast_column("audio", library.Audio())
    library.DatasetDict(parts).save_to_disk(str(folder / "my" / "saved"))


def lhotse(folder: Path) -> None:
    """Lines as Lhotse writes them; tests/test_importers.py reads files of the library itself."""
    for split in ("train", "valid"):
        lines = []
        for _, name, who, text in (row for row in ROWS if row[0] == split):
            source = {
                "type": "file",
                "channels": [0],
                "source": str(folder / "wav" / f"{name}.wav"),
            }
            whole = {"id": name, "start": 0, "duration": 0.9, "channel": 0}
            said = {**whole, "recording_id": name, "text": text, "speaker": who}
            recording = {"id": name, "sources": [source], "sampling_rate": RATE}
            recording |= {"num_samples": int(0.9 * RATE), "duration": 0.9, "channel_ids": [0]}
            cut = {**whole, "supervisions": [said], "recording": recording, "type": "MonoCut"}
            lines.append(json.dumps(cut) + "\n")
        (folder / "cuts").mkdir(exist_ok=True)
        with gzip.open(folder / "cuts" / f"{split}.jsonl.gz", "wt") as file:
            file.writelines(lines)


def webdataset(folder: Path) -> None:
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars" / "part-0.tar", "w") as tar:
        for number in range(60):
            audio = (folder / "wav" / "t0.wav").read_bytes()
            for ending, content in (("wav", audio), ("txt", b"NUMBER ONE")):
                member = tarfile.TarInfo(f"u{number}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def auto(folder: Path) -> None:
    (folder / "my").mkdir()
    ljspeech(folder)
    (folder / "LJSpeech-1.1").rename(folder / "my" / "corpus")


FORMS = (
    auto,
    kaldi,
    common_voice,
    ljspeech,
    nemo,
    wenet,
    audiofolder,
    datasets,
    lhotse,
    webdataset,
)
FORM_BLOCKS = {block[0].split()[3]: block for block in blocks_of(section_of("another form"))}


def test_every_form_has_its_block():
    assert list(FORM_BLOCKS) == [form.__name__.replace("_", "-") for form in FORMS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_corpus_in_another_form(form, folder, commands):
    form(folder)
    prepare, train = FORM_BLOCKS[form.__name__.replace("_", "-")]
    run(prepare.replace("/corpora/wav", str(folder / "wav")), commands)
    run(train, commands, SMALL)
    assert list((folder / "runs").glob("*/checkpoints/*/model.safetensors"))


def test_commands_in_wav_scp_become_files(folder, commands):
    kaldi(folder)
    data = folder / "data"
    for part in ("train", "dev"):
        table = data / part / "wav.scp"
        rows = [line.split() for line in table.read_text().splitlines()]
        table.write_text("".join(f"{name} cat {path} |\n" for name, path in rows))
        (script,) = blocks_of(section_of("another form"), indent=8)
        subprocess.run(["bash", "-ec", "\n".join(script)], check=True, cwd=data / part)
    run("python -m asr.prepare kaldi data --to data/own", commands)
    assert len((data / "own" / "train.tsv").read_text().splitlines()) == 4

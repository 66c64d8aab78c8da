"""The commands of docs/quickstart.md and docs/corpora.md run, on corpora of a few utterances."""

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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import soundfile
from tiny_speech import json_lines

from asr.data.importers import spoken_numbers

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TOUR = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
CORPORA = (ROOT / "docs" / "corpora.md").read_text(encoding="utf-8")
NOT_RUN = {
    "make .venv": "installs",
    "source .venv/bin/activate": "is for the user's shell",
    "tensorboard --logdir runs": "serves until it is stopped",
}
# Every training is of one step, and what is not the demo's is smaller than its recipe says.
TRAINING = ["train.steps=1", "train.samples=1"]
SHORT = {"train": TRAINING, "sweep": TRAINING, "evaluate": ["--pictures", "1"]}
SMALL = {
    "small_corpus_conformer": [
        *("model.d_model=8", "model.heads=2", "model.feed_forward=8", "model.encoder_layers=2"),
        *("model.intermediate_ctc=null", "decode.beam=1", "decode.ctc_weight=0"),
        "decode.speeds=[1.0]",
    ],
    "fine_tune": ["decode.beam=1", "decode.ctc_weight=0", "decode.speeds=[1.0]"],
    "librispeech100": ["model.listener.hidden=8", "model.speller.hidden=8"],
}
RATE = 16_000


class Row(NamedTuple):
    name: str
    speaker: str
    text: str


ROWS = {
    "train": [Row(f"t{n}", f"s{n % 2}", text) for n, text in enumerate(["ONE", "TWO SIX", "TEN"])],
    "valid": [Row("v1", "s3", "SIX"), Row("v2", "s3", "TWO")],
}
DEV = {"train": ROWS["train"], "dev": ROWS["valid"]}  # as other tools name them


def blocks_of(section: str, indent: int = 4) -> list[list[str]]:
    """Its indented blocks, each as a list of commands."""
    found = re.findall(
        rf"^\n((?: {{{indent}}}\S.*\n(?: {{{indent}}}.*\n)*)+)", section, re.MULTILINE
    )
    return [[*map(str.strip, block.replace("\\\n", " ").splitlines())] for block in found]


def sections_of(page: str) -> dict[str, str]:
    """Its sections by title."""
    parts = (part.partition("\n") for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:])
    return {title: text for title, _, text in parts}


def audio_of(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = np.arange(int(0.9 * RATE)) / RATE
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * 300 * seconds**2), RATE)


def run(line: str, commands, more=()) -> str:
    """One command: ours in this process, any other by the shell -> what ours printed."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["python", "-m"]:
        name = words[2].removeprefix("asr.")
        module = importlib.import_module(f"asr.{name}")
        short = SHORT.get(name, ())
        replaced = tuple(text.partition("=")[0] + "=" for text in short)
        given = [word for word in words[3:] if not word.startswith(replaced)]
        code, out, err = commands(module, *given, *short, *more)
        assert code == 0, f"{line}\n{out}\n{err}"
        return out
    if line not in NOT_RUN:
        where = str(Path(sys.executable).parent)
        env = {**os.environ, "PATH": f"{where}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        subprocess.run(["bash", "-ec", line], check=True, env=env, capture_output=True)
    return ""


def small(line: str) -> list[str]:
    """Overrides that make the model of this training, or its decoding, small."""
    return ["text.kind=characters", *SMALL[Path(line.split()[3]).stem]]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where the user stands: recipes and models of the project, and a folder of audio."""
    for name in ("pretrained", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for row in ROWS["train"] + ROWS["valid"]:
        audio_of(tmp_path / "wav" / f"{row.name}.wav")
    return tmp_path


def test_the_tour_from_training_to_transcripts(folder, commands):
    """Sections 2 to 6 and 8 up to the images, whose corpus is a download."""
    pytest.importorskip("espeakng_loader", reason="needs the extra demo")
    spoken_numbers.prepare(folder / "data" / "spoken_numbers", train=12, valid=2, test=3)
    audio_of(folder / "my.wav")
    audio_of(folder / "recordings" / "first.wav")
    lines = [
        line
        for title, section in sections_of(TOUR).items()
        if title.partition(".")[0] in "234568"
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
    sections = sections_of(CORPORA)
    (header, *_), *rest = blocks_of(sections["A table of recordings"])
    rest += blocks_of(sections["Fine-tune a model"])
    (folder / "my").mkdir()
    (folder / "wav").rename(folder / "my" / "audio")
    for split, rows in ROWS.items():
        lines = [f"{r.speaker}\taudio/{r.name}.wav\t{r.text}" for r in rows]
        (folder / "my" / f"{split}.tsv").write_text("\n".join([header, *lines]) + "\n")
    sidecars(folder)
    audio_of(folder / "my.wav")
    lines = [line for block in rest for line in block]
    assert len(lines) == 8
    for line in lines:
        keeps_its_size = "asr.train" not in line or "train.init" in line
        run(line, commands, [] if keeps_its_size else small(line))


def kaldi(folder: Path) -> None:
    for part, rows in DEV.items():
        data = folder / "data" / part
        data.mkdir(parents=True)
        audio = [f"{r.name} {folder}/wav/{r.name}.wav\n" for r in rows]
        (data / "wav.scp").write_text("".join(audio))
        (data / "text").write_text("".join(f"{r.name} {r.text}\n" for r in rows))
        (data / "utt2spk").write_text("".join(f"{r.name} {r.speaker}\n" for r in rows))


def common_voice(folder: Path) -> None:
    corpus = folder / "cv-corpus" / "cy"
    for part, rows in DEV.items():
        for row in rows:
            audio_of(corpus / "clips" / f"{row.name}.mp3")
        lines = [f"{r.speaker}\t{r.name}.mp3\t{r.text}\n" for r in rows]
        (corpus / f"{part}.tsv").write_text("client_id\tpath\tsentence\n" + "".join(lines))


def ljspeech(folder: Path) -> None:
    names = [f"LJ{n:03}-0001" for n in range(60)]  # of which --valid 0.02 holds out one
    for name in names:
        audio_of(folder / "LJSpeech-1.1" / "wavs" / f"{name}.wav")
    lines = [f"{name}|no. 1|number one\n" for name in names]
    (folder / "LJSpeech-1.1" / "metadata.csv").write_text("".join(lines))


def sidecars(folder: Path) -> None:
    for number in range(60):
        path = folder / "my" / "recordings" / f"s{number % 3}" / f"{number}.wav"
        audio_of(path)
        path.with_suffix(".txt").write_text("NUMBER ONE\n")


def datasets(folder: Path) -> None:
    library = pytest.importorskip("datasets", reason="200 MB: pip install '.[datasets]'")
    parts = {}
    for part, rows in (("train", ROWS["train"]), ("validation", ROWS["valid"])):
        table = {"audio": [f"{folder}/wav/{r.name}.wav" for r in rows]}
        table |= {"sentence": [r.text for r in rows]}
        parts[part] = library.Dataset.from_dict(table).cast_column("audio", library.Audio())
    library.DatasetDict(parts).save_to_disk(str(folder / "my" / "saved"))


def lhotse(folder: Path) -> None:
    """Lines as Lhotse writes them; tests/test_importers.py reads files of the library itself."""
    for split, rows in ROWS.items():
        cuts = []
        for name, speaker, text in rows:
            source = {"type": "file", "channels": [0], "source": f"{folder}/wav/{name}.wav"}
            whole = {"id": name, "start": 0, "duration": 0.9, "channel": 0}
            said = {**whole, "recording_id": name, "text": text, "speaker": speaker}
            recording = {"id": name, "sources": [source], "sampling_rate": RATE}
            recording |= {"num_samples": int(0.9 * RATE), "duration": 0.9, "channel_ids": [0]}
            cuts.append(
                {**whole, "supervisions": [said], "recording": recording, "type": "MonoCut"}
            )
        plain = json_lines(folder / "cuts" / f"{split}.jsonl", cuts)
        plain.with_suffix(".jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()


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
    sidecars,
    common_voice,
    kaldi,
    ljspeech,
    datasets,
    lhotse,
    webdataset,
)
NAMES = {sidecars: "folder", common_voice: "table"}  # others have the name of the format


def format_of(form: Callable[[Path], None]) -> str:
    return NAMES.get(form, form.__name__)


FORM_COMMANDS = {
    line.split()[3]: line for line in re.findall(r"\| `(python -m asr\.prepare [^`]+)` \|", CORPORA)
}


def test_every_form_has_its_command():
    assert list(FORM_COMMANDS) == list(map(format_of, FORMS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_corpus_of_another_tool(form, folder, commands):
    """It is prepared, and the command that is printed last trains on it."""
    form(folder)
    prepare = FORM_COMMANDS[format_of(form)]
    printed = run(prepare.replace("/corpora/wav", str(folder / "wav")), commands)
    train = printed.splitlines()[-1].removeprefix("next: ")
    run(train, commands, small(train))
    assert list((folder / "runs").glob("*/checkpoints/*/model.safetensors"))


def test_phones_of_timit_are_tokens(folder, commands):
    phones = ["h#", "sh", "ix", "hv", "eh", "dcl", "jh", "q", "h#"]
    for part in ("TRAIN/DR1/FCJF0/SA1", "TRAIN/DR1/FCJF0/SX1", "TRAIN/DR2/MABC0/SI9"):
        audio_of(folder / f"{part}.WAV")
        lines = [f"{n} {n + 1} {phone}\n" for n, phone in enumerate(phones)]
        (folder / f"{part}.PHN").write_text("".join(lines))
    section = sections_of(CORPORA)["Corpora that need a table first"]
    (script,) = [block for block in blocks_of(section) if "${s^^}" in block[0]]
    subprocess.run(["bash", "-c", "\n".join(script)], check=True)
    assert Path("train.tsv").read_text().splitlines() == [
        "audio\tspeaker\ttext",
        "TRAIN/DR1/FCJF0/SX1.WAV\tFCJF0\tsil sh ih hh eh sil jh sil",
        "TRAIN/DR2/MABC0/SI9.WAV\tMABC0\tsil sh ih hh eh sil jh sil",
    ]
    out = run("python -m asr.prepare table train.tsv --to data/own --valid 0.5", commands)
    assert "letters a second" not in out and "upper-az" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("next: ")]
    assert "text.kind=word" in line
    run(line.removeprefix("next: "), commands, [*SMALL["small_corpus_conformer"], "run=phones"])
    run("python -m asr.evaluate runs/phones --split valid", commands)
    assert json.loads(Path("runs/phones/evaluate/valid/score.json").read_text())["words"] == 8


def test_commands_in_wav_scp_become_files(folder, commands):
    kaldi(folder)
    data = folder / "data"
    for part in ("train", "dev"):
        table = data / part / "wav.scp"
        rows = [line.split() for line in table.read_text().splitlines()]
        table.write_text("".join(f"{name} cat {path} |\n" for name, path in rows))
        (script,) = blocks_of(sections_of(CORPORA)["What is checked and written"], indent=8)
        subprocess.run(["bash", "-ec", "\n".join(script)], check=True, cwd=data / part)
    run("python -m asr.prepare kaldi data --to data/own", commands)
    assert len((data / "own" / "train.tsv").read_text().splitlines()) == 4

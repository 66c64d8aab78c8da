"""What the cases of the fuzz test share: a corpus, recipes, finished runs, and commands on them.

A case copies what it damages into a folder of its own, with data/ for input, run/ and out/ for
output, and home/, whose victim/ holds the files to which its links lead.
"""

import gzip
import os
import shutil
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fuzz_judge import Case, run
from tiny_speech import make_corpus, make_recipe

from asr import compare, evaluate, export, prepare, prune, sweep, train, transcribe
from asr.kernels.cpu import compiler

COMMANDS = """
train resume evaluate evaluate_out transcribe json list compare export prune
""".split()  # noqa: SIM905 (readable as one string)
OTHER_COMMANDS = ["sweep", "tsv", "shards", "mnist"]


@dataclass
class World:
    """What the cases share and only read."""

    folder: Path
    recipes: dict[str, Path]  # las, transformer, language, images
    runs: dict[str, Path]  # las, other (as las, with another seed), transformer, language
    address: str = ""  # of the server, with the seed
    served: Path = Path()  # its folder

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"


def make_world(folder: Path) -> World:
    """A corpus, four recipes and four runs."""
    compile_kernels()
    corpus = folder / "corpus"
    corpus.mkdir()
    make_corpus(corpus)
    las = yaml.safe_load(make_recipe(corpus).read_text())
    las["task"] = "speech"
    las["train"] |= {"epochs": 2, "save_every": 1, "keep": 3, "wer_utterances": 3}
    small = {"d_model": 8, "heads": 2, "feed_forward": 8, "encoder_layers": 2, "decoder_layers": 2}
    small |= {"kind": "transformer", "subsampling_channels": 2, "layer_drop": 0.1}
    shared = {key: las["train"][key] for key in ("epochs", "save_every", "keep", "log_every")}
    shared |= {"threads": 1, "device": "cpu"}
    texts = {"train": [str(corpus / "train.tsv")], "valid": [str(corpus / "valid.tsv")]}
    lstm = {"kind": "lstm", "layers": 1, "hidden": 5, "embedding": 4, "backend": "reference"}
    rows = {"kind": "rows", "hidden": 5, "backend": "reference"}
    trees = {
        "las": las,
        "transformer": las | {"model": small, "train": shared | {"batch_seconds": 2.0}},
        "language": {"task": "language", "run": "lm", "data": texts | {"workers": 0}, "model": lstm}
        | {"train": shared, "text": {"run": str(folder / "runs" / "las")}},
        "images": {"task": "images", "run": "images", "model": rows}
        | {"data": {"folder": str(corpus), "batch": 20}, "train": shared | {"samples": 0}},
    }
    write_images(corpus)
    world = World(folder, {name: folder / f"{name}.yaml" for name in trees}, {})
    for name, tree in trees.items():
        world.recipes[name].write_text(yaml.safe_dump(tree))
    for name in ("las", "other", "transformer", "language"):
        _train(world, name)
    return world


def compile_kernels() -> None:
    """Compile the kernels of the CPU, where they are not, into the user's cache."""
    pid = os.fork()
    if not pid:
        with suppress(compiler.BuildError):
            compiler.load()
        os._exit(0)
    os.waitpid(pid, 0)


def _train(world: World, name: str) -> None:
    """A run that can be resumed, for one step."""
    place = new_place(world.folder / "making", "")
    target = world.folder / "runs" / name
    line = [str(world.recipes.get(name, world.recipes["las"])), "--run", str(target)]
    line += ["seed=2"] if name == "other" else []
    steps = [Case(train, line, cpu=60)]
    if name != "language":
        steps.append(Case(evaluate, [str(target), "--split", "test"], cpu=60))
    for case in steps:
        result = run(case, place)
        assert result.code == 0, result.err
    shutil.rmtree(sorted((target / "checkpoints").iterdir())[-1])
    world.runs[name] = target
    shutil.rmtree(place)


def write_images(folder: Path) -> None:
    """IDX files of 40 and 10 images of 8 x 8 pixels."""
    for name, count in (("train", 40), ("t10k", 10)):
        pixels = bytes(i * j % 251 for i in range(count) for j in range(64))
        labels = bytes(i % 4 for i in range(count))
        parts = (("images-idx3", (count, 8, 8), pixels), ("labels-idx1", (count,), labels))
        for what, sizes, content in parts:
            header = bytes((0, 0, 8, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes)
            packed = gzip.compress(header + content, mtime=0)
            (folder / f"{name}-{what}-ubyte.gz").write_bytes(packed)


def new_place(place: Path, source: Path | str) -> Path:
    """The folder of a case: work, tmp, data, out, and a home with files that links point to."""
    for name in ("work", "tmp", "data", "out", "home/victim/inner", "home/.cache/layernorm-asr"):
        (place / name).mkdir(parents=True)
    victim = place / "home" / "victim"
    (victim / "inner" / "victim.txt").write_text("a b c\n")
    for ending in ("txt", "log", "html", "md", "lock", "png", "svg", "index"):
        (victim / f"victim.{ending}").write_text("x\n")
    for path in Path(source).rglob("*") if source else ():
        if path.is_file():
            shutil.copy(path, victim / f"victim{path.suffix}")
    return place


def command(name: str, world: World, place: Path, run: Path | None = None) -> Case:
    """A command on sound input, or on a run."""
    model = "transformer" if name == "prune" else "las"
    run, out = run or world.runs[model], place / "out"
    good = world.corpus / "test-0.flac"
    lines: dict[str, tuple[Any, list[Any], str]] = {
        "train": (train, [world.recipes["las"], "train.steps=2", "--run", place / "run"], "run"),
        "resume": (train, [world.recipes["las"], "--run", run, "--resume"], "run"),
        "evaluate": (evaluate, [run, "--split", "test"], "run"),
        "evaluate_out": (evaluate, [run, "--split", "test", "--out", out / "x"], "out"),
        "transcribe": (transcribe, [run, good], ""),
        "json": (transcribe, [run, good, "--json", "decode.beam=2"], ""),
        "list": (transcribe, [run, "--list", place / "data/list.txt", "--out", out], "out"),
        "compare": (compare, [run, world.runs["other"], "--out", out], "out"),
        "export": (export, [run, "--to", out / "x"], "out"),
        "prune": (prune, [run, "--to", out / "x", "--encoder", "1"], "out"),
        "sweep": (sweep, [world.recipes["las"], "seed=1,2", "--out", out, "--dry-run"], ""),
        "tsv": (prepare, ["tsv", world.corpus / "test.tsv", "--to", out], "out"),
        "shards": (prepare, ["shards", world.corpus / "test.tsv", "--to", out], "out"),
        "mnist": (prepare, ["mnist", "--from", world.corpus, "--to", out], "out"),
    }
    if name == "list":
        (place / "data/list.txt").write_text(f"{good}\n{world.corpus / 'test-1.flac'}\n")
    module, arguments, writes = lines[name]
    return Case(module, [str(a) for a in arguments], (writes,) if writes else ())


def own_run(world: World, place: Path, name: str) -> Path:
    """A copy of a run that the case may damage or write to."""
    model = "transformer" if name == "prune" else "las"
    return Path(shutil.copytree(world.runs[model], place / "run"))

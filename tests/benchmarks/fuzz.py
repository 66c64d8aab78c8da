"""Fuzz the commands: on damaged input they succeed or print one line of error, and harm nothing.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/fuzz.py [--cases 500] [--seed 1]

hypothesis makes the cases and reduces one that fails: a command on what a user may meet, such as a
damaged run folder, a recipe with wrong values, a faulty table, a truncated recording or tar, a full
disk or a signal. fuzz_judge.py runs it and lists what is a fault. A failed case's folder is kept.
"""

import argparse
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent))
from fuzz_judge import Case, Result, fault_of, run
from tiny_speech import RATE, make_corpus, make_recipe, tones

from asr import compare, evaluate, export, prepare, sweep, train, transcribe
from asr.kernels.cpu import compiler

Draw = Callable[[st.SearchStrategy], Any]
ENDS = {0: "success", 2: "refused"}


@dataclass
class World:
    """A corpus, a recipe and runs, which the cases only read or copy."""

    folder: Path
    recipe: Path
    runs: dict[str, Path]

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"


def make_world(folder: Path) -> World:
    """Train the runs, of one step each, and evaluate them."""
    _compile_kernels()
    (folder / "corpus").mkdir()
    make_corpus(folder / "corpus")
    tree = yaml.safe_load(make_recipe(folder / "corpus").read_text())
    tree["train"] |= {"save_every": 1, "keep": 3, "wer_utterances": 3}
    world = World(folder, folder / "las.yaml", {})
    world.recipe.write_text(yaml.safe_dump(tree))
    place = new_place(folder / "making")
    for number, name in enumerate(("las", "other"), start=1):
        target = world.runs[name] = folder / "runs" / name
        for module, line in (
            (train, [str(world.recipe), "--run", str(target), f"seed={number}"]),
            (evaluate, [str(target), "--split", "test"]),
        ):
            result = run(Case(module, line, cpu=60), place)
            assert result.code == 0, result.err
        shutil.rmtree(sorted((target / "checkpoints").iterdir())[-1])  # so that it can be resumed
    return world


def _compile_kernels() -> None:
    """In a process of its own, since threads of torch do not survive a fork."""
    pid = os.fork()
    if not pid:
        with suppress(compiler.BuildError):
            compiler.load()
        os._exit(0)
    os.waitpid(pid, 0)


def new_place(place: Path) -> Path:
    """The folder of a case: data for input, out for output, and files that links lead to."""
    shutil.rmtree(place, ignore_errors=True)
    for name in ("work", "tmp", "data", "out", "home/victim/inner"):
        (place / name).mkdir(parents=True)
    (place / "home/victim/inner/victim.txt").write_text("a b c\n")
    (place / "home/victim/victim.txt").write_text("x\n")
    return place


def command(name: str, world: World, place: Path, run: Path | None = None) -> Case:
    """A command on sound input, or on a run."""
    run, out = run or world.runs["las"], place / "out"
    test, good = world.corpus / "test.tsv", world.corpus / "test-0.flac"
    lines: dict[str, tuple[Any, list[Any], str]] = {
        "train": (train, [world.recipe, "train.steps=2", "--run", place / "run"], "run"),
        "resume": (train, [world.recipe, "--run", run, "--resume"], "run"),
        "evaluate": (evaluate, [run, "--split", "test"], "run"),
        "transcribe": (transcribe, [run, good, "--json", "decode.beam=2"], ""),
        "list": (transcribe, [run, "--list", test, "--out", out], "out"),
        "compare": (compare, [run, world.runs["other"], "--out", out], "out"),
        "export": (export, [run, "--to", out / "x"], "out"),
        "sweep": (sweep, [world.recipe, "seed=1,2", "--out", out, "--dry-run"], ""),
        "table": (prepare, ["table", test, "--to", out], "out"),
        "shards": (prepare, ["shards", test, "--to", out], "out"),
    }
    module, arguments, writes = lines[name]
    return Case(module, [str(a) for a in arguments], (writes,) if writes else ())


ON_RUNS = ("resume", "evaluate", "transcribe", "list", "compare", "export")


def own_run(world: World, place: Path) -> Path:
    """A copy of a run that the case may damage or write to."""
    return Path(shutil.copytree(world.runs["las"], place / "run"))


def good_command(world: World, place: Path, draw: Draw) -> Case:
    """Any command on sound input."""
    name = draw(st.sampled_from(("train", "sweep", "table", "shards", *ON_RUNS)))
    return command(name, world, place, own_run(world, place) if name in ON_RUNS else None)


# Damage

LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=40)
)
LEAVES |= st.sampled_from(("", "../x", "/etc/passwd", "x" * 300, "a\tb", "nan", "\x1b[2J", "-rf"))
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=9), v, max_size=3)
)


def damaged(content: bytes, draw: Draw) -> bytes:
    """Content that is cut, or of which some bytes are others."""
    if draw(st.booleans()):
        return content[: draw(st.integers(0, len(content)))]
    data = bytearray(content)
    places = st.integers(0, max(0, len(data) - 1)) | st.integers(0, min(64, max(0, len(data) - 1)))
    changes = st.lists(st.tuples(places, st.binary(min_size=1, max_size=8)), min_size=1, max_size=5)
    for at, new in draw(changes):
        data[at : at + len(new)] = new
    return bytes(data)


def changed(tree: Any, draw: Draw) -> Any:
    """A tree of mappings and lists of which something is another value, or missing."""
    if isinstance(tree, dict | list) and tree and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(list(tree) if isinstance(tree, dict) else range(len(tree))))
        if not draw(st.integers(0, 9)):
            del tree[key]
        else:
            tree[key] = changed(tree[key], draw)
        return tree
    if type(tree) in (int, float) and draw(st.booleans()):
        return type(tree)(draw(st.integers(0, 9)))
    return draw(VALUES)


def damage_file(path: Path, draw: Draw) -> None:
    """Another content, with the right checksum where the run has one."""
    content = path.read_bytes()
    new = damaged(content, draw)
    with suppress(ValueError):
        if path.suffix == ".json":
            new = json.dumps(changed(json.loads(content), draw)).encode()
    path.write_bytes(new)
    sums = path.with_name("sha256.json")
    if path != sums and sums.is_file():
        known = json.loads(sums.read_text())
        sums.write_text(json.dumps(known | {path.name: hashlib.sha256(new).hexdigest()}))


def displace(path: Path, victim: Path, draw: Draw) -> None:
    """Put something else at the path: nothing, a folder, an empty file or a link."""
    content = path.read_bytes()
    path.unlink()
    kind = draw(st.sampled_from(("nothing", "folder", "empty", "link")))
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "link":
        (victim / "content").write_bytes(content)
        path.symlink_to(victim / "content")


# The kinds of cases


def run_case(world: World, place: Path, draw: Draw) -> Case:
    """One or two files of a run folder are damaged or missing."""
    name = draw(st.sampled_from(ON_RUNS))
    folder = own_run(world, place)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())))
        if draw(st.integers(0, 2)):
            damage_file(path, draw)
        else:
            displace(path, place / "home" / "victim", draw)
    return command(name, world, place, folder)


def recipe_case(world: World, place: Path, draw: Draw) -> Case:
    """A recipe with wrong values is trained, planned as a sweep, or that of a run."""
    path = place / "data" / "r.yaml"
    tree = yaml.safe_load((world.runs["las"] / "recipe.yaml").read_text())  # has every key
    for _ in range(draw(st.integers(1, 2))):
        tree = changed(tree, draw)
    text = yaml.safe_dump(tree, allow_unicode=True)
    if not draw(st.integers(0, 4)):
        text = damaged(text.encode("utf-8", "surrogatepass"), draw).decode("utf-8", "replace")
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    name = draw(st.sampled_from(("train", "sweep", "evaluate")))
    if name == "evaluate":
        folder = own_run(world, place)
        shutil.copy(path, folder / "recipe.yaml")
        case = command(name, world, place, folder)
    elif name == "sweep":
        case = Case(sweep, [str(path), "seed=1,2", "--out", str(place / "out"), "--dry-run"])
    else:
        case = Case(train, [str(path), "train.steps=1", "--run", str(place / "run")], ("run",))
    case.may_need_memory = True
    return case


FIELDS = st.sampled_from((
    "", "\x1b[2J", "a" * 9000, "../x", "train-1", "é\u202e", "\u2028", "nan", "inf", "-1", "0",
    "x", "1e308", "/etc/passwd", "x.tar/a@512+9", "x" * 300, "a/" * 3000, "🎉" * 50, "\ufeff",
    "A,B!", "<x>",
)) | st.text(max_size=20)  # fmt: skip


def table_case(world: World, place: Path, draw: Draw) -> Case:
    """A manifest with faulty fields, or damaged."""
    path = place / "data" / "own.tsv"
    for audio in world.corpus.glob("train-*.flac"):
        (place / "data" / audio.name).symlink_to(audio)
    rows = [line.split("\t") for line in (world.corpus / "train.tsv").read_text().splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        rows[draw(st.integers(0, len(rows) - 1))][draw(st.integers(0, 4))] = draw(FIELDS)
    end = draw(st.sampled_from(("\n", "\r\n", "\n\n")))
    content = end.join("\t".join(row) for row in rows).encode("utf-8", "surrogatepass")
    path.write_bytes(content if draw(st.integers(0, 4)) else damaged(content, draw))
    out, las = ["--out", str(place / "out")], str(world.runs["las"])
    one_step = ["train.steps=1", "--run", str(place / "run")]
    to = [str(path), "--to", str(place / "out")]
    return draw(st.sampled_from((
        Case(train, [str(world.recipe), f"data.train={path}", *one_step], ("run",)),
        Case(evaluate, [las, "--split", str(path), *out], ("out",), needs_line=False),
        Case(transcribe, [las, "--list", str(path), *out], ("out",), needs_line=False),
        Case(prepare, ["table", *to], ("out",), many_lines=True),
        Case(prepare, ["table", *to, "--skip-bad"], ("out",), many_lines=True),
        Case(prepare, ["shards", *to], ("out",)),
    )))  # fmt: skip


CODINGS = (
    ("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "FLOAT"), ("WAV", "IMA_ADPCM"), ("AU", "ULAW"),
    ("RF64", "PCM_16"), ("AIFF", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
)  # fmt: skip
RATES = (1, 4000, 8000, 11025, 16000, 44100, 48000, 192000)
COUNTS = (0, 1, 39, 400, 1152, 9600)


def audio_case(world: World, place: Path, draw: Draw) -> Case:
    """A bad recording before or after a good one, which is always transcribed."""
    data = place / "data"
    name = draw(st.sampled_from(("bad", "bad", "b d", "b\x1b[2J", "-b")))
    bad, good = data / f"{name}.{draw(st.sampled_from(('wav', 'mp3', 'opus')))}", data / "good.flac"
    bad.write_bytes(_audio(draw))
    soundfile.write(good, tones("abc", 1), RATE)
    both = draw(st.permutations((bad, good)))
    table = data / "own.tsv"
    rows = [f"{path.stem[0]}\ts\t{path.name}\t0.36\tab" for path in both]
    table.write_text("\n".join(["id\tspeaker\taudio\tseconds\ttext", *rows]))
    las, out, names = str(world.runs["las"]), str(place / "out"), list(map(os.fspath, both))
    to = ["table", str(table), "--to", out]
    case = draw(st.sampled_from((
        Case(transcribe, [las, *names], (), (("stdout", str(good)),)),
        Case(transcribe, [las, *names, "--out", out], ("out",), (("stdout", str(good)),)),
        Case(evaluate, [las, "--split", str(table), "--out", out], ("out",), needs_line=False),
        Case(prepare, [*to, "--skip-bad"], ("out",), (("out/own.tsv", "good"),), many_lines=True),
        Case(prepare, [*to, "--headers-only"], ("out",), many_lines=True),
    )))  # fmt: skip
    case.cpu += bad.stat().st_size / 2e5
    return case


def _audio(draw: Draw) -> bytes:
    """An audio file of any coding, often damaged; at times joined with another."""
    wave = tones("abc cab", 1)[: draw(st.sampled_from((*COUNTS, None, None)))]
    if len(wave) and not draw(st.integers(0, 4)):
        wave[draw(st.integers(0, len(wave) - 1))] = draw(st.sampled_from((np.nan, np.inf, 1e30)))
    kind, subtype = draw(st.sampled_from(CODINGS))
    rate, channels = draw(st.sampled_from(RATES)), draw(st.sampled_from((1, 1, 2, 5)))
    file = io.BytesIO()
    try:
        soundfile.write(file, np.stack([wave] * channels, 1), rate, subtype, format=kind)
    except (soundfile.SoundFileError, ValueError, AssertionError):  # not every combination exists
        return b""
    content = file.getvalue()
    if len(content) > 200 and not draw(st.integers(0, 3)):  # a wrong number in the header
        number = draw(st.sampled_from((0, 1, 2**15, 2**31 - 1, 2**32 - 1)))
        at = draw(st.integers(4, 60))
        content = content[:at] + struct.pack("<I", number) + content[at + 4 :]
    content *= draw(st.sampled_from((1, 1, 1, 2)))
    return damaged(content, draw) if content and draw(st.booleans()) else content


def tar_case(world: World, place: Path, draw: Draw) -> Case:
    """A damaged tar of webdataset samples."""
    flac = (world.corpus / "test-0.flac").read_bytes()
    about = json.dumps(changed({"text": "a", "id": "s3", "speaker": 1}, draw)).encode()
    file, data = io.BytesIO(), place / "data"
    with tarfile.open(fileobj=file, mode="w") as tar:
        samples = [("s1.flac", flac), ("s1.txt", b"a b"), ("s3.flac", flac), ("s3.json", about)]
        for name, content in samples:
            entry = tarfile.TarInfo(draw(st.sampled_from((name,) * 8 + ("../x.flac", "/x.txt"))))
            entry.size = len(content)
            entry.type = draw(st.sampled_from((b"0",) * 8 + (b"2", b"5")))
            tar.addfile(entry, io.BytesIO(content))
    (data / "set").mkdir()
    content = file.getvalue()
    path = data / "set" / "x.tar"
    path.write_bytes(damaged(content, draw) if draw(st.booleans()) else content)
    line = ["webdataset", str(data / "set"), "--to", str(place / "out"), "--skip-bad"]
    return Case(prepare, line, ("out",), many_lines=True)


CHANGES = ("open", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate")


def disk_case(world: World, place: Path, draw: Draw) -> Case:
    """The disk is full, or may not be written, from some change on; the command then succeeds."""
    case = good_command(world, place, draw)
    number = draw(st.sampled_from((errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)))
    first = draw(st.integers(1, 40))
    case.before.append(lambda: _fail_changes(place, first, number))
    case.many_lines = case.arguments[0] == "table"
    _try_again(case)
    return case


def _fail_changes(place: Path, first: int, number: int) -> None:
    """Changes of files in the folder fail from the `first` on."""
    left = first

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        reads = event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in CHANGES and not reads and str(arguments[0]).startswith(str(place)):
            left -= 1
            if left <= 0:
                raise OSError(number, os.strerror(number), str(arguments[0]))

    sys.addaudithook(check)


def _try_again(case: Case) -> None:
    more = ["--resume"] if case.module is train and "--resume" not in case.arguments else []
    case.again = Case(case.module, [*case.arguments, *more], case.may_write)


def signal_case(world: World, place: Path, draw: Draw) -> Case:
    """A signal at the n-th call of a function; the command then succeeds, or resumes."""
    case = good_command(world, place, draw)
    number = draw(st.sampled_from((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
    calls = int(10 ** draw(st.floats(1, 5.7)))
    case.before.append(lambda: _send_signal(calls, number))
    case.codes = (0, 3, 130, *([] if number == signal.SIGINT else [-number]))
    case.may_leave = number != signal.SIGINT
    case.cpu *= 2  # counting takes time
    _try_again(case)
    return case


def _send_signal(calls: int, number: int) -> None:
    """Send a signal to this process after so many calls of functions."""
    count = 0

    def profile(*event: Any) -> None:
        nonlocal count
        count += 1
        if count == calls:
            os.kill(os.getpid(), number)

    sys.setprofile(profile)


KINDS: dict[str, tuple[Callable[[World, Path, Draw], Case], float]] = {  # and its share of all
    "run": (run_case, 0.25),
    "recipe": (recipe_case, 0.25),
    "table": (table_case, 0.1),
    "audio": (audio_case, 0.15),
    "tar": (tar_case, 0.1),
    "disk": (disk_case, 0.08),
    "signal": (signal_case, 0.07),
}


def fuzz(world: World, kind: str, cases: int, number: int) -> tuple[Counter, str | None]:
    """Run the cases of a kind -> how they ended, and the report of a fault."""
    make, ends, faults = KINDS[kind][0], Counter(), []

    @seed(number)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        place = new_place(world.folder / f"case-{kind}")
        case = make(world, place, lambda strategy: data.draw(strategy))
        fault, result = fault_of(case, place, (world.corpus, world.folder / "runs"))
        ends[ENDS.get(result.code, "stopped")] += 1
        if fault:
            failed = world.folder / f"failed-{kind}"
            shutil.rmtree(failed, ignore_errors=True)
            place.rename(failed)
            faults.append(report(kind, fault, case, result))
            raise AssertionError(fault)

    try:
        one()
    except BaseException as error:  # also hypothesis' own, for a fault that does not come again
        return ends, faults[-1] if faults else repr(error)
    return ends, None


def report(kind: str, fault: str, case: Case, result: Result) -> str:
    """A case in a few lines."""
    line = " ".join(repr(argument)[1:-1] for argument in case.arguments)
    err = "\n  ".join(repr(text)[1:-1] for text in result.err[-1500:].splitlines())
    return f"{kind}: {fault}\n  {case.module.__name__} {line[:1500]}\n  code {result.code}\n  {err}"


def main() -> int:
    """Run the cases and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Else threads of a new process, when they begin at once, find torch's pool half made.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    folder, wrong = Path(tempfile.mkdtemp(prefix="fuzz-")), 0
    world = make_world(folder)
    chosen = {kind: KINDS[kind][1] for kind in args.kind or KINDS}
    for kind, share in chosen.items():
        ends, fault = fuzz(world, kind, round(args.cases * share / sum(chosen.values())), args.seed)
        wrong += bool(fault)
        print(f"{kind}: {', '.join(f'{n} {end}' for end, n in ends.items())}", flush=True)
        if fault:
            print(f"{fault}\n  in {folder}/failed-{kind}", flush=True)
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

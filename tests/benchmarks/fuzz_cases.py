"""The cases of the fuzz test, by kind; each is a function of (world, place, random.Random).

run: members of run folders and of output folders    recipe: values by the schema
table: manifests     audio: recordings     tar: tars that are read or unpacked
http: servers        environment: variables
disk: no space, no files, no permission at a random moment
signal: SIGTERM, Ctrl-C or SIGHUP at a random call, or output that nobody reads

fuzz_world.py describes the world and the folder of a case, its place.
"""

import errno
import gzip
import hashlib
import io
import json
import os
import random
import resource
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_media
import fuzz_recipes
import soundfile
import yaml
from fuzz_files import damage_bytes, damage_file, damage_text, place_odd
from fuzz_judge import Case, run
from fuzz_world import COMMANDS, OTHER_COMMANDS, World, command, own_run, write_images
from tiny_speech import RATE, tones

from asr import evaluate, prepare, sweep, train, transcribe
from asr.data import corpus as manifests
from asr.data.importers import download, librispeech
from asr.images import data as images

Chance = random.Random
SUBSET = "dev-clean-2"


# Run folders and output folders

MORE_MEMBERS = """
train.lock train.log recipe.yaml tokenizer.json tokenizer.model features.safetensors .launch
checkpoints checkpoints/.00000003.part checkpoints/.00000003.old checkpoints/00000009 evaluate
checkpoints/00000009/model.safetensors checkpoints/damaged-00000003 evaluate/test bad_batch x
evaluate/test/score.json evaluate/test/hypotheses.tsv evaluate/test/page.html .recipe.yaml.ab
evaluate/test/attention events.out.tfevents.1 events.out.tfevents.9999999999.x inner/file .x
""".split()  # noqa: SIM905 (readable as one string)
OUT_MEMBERS = {
    "list": "about.json shards shards/00000000.jsonl transcripts.tsv failures.tsv summary.json",
    "compare": "compare.md compare.html curves.png curves.svg seeds.png seeds.svg",
    "tsv": "test.tsv test.audio test.tsv.index",
    "shards": "test.tsv test-00000.tar",
    "mnist": "train-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz",
    "evaluate_out": "x x/score.json x/page.html x/hypotheses.tsv x/alignment.txt",
}


def run_case(world: World, place: Path, chance: Chance) -> Case:
    """One to three members of a run folder or an output folder are odd."""
    victim = place / "home" / "victim"
    if chance.random() < 0.15:
        name = chance.choice(list(OUT_MEMBERS))
        case = command(name, world, place)
        if chance.random() < 0.5 and run(case, place).code == 0:  # its own output, then damaged
            members = [p for p in (place / "out").rglob("*") if p.is_file()]
            damage_file(chance.choice(members), chance)
        else:
            place_odd(place / "out" / chance.choice(OUT_MEMBERS[name].split()), victim, chance)
        case.many_lines = name == "tsv"
        return case
    name = chance.choice(COMMANDS[1:])
    folder = own_run(world, place, name)
    for _ in range(chance.choice((1, 1, 2, 3))):
        members = sorted(p for p in folder.rglob("*") if not p.is_symlink())
        files = [path for path in members if path.is_file()]
        if chance.random() < 0.6 and files:
            damage_file(chance.choice(files), chance)
        else:
            new = folder / chance.choice(MORE_MEMBERS)
            target = chance.choice((new, *members))
            if all(p.is_dir() for p in target.parents if os.path.lexists(p)):
                place_odd(target, victim, chance)
    if chance.random() < 0.15:
        return _in_another_role(world, place, folder, chance)
    return command(name, world, place, folder)


def _in_another_role(world: World, place: Path, folder: Path, chance: Chance) -> Case:
    """The damaged run is not the command's own, but one that it uses."""
    settings = ("decode.ensemble=[{}]", "decode.lm={}", "train.init={}", "--against")
    setting = chance.choice(settings)
    if setting == "--against":
        case = command("evaluate_out", world, place)
        case.arguments += ["--against", str(folder)]
    else:
        case = command("train" if "init" in setting else "transcribe", world, place)
        case.arguments.insert(1, setting.format(folder))
        case.may_write = ("made",)
        case.arguments = [a if a != str(folder) else str(place / "made") for a in case.arguments]
    return case


# Recipes


def recipe_case(world: World, place: Path, chance: Chance) -> Case:
    """A recipe with odd values is trained in, resumed, planned as a sweep, or used by a run."""
    paths = odd_paths(world, place, chance)
    kind = chance.choice(("las", "las", "transformer", "transformer", "language", "images"))
    text = world.recipes[kind].read_text()
    way = chance.random()
    if way < 0.25:
        text = damage_text(text, chance)
    else:
        tree = fuzz_recipes.odd_recipe(yaml.safe_load(text), paths, chance)
        text = fuzz_recipes.as_text(tree, chance)
    path = place / "data" / "r.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    steps = ["train.steps=1"] if "train" in text else []
    line = [str(path), *steps, *_overrides(world, kind, paths, chance)]
    name = chance.choice(("train",) * 8 + ("resume", "sweep", "transcribe"))
    if name == "sweep":
        case = Case(sweep, [*line, "seed=1,2", "--out", str(place / "out"), "--dry-run"])
    elif name == "transcribe":
        folder = own_run(world, place, name)
        (folder / "recipe.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        case = command(chance.choice(COMMANDS[2:-1]), world, place, folder)
    else:
        if name == "resume":
            own_run(world, place, name)
            line += ["--resume", *chance.choice(([], ["--force"]))]
        case = Case(train, [*line, "--run", str(place / "run")], ("run",))
    case.may_need_memory = True
    return case


def _overrides(world: World, kind: str, paths: list[str], chance: Chance) -> list[str]:
    """At times one setting on the command line."""
    if chance.random() < 0.75:
        return []
    tree = fuzz_recipes.odd_recipe(yaml.safe_load(world.recipes[kind].read_text()), paths, chance)
    group, keys = tree, []
    while isinstance(group, dict) and group:
        keys.append(chance.choice(list(group)))
        group = group[keys[-1]]
    text = f"{'.'.join(map(str, keys))}={json.dumps(group)}"
    return [] if text.startswith("-") else [text.replace("\0", "")]


def odd_paths(world: World, place: Path, chance: Chance) -> list[str]:
    """Names of files and folders of many kinds."""
    odd = place / "data" / "odd"
    victim = place / "home" / "victim"
    kinds = [odd / f"{number}.tsv" for number in range(4)]
    for path in kinds:
        place_odd(path, victim, chance)
    sound = [world.corpus / "train.tsv", world.runs["las"], world.runs["language"], world.corpus]
    names = ["", ".", "..", "/", "~", "a\0b", "x" * 300, "/dev/zero", "/proc/self/mem", "x/" * 2000]
    names += ["/dev/stdin", "\udcff", "a\nb", "\x1b[2J", "https://x/y", "-rf", "/proc/self/environ"]
    return [*map(str, kinds), *map(str, sound), *names]


# Manifests

AUDIO = ("../x.flac", "/etc/passwd", "a\x00.flac", "\x1b[2J.flac", "x.tar/a@512+9", "", ".", "~/x")
AUDIO += ("x.tar/a@-1+9", "https://x/y.flac", "x" * 300, "a/" * 3000, "train-0.flac/", "odd.flac")
SECONDS = ("nan", "inf", "-1", "0", "1e308", "", "x", "0x1", "1_0", "٣", "1e-9", "99999999")
SECONDS += ("9" * 400,)
IDS = ("", "\x1b[2J", "a" * 9000, "../x", "train-1", "\ud800", "é\u202e", "\u2028", "a\x0bb")
IDS += ("x\x85y",)
WORDS = ("", " ", "\x07", "a" * 1_100_000, "\ud800", "\u202e", "🎉" * 50, "\ufeff", "a\x85b")
WORDS += ("A,B!",)


def table_case(world: World, place: Path, chance: Chance) -> Case:
    """A manifest, or its index, is damaged."""
    path = place / "data" / "own.tsv"
    for audio in world.corpus.glob("train-*.flac"):
        (place / "data" / audio.name).symlink_to(audio)
    victim = place / "home" / "victim"
    text = (world.corpus / "train.tsv").read_text()
    way = chance.random()
    if way < 0.2:
        path.write_bytes(damage_bytes(text.encode(), chance))
    elif way < 0.4:
        path.write_text(damage_text(text, chance), errors="surrogatepass")
    elif way < 0.5:
        path.write_text(text)
        place_odd(chance.choice((path, path.with_name("own.tsv.index"))), victim, chance)
    else:
        path.write_text(_odd_rows(text, chance), errors="surrogatepass")
    place_odd(place / "data" / "odd.flac", victim, chance)  # which some rows name
    return _with_table(world, place, path, chance)


def _odd_rows(text: str, chance: Chance) -> str:
    rows = [line.split("\t") for line in text.splitlines()]
    for _ in range(chance.randint(1, 3)):
        row = chance.choice(rows[1:])
        column = chance.randrange(len(rows[0]))
        row[column] = chance.choice((IDS, IDS, AUDIO, SECONDS, WORDS)[column])
    if chance.random() < 0.2:
        rows[0][chance.randrange(len(rows[0]))] = chance.choice(("", "x", "id", "\x1b[2J"))
    ends = chance.choice(("\n", "\n", "\r\n", "\r", "\n\n"))
    return ends.join("\t".join(row) for row in rows) + chance.choice((ends, ""))


def _with_table(world: World, place: Path, path: Path, chance: Chance) -> Case:
    """A command that reads a manifest."""
    out, run, las = place / "out", str(world.runs["las"]), str(world.recipes["las"])
    one_step = ["train.steps=1", "train.samples=0", "--run", str(place / "run")]
    outside = chance.choice(([], [], ["data.allow_outside_audio=true"]))
    role = chance.choice(("train", "valid"))
    language = [str(world.recipes["language"]), f"data.{role}=[{path}]", *one_step]
    by, to = chance.choice(([], ["--by", "speaker"])), ["--to", str(out)]
    cases = [
        Case(train, [las, f"data.{role}={path}", *outside, *one_step], ("run",)),
        Case(train, language, ("run",)),
        Case(evaluate, [run, "--split", str(path), "--out", str(out), *outside, *by], ("out",)),
        Case(transcribe, [run, "--list", str(path), "--out", str(out), *outside], ("out",)),
        Case(prepare, ["tsv", str(path), *to], ("out",), many_lines=True),
        Case(prepare, ["tsv", str(path), *to, "--skip-bad"], ("out",), many_lines=True),
        Case(prepare, ["shards", str(path), *to], ("out",)),
    ]
    case = chance.choice(cases)
    case.needs_line = case.module not in (evaluate, transcribe)  # they print which audio is bad
    if chance.random() < 0.5:
        case.before.append(lambda: setattr(manifests, "SMALL", 0))  # with an index
    return case


# Recordings


def audio_case(world: World, place: Path, chance: Chance) -> Case:
    """A bad recording before or after a good one, which is always transcribed."""
    data, out, run = place / "data", place / "out", str(world.runs["las"])
    minutes = chance.choice((30, 120)) if chance.random() < 0.01 else 0
    content, ending = fuzz_media.audio(data / "scratch", chance, minutes)
    stem = chance.choice(("bad",) * 6 + ("b d", "b\x1b[2J", "b\udcff", "-b"))
    bad = data / f"{stem}.{ending}"
    bad.write_bytes(content)
    if chance.random() < 0.1:
        place_odd(bad, place / "home" / "victim", chance)
    good = data / "good.flac"
    soundfile.write(good, tones("abc", 1), RATE)
    both = [bad, good] if chance.random() < 0.7 else [good, bad]
    names = list(map(os.fspath, both))
    table = data / "own.tsv"
    rows = [f"{path.stem[0]}\ts\t{path.name}\t0.36\tab" for path in both]
    table.write_text(
        "\n".join(["id\tspeaker\taudio\tseconds\ttext", *rows]), errors="surrogateescape"
    )
    listed = data / "list.txt"
    listed.write_text("\n".join(names), errors="surrogateescape")
    to = ["--to", str(out)]
    printed, skip = (("stdout", str(good)),), (("out/own.tsv", "good.flac"),)
    split = ["--split", str(table), "--out", str(out)]
    cases = [
        Case(transcribe, [run, *names], (), printed),
        Case(transcribe, [run, *names, "--json", "decode.beam=2"], (), printed),
        Case(transcribe, [run, *names, "--out", str(out), "--format", "srt"], ("out",), printed),
        Case(transcribe, [run, "--list", str(listed), *("--out", str(out))], ("out",)),
        Case(evaluate, [run, *split], ("out",), (("out/hypotheses.tsv", "g\t"),)),
        Case(prepare, ["tsv", str(table), *to, "--skip-bad"], ("out",), skip, many_lines=True),
        Case(prepare, ["tsv", str(table), *to, "--headers-only"], ("out",), many_lines=True),
        Case(prepare, ["shards", str(table), *to], ("out",)),
    ]
    cases[3].expected = (("out/transcripts.tsv", "good.flac"),)
    tabular = stem in ("bad", "b d")  # the name can stand in a table
    case = chance.choice((*cases[:3], *(cases if tabular else cases[:4])))
    case.needs_line = case not in cases[3:5]
    small = bad.is_file() and bad.stat().st_size < 8 << 20
    case.cpu += minutes + (bad.stat().st_size / 2e5 if small else 0)  # 4 MB may last five minutes
    return case


# Tars


def tar_case(world: World, place: Path, chance: Chance) -> Case:
    """A tar of samples, one of packed audio, or a corpus's archive."""
    flac = (world.corpus / "test-0.flac").read_bytes()
    seconds = chance.choice((1, "1", None, [], 1e400))
    about = json.dumps({"text": "a", "id": "s3", "seconds": seconds}).encode()
    samples = [("s1.flac", flac), ("s1.txt", b"a b"), ("s3.flac", flac), ("s3.json", about)]
    data, out = place / "data", place / "out"
    way = chance.choice(("webdataset", "packed", "archive"))
    if way == "webdataset":
        (data / "set").mkdir()
        for name in ("a", "b\x1b[2J")[: chance.randint(1, 2)]:
            (data / "set" / f"{name}.tar").write_bytes(fuzz_media.tar(chance, samples))
        case = Case(prepare, ["webdataset", str(data / "set"), "--to", str(out)], ("out",))
        case.many_lines = True
        return case
    if way == "archive":
        return _archive(place, flac, chance)
    content = fuzz_media.tar(chance, samples)
    (data / "x.tar").write_bytes(content)
    rows = ["id\tspeaker\taudio\tseconds\ttext"]
    for number in range(3):
        at = content.find(b"fLaC") if chance.random() < 0.5 else 512 * chance.randrange(9)
        size = chance.choice((len(flac), len(flac), 0, 10**9, 10**17, 9))
        name = chance.choice(("s1.flac", "s1.flac", "../x", "s3.flac"))
        rows.append(f"{number}\ts\tx.tar/{name}@{max(at, 0)}+{size}\t0.3\tab")
    (data / "own.tsv").write_text("\n".join(rows))
    return _with_table(world, place, data / "own.tsv", chance)


def _archive(place: Path, flac: bytes, chance: Chance) -> Case:
    """LibriSpeech's archive, as if its checksum were right."""
    folder, out = f"LibriSpeech/{SUBSET}/1/2", place / "out"
    files = [(f"{folder}/1-2-0.flac", flac), (f"{folder}/1-2.trans.txt", b"1-2-0 A B\n")]
    content = gzip.compress(fuzz_media.tar(chance, files), 1)
    if chance.random() < 0.15:
        content = damage_bytes(content, chance)
    (out / f"{SUBSET}.tar.gz").write_bytes(content)
    line = ["librispeech", "--subsets", SUBSET, "--to", str(out), "--url", "http://127.0.0.1:1"]
    return Case(prepare, line, ("out",), before=[lambda: _know(content)])


def _flac(chance: Chance) -> bytes:
    file = io.BytesIO()
    noise = [chance.uniform(-1, 1) for _ in range(20_000)]
    soundfile.write(file, noise, RATE, format="FLAC")
    return file.getvalue()


def _know(content: bytes) -> None:
    archive = librispeech.Archive(31, hashlib.md5(content).hexdigest())
    librispeech.SUBSETS[SUBSET] = archive


# Servers


def http_case(world: World, place: Path, chance: Chance) -> Case:
    """Downloads from a hostile server; its pauses are shorter than in earnest."""
    number = place.name
    served = world.served / number
    served.mkdir()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, text in (("1-2.trans.txt", b"1-2-0 A\n"), ("1-2-0.flac", _flac(chance))):
            entry = tarfile.TarInfo(f"LibriSpeech/{SUBSET}/1/2/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    (served / f"{SUBSET}.tar.gz").write_bytes(file.getvalue())
    write_images(served)
    sums = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in served.iterdir()}

    def shorten() -> None:
        _know(file.getvalue())
        images.FILES.update({name: sums[name] for name in images.FILES})
        download.TIMEOUT, download.PAUSE = 0.4, 0.01

    url = f"{world.address}/{number}"
    kind = chance.choice((["librispeech", "--subsets", SUBSET], ["mnist"]))
    line = [*kind, "--to", str(place / "out"), "--url", url]
    # Its bars of progress stay on stderr above the error.
    return Case(prepare, line, ("out",), before=[shorten], many_lines=True)


# Environment, disk, signals

NAMES = """
RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_ERROR_FILE OMP_NUM_THREADS HOME
XDG_CACHE_HOME TMPDIR LANG LC_ALL COLUMNS TERM NO_COLOR MPLBACKEND CUDA_VISIBLE_DEVICES
http_proxy TZ USER LOGNAME LRU_CACHE_CAPACITY ONEDNN_PRIMITIVE_CACHE_CAPACITY
""".split()  # noqa: SIM905 (readable as one string)
SETTINGS = ("", "0", "1", "-1", "2", "x", "1.5", "1\n", " 1", "٣", "9" * 30, "\udcff", "~")
SETTINGS += ("/nonexistent/x", "\x1b[2J", "a" * 9000, "C", "de_DE.UTF-8", "/", "/dev/null", "nan")
STARTED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
STARTED |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"}
STARTED |= {"MASTER_ADDR": "127.0.0.1"}


def good_command(world: World, place: Path, chance: Chance) -> Case:
    """Any command on sound input."""
    name = chance.choice((*COMMANDS, *OTHER_COMMANDS))
    run = own_run(world, place, name) if name in COMMANDS[1:] else None
    return command(name, world, place, run)


def environment_case(world: World, place: Path, chance: Chance) -> Case:
    """Odd variables of the environment, at times besides those of torchrun."""
    case = good_command(world, place, chance)
    case.environment = dict(STARTED) if chance.random() < 0.4 else {}
    for _ in range(chance.choice((1, 1, 2, 4))):
        case.environment[chance.choice(NAMES)] = chance.choice(SETTINGS)
    if case.environment.get("WORLD_SIZE", "").strip().isdigit():
        case.environment["WORLD_SIZE"] = "1"  # else it waits for the other ranks, as it should
    case.new_interpreter = chance.random() < 0.1
    if case.new_interpreter:  # whose libraries themselves report a wrong value of these two
        case.environment["OMP_NUM_THREADS"] = chance.choice(("1", "2"))
        encoding = chance.choice(("latin-1", "ascii:strict", "utf-8"))
        case.environment["PYTHONIOENCODING"] = encoding
    case.cpu *= 4 if case.new_interpreter else 1
    return case


FAULTS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EMFILE)
FAULTS += (errno.EPERM,)
CHANGES = ("open", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod")


def disk_case(world: World, place: Path, chance: Chance) -> Case:
    """Writes fail from some size or call on; a training then resumes."""
    case = good_command(world, place, chance)
    way = chance.randrange(3)
    if way == 0:
        size = int(10 ** chance.uniform(0, 5.5))
        case.before.append(lambda: _limit_files(size))
    elif way == 1:
        number = chance.choice((16, 20, 24, 32, 48))
        case.before.append(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number)))
    else:
        first, every = chance.randint(1, 40), chance.random() < 0.5
        number = chance.choice(FAULTS)
        case.before.append(lambda: _fail_changes(place, first, every, number))
    case.many_lines = case.arguments[0] == "tsv"
    _try_again(case)
    return case


def _try_again(case: Case) -> None:
    more = ["--resume"] if case.module is train and "--resume" not in case.arguments else []
    case.again = Case(case.module, [*case.arguments, *more], case.may_write)


def _limit_files(size: int) -> None:
    sys.dont_write_bytecode = True  # else Python keeps a part of a module in __pycache__
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _fail_changes(place: Path, first: int, every: bool, number: int) -> None:
    """The `first` change of a file in the folder fails, and perhaps every later one."""
    left = first

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in CHANGES or not str(arguments[0]).startswith(str(place)):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        left -= 1
        if left == 0 or (left < 0 and every):
            raise OSError(number, os.strerror(number), str(arguments[0]))

    sys.addaudithook(check)


def signal_case(world: World, place: Path, chance: Chance) -> Case:
    """Signals at the n-th call of a function, or standard output that is closed or unread."""
    case = good_command(world, place, chance)
    if chance.random() < 0.1:
        case.before.append(_unread)
        case.codes, case.needs_line = (0, 2), False
        return case
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    sent = [chance.choice(numbers) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    calls = [int(10 ** chance.uniform(1, 5.7)) for _ in sent]
    case.before.append(lambda: _send_signals(calls, sent))
    case.codes = (0, 3, 130, *(-number for number in sent if number != signal.SIGINT))
    if len(sent) > 1:
        case.codes += (-signal.SIGINT,)
    case.may_leave = any(number != signal.SIGINT for number in sent)
    case.cpu *= 2  # counting takes time
    _try_again(case)
    return case


def _unread() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)


def _send_signals(calls: list[int], numbers: list[signal.Signals]) -> None:
    """Send the numbers to this process, each after so many calls of functions."""
    waiting = list(zip(calls, numbers, strict=True))
    count = 0

    def profile(*event: Any) -> None:
        nonlocal count
        count += 1
        if waiting and count >= waiting[0][0]:
            count = 0
            os.kill(os.getpid(), waiting.pop(0)[1])

    sys.setprofile(profile)


KINDS: dict[str, tuple[Callable[[World, Path, Chance], Case], int]] = {  # and a share of all cases
    "run": (run_case, 24),
    "recipe": (recipe_case, 22),
    "table": (table_case, 10),
    "audio": (audio_case, 14),
    "tar": (tar_case, 10),
    "http": (http_case, 6),
    "environment": (environment_case, 4),
    "disk": (disk_case, 5),
    "signal": (signal_case, 5),
}

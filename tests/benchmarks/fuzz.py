"""Fuzz recipes, manifests and audio files: every command must succeed or print one error line.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/fuzz.py [--recipes 1000] [--files 500]

Every case is a command in its own process (forked_commands.py) that must exit with code 0, or with
2 and exactly one line `error: ...` on stderr (asr.prepare tsv: one line per faulty row before it).
Failures are a traceback, any other exit code, more than 10 seconds of CPU or clock time (--clock
allows more on a busy machine), and half-written output: a run folder without a training step, a
checkpoint whose checksums differ, a hidden file, a manifest in spite of an error. Prints the number
of cases and failures.

Half of the recipes are damaged as text, which the parser usually refuses, and half as values of the
resolved recipe, many of which are odd but legal. The command line limits trainings to one step. The
address space is limited to 8 GB, so that a recipe that needs more memory is refused.
"""

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import soundfile
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
from forked_commands import fork
from tiny_speech import RATE, make_corpus, make_recipe, tones

from asr import prepare, train, transcribe
from asr.training.checkpoint import is_sound, list_checkpoints

SECONDS = 10
LIMITS = {resource.RLIMIT_CPU: SECONDS, resource.RLIMIT_AS: 8 << 30}
VALUES = """
-1 0 1 3 17 0.5 1e308 -1e-300 nan .inf -.inf null '' [] {} true yes no ~ 1_000 0x1F 12:30:45 . * &
99999999999999999999 1000000 2024-01-01 [1,2,3] {a:b} ../x /etc/passwd /dev/zero !x % @ *a &a : #
!!binary !!python/name:os.system <<: | > - ? " ' { [ las transformer auto cuda
""".split()  # noqa: SIM905 (readable as one string)
KEYS = ("kind", "base", "task", "run", "seed", "data", "text", "model", "train", "decode", "<<")
ODD = ("\x00", "\t", "\ufeff", "é" * 300, "\u2028", "[" * 3000, "\x1b[2J", "1" * 999)


def damage_text(text: str, chance: random.Random) -> str:
    """One to three changes typical of typing errors, bad merges or hostile input."""
    lines = text.split("\n")
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(lines))
        change = chance.choice((_value, _value, _value, _key, _line, _bytes))
        lines[at : at + 1] = change(lines[at], lines, chance)
    if chance.random() < 0.05:
        lines = lines[: chance.randrange(len(lines))]
    return "\n".join(lines)


def _value(line: str, lines: list[str], chance: random.Random) -> list[str]:
    for mark in (":", "\t", "-"):
        if mark in line:
            parts = line.split(mark)
            place = chance.randrange(1, len(parts))
            parts[place] = (" " if mark != "\t" else "") + chance.choice(VALUES)
            return [mark.join(parts)]
    return [line + chance.choice(VALUES)]


def _key(line: str, lines: list[str], chance: random.Random) -> list[str]:
    space = line[: len(line) - len(line.lstrip())]
    return [f"{space}{chance.choice(KEYS)}:{line.partition(':')[2]}"]


def _line(line: str, lines: list[str], chance: random.Random) -> list[str]:
    other = chance.choice(lines)
    return chance.choice(([], [line, line], [line, other], ["  " + line], [line.lstrip()], [other]))


def _bytes(line: str, lines: list[str], chance: random.Random) -> list[str]:
    at = chance.randrange(len(line) + 1)
    odd = chance.choice(ODD)
    return [line[:at] + odd + line[at:]]


def damage_tree(tree: dict, chance: random.Random) -> dict:
    """One to three keys with another value: valid YAML, which the parser accepts."""
    for _ in range(chance.randint(1, 3)):
        group, path = tree, []
        while isinstance(group, dict) and group:
            path.append((group, chance.choice(list(group))))
            group = group[path[-1][1]]
        group, key = path[-1]
        group[key] = chance.choice((0, 1, 2, 3, 7, 0.5, 1.0, 1e-9, True, None, -1, 300, group[key]))
    return tree


def damage_bytes(content: bytes, chance: random.Random) -> bytes:
    """Flipped, lost, added and overwritten bytes, half of them in the header."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(min(len(data), 64) if chance.random() < 0.5 else len(data))
        size = chance.choice((1, 1, 2, 4, 100))
        new = chance.choice((chance.randbytes(size), b"\xff" * size, b"\x00" * size, b""))
        data[at : at + size] = new
        if not data:
            return b""
    return bytes(data[: chance.randrange(len(data))] if chance.random() < 0.1 else data)


class Fuzzer:
    """Cases and their results."""

    def __init__(self, folder: Path, seed: int, clock: float) -> None:
        self.folder, self.seed, self.clock = folder, seed, clock
        self.corpus = folder / "corpus"
        self.corpus.mkdir()
        make_corpus(self.corpus)
        self.recipe = make_recipe(self.corpus)
        self.trained = folder / "trained"
        line = ["train.steps=1", "train.samples=0", "--run", str(self.trained)]
        # Not in this process: torch's threads do not exist in forked processes.
        assert fork(train, [str(self.recipe), *line], folder / "trained.txt").wait(900.0) == 0
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def case(self, kind: str, number: int) -> None:
        """One damaged file, one command, one verdict."""
        chance = random.Random(f"{self.seed} {kind} {number}")
        place = self.folder / "case"
        place.mkdir()
        made: Callable[[Path, random.Random], tuple] = getattr(self, f"_{kind}")
        module, arguments = made(place, chance)
        out, err = place / "stdout", place / "stderr"
        process = fork(module, arguments, out, err, LIMITS)
        code = process.wait(self.clock)
        if code is None:
            process.kill()
        fault = self._fault(code, place, kind)
        self.ends[f"{kind}: {'WRONG' if fault else 'success' if code == 0 else 'refused'}"] += 1
        if fault:
            self.wrong.append(f"{kind} {number}: {fault}")
            print(self.wrong[-1], err.read_text(errors="replace")[-1500:], flush=True)
        shutil.rmtree(place)

    def _fault(self, code: int | None, place: Path, kind: str) -> str | None:
        if code is None or code == -signal.SIGXCPU:
            return "hangs"
        output = (place / "stdout").read_text(errors="replace")
        lines = (place / "stderr").read_text(errors="replace").splitlines()
        if "Traceback" in output or any("Traceback" in line for line in lines):
            return "traceback"
        if code not in (0, 2):
            return f"exit code {code}"
        if code == 2 and not (lines and lines[-1].startswith("error: ")):
            return "no error line"
        if code == 2 and kind != "table" and len(lines) != 1:
            return f"{len(lines)} lines"
        return self._half_written(code, place)

    def _half_written(self, code: int, place: Path) -> str | None:
        run, made = place / "run", place / "made"
        if code == 2 and run.exists() and not (run / "train.log").exists():
            return "a run folder that was never trained in"
        if not all(is_sound(checkpoint) for checkpoint in list_checkpoints(run)):
            return "a damaged checkpoint"
        if code == 2 and made.exists() and any(made.iterdir()):
            return "a manifest in spite of the error"
        hidden = [path.name for top in (run, made) for path in top.rglob(".*")]
        return f"left behind: {hidden}" if hidden else None

    def _recipe(self, place: Path, chance: random.Random) -> tuple:
        path = place / "r.yaml"
        if chance.random() < 0.5:
            text = damage_text(self.recipe.read_text(), chance)
        else:
            full = yaml.safe_load((self.trained / "recipe.yaml").read_text())
            text = yaml.safe_dump(damage_tree(full, chance))
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        steps = ["train.steps=1"] if "train" in text else []
        return train, [str(path), *steps, "--run", str(place / "run")]

    def _manifest(self, place: Path, chance: random.Random) -> tuple:
        path = self._damaged_table(place, chance)
        role = chance.choice(("train", "valid"))
        more = [f"data.{role}={path}", "train.steps=1", "--run", str(place / "run")]
        return train, [str(self.recipe), *more]

    def _table(self, place: Path, chance: random.Random) -> tuple:
        path = self._damaged_table(place, chance)
        return prepare, ["tsv", str(path), "--to", str(place / "made")]

    def _damaged_table(self, place: Path, chance: random.Random) -> Path:
        for audio in self.corpus.glob("train-*.flac"):
            (place / audio.name).symlink_to(audio)
        path, text = place / "own.tsv", (self.corpus / "train.tsv").read_text()
        if chance.random() < 0.3:
            path.write_bytes(damage_bytes(text.encode(), chance))
        else:
            path.write_text(damage_text(text, chance))
        return path

    def _audio(self, place: Path, chance: random.Random) -> tuple:
        kind = chance.choice(("wav", "flac", "ogg", "mp3"))
        path = place / f"a.{kind}"
        soundfile.write(path, tones("abc", 1), RATE)
        path.write_bytes(damage_bytes(path.read_bytes(), chance))
        return transcribe, [str(self.trained), str(path)]


def main() -> int:
    """Print the figures; exit code 1 after any failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", type=int, default=1000)
    parser.add_argument("--files", type=int, default=500, help="half audio, half manifests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clock", type=float, default=10.0, help="seconds that a case may take")
    args = parser.parse_args()
    torch.set_num_threads(1)
    quarter = args.files // 4
    wanted = {"recipe": args.recipes, "audio": args.files - 2 * quarter}
    wanted |= {"manifest": quarter, "table": quarter}
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), args.seed, args.clock)
        for kind, count in wanted.items():
            for number in range(count):
                fuzzer.case(kind, number)
                if number % 100 == 99:
                    print(f"{number + 1} x {kind}", flush=True)
            print(f"{count} x {kind}: {len(fuzzer.wrong)} wrong so far", flush=True)
    for name, count in sorted(fuzzer.ends.items()):
        print(f"{name} {count}")
    print(f"{sum(wanted.values())} cases, {len(fuzzer.wrong)} wrong")
    return 1 if fuzzer.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

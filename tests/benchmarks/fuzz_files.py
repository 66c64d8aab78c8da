"""Content and kinds of file that nobody expects: JSON, weights, training states, FIFOs, links.

Everything is a function of its random.Random. `place_odd` puts one of them at a path; links lead to
files of the case's `victim` folder, which must stay as they are.
"""

import hashlib
import io
import json
import os
import random
import shutil
import stat
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from tensorboard.summary.writer.record_writer import RecordWriter

VALUES = """
-1 0 1 3 17 0.5 1e308 -1e-300 nan .inf -.inf null '' [] {} true yes no ~ 1_000 0x1F 12:30:45 . * &
99999999999999999999 1000000 2024-01-01 [1,2,3] {a:b} ../x /etc/passwd /dev/zero !x % @ *a &a : #
!!binary !!python/name:os.system <<: | > - ? " ' { [ las transformer auto cuda
""".split()  # noqa: SIM905 (readable as one string)
KEYS = ("kind", "base", "task", "run", "seed", "data", "text", "model", "train", "decode", "<<")
ODD = ("\x00", "\t", "\ufeff", "é" * 300, "\u2028", "[" * 3000, "\x1b[2J", "1" * 999, "\r")
ODD += ("\ud800",)
PLAIN = (None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**25, 0.5, 1e308, float("nan"))
NESTED = ([], {}, [[]], {"a": {}}, [None], ["x", 1], {"": 0}, {"\x1b[2J": []})
TEXTS = ("", "x", "\x1b]0;x\x07", "\ud800", "a" * 300, "../../x", "/etc/passwd", "\0", "1")
TEXTS += ("é\u202e",)


def odd_value(chance: random.Random) -> Any:
    """A value of any type that JSON has."""
    return chance.choice(chance.choice((PLAIN, NESTED, TEXTS)))


def change_leaf(tree: Any, new: Any, chance: random.Random) -> Any:
    """A tree of mappings and lists, with something replaced, added or removed somewhere in it."""
    if isinstance(tree, dict | list) and tree and chance.random() < 0.85:
        key = chance.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if chance.random() < 0.1:
            del tree[key]
        elif isinstance(tree, dict) and chance.random() < 0.05:
            tree[chance.choice(TEXTS)] = new
        else:
            tree[key] = change_leaf(tree[key], new, chance)
        return tree
    return new


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
    return [line[:at] + chance.choice(ODD) + line[at:]]


def json_text(text: str, chance: random.Random) -> str:
    """JSON, or almost."""
    way = chance.randrange(6)
    if way == 0:
        depth = 200_000
        return chance.choice(("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth))
    if way == 1:
        return chance.choice(
            ("1" * 10_000, "1e999", '"\\ud800"', "NaN", "-", "[1,]", '{"a":1}' * 2)
        )
    try:
        tree = change_leaf(json.loads(text), odd_value(chance), chance)
    except ValueError:
        tree = odd_value(chance)
    return json.dumps(tree)


def weights(content: bytes, chance: random.Random) -> bytes:
    """Safetensors with another header, or other tensors."""
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    way = chance.randrange(5)
    if way == 0:
        number = chance.choice((0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1))
        return number.to_bytes(8, "little") + content[8:]
    if way == 1:
        text = json_text(json.dumps(header), chance)
    elif way == 2:
        name = chance.choice([key for key in header if key != "__metadata__"])
        part = chance.choice(("dtype", "shape", "data_offsets"))
        value = {
            "dtype": ["F64", "F16", "C64", "U8", "X"],
            "shape": ([], [2**40, 2**40], [0], [-1]),
        }
        value |= {"data_offsets": ([0, 2**50], [8, 0], [0, 0], [-1, 1])}
        header[name][part] = chance.choice(value[part])
        text = json.dumps(header)
    elif way == 3:
        key = chance.choice(("step", "loss", "format", "vocabulary"))
        value = chance.choice(("nan", "-inf", "1e999", "x", "\x1b[2J", "9" * 5000, "-1", ""))
        header.setdefault("__metadata__", {})[key] = value
        text = json.dumps(header)
    else:
        number = chance.choice((float("nan"), float("inf"), 3e38, -3e38, 1e-40, 0.0))
        data, text = struct.pack("<f", number) * (len(data) // 4), json.dumps(header)
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + data


def training_state(content: bytes, chance: random.Random) -> bytes:
    """The archive of a training state with a wrong value, or a wrong archive of the right ones."""
    if chance.random() < 0.7:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        file = io.BytesIO()
        torch.save(change_leaf(state, _odd_tensor(chance), chance), file)
        return file.getvalue()
    file, packing = io.BytesIO(), chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", packing) as new:
        for entry in old.infolist():
            part = old.read(entry)
            if chance.random() < 0.1:
                part = chance.choice((b"", bytes(50 << 20), chance.randbytes(99), part[:-1]))
            if chance.random() < 0.95:
                new.writestr(entry.filename, part)
            if chance.random() < 0.05:
                new.writestr(f"{entry.filename}x{'../' * 9}", part)
    return file.getvalue()


def _odd_tensor(chance: random.Random) -> Any:
    """A value that torch.save takes: often a tensor of an odd shape, type or layout."""
    one = torch.ones(1)
    tensors = [one.expand(1 << 40), one.expand(1 << 20, 1 << 20), torch.ones(0), one[0], one > 0]
    tensors += [one * float("nan"), torch.ones(3, 5).to_sparse(), one.to(torch.complex64)]
    tensors += [
        torch.ones(2, 2, dtype=torch.float16),
        torch.arange(7),
        torch.empty(9, device="meta"),
    ]
    tensors += [torch.ones(5056, dtype=torch.uint8)]
    return chance.choice(tensors) if chance.random() < 0.6 else odd_value(chance)


def events(content: bytes, chance: random.Random) -> bytes:
    """An event file whose records have valid checksums and damaged content."""
    records, at = [], 0
    while at + 12 <= len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        records.append(content[at + 12 : at + 12 + size])
        at += 16 + size
    for _ in range(chance.randint(1, 20)):
        place = chance.randrange(len(records))
        records[place] = damage_bytes(records[place] or b"x", chance)
    file = io.BytesIO()
    writer = RecordWriter(file)
    for record in records:
        writer.write(record)
    return file.getvalue()


def _content(path: Path) -> bytes:
    """The begin of a file, which may be a giant; of what is no file, something."""
    if not path.is_file():
        return b"x" * 99
    with path.open("rb") as file:
        return file.read(1 << 20)


def damage_file(path: Path, chance: random.Random) -> None:
    """Other content of the kind that the file's name announces, with valid checksums."""
    content = _content(path)
    if chance.random() < 0.15 or not content:
        text = content.decode("utf-8", "replace")
        new = chance.choice((b"", b"\0" * 99, chance.randbytes(300), text.encode("utf-16")))
    else:
        try:
            new = _other_content(path.name, content, chance)
        except Exception:  # it is damaged already, or the new values cannot be written
            new = damage_bytes(content, chance)
    path.write_bytes(new)
    sums = path.with_name("sha256.json")
    if path.name in ("model.safetensors", "training.pt"):
        with suppress(Exception):  # no such file, or a damaged one
            known = json.loads(_content(sums))
            sums.write_text(json.dumps(known | {path.name: hashlib.sha256(new).hexdigest()}))


def _other_content(name: str, content: bytes, chance: random.Random) -> bytes:
    """Changed content of a file of that name."""
    for ending, change in _BINARY.items():
        if ending in name:
            return change(content, chance)
    text, ending = content.decode("utf-8", "replace"), name.rpartition(".")[2]
    if ending in ("json", "jsonl"):
        text = json_text(text, chance)
    elif ending == "yaml" and chance.random() < 0.5:
        text = yaml.safe_dump(change_leaf(yaml.safe_load(text), odd_value(chance), chance))
    elif ending in ("yaml", "tsv", "log", "html", "md"):
        text = damage_text(text, chance)
    else:
        return damage_bytes(content, chance)
    return text.encode("utf-8", "surrogatepass")


_BINARY = {".safetensors": weights, ".pt": training_state, "tfevents": events}


def place_odd(path: Path, victim: Path, chance: random.Random) -> str:
    """Put something odd at the path instead of what is there -> what it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    was = _content(path)
    path.unlink(missing_ok=True)
    kind = chance.choice(
        [
            "file",
            "link",
            "hardlink",
            "dangling",
            "loop",
            "device",
            "folder",
            "fifo",
            "socket",
            "giant",
            "empty",
            "closed",
            "big",
        ]
    )
    targets = sorted(
        p for p in victim.rglob("*") if p.is_dir() or p.suffix in (path.suffix, ".txt")
    )
    if kind == "link":
        path.symlink_to(chance.choice(targets))
    elif kind == "hardlink":
        os.link(chance.choice([target for target in targets if target.is_file()]), path)
    elif kind in ("dangling", "loop", "device"):
        to = {"dangling": victim / "new", "loop": path, "device": Path("/dev/zero")}[kind]
        path.symlink_to(to)
    elif kind == "folder":
        path.mkdir()
        (path / "inner.txt").write_text("x")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "giant":
        path.write_bytes(was)
        os.truncate(path, 1 << 40)
    else:
        contents = {"empty": b"", "closed": was, "big": was + b"\n" * (4 << 20), "file": was[:-1]}
        path.write_bytes(contents[kind])
        path.chmod(0 if kind == "closed" else 0o644)
    return kind

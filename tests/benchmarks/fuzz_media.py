"""Audio files and tars, valid ones at their limits and damaged ones.

`audio` makes a file of any container that libsndfile writes, of any rate, length and number of
channels, or with samples that are no numbers, and often damages its header. `tar` makes an archive
header by header: names, sizes and types that no honest tar has, PAX records, GNU long names and
sparse maps, chained.
"""

import os
import random
import struct
from pathlib import Path

import numpy as np
import soundfile
from fuzz_files import damage_bytes
from tiny_speech import RATE, tones

# Container -> encodings, the name's ending, most channels.
CONTAINERS = {
    "WAV": (("PCM_16", "PCM_U8", "FLOAT", "DOUBLE", "ULAW", "IMA_ADPCM", "GSM610"), "wav", 32),
    "RF64": (("PCM_16", "PCM_24", "FLOAT"), "wav", 32),
    "W64": (("PCM_16", "DOUBLE"), "wav", 32),
    "AIFF": (("PCM_16", "PCM_S8", "FLOAT"), "wav", 32),
    "AU": (("PCM_16", "ULAW", "FLOAT", "G721_32"), "wav", 32),
    "CAF": (("PCM_16", "ALAC_16", "FLOAT"), "wav", 8),
    "FLAC": (("PCM_16", "PCM_24", "PCM_S8"), "flac", 8),
    "OGG": (("VORBIS", "OPUS"), "ogg", 8),
    "MP3": (("MPEG_LAYER_III",), "mp3", 2),
}
RATES = (1, 10, 99, 4000, 8000, 11025, 16000, 22050, 44100, 48000, 96000, 192000, 655350)
COUNTS = (0, 1, 2, 39, 400, 1151, 1152, 1153, 4096, 9600, 30000)
NUMBERS = (0, 1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def audio(scratch: Path, chance: random.Random, minutes: int = 0) -> tuple[bytes, str]:
    """An audio file and the ending of its name; minutes: of silence, or 0 for a short file."""
    content, ending = b"", "wav"
    for _ in range(9):  # not every combination exists
        container = chance.choice(list(CONTAINERS))
        encodings, ending, most = CONTAINERS[container]
        rate = chance.choice(RATES) if chance.random() < 0.6 else RATE
        channels = chance.choice((1, 1, 1, 2, 3, most))
        if minutes:
            container, ending, encodings, rate, channels = "FLAC", "flac", ("PCM_16",), 8000, 1
        samples = _samples(chance, channels, rate * 60 * minutes)
        if content := _encoded(scratch, samples, rate, container, chance.choice(encodings)):
            break
    if chance.random() < 0.5 and content and not minutes:
        content = chance.choice((_damage_header, damage_bytes, _cut))(content, chance)
    ending = chance.choice((ending, ending, "wav", "mp3", "opus", "raw", "txt"))
    return content, ending


def _encoded(path: Path, samples: np.ndarray, rate: int, container: str, encoding: str) -> bytes:
    """An audio file, written in a process of its own, since libsndfile crashes for some; or b""."""
    pid = os.fork()
    if not pid:
        try:
            soundfile.write(path, samples, rate, format=container, subtype=encoding)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    content = path.read_bytes() if status == 0 else b""
    path.unlink(missing_ok=True)
    return content


def _samples(chance: random.Random, channels: int, silence: int) -> np.ndarray:
    if silence:
        return np.zeros(silence, np.int16)
    wave = tones(chance.choice(("abc", "a", "c b a bc")), 1)[: chance.choice((*COUNTS, None, None))]
    if chance.random() < 0.2 and len(wave):
        odd = chance.choice((np.nan, np.inf, -np.inf, 1e30, 1e-40, 1.0))
        wave[chance.randrange(len(wave)) :: chance.choice((1, 7, 10**6))] = odd
    return np.repeat(wave[:, None], channels, axis=1) if channels > 1 else wave


def _damage_header(content: bytes, chance: random.Random) -> bytes:
    """One to three numbers in the first 200 bytes replaced."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        form = chance.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
        size = struct.calcsize(form)
        number = chance.choice(NUMBERS) % (1 << 8 * size)
        if len(data) > size:
            struct.pack_into(form, data, chance.randrange(min(200, len(data) - size)), number)
    return bytes(data)


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))] * chance.choice((1, 1, 2))


# Tars

NAMES = ("a", "s1", "..", "../x", "/x", "", ".", "./a", "a/../b", "a\\b", "x" * 99, "é" * 40)
NAMES += ("\x1b[2J", "a b\tc\nd", "\udcff\udcfe", "-rf", "a" * 50 + "/" + "b" * 45, "s1.x.y")
NAMES += ("a//b",)
TYPES = b"00000\x001234567gxLKSVMDAXN\xff"
SPARSE = ("GNU.sparse.map", "GNU.sparse.size", "GNU.sparse.numblocks", "GNU.sparse.major")
SPARSE += ("GNU.sparse.name", "GNU.sparse.realsize", "GNU.sparse.minor")
PAX = ("path", "size", "linkpath", "mtime", "uid", "hdrcharset", "SCHILY.xattr.x", "comment")


def tar(chance: random.Random, samples: list[tuple[str, bytes]]) -> bytes:
    """A tar of these files, with damaged, odd and chained headers between and of them."""
    parts = []
    for name, content in samples:
        parts += [_odd_entry(chance) for _ in range(chance.choice((0, 0, 0, 1, 2)))]
        if chance.random() < 0.15:
            parts.append(_prefix_header(chance) * chance.choice((1, 1, 2, 1200)))
        damaged = chance.random() < 0.15
        parts.append(_entry(chance if damaged else None, name, content, b"0"))
    content = b"".join(parts) + bytes(1024 if chance.random() < 0.8 else 0)
    if chance.random() < 0.1:
        content = damage_bytes(content, chance)
    return content[: chance.randrange(len(content))] if chance.random() < 0.1 else content


def _odd_entry(chance: random.Random) -> bytes:
    kind = bytes([chance.choice(TYPES)])
    name = chance.choice(NAMES) + chance.choice(("", ".wav", ".txt", ".json", ".flac"))
    content = chance.randbytes(chance.choice((0, 1, 511, 512, 513)))
    return _entry(chance, name, content, kind)


def _prefix_header(chance: random.Random) -> bytes:
    """A header that describes the next one: a long name, PAX records, or a sparse map."""
    kind = chance.choice((b"L", b"K", b"x", b"g"))
    if kind in b"LK":
        return _entry(None, "././@LongLink", chance.choice(NAMES).encode(*_SURROGATES) * 20, kind)
    records = b""
    for _ in range(chance.choice((1, 2, 500))):
        values = (*NAMES, "1", "-1", "1e9", "9" * 30, "9" * 5000, "0,1,2,3", "1,")
        key = chance.choice(PAX + SPARSE)
        record = f" {key}={chance.choice(values)}\n".encode(*_SURROGATES)
        size = len(record) + len(str(len(record) + 3))
        size = chance.choice((size,) * 8 + (0, 1, size + 1, 10**9, 10**20))
        records += str(size).encode() + record
    return _entry(None, "pax", records, kind)


_SURROGATES = ("utf-8", "surrogateescape")


def _entry(chance: random.Random | None, name: str, content: bytes, kind: bytes) -> bytes:
    """Header and content; with `chance`, one to three fields of the header are odd."""
    fields = {
        "name": name.encode(*_SURROGATES)[:100],
        "mode": b"0000644",
        "uid": b"0000000",
        "gid": b"0000000",
        "size": b"%011o" % len(content),
        "mtime": b"00000000000",
        "sum": b" " * 8,
        "kind": kind,
        "link": b"",
        "magic": b"ustar\x0000",
        "owner": b"",
        "group": b"",
        "major": b"",
        "minor": b"",
        "prefix": b"",
    }
    widths = (100, 8, 8, 8, 12, 12, 8, 1, 100, 8, 32, 32, 8, 8, 155)
    right = True
    for _ in range(chance.randint(0, 2) if chance else 0):
        _change_field(fields, chance)
        right = right and chance.random() < 0.9
    header = b"".join(v.ljust(w, b"\0")[:w] for v, w in zip(fields.values(), widths, strict=True))
    total = sum(header) + (0 if right else 1)
    header = (header[:148] + b"%06o\0 " % total + header[156:]).ljust(512, b"\0")
    return header + content + bytes(-len(content) % 512)


def _change_field(fields: dict[str, bytes], chance: random.Random) -> None:
    numbers = (b"", b"-1", b"77777777777", b"\xff" * 12, b"\x80" + bytes(7) + b"\xff" * 4, b"9x")
    numbers += (b"\x80" + b"\x7f" * 11, b"0" * 12, b" 12 ", b"\0" * 12)
    values = {
        "name": [name.encode(*_SURROGATES) for name in NAMES],
        "link": [b"../../x", b"/etc/passwd", b"a", b"\x1b[2J"],
        "kind": [bytes([kind]) for kind in TYPES],
        "magic": [b"ustar  \0", bytes(8), b"\xff" * 8],
        "prefix": [b"..", b"/", b"p" * 155, b"\xff\xfe", chance.randbytes(155)],
    }
    key = chance.choice(("size", "size", "mode", "mtime", "uid", "major", *values))
    fields[key] = chance.choice(values.get(key, numbers))

"""A local HTTP server whose answers are damaged, endless, slow or hostile.

It runs in a process of its own. The path of a request, /SEED/NUMBER/..., names the case, whose
random.Random determines the answers to the case's first, second, ... connection; what is served is
the file of the request's name in the server's folder NUMBER.
"""

import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

STATUS = ("HTTP/1.1 200 OK",) * 10 + (
    *(f"HTTP/1.1 {code} No" for code in (100, 204, 206, 304, 400, 401, 404, 416, 429, 500, 503)),
    *(
        "HTTP/9.9 200 OK",
        "HTTP/1.1 abc",
        "ICY 200 OK",
        "",
        "HTTP/1.1 200 \x1b[2J",
        "HTTP/1.1 99999",
    ),
    *("HTTP/1.0 200 OK", "HTTP/1.1 404 " + "x" * 60_000, "HTTP/1.1 500 a\x07\x9b", "x" * 70_000),
)
PLACES = ("/", "", "//", "http://[::1", "file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x")
PLACES += ("\x1b[2J",)
PLACES += ("http://127.0.0.1:1/x", "https://127.0.0.1:1/x", "http://example.invalid/x", "é" * 9)
PLACES += ("http://127.0.0.1:99999/x", "http://127.0.0.1/" + "x" * 9000, "javascript:x")
PLACES += ("http://@/x",)
LENGTHS = ("-1", "1e3", "0", "x", "", "9" * 30, str(2**63), "12", "1, 2", "+5")
RANGES = ("bytes 0-9/10", "bytes */*", "bytes 5-1/2", "bytes -1-2/3", "x", "bytes 0-0/" + "9" * 20)


def answer(chance: random.Random, content: bytes, start: int) -> tuple[bytes, bytes, str]:
    """Head and body of an answer and how it is sent: whole, cut, reset, slowly or without end."""
    if chance.random() < 0.35:  # honest
        part = content[start:]
        total = f"bytes {start}-{len(content) - 1}/{len(content)}"
        first = f"HTTP/1.1 206 Part\r\nContent-Range: {total}" if start else "HTTP/1.1 200 OK"
        return f"{first}\r\nContent-Length: {len(part)}\r\n\r\n".encode(), part, "whole"
    lines, body = [chance.choice(STATUS)], content
    if chance.random() < 0.15:
        code = chance.choice((301, 302, 303, 307, 308))
        lines = [f"HTTP/1.1 {code} Moved", f"Location: {chance.choice(PLACES)}"]
    if chance.random() < 0.5:
        length = chance.choice((str(len(body)), str(len(body)), *LENGTHS))
        lines += [f"Content-Length: {length}"] * chance.choice((1, 1, 1, 2))
    if chance.random() < 0.25:
        lines.append(f"Content-Range: {chance.choice(RANGES)}")
    if chance.random() < 0.25:
        lines.append("Transfer-Encoding: chunked")
        body = _chunked(body, chance)
    if chance.random() < 0.15:
        odd = ("Content-Encoding: gzip", "X" * 70_000, "no colon", ": x", "X: \x1b[2J", " folded")
        lines += [chance.choice(odd)] * chance.choice((1, 1, 200, 20_000))
    end = chance.choice(("\r\n", "\r\n", "\r\n", "\n", "\r"))
    head = (end.join(lines) + end * 2).encode("latin-1", "replace")
    if chance.random() < 0.05:
        head = b"HTTP/1.1 100 Continue\r\n\r\n" * chance.choice((1, 100_000)) + head
    return head, body, chance.choice(("whole", "whole", "cut", "reset", "slow", "more", "nothing"))


def _chunked(body: bytes, chance: random.Random) -> bytes:
    sizes = (b"%x" % len(body),) * 3 + (b"-1", b"", b"x", b"f" * 30, b"0", b"1;" + b"x" * 99_000)
    return (
        chance.choice(sizes)
        + b"\r\n"
        + body
        + chance.choice((b"\r\n0\r\n\r\n", b"", b"\r\n0\r\nX"))
    )


def serve(folder: Path) -> tuple[int, int]:
    """Start the server -> its process and its port."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    pid = os.fork()
    if pid:
        port = listening.getsockname()[1]
        listening.close()
        return pid, port
    connections: Counter[str] = Counter()
    listening.settimeout(5.0)
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        arguments = (connection, folder, connections)
        threading.Thread(target=_respond, args=arguments, daemon=True).start()
    os._exit(0)


def _respond(connection: socket.socket, folder: Path, connections: Counter) -> None:
    with suppress(OSError, ValueError, IndexError), connection:
        connection.settimeout(5.0)
        request = b""
        while b"\r\n\r\n" not in request:
            block = connection.recv(1 << 16)
            if not block:
                return
            request += block
        path = request.split(b" ")[1].decode()
        seed, number, *names = path.strip("/").split("/")
        case = f"{seed} {number}"
        connections[case] += 1
        _, _, start = request.partition(b"Range: bytes=")
        start = int(start.partition(b"-")[0] or 0)
        content = b"x" * 100
        with suppress(OSError):
            content = (folder / number / names[-1]).read_bytes()
        chance = random.Random(f"{case} {connections[case]}")
        head, body, way = answer(chance, content, start)
        _send(connection, head, body, way)


def _send(connection: socket.socket, head: bytes, body: bytes, way: str) -> None:
    if way == "slow":
        for place in range(0, 400, 4):
            connection.sendall((head + body)[place : place + 4])
            time.sleep(0.02)
        return
    if way == "reset":
        connection.sendall(head + body[: len(body) // 2])
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return
    texts = {"cut": body[: len(body) // 3], "nothing": b"", "more": body + bytes(1 << 16)}
    connection.sendall(head + texts.get(way, body))

"""Downloads from a local server that disconnects, sends false headers or is missing."""

import contextlib
import hashlib
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from full_disk import full_disk

from asr.data.importers import download
from asr.data.importers.download import fetch
from asr.errors import UserError

CONTENT = bytes(i * 7919 % 251 for i in range(300_007))
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT under any name, at most `per_connection` bytes, and records the requests."""

    daemon_threads = True
    per_connection = 10**9
    ranges = True  # whether the server supports ranges
    partial = False  # whether it sends 206 even for the whole file
    lengths = True  # whether it sends Content-Length
    replies = ()  # status codes for the first requests

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/corpus.tar.gz"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.headers.get("Range"))
        if len(self.server.asked) <= len(self.server.replies):
            self.send_error(self.server.replies[len(self.server.asked) - 1])
            return
        self._content(self._start())

    def _start(self):
        wanted = self.headers.get("Range")
        return int(wanted[len("bytes=") : -1]) if wanted and self.server.ranges else 0

    def _content(self, start):
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            self.end_headers()
            return
        part = start or self.server.partial
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        if self.server.lengths:
            self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start : start + self.server.per_connection])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def refusal(server, path, md5=MD5):
    with pytest.raises(UserError) as caught:
        fetch(server.url, path, md5)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_is_downloaded_completely(server, tmp_path, capfd):
    path = tmp_path / "new" / "corpus.tar.gz"
    fetch(server.url, path, MD5)
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["corpus.tar.gz"] and server.asked == [None]
    assert "corpus.tar.gz" in capfd.readouterr().err  # the progress bar names the file


def test_an_existing_file_is_not_requested(server, tmp_path):
    path = tmp_path / "corpus.tar.gz"
    path.write_bytes(CONTENT)
    fetch(server.url, path, MD5)
    assert server.asked == []
    path.write_bytes(b"something of mine")
    assert "is not the published file" in refusal(server, path)
    assert path.read_bytes() == b"something of mine"


@pytest.mark.parametrize("lengths", [True, False])
def test_a_partial_download_is_resumed(server, tmp_path, lengths):
    server.lengths = lengths
    path = tmp_path / "corpus.tar.gz"
    (tmp_path / "corpus.tar.gz.part").write_bytes(CONTENT[:1009])
    fetch(server.url, path, MD5)
    assert path.read_bytes() == CONTENT and server.asked == ["bytes=1009-"]


def test_a_connection_that_breaks_repeatedly(server, tmp_path):
    server.per_connection = 40_009
    path = tmp_path / "corpus.tar.gz"
    fetch(server.url, path, MD5)
    assert path.read_bytes() == CONTENT
    starts = [None, *(f"bytes={40_009 * i}-" for i in range(1, 8))]
    assert (
        server.asked == starts
    )  # more disconnects than TRIES: a growing download is not abandoned


@pytest.mark.parametrize("partial", [False, True])
def test_a_server_without_ranges_sends_everything_again(server, tmp_path, partial):
    server.ranges, server.partial = False, partial
    path = tmp_path / "corpus.tar.gz"
    (tmp_path / "corpus.tar.gz.part").write_bytes(b"x" * 1009)
    fetch(server.url, path, MD5)
    assert path.read_bytes() == CONTENT


def test_a_complete_part_is_only_verified(server, tmp_path):
    path = tmp_path / "corpus.tar.gz"
    (tmp_path / "corpus.tar.gz.part").write_bytes(CONTENT)
    fetch(server.url, path, MD5)
    assert path.read_bytes() == CONTENT and server.asked == [f"bytes={len(CONTENT)}-"]


def test_a_part_of_another_file_is_detected(server, tmp_path):
    path = tmp_path / "corpus.tar.gz"
    (tmp_path / "corpus.tar.gz.part").write_bytes(b"x" * 1009)
    assert "published is " + MD5 in refusal(server, path)
    assert names(tmp_path) == []
    fetch(server.url, path, MD5)  # the second try starts from byte 0
    assert path.read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    message = refusal(server, tmp_path / "corpus.tar.gz", md5="0" * 32)
    assert server.url in message and MD5 in message and "0" * 32 in message
    assert names(tmp_path) == []


def test_a_stalled_connection_is_abandoned_and_its_part_kept(server, tmp_path):
    server.per_connection = 0
    (tmp_path / "corpus.tar.gz.part").write_bytes(CONTENT[:1009])
    message = refusal(server, tmp_path / "corpus.tar.gz")
    assert "the connection ended early" in message and "1009 bytes are kept" in message
    assert len(server.asked) == download.TRIES and names(tmp_path) == ["corpus.tar.gz.part"]


def test_a_busy_server_is_retried_and_a_refusal_is_not(server, tmp_path):
    server.replies = (503, 429)
    fetch(server.url, tmp_path / "a", MD5)
    assert len(server.asked) == 3
    server.asked.clear()
    server.replies = (404,)
    assert "the server says 404" in refusal(server, tmp_path / "b")
    assert len(server.asked) == 1


def test_no_server(server, tmp_path):
    url = server.url.replace(str(server.server_address[1]), "9")  # discard: nothing listens there
    with pytest.raises(UserError, match=r"Connection refused$"):
        fetch(url, tmp_path / "a", MD5)


@pytest.mark.parametrize("url", ["dev-clean.tar.gz", "https:///x", "http://[::1/x", "htp://a/b"])
def test_what_is_no_address_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with pytest.raises(UserError, match=f"^{re.escape(url)}: ") as raised:
        fetch(url, tmp_path / "a", MD5)
    assert "\n" not in str(raised.value) and names(tmp_path) == []


class RawServer:
    """Answers each connection with the bytes of the next reply; the last one again and again."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/corpus.tar.gz"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.socket.accept()
                reply = self.replies[min(len(self.asked), len(self.replies) - 1)]
                with connection, contextlib.suppress(OSError):  # its client has ended
                    self.asked.append(connection.recv(1 << 16).decode("latin-1"))
                    connection.sendall(reply)


@pytest.fixture
def raw(monkeypatch):
    """Makes a server of raw replies."""
    monkeypatch.setattr(download, "PAUSE", 0.0)
    servers = []

    def make(*replies):
        servers.append(RawServer(*replies))
        return servers[-1]

    yield make
    for server in servers:
        server.socket.close()


def head(status="200 OK", **headers):
    lines = [f"HTTP/1.1 {status}", *(f"{key.replace('_', '-')}: {v}" for key, v in headers.items())]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


def chunk(content, size=None):
    size = f"{len(content):x}" if size is None else size
    return f"{size}\r\n".encode() + content + b"\r\n"


def test_content_in_chunks_is_received(raw, tmp_path):
    pieces = (chunk(CONTENT[i : i + 70_001]) for i in range(0, len(CONTENT), 70_001))
    reply = head(Transfer_Encoding="chunked") + b"".join(pieces) + b"0\r\n\r\n"
    fetch(raw(reply).url, tmp_path / "a", MD5)
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("place", ["bytes 7-99/100", ""])
def test_an_answer_with_another_part_keeps_what_is_there(raw, tmp_path, place):
    (tmp_path / "a.part").write_bytes(CONTENT[:1009])
    server = raw(head("206 Partial Content", Content_Range=place) + CONTENT[7:])
    message = refusal(server, tmp_path / "a")
    assert "the server sends another part" in message and "1009 bytes are kept" in message
    assert (tmp_path / "a.part").read_bytes() == CONTENT[:1009]


def test_a_part_that_is_a_link_is_not_written(raw, tmp_path):
    other, part = tmp_path / "other", tmp_path / "a.part"
    other.write_bytes(b"mine")
    part.symlink_to(other)
    server = raw(head() + CONTENT)
    assert str(part) in refusal(server, tmp_path / "a") and server.asked == []
    assert other.read_bytes() == b"mine"


def test_a_full_disk_keeps_what_is_there(raw, tmp_path):
    (tmp_path / "a.part").write_bytes(CONTENT[:1009])
    length = {"Content_Range": f"bytes 1009-300006/{len(CONTENT)}"}
    server = raw(head("206 Partial Content", **length) + CONTENT[1009:])
    with full_disk(100_000):
        message = refusal(server, tmp_path / "a")
    assert f"{tmp_path / 'a.part'}: cannot be written: File too large; the same" in message
    kept = (tmp_path / "a.part").read_bytes()
    assert CONTENT.startswith(kept) and len(kept) >= 1009

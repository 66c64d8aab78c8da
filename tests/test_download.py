"""Downloads from a local server that disconnects, sends false headers, redirects or is missing."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from asr.data.importers import download
from asr.data.importers.download import check_address, fetch
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
    redirect = ""

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
        if self.server.redirect:
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
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


def refusal(server, path, md5=MD5, **kwargs):
    with pytest.raises(UserError) as caught:
        fetch(server.url, path, md5, **kwargs)
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


def test_a_part_longer_than_the_file_is_restarted(server, tmp_path):
    path = tmp_path / "corpus.tar.gz"
    (tmp_path / "corpus.tar.gz.part").write_bytes(CONTENT + b"more")
    fetch(server.url, path, MD5)
    assert path.read_bytes() == CONTENT and server.asked[-1] is None


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
    with pytest.raises(UserError, match=r"Connection refused.*resumes there"):
        fetch(url, tmp_path / "a", MD5)


def test_an_endless_file_is_stopped(server, tmp_path):
    assert "larger than the limit of 1000 bytes" in refusal(server, tmp_path / "a", max_bytes=1000)


@pytest.mark.parametrize(
    "url",
    [
        "http://www.openslr.org/resources/12/dev-clean.tar.gz",
        "http://127.0.0.1.example.org/x",
        "http://localhost.example.org/x",
        "http://user@example.org/x",
        "ftp://www.openslr.org/x",
        "file:///etc/passwd",
        "https:///x",
        "//www.openslr.org/x",
        "dev-clean.tar.gz",
        "http://[::1/x",
    ],
)
def test_addresses_that_are_refused(url, tmp_path):
    with pytest.raises(UserError, match="address"):
        check_address(url)
    with pytest.raises(UserError, match="address"):
        fetch(url, tmp_path / "a", MD5)


@pytest.mark.parametrize(
    "url", ["https://www.openslr.org/x", "http://localhost:8/x", "http://[::1]:8/x"]
)
def test_addresses_that_are_accepted(url):
    check_address(url)


@pytest.mark.parametrize("target", ["http://example.org/x", "file:///etc/passwd"])
def test_an_unsafe_redirect_is_refused(server, tmp_path, target):
    server.redirect = target
    with pytest.raises(UserError, match=r"only https|says 302"):
        fetch(server.url, tmp_path / "a", MD5)
    assert len(server.asked) == 1 and names(tmp_path) == []

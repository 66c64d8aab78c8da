"""Download large files and unpack archives, trusting neither.

Download: over TLS, resumed after a broken connection (HTTP ranges: RFC 9110, section 14), verified.
Content stays in NAME.part until its MD5 is the published one, and is only then renamed. So a file
under its own name is complete, and repeating the command resumes.

Unpack: only folders and plain files, only below the given folder, and only up to a size: no links,
devices or sparse files, no absolute or climbing names, no name twice. Rights and owners in the
archive are ignored. tarfile's own `filter="data"` is not in every Python 3.10 and limits no size.
"""

import gzip
import http.client
import ipaddress
import shutil
import ssl
import struct
import tarfile
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.error import HTTPError, URLError

from rich import progress
from rich.console import Console

from asr.errors import UserError
from asr.io import md5_of_file

CHUNK = 1 << 18  # bytes
# tarfile reads an extended header at once: a few kB in honest archives, a bomb otherwise.
MAX_READ = 1 << 20
MAX_FILES = 1_000_000
DAMAGED = (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error, struct.error)


class _Hostile(Exception):
    """A property that no honest archive has."""


class _Limited:
    """The unpacked stream, limited to `max_bytes` in all and MAX_READ at once."""

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ:
            raise _Hostile("has a header of more than a megabyte")
        self._check(self.tell())
        return self._stream.read(size)

    def seek(self, offset: int) -> int:
        self._check(offset)
        return self._stream.seek(offset)

    def _check(self, offset: int) -> None:
        if offset > self._max_bytes:
            raise _Hostile(f"unpacks to more than {self._max_bytes} bytes")


def unpack(archive: str | Path, to: str | Path, max_bytes: int, max_files: int = MAX_FILES) -> None:
    """Unpack a .tar.gz into the folder `to`, which must not exist.

    Raises UserError with archive and entry if one breaks a rule, and if the archive is broken; what
    was unpacked until then stays in `to`.
    """
    archive, to = Path(archive), Path(to)
    try:
        to.mkdir(parents=True)
        with gzip.open(archive) as file:
            stream = _Limited(file, max_bytes)
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                _unpack_all(tar, to, max_files)
            while stream.read(CHUNK):  # to the end, where the checksum is
                pass
    except _Hostile as error:
        raise UserError(f"{archive}: {error}; it is not unpacked") from None
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{archive}: cannot be unpacked: {reason}") from None


def _unpack_all(tar: tarfile.TarFile, to: Path, max_files: int) -> None:
    for number, member in enumerate(tar, start=1):
        if number > max_files:
            raise _Hostile(f"has more than {max_files} entries")
        path = to.joinpath(*_parts(member.name))
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
        elif member.isreg() and not member.issparse():
            path.parent.mkdir(parents=True, exist_ok=True)
            _copy(tar, member, path)
        else:
            raise _Hostile(f"entry {member.name!r} is neither a file nor a folder")


def _parts(name: str) -> tuple[str, ...]:
    parts = PurePosixPath(name).parts
    # On other systems a backslash or a colon separates folders and drives.
    if name.startswith("/") or ".." in parts or any(c in name for c in "\\:\0"):
        raise _Hostile(f"entry {name!r} leads out of its folder")
    return parts


def _copy(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    try:
        file = path.open("xb")
    except FileExistsError:
        raise _Hostile(f"entry {member.name!r} comes twice") from None
    with file, tar.extractfile(member) as source:
        shutil.copyfileobj(source, file, CHUNK)
        if file.tell() != member.size:
            raise _Hostile(f"entry {member.name!r} ends early")


TIMEOUT = 30.0  # seconds without a byte before a connection counts as broken
TRIES = 4  # connections in a row without a byte
PAUSE = 1.0  # seconds before the second of them, doubled each time
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
MAX_BYTES = 200 * 10**9  # known corpora come in smaller files
BROKEN = (http.client.HTTPException, URLError, ConnectionError, TimeoutError, ssl.SSLError)


def fetch(url: str, path: str | Path, md5: str, max_bytes: int = MAX_BYTES) -> None:
    """Download `url` to `path`, unless it exists.

    Raises UserError for an address that is not https (http only to this machine), a server that
    refuses, a connection that keeps breaking, and content with another MD5.
    """
    check_address(url)
    path = Path(path)
    if path.exists():
        if md5_of_file(path) != md5:
            raise UserError(f"{path}: is not the published file (MD5 {md5}); move it away")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    _receive_all(url, part, max_bytes)
    received = md5_of_file(part)
    if received != md5:
        part.unlink()
        raise UserError(
            f"{url}: MD5 {received}, published is {md5}; the file is deleted. Try again or --url"
        )
    part.replace(path)


def check_address(url: str) -> None:
    """Raises UserError unless the address is https, or http to this machine itself."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise UserError(f"{url}: not an address") from None
    secure = parts.scheme == "https" and host
    if not (secure or (parts.scheme == "http" and _is_this_machine(host))):
        raise UserError(f"{url}: only https addresses are allowed (http on this machine alone)")


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows only redirections to permitted addresses: never from TLS to plain text."""

    def redirect_request(self, *request: Any) -> urllib.request.Request | None:
        check_address(request[-1])
        return super().redirect_request(*request)


def _receive_all(url: str, part: Path, max_bytes: int) -> None:
    """Connect again and again, as long as the file grows."""
    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    rest, console = progress.TimeRemainingColumn(), Console(stderr=True)
    failed = 0
    with progress.Progress("{task.description}", *columns, rest, console=console) as bar:
        task = bar.add_task(part.name.removesuffix(".part"), total=None)
        while True:
            before = _size(part)
            try:
                if _receive(url, part, max_bytes, lambda **news: bar.update(task, **news)):
                    return
                reason = "the connection ended early"
            except BROKEN as error:
                reason = _reason(url, error)
            failed = 1 if _size(part) > before else failed + 1
            if failed >= TRIES:
                raise UserError(
                    f"{url}: {reason}; {_size(part)} bytes are kept in {part}, "
                    "the same command resumes there"
                )
            time.sleep(PAUSE * 2 ** (failed - 1))


def _reason(url: str, error: Exception) -> str:
    """Why a connection failed; raises UserError if another try would fail too."""
    if isinstance(error, HTTPError):
        error.close()
        answer = f"the server says {error.code} {error.reason}"
        if error.code not in TEMPORARY:
            raise UserError(f"{url}: {answer}") from None
        return answer
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise UserError(f"{url}: the server's certificate is not valid: {reason}") from None
    return str(reason) or type(reason).__name__


def _receive(url: str, part: Path, max_bytes: int, update: Callable[..., None]) -> bool:
    """One connection, appended to `part` -> whether the file is complete by the server's length."""
    have = _size(part)
    try:
        response = _open(url, have)
    except HTTPError as error:
        if error.code != 416:  # the range begins after the file's end
            raise
        error.close()
        complete = error.headers.get("Content-Range", "") == f"bytes */{have}"
        if not complete:
            part.unlink(missing_ok=True)
        return complete
    with response:
        place = response.headers.get("Content-Range", "")
        # Otherwise the answer is the file from its beginning.
        resumed = response.status == 206 and place.startswith(f"bytes {have}-")
        start = have if resumed else 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdigit() else None
        update(completed=start, total=total)
        with part.open("ab" if start else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                update(advance=len(chunk))
                if file.tell() > max_bytes:
                    raise UserError(f"{url}: larger than the limit of {max_bytes} bytes")
    return total is None or _size(part) == total


def _open(url: str, start: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "layernorm-asr", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    handlers: list[urllib.request.BaseHandler] = [_Redirects()]
    if _is_this_machine(urllib.parse.urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))  # a proxy cannot reach it
    opener = urllib.request.build_opener(*handlers)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

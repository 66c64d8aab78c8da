"""Large files from the network: over TLS, resumed where a connection broke off, verified.

What has arrived lies beside its place as NAME.part until its MD5 is the published one; only then
is it renamed. So a file under its own name is whole, and running the same command again goes on.

HTTP ranges: RFC 9110, section 14.
"""

import hashlib
import http.client
import ipaddress
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from asr.errors import UserError

CHUNK = 1 << 18  # bytes
TIMEOUT = 30.0  # seconds without a byte before a connection counts as broken
TRIES = 4  # connections in a row that bring nothing
PAUSE = 1.0  # seconds before the second of them, doubled each time
WORTH_ANOTHER_TRY = (408, 425, 429, 500, 502, 503, 504)
MAX_BYTES = 200 * 10**9  # no corpus we know comes in a larger file

BROKEN = (
    http.client.HTTPException,
    urllib.error.URLError,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
)


def fetch(url: str, path: str | Path, md5: str, max_bytes: int = MAX_BYTES) -> None:
    """Brings the file at `url` to `path`, unless it is there already.

    Raises UserError for an address that is not https (http only to this machine), a server that
    refuses, a connection that keeps breaking, and content with another MD5.
    """
    check_address(url)
    path = Path(path)
    if path.exists():
        if _md5(path) != md5:
            raise UserError(f"{path}: is not the published file (MD5 {md5}); move it away")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    _receive_all(url, part, max_bytes)
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise UserError(
            f"{url}: MD5 {found}, published is {md5}; what came is deleted. Try again or --url"
        )
    part.replace(path)


def check_address(url: str) -> None:
    """Raises UserError unless the address is https, or http to this machine itself."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise UserError(f"{url}: not an address") from None
    if parts.scheme == "https" and host:
        return
    if parts.scheme == "http" and _is_this_machine(host):
        return
    raise UserError(f"{url}: only https addresses are downloaded from (http on this machine alone)")


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirection only to where we would go ourselves: never from TLS to plain text."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _receive_all(url: str, part: Path, max_bytes: int) -> None:
    """Connects as often as it takes, as long as the file grows."""
    failed = 0
    with _bar() as progress:
        task = progress.add_task(part.name.removesuffix(".part"), total=None)
        while True:
            before = _size(part)
            try:
                if _receive(url, part, max_bytes, lambda **known: progress.update(task, **known)):
                    return
                reason = "the connection ended early"
            except BROKEN as error:
                reason = _reason(url, error)
            failed = 1 if _size(part) > before else failed + 1
            if failed >= TRIES:
                raise UserError(
                    f"{url}: {reason}; {_size(part)} bytes are kept in {part}, "
                    "the same command goes on from there"
                )
            time.sleep(PAUSE * 2 ** (failed - 1))


def _reason(url: str, error: Exception) -> str:
    """Why a connection failed; raises UserError where another try would fail alike."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        said = f"the server says {error.code} {error.reason}"
        if error.code not in WORTH_ANOTHER_TRY:
            raise UserError(f"{url}: {said}") from None
        return said
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise UserError(f"{url}: the server's certificate is not valid: {reason}") from None
    return str(reason) or type(reason).__name__


def _receive(url: str, part: Path, max_bytes: int, tell: Callable[..., None]) -> bool:
    """One connection: adds to `part` what comes. Whether the file is whole by the server's word."""
    have = _size(part)
    try:
        response = _open(url, have)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # the range begins behind the file's end
            raise
        error.close()
        whole = error.headers.get("Content-Range", "") == f"bytes */{have}"
        if not whole:
            part.unlink(missing_ok=True)
        return whole
    with response:
        start = have if _goes_on(response, have) else 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdigit() else None
        tell(completed=start, total=total)
        with part.open("ab" if start else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                tell(advance=len(chunk))
                if file.tell() > max_bytes:
                    raise UserError(f"{url}: larger than the limit of {max_bytes} bytes")
    return total is None or _size(part) == total


def _open(url: str, start: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "layernorm-asr", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    handlers: list[urllib.request.BaseHandler] = [_Redirects()]
    if _is_this_machine(urllib.parse.urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))  # no proxy knows the way to it
    opener = urllib.request.build_opener(*handlers)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)


def _goes_on(response: http.client.HTTPResponse, have: int) -> bool:
    """Whether the answer begins where our part ends; else it is the whole file anew."""
    place = response.headers.get("Content-Range", "")
    return response.status == 206 and place.startswith(f"bytes {have}-")


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

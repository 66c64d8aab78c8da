"""Download large files, resumed after a broken connection, and verified.

Content stays in NAME.part until its MD5 is the published one, and is only then renamed. So a file
under its final name is complete, and repeating the command resumes (HTTP ranges: RFC 9110, section
14).
"""

import http.client
import os
import re
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO
from urllib.error import HTTPError

from rich import progress
from rich.console import Console

from asr.errors import UserError, terminal, writing
from asr.io import md5_of_file, open_append

CHUNK = 1 << 18  # bytes
TIMEOUT = 30.0  # seconds without a byte before a connection counts as broken
LEAST = 1 << 14  # bytes
TRIES = 4  # connections in a row that bring less than LEAST
PAUSE = 1.0  # seconds before the second of them, doubled each time
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
BROKEN = (http.client.HTTPException, OSError)
LENGTH = re.compile("[0-9]{1,18}")
RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:\*|[0-9]{1,18})")


def fetch(url: str, path: str | Path, md5: str) -> None:
    """Download `url` to `path`, unless it exists.

    Raises UserError for an address that is none, a server that refuses, a connection that keeps
    breaking, and content with another MD5.
    """
    path = Path(path)
    if path.exists():
        if md5_of_file(path) != md5:
            raise UserError(f"{path}: is not the published file (MD5 {md5}); move it away")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with writing(part), open_append(part) as file:  # closing it writes, too
        try:
            _receive_all(url, file)
            os.fsync(file.fileno())
        finally:
            if os.fstat(file.fileno()).st_size == 0:
                part.unlink()
    received = md5_of_file(part)
    if received != md5:
        part.unlink()
        raise UserError(
            f"{url}: MD5 {received}, published is {md5}; the file is deleted. Try again or --url"
        )
    part.replace(path)


def _receive_all(url: str, part: IO[bytes]) -> None:
    """Connect again and again, as long as the file grows."""
    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    rest, console = progress.TimeRemainingColumn(), Console(file=terminal(sys.stderr))
    failed = 0
    with progress.Progress("{task.description}", *columns, rest, console=console) as bar:
        task = bar.add_task(Path(part.name).stem, total=None)
        while True:
            before = part.seek(0, os.SEEK_END)
            try:
                if _receive(url, part, lambda **news: bar.update(task, **news)):
                    return
                reason = "the connection ended early"
            except BROKEN as error:
                reason = _reason(url, error)
            except (ValueError, OverflowError) as error:  # of a redirection or a length
                raise UserError(f"{url}: an invalid address or answer: {_short(error)}") from None
            size = part.seek(0, os.SEEK_END)
            failed = 1 if size >= before + LEAST else failed + 1
            if failed >= TRIES:
                kept = f"; {size} bytes are kept in {part.name}, the same command resumes there"
                raise UserError(f"{url}: {reason}{kept if size else ''}")
            time.sleep(PAUSE * 2 ** (failed - 1))


def _reason(url: str, error: Exception) -> str:
    """Why a connection failed; raises UserError if another try would fail too."""
    if isinstance(error, HTTPError):
        error.close()
        answer = f"the server says {error.code} {_short(error.reason)}"
        if error.code not in TEMPORARY:
            raise UserError(f"{url}: {answer}") from None
        return answer
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise UserError(f"{url}: the server's certificate is not valid: {reason}") from None
    return _short(reason) or type(reason).__name__


def _short(reason: object) -> str:
    """On one line, and not longer, whatever the server sends."""
    return " ".join(str(reason).split())[:200]


def _receive(url: str, part: IO[bytes], update: Callable[..., None]) -> bool:
    """One connection, appended to `part` -> whether the file is complete by the server's length."""
    have = part.seek(0, os.SEEK_END)
    try:
        response = _open(url, have)
    except HTTPError as error:
        if error.code != 416:
            raise
        error.close()
        return True  # nothing follows what is there; the checksum decides
    with response:
        start = _start(response, have)
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if LENGTH.fullmatch(length) else None
        update(completed=start, total=total)
        if start == 0:
            part.truncate(0)
        # read1 returns what is there: read would wait, and a chunk of -1 bytes would have no end.
        while content := response.read1(CHUNK):
            try:
                part.write(content)
                part.flush()
            except OSError as error:
                fault = f"cannot be written: {error.strerror}; the same command resumes"
                raise UserError(f"{part.name}: {fault}") from None
            update(advance=len(content))
    return total is None or part.seek(0, os.SEEK_END) == total


def _start(response: http.client.HTTPResponse, have: int) -> int:
    """Where the content that follows begins: at `have` or 0. HTTPException for another position."""
    if response.status != 206:
        return 0
    match = RANGE.fullmatch(content_range := response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) not in (0, have):
        raise http.client.HTTPException(f"the server sends another part: {_short(content_range)!r}")
    return int(match[1])


def _open(url: str, start: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "layernorm-asr", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)

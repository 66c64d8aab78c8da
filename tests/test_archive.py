"""Valid archives are extracted completely; hostile ones write nothing outside their folder."""

import gzip
import io
import os
import stat
import tarfile
import time
import tracemalloc

import pytest

from asr.data.importers import archive
from asr.data.importers.archive import unpack
from asr.errors import UserError


def entry(name, content=b"", **settings):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in settings.items():
        setattr(info, key, value)
    return info, content


def pack(path, *entries, format=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w:gz", format=format) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return path


def refusal(tmp_path, path, **limits):
    limits = {"max_bytes": 10_000_000, **limits}
    with pytest.raises(UserError) as caught:
        unpack(path, tmp_path / "out", **limits)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_valid_archive_is_extracted_completely(tmp_path, format):
    big = os.urandom(700_001)
    path = pack(
        tmp_path / "a.tar.gz",
        entry("./a", type=tarfile.DIRTYPE),
        entry("./a/b/one.flac", big, mode=0o4777, uid=0),
        entry("a/empty", b""),
        entry("a/" + 80 * "n" + "/x", b"long name"),
        format=format,
    )
    unpack(path, tmp_path / "out", max_bytes=10_000_000)
    assert tree(tmp_path / "out") == {
        "a/b/one.flac": big,
        "a/empty": b"",
        f"a/{80 * 'n'}/x": b"long name",
    }
    mode = (tmp_path / "out/a/b/one.flac").stat().st_mode
    assert not mode & (stat.S_ISUID | stat.S_IXUSR)  # permissions in an archive are ignored


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil", "a/..", "..", "c:/evil",
                                  "..\\evil"])  # fmt: skip
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_names_outside_the_folder_are_refused(tmp_path, name, kind):
    path = pack(tmp_path / "a.tar.gz", entry("fine", b"x"), entry(name, b"", type=kind))
    message = refusal(tmp_path, path)
    assert repr(name) in message and "leads out of its folder" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar.gz", "out"]


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE],
    ids=["symlink", "hardlink", "character device", "block device", "pipe"],
)
def test_links_and_devices_are_refused(tmp_path, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    path = pack(
        tmp_path / "a.tar.gz",
        entry("door", type=kind, linkname=str(outside)),
        entry("door/evil", b"x"),
    )
    assert "'door' is neither a file nor a folder" in refusal(tmp_path, path)
    assert tree(outside) == {} and list((tmp_path / "out").iterdir()) == []


def test_a_repeated_name_is_refused(tmp_path):
    path = pack(tmp_path / "a.tar.gz", entry("a", b"first"), entry("./a", b"second"))
    assert "'./a' comes twice" in refusal(tmp_path, path)
    assert tree(tmp_path / "out") == {"a": b"first"}


def bomb(path, header, size):
    """An archive of a few kB: a header followed by `size` zeros."""
    with gzip.open(path, "wb") as file:
        file.write(header)
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return path


def test_an_archive_bomb_stops_at_the_limit(tmp_path):
    header = entry("zeros")[0]
    header.size = 64 << 20
    path = bomb(tmp_path / "a.tar.gz", header.tobuf(), 64 << 20)
    assert path.stat().st_size < 1 << 20
    assert "unpacks to more than 3000000 bytes" in refusal(tmp_path, path, max_bytes=3_000_000)
    assert (tmp_path / "out/zeros").stat().st_size < 5_000_000


def test_many_small_files_stop_at_their_limit(tmp_path):
    path = pack(tmp_path / "a.tar.gz", *(entry(f"f{i}", b"x") for i in range(12)))
    assert "has more than 11 entries" in refusal(tmp_path, path, max_files=11)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_bomb_in_a_header_uses_neither_memory_nor_time(tmp_path, kind):
    header = entry("header", type=kind)[0]
    header.size = 256 << 20
    path = bomb(tmp_path / "a.tar.gz", header.tobuf(tarfile.GNU_FORMAT), 64 << 20)
    tracemalloc.start()
    began = time.monotonic()
    assert f"headers of more than {archive.MAX_HEADERS} bytes" in refusal(
        tmp_path, path, max_bytes=10**12
    )
    assert time.monotonic() - began < 5 and tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_damaged_and_invalid_archives_are_reported_in_one_line(tmp_path):
    intact = pack(tmp_path / "a.tar.gz", entry("a", os.urandom(50_000))).read_bytes()
    middle_wrong = intact[:25_000] + bytes(20) + intact[25_020:]
    contents = [b"", b"no archive", intact[:-9], intact[:20_000], intact[:5], middle_wrong]
    for number, content in enumerate([*contents, gzip.compress(b"no tar" * 999)]):
        path = tmp_path / f"{number}.tar.gz"
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{number}.tar.gz: cannot be unpacked: ."):
            unpack(path, tmp_path / f"out{number}", max_bytes=10_000_000)
    assert "No such file" in refusal(tmp_path, tmp_path / "none.tar.gz")


def test_a_false_size_is_detected(tmp_path):
    header = entry("a")[0]
    header.size = 5000
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(header.tobuf() + b"x" * 700))
    message = refusal(tmp_path, tmp_path / "a.tar.gz")
    assert "ends early" in message or "unexpected end of data" in message


def test_extraction_never_overwrites_existing_files(tmp_path):
    (tmp_path / "out").mkdir()
    path = pack(tmp_path / "a.tar.gz", entry("a", b"x"))
    assert "File exists" in refusal(tmp_path, path)
    assert archive.MAX_HEADERS < 2**21  # the memory that one header may use


def test_an_archive_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.tar.gz")
    assert "not a regular file" in refusal(tmp_path, tmp_path / "a.tar.gz")

"""What a command prints: one line an error, and nothing that acts on a terminal."""

import errno
import io
import os
import subprocess
import sys
import unicodedata

import pytest
import torch

from asr.errors import UserError, printable, run_command, terminal

HOSTILE = "a\x1b[2J\rb\x07\x9b31m\x7f\x00é\t😀\u202egpj.exe\u2069"
ESCAPED = "a\\x1b[2J\\x0db\\x07\\x9b31m\\x7f\\x00é\t😀\\u202egpj.exe\\u2069"
REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_exactly_the_control_characters_are_escaped():
    for code in range(0x110000):
        sign = chr(code)
        control = unicodedata.category(sign) == "Cc" and sign not in "\t\n"
        expected = f"\\x{code:02x}" if control else sign
        if unicodedata.bidirectional(sign) in REORDERING:
            expected = f"\\u{code:04x}"
        assert printable(sign) == expected


def test_a_command_prints_no_control_character(capsys):
    def main():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        raise UserError(HOSTILE)

    with pytest.raises(SystemExit, match="2"):
        run_command(main)
    out, err = capsys.readouterr()
    assert out == f"{ESCAPED}\n"
    assert err == f"{ESCAPED}\nerror: {printable(' '.join(HOSTILE.split()))}\n"


def test_a_progress_bar_writes_its_own_control_characters(capsys):
    with pytest.raises(SystemExit):
        run_command(lambda: print("\x1b[2K", file=terminal(), flush=True))
    assert capsys.readouterr().out == "\x1b[2K\n"
    assert terminal() is sys.stdout


def test_the_streams_work_after_the_command(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, "utf-8", write_through=True))
    with pytest.raises(SystemExit):
        run_command(lambda: print("first"))
    print("second")
    assert raw.getvalue() == b"first\nsecond\n"


def test_a_gpu_that_the_build_of_torch_does_not_know_is_one_line(capsys):
    def main():
        reason = "no kernel image is available for execution on the device"
        raise RuntimeError(
            f"CUDA error: {reason}\nCUDA kernel errors might be asynchronously reported"
        )

    with pytest.raises(SystemExit, match="2"):
        run_command(main)
    err = capsys.readouterr().err
    assert err.startswith("error: this build of torch has no kernels for this GPU: install")
    assert err.count("\n") == 1


def test_a_torchaudio_that_does_not_fit_torch_is_one_line_with_a_remedy(capsys, tmp_path):
    library = tmp_path / "libtorchaudio.so"
    library.write_bytes(b"not a library")

    with pytest.raises(SystemExit, match="2"):
        run_command(lambda: torch.ops.load_library(library))
    err = capsys.readouterr().err
    assert err.startswith("error: the installed torchaudio cannot be loaded")
    assert "pip install torchaudio==2.11.0" in err and err.count("\n") == 1


@pytest.mark.parametrize("name", [b"/runs/a", "/runs/a"])
def test_a_path_in_an_error_of_the_system_is_text(name, capsys):
    def main():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    with pytest.raises(SystemExit, match="2"):
        run_command(main)
    assert capsys.readouterr().err == "error: /runs/a: No space left on device\n"


@pytest.mark.parametrize(
    ("code", "closed"), [("1 / 0", ""), ("print('x' * 100000)", "1>&-"), ("1 / 0", "2>&-")]
)
def test_closed_streams_and_bugs_end_a_process_as_python_does(code, closed):
    main = f"from asr.errors import run_command; run_command(lambda: {code})"
    line = f'"{sys.executable}" -c "{main}" {closed}'
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.returncode == (1 if code == "1 / 0" else 0)
    assert ("ZeroDivisionError" in done.stderr) == (code == "1 / 0" and not closed)
    assert "Exception ignored" not in done.stderr


def test_the_ends_of_a_long_message_are_printed(capsys):
    def main():
        raise UserError(f"a.tsv:7: {'a/' * 500_000}: File name too long")

    with pytest.raises(SystemExit, match="2"):
        run_command(main)
    line = capsys.readouterr().err
    assert line.startswith("error: a.tsv:7: a/a/") and line.endswith("a/: File name too long\n")
    assert len(line) < 2100

"""The log of a run, read back by TensorBoard's own reader."""

import errno
import io
import logging
import math
import os
import pty
import re
import shutil
import sys
import threading
import time
from dataclasses import replace
from html import unescape
from select import select

import numpy as np
import pytest
import torch
from event_files import curve, events
from full_disk import full_disk
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.summary.writer.record_writer import RecordWriter
from tiny_speech import age

from asr.errors import UserError, printable, run_command
from asr.training.logging import Log, Step, figure_texts
from asr.training.losses import Sum
from asr.training.state import TrainState


def step(total, count, norm=1.0, lr=0.5):
    return Step({"nll": Sum(torch.tensor(total), torch.tensor(count))}, norm, lr)


def text(run, name):
    (point,) = events(run).Tensors(name)
    return point.tensor_proto.string_val[0].decode()


def test_curves_are_means_over_the_steps_between(tmp_path):
    with Log(tmp_path, every=2, total_steps=5) as log:
        for n, each in enumerate([step(6.0, 3), step(1.0, 4, norm=7.0), step(5.0, 5)], start=1):
            log.step(TrainState(step=n, epoch=1), each, 3.0)
        log.step(TrainState(step=4, epoch=2), step(3.0, 1, norm=0.25, lr=0.25), 3.0)
        log.step(TrainState(step=5, epoch=2), step(9.0, 3), 3.0, last=True)
    assert curve(tmp_path, "train/nll") == [(2, 1.0), (4, pytest.approx(8 / 6)), (5, 3.0)]
    assert curve(tmp_path, "train/gradient_norm") == [(2, 7.0), (4, 1.0), (5, 1.0)]
    assert curve(tmp_path, "train/learning_rate") == [(2, 0.5), (4, 0.25), (5, 0.5)]
    assert [value for _, value in curve(tmp_path, "train/epoch")] == [1, 2, 2]
    assert all(value > 0 for _, value in curve(tmp_path, "speed/audio_per_second"))


@pytest.mark.parametrize("open_console", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_a_run_continues_without_its_console(tmp_path, monkeypatch, open_console):
    """Its reader has exited (`| head`, a `tee` killed with the connection), or it was closed."""
    reader, writer = open_console()
    with os.fdopen(writer, "w") as console:
        monkeypatch.setattr("sys.stdout", console)
        with Log(tmp_path, every=1, total_steps=2) as log:
            log.info("read")
            os.close(reader)
            log.info("not read")
            log.step(TrainState(step=1), step(6.0, 3), 3.0)
            log.info("nor this")
        monkeypatch.undo()
    logged = (tmp_path / "train.log").read_text()
    assert all(line in logged for line in (" read\n", " not read\n", " nor this\n", "step 1/2"))
    assert logged.count("the console is gone") == 1
    assert curve(tmp_path, "train/nll") == [(1, 2.0)]


def test_a_console_without_a_descriptor_may_close_too(tmp_path, monkeypatch):
    """A notebook's console has no file descriptor; with `>&-` there is no console."""

    class Notebook(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "gone")

    for number, console in enumerate((Notebook(), None)):
        monkeypatch.setattr("sys.stdout", console)
        run = tmp_path / str(number)
        run.mkdir()
        with Log(run, every=1, total_steps=1) as log:
            log.info("first")
            log.info("second")
        if console:
            sys.stdout.close()  # the file that has its descriptor now
        monkeypatch.undo()
        assert " second\n" in (run / "train.log").read_text()


def test_lines_are_written_to_the_console_and_the_file(tmp_path, capsys):
    with Log(tmp_path, every=1, total_steps=2) as log:
        log.info("[skipped] a: 100 %")
        log.step(TrainState(step=1), step(6.0, 3), 3.0)
    out = capsys.readouterr().out
    written = (tmp_path / "train.log").read_text(encoding="utf-8")
    for place in (out, written):
        assert "[skipped] a: 100 %" in place
        assert "step 1/2  epoch 1  nll 2.0000" in place
    assert "min left" in out
    assert "\x1b" not in out  # plain lines where there is no terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("width", "shown", "cut"),
    [
        (40, ["nll 2.0000"], ["step 2600"]),
        (80, [" 65%", "nll 2.0000", "step 2600/4000", "accuracy 25.0 %"], ["CTC WER", "real time"]),
        (150, ["CTC WER 405.0 %", "real time"], []),
    ],
)
def test_the_progress_line_fits_the_terminal(width, shown, cut, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    sums = {"nll": (6.0, 3), "accuracy": (1.0, 4), "ctc_wer": (81.0, 20), "divergence": (9.0, 2)}
    values = {key: Sum(*map(torch.tensor, value)) for key, value in sums.items()}
    with Log(tmp_path, every=100, total_steps=4000, step=2599) as log:
        log.step(TrainState(step=2600), Step(values, 1.0, 0.5), 3.0)
        log.progress.refresh()
        out = sys.stdout.getvalue()
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out))
    assert max(map(len, lines)) <= width
    assert all(text in lines[-1] for text in shown), lines[-1]
    assert not any(text in lines[-1] for text in cut)
    if width == 80:
        assert re.search(r"━+ +65% [-\d]+:[-\d]+:[-\d]+ nll", lines[-1])


def test_lines_have_rates_in_percent_and_curves_fractions(tmp_path, capsys):
    rates = {"nll": (6.0, 3), "accuracy": (1.0, 8)}
    values = {key: Sum(*map(torch.tensor, value)) for key, value in rates.items()}
    with Log(tmp_path, every=1, total_steps=1) as log:
        log.step(TrainState(step=1), Step(values, 1.0, 0.5), 3.0)
    assert "  nll 2.0000  accuracy 12.5 %  " in capsys.readouterr().out
    assert curve(tmp_path, "train/accuracy") == [(1, 0.125)]
    texts = figure_texts({"wer": 4.0521, "diagonality": 0.25, "ctc_wer": 1.0})
    assert texts == ["WER 405.2 %", "diagonality 0.2500", "CTC WER 100.0 %"]


def test_a_step_that_was_not_used_is_on_no_curve(tmp_path, capsys):
    bad = replace(step(math.nan, 5, norm=math.inf), finite=False)
    with Log(tmp_path, every=2, total_steps=6) as log:
        for n, each in enumerate([bad, step(6.0, 3), step(1.0, 4), bad, bad, bad], start=1):
            log.step(TrainState(step=n), each, 3.0, last=n == 6)
    assert curve(tmp_path, "train/nll") == [(2, 2.0), (4, 0.25)]
    assert curve(tmp_path, "train/gradient_norm") == [(2, 1.0), (4, 1.0)]
    assert "step 6/6  epoch 1  no step used  " in capsys.readouterr().out


def test_warnings_of_kernels_are_in_the_log(tmp_path, capsys):
    """They are printed once, and as before where no run is logged."""
    logger = logging.getLogger("asr.kernels.dispatch")
    with Log(tmp_path, every=5, total_steps=8):
        logger.warning("a slower backend is used")
    captured = capsys.readouterr()
    _, _, rest = captured.out.partition("  ")  # after the time
    assert rest == "a slower backend is used\n" and captured.err == ""
    assert (tmp_path / "train.log").read_text().endswith(" a slower backend is used\n")
    logger.warning("later")
    assert "later" not in (tmp_path / "train.log").read_text()
    assert logging.getLogger("asr").propagate and not logging.getLogger("asr").handlers


def test_a_window_after_resuming_has_its_own_length(tmp_path, capsys):
    with Log(tmp_path, every=10, total_steps=70, step=7) as log:
        log.since -= 3.0
        for n in (8, 9, 10):  # a second each; 60 are left
            log.step(TrainState(step=n), step(1.0, 1), 0.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("  1.0 steps/s  1.0 min left")


@pytest.mark.parametrize("end", [6, 13])
def test_epochs_may_be_longer_or_shorter_than_the_first(end, tmp_path, capsys):
    """8 steps were planned; the last line is printed at the true end."""
    with Log(tmp_path, every=5, total_steps=8) as log:
        for n in range(1, end + 1):
            log.step(TrainState(step=n), step(1.0, 1), 3.0, last=n == end)
    progress = re.findall(
        r"^[\d:]{8}  step (\S+) .*  (\S+) min left$", capsys.readouterr().out, re.MULTILINE
    )
    places = {6: ["5/8", "6/6"], 13: ["5/8", "10/10", "13/13"]}
    assert [place for place, _ in progress] == places[end]
    assert float(progress[-1][1]) == 0.0 and all(not left.startswith("-") for _, left in progress)


def test_the_log_closes_its_file_when_training_fails(tmp_path):
    with pytest.raises(RuntimeError, match="boom"), Log(tmp_path, 1, 2) as log:
        raise RuntimeError("boom")
    assert log.lines.file.closed
    with Log(tmp_path, 1, 2, step=1) as log:
        log.info("again")
    assert (tmp_path / "train.log").read_text().count("again") == 1


def test_pictures_and_texts(tmp_path):
    pixels = np.zeros((11, 23, 3), np.uint8)
    pixels[:, :, 1] = 200
    with Log(tmp_path, 1, 2) as log:
        log.picture("attention/u1", pixels, 7)
        log.text("decoded/u1", ["reference: a"], 7)
        log.scalars("valid", {"wer": 0.5, "nll": 1.5}, 7)
    (image,) = events(tmp_path).Images("attention/u1")
    assert (image.step, image.height, image.width) == (7, 11, 23)
    assert text(tmp_path, "decoded/u1/text_summary") == "reference: a"
    assert curve(tmp_path, "valid/wer") == [(7, 0.5)] and curve(tmp_path, "valid/nll") == [(7, 1.5)]


MARKDOWN = [
    "# a *b* __c__ ~~d~~ `e` [f](http://g) ![h](i.png) <b>j</b> <script>k</script> &amp; &lt; \\*",
    "    four spaces", "~~~", "~~~", "| a | b |", "|---|---|", "1. one", "- two", "+ three",
    "> four", "===", "---", "a  b\nc", "http://x.y <http://x.y> a_b_c", "\u202egpj.exe \x1b[2J",
    "\tab", "é😀",
]  # fmt: skip


def test_texts_are_shown_as_they_are(tmp_path):
    """TensorBoard's own Markdown is the judge; a browser then shows its HTML as text."""
    with Log(tmp_path, 1, 2) as log:
        log.text("decoded/u\u202e", MARKDOWN, 7)
    written = text(tmp_path, "decoded/u\\u202e/text_summary")
    page = markdown_to_safe_html(written)
    paragraphs = re.findall(r"<p>(.*?)</p>", page, re.DOTALL)
    assert set(re.findall("</?[a-z0-9]+", page)) == {"<p", "</p"}
    shown = [unescape(one) for one in paragraphs]
    assert shown == [printable(" ".join(line.split())) for line in MARKDOWN]


def test_the_recipe_is_kept_as_text_and_no_curve_is_touched(tmp_path):
    flat = {"seed": 1, "train.steps": None, "data.test": "{}", "mvn": True, "lr": 0.1, "list": [1]}
    with Log(tmp_path, 1, 2) as log:
        log.scalars("valid", {"wer": 0.5}, 7)
        log.finish("seed: 1\n", flat, {"valid/wer": 0.25, "valid/ctc": 2.0}, 9)
    assert text(tmp_path, "recipe/text_summary") == "```yaml\nseed: 1\n```"
    # A final figure written as valid/wer would distort the curve.
    assert curve(tmp_path, "valid/wer") == [(7, 0.5)] and curve(tmp_path, "best/wer") == [(9, 0.25)]
    assert events(tmp_path).Tags()["scalars"] == ["valid/wer", "best/wer"]
    assert len(list(tmp_path.glob("events.*"))) == 1


def test_hparams_has_the_settings_of_all_runs_and_the_best_figures_first(tmp_path):
    """As TensorBoard's plug-in answers the page's request: settings that differ come first."""
    settings = {"a": {"seed": 1, "norm": "ba"}, "b": {"seed": 1, "norm": "none", "x": 2}}
    for name, flat in settings.items():
        (tmp_path / name).mkdir()
        with Log(tmp_path / name, 1, 2) as log:
            log.scalars("valid", {"wer": 0.5}, 7)
            log.scalars("speed", {"hours": 0.5}, 7)
            log.finish("", flat, {"valid/wer": 0.25, "valid/nll": 1.0}, 9)
    loader = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    board = Context(TBContext(data_provider=MultiplexerDataProvider(loader, str(tmp_path))))
    request = RequestContext()
    written = board.hparams_metadata(request, "")
    found = board.experiment_from_metadata(request, "", True, written, None)
    assert [info.name for info in found.hparam_infos] == ["norm", "seed", "x"]
    metrics = [info.name.tag for info in found.metric_infos]
    assert metrics == ["best/nll", "best/wer", "speed/hours", "valid/wer"]


def test_the_first_charts_are_those_of_scalars_that_the_run_has(tmp_path):
    with Log(tmp_path, 1, 9) as log:
        log.step(TrainState(step=1), step(6.0, 3), 3.0)
        log.scalars("valid", {"nll": 0.5}, 1)
        log.scalars("valid", {"nll": 0.25, "wer": 0.5}, 2)
        log.scalars("valid", {"nll": 0.25, "wer": 0.5}, 3)
    first, second = events(tmp_path).Tensors("custom_scalars__config__")
    for point, has_wer in ((first, False), (second, True)):
        layout = Layout.FromString(point.tensor_proto.string_val[0])
        charts = [list(chart.multiline.tag) for chart in layout.category[0].chart]
        assert charts[0] == ["train/nll", "valid/nll"] and (["valid/wer"] in charts) is has_wer


def test_events_after_the_checkpoint_of_a_killed_run_are_purged(tmp_path):
    with Log(tmp_path, 1, 9) as log:
        for n in range(1, 6):
            log.scalars("valid", {"wer": n / 10}, n)
    age(tmp_path)
    with Log(tmp_path, 1, 9, step=3) as log:
        for n in range(4, 7):
            log.scalars("valid", {"wer": n / 100}, n)
    assert [s for s, _ in curve(tmp_path, "valid/wer")] == [1, 2, 3, 4, 5, 6]
    assert dict(curve(tmp_path, "valid/wer"))[5] == pytest.approx(0.05)


def test_a_run_restarted_in_the_same_folder_hides_the_old_curves(tmp_path):
    """A run killed before its first checkpoint and restarted: steps must not overlap."""
    with Log(tmp_path, 1, 9) as log:
        for n in range(1, 6):
            log.scalars("valid", {"wer": n / 10}, n)
    age(tmp_path)
    with Log(tmp_path, 1, 9, step=0) as log:
        for n in range(1, 4):
            log.scalars("valid", {"wer": n / 100}, n)
    assert [s for s, _ in curve(tmp_path, "valid/wer")] == [1, 2, 3]


def test_validation_is_excluded_from_the_throughput(tmp_path):
    with Log(tmp_path, 1, 2) as log:
        log.since -= 100.0  # as if 100 s of validation had passed
        log.exclude(100.0)
        log.step(TrainState(step=1), step(1.0, 1), 60.0)
    ((_, rate),) = curve(tmp_path, "speed/audio_per_second")
    assert rate > 60


FULL = (
    r"its log cannot be written \(File too large\); no step is saved yet: make room, then start "
    "again with the same command$"
)


def test_a_full_disk_ends_the_run_and_leaves_no_half_line(tmp_path, capfd):
    path = tmp_path / "train.log"
    with pytest.raises(UserError, match=FULL) as error, Log(tmp_path, 1, 5) as log:
        log.info("one line")
        with full_disk(path.stat().st_size + 40):  # not enough for a line
            log.info("another line, for which there is no space")
        pytest.fail("no error was raised")
    assert str(error.value).startswith(f"{tmp_path}: ")
    first, last = path.read_text().splitlines()
    assert first.endswith(" one line") and " ended: " in last  # there is space again
    assert "Traceback" not in capfd.readouterr().err


def test_a_disk_that_is_full_before_the_first_line(tmp_path, capfd):
    before = threading.excepthook
    with full_disk(20), pytest.raises(UserError, match=FULL), Log(tmp_path, 1, 5):
        pytest.fail("no error was raised")
    assert capfd.readouterr().err == "" and threading.excepthook is before


def test_a_run_folder_that_was_removed(tmp_path):
    """TensorBoard opens its file for every write, too."""
    run = tmp_path / "run"
    run.mkdir()
    removed = pytest.raises(UserError, match=f"^{run}: removed while training wrote into it; ")
    with removed, Log(run, 1, 5) as log:
        log.info("first")
        shutil.rmtree(run)
        log.scalars("train", {"nll": 1.0}, 1)
        for _ in range(1000):  # its thread may take a moment
            log.flush()
            time.sleep(0.001)
    assert not run.exists()


def test_nothing_is_written_through_a_link(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.write_text("as it was")
    path = run / "train.log"
    path.symlink_to(other)
    with pytest.raises(UserError, match=f"^{path}: a symbolic link"), Log(run, 1, 5) as log:
        log.info("first")
    assert other.read_text() == "as it was"


@pytest.mark.parametrize("console", ["pipe", "terminal"])
def test_control_characters_are_escaped(console, tmp_path, monkeypatch):
    """In the file too, which may be shown on a terminal; a name may also be no text at all."""
    reader, writer = os.pipe() if console == "pipe" else pty.openpty()
    with os.fdopen(writer, "w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdout", stream)

        def main():
            with Log(tmp_path, every=1, total_steps=2) as log:
                log.info("skipped a\x1b]0;title\x07b\udc80 \u00e4\tc\nd")

        with pytest.raises(SystemExit) as ended:
            run_command(main)
        shown = b""
        while select([reader], [], [], 1.0)[0]:  # a terminal's output comes in pieces
            shown += os.read(reader, 10_000)
        os.close(reader)
        monkeypatch.undo()
    assert ended.value.code == 0
    written = (tmp_path / "train.log").read_bytes()
    assert b"skipped a\\x1b]0;title\\x07b\\udc80 \xc3\xa4\tc\nd\n" in written
    assert b"a\\x1b]0;title\\x07b\\udc80 \\xe4" in shown and b"\x1b]0" not in shown
    assert (b"\x1b[" in shown) is (console == "terminal")  # the bar moves the cursor


def test_a_full_disk_under_tensorboard_is_no_traceback_of_its_thread(tmp_path, capfd, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = threading.excepthook
    refused = pytest.raises(UserError, match=r"its log cannot be written \(No space left")
    with refused, Log(tmp_path, 1, 5) as log:
        monkeypatch.setattr(RecordWriter, "write", full)
        log.scalars("train", {"nll": 1.0}, 1)
        for _ in range(1000):  # its thread may take a moment
            log.flush()
            time.sleep(0.001)
        pytest.fail("no error was raised")
    assert capfd.readouterr().err == "" and threading.excepthook is before


def test_other_errors_pass_a_log_unchanged(tmp_path):
    with pytest.raises(OSError, match="another"), Log(tmp_path, 1, 5):
        raise OSError(errno.EIO, "another")

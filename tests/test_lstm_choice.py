"""The choice of a backend, its log lines, and independence of processes and threads."""

import copy
import logging
import multiprocessing
import os
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import get_args

import pytest
import torch
from full_disk import full_disk
from test_lstm_backends import HERE, LENGTHS, gradients, make

from asr.config.cell import PRESETS, CellSettings
from asr.config.schema import LSTMConfig
from asr.errors import UserError
from asr.kernels import check, dispatch, python
from asr.kernels.cpu import compiler, decoder
from asr.kernels.cuda import cluster
from asr.models.build import config_errors
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell

BA = CellSettings("ba")
CPU = pytest.mark.skipif(
    compiler.obstacle() is not None, reason=f"no kernels: {compiler.obstacle()}"
)


@pytest.fixture(autouse=True)
def no_warning_yet(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    for cached in (dispatch._warn_once, dispatch.choose_backend):
        cached.cache_clear()
    yield
    dispatch.choose_backend.cache_clear()


def chosen(name, settings=BA):
    """The backend of float32 weights on a CPU."""
    kind = torch.device("cpu"), torch.float32, torch.float32
    return dispatch.choose_backend(name, settings, *kind).name


def test_variable_replaces_auto_and_nothing_else(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "python")
    assert LayerNormLSTM(3, 7).kernels.name == LayerNormLSTMCell(3, 7).kernels.name == "python"
    assert LayerNormLSTM(3, 7, backend="reference").kernels.name == "reference"
    monkeypatch.setenv(dispatch.VARIABLE, "gpu")
    with pytest.raises(UserError, match=r"LAYERNORM_LSTM_BACKEND = gpu: no such backend; choose"):
        LayerNormLSTM(3, 7)


def test_uncovered_settings_fall_back_with_one_warning(caplog):
    for _ in range(2):
        make("thesis", "python")(torch.randn(2, 3, 3))
    messages = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    reason = "'python' does not compute norm='thesis'"
    assert messages == [f"the LSTM's slower backend 'reference' is used: {reason}"]


@pytest.mark.parametrize("name", ["auto", "python", "cpu"])
@pytest.mark.parametrize("change", [{"norm": "new"}, {"norm_kind": "new"}])
def test_a_norm_that_no_kernel_knows_runs_on_reference(name, change, monkeypatch):
    """Also where a kernel would compute some other norm without an error."""
    monkeypatch.setitem(PRESETS, "new", ("new", "none", 1e-5))
    monkeypatch.setattr("asr.config.cell.NORM_KINDS", ("layer", "rms", "new"))
    assert chosen(name, CellSettings(**change)) == "reference"


def test_recipes_know_every_cell():
    assert get_args(LSTMConfig.model_fields["norm"].annotation) == (*PRESETS,)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """An empty cache and a missing compiler."""
    monkeypatch.setenv("LAYERNORM_LSTM_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compiler, "_loaded", [])
    caches = compiler._library_path, dispatch.choose_backend
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_without_compiler_one_warning_and_python(no_compiler, caplog):
    lstm, x = make("ba", "auto"), torch.randn(5, 11, 3)
    judge = make("ba", "reference")(x)[0]
    for _ in range(2):
        torch.testing.assert_close(lstm(x)[0], judge, atol=1e-5, rtol=1e-4)
    warned = [r.message for r in caplog.records]
    reason = "no C++ compiler (no-such-compiler) on the PATH"
    assert warned == [f"the LSTM's slower backend 'python' is used: {reason}"]
    with pytest.raises(ValueError, match="backend 'cpu' cannot run here: no C\\+\\+ compiler"):
        LayerNormLSTM(3, 7, backend="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_recipe_that_forces_what_cannot_run_gets_one_line():
    with pytest.raises(UserError) as caught, config_errors("model"):
        LayerNormLSTMCell(3, 7, backend="cuda")
    assert str(caught.value).startswith("model: backend 'cuda' cannot run here: ")


def test_weights_on_another_device_than_the_forced_backend_are_reported():
    lstm = LayerNormLSTM(3, 7, backend="cpu")
    with pytest.raises(UserError, match=r"backend 'cpu' of the LSTM cannot run: .* torch.bfloat16"):
        lstm.bfloat16()(torch.randn(2, 5, 3).bfloat16())
    lstm.float()(torch.randn(2, 5, 3))


def test_a_backend_is_chosen_once_for_each_kind_of_weights(monkeypatch):
    """Whatever layer has them, and again only after a change of dtype."""
    asked = []
    python = dispatch.BACKENDS["python"]._replace(obstacle=lambda *kind: asked.append(kind))
    monkeypatch.setitem(dispatch.BACKENDS, "python", python)
    lstm, x = LayerNormLSTM(3, 7, 2, backend="python"), torch.randn(2, 5, 3)
    for _ in range(3):
        lstm(x)
        copy.deepcopy(lstm)(x)
    assert asked == [(torch.device("cpu"), torch.float32)]
    lstm.double()(x.double())
    assert asked[1:] == [(torch.device("cpu"), torch.float64)]


class StandInGpu:
    """Backends of a GPU that this machine lacks, with what the check says of each."""

    def __init__(self, monkeypatch):
        self.faults, self.checked = {}, []
        for name in ("cuda", "cluster"):
            backend = dispatch.BACKENDS[name]._replace(obstacle=lambda *kind: None)
            monkeypatch.setitem(dispatch.BACKENDS, name, backend)
        monkeypatch.setattr(cluster, "missing", lambda: None)
        monkeypatch.setattr(dispatch, "fault", self.fault)
        monkeypatch.setattr(dispatch, "decoder_fault", self.decoder_fault)

    def fault(self, layer, settings, products, shape, device):
        self.checked.append(shape)
        return self.faults.get(layer)

    def decoder_fault(self, run, settings, products, device):
        self.checked.append("decoder")
        return self.faults.get(run)

    def choose(self, name="auto", settings=BA, products=torch.bfloat16, shape=(2, 512, 32)):
        device = torch.device("cuda:0")
        return dispatch.choose_backend(name, settings, device, torch.float32, products, shape).name


@pytest.fixture
def gpu(monkeypatch):
    return StandInGpu(monkeypatch)


def warnings_in(caplog):
    return [record.message for record in caplog.records]


def test_the_rule_of_auto_on_a_gpu(gpu, monkeypatch, caplog):
    assert gpu.choose() == "cluster"
    assert gpu.choose(shape=(2, 513, 32)) == gpu.choose(products=torch.float32) == "cuda"
    assert gpu.choose(shape=None) == "cuda"  # decoders and single steps
    assert gpu.choose() == "cluster" and len(gpu.checked) == 4  # each once
    assert gpu.checked[-1] == "decoder"
    monkeypatch.setattr(cluster, "missing", lambda: "an older GPU")
    assert gpu.choose(shape=(2, 256, 32)) == "cuda"
    assert not caplog.records
    assert gpu.choose(settings=CellSettings("thesis")) == "reference"
    dispatch.choose_backend.cache_clear()
    none = dispatch.BACKENDS["cuda"]._replace(obstacle=lambda *kind: "triton is not installed")
    monkeypatch.setitem(dispatch.BACKENDS, "cuda", none)
    assert gpu.choose() == "python"
    assert warnings_in(caplog)[1:] == [
        "the LSTM's slower backend 'python' is used: triton is not installed"
    ]


def test_auto_takes_no_backend_of_a_gpu_that_fails_its_check(gpu, caplog):
    gpu.faults[dispatch.BACKENDS["cluster"].layer] = "wrong"
    assert [gpu.choose(), gpu.choose()] == ["cuda", "cuda"]
    reasons = "'cluster' fails its check on cuda:0: wrong"
    assert warnings_in(caplog) == [f"the LSTM's slower backend 'cuda' is used: {reasons}"]
    gpu.faults[dispatch.BACKENDS["cuda"].layer] = "no compiler"
    assert gpu.choose(shape=(2, 512, 64)) == "python"
    reasons += "; 'cuda' fails its check on cuda:0: no compiler"
    assert warnings_in(caplog)[1:] == [f"the LSTM's slower backend 'python' is used: {reasons}"]
    gpu.faults[dispatch.BACKENDS["cuda"].decoder] = "a wrong decoder"
    assert gpu.choose(shape=None) == "python"
    assert warnings_in(caplog)[-1].endswith("'cuda' fails its check on cuda:0: a wrong decoder")
    gpu.checked.clear()
    assert gpu.choose("cluster") == "cluster" and not gpu.checked  # as requested


def test_a_named_backend_of_a_gpu_falls_back_to_the_next_slower_one(gpu, caplog):
    assert gpu.choose("cluster", products=torch.float32) == "cuda"
    reason = "backend 'cluster' computes products in bf16, not in torch.float32"
    assert warnings_in(caplog) == [f"the LSTM's slower backend 'cuda' is used: {reason}"]


SHAPE, HERE_IS = (2, 5, 4), torch.device("cpu")


def scaled(factor):
    def layer(batch, weights, settings, products):
        result = python.layer(batch, weights, settings, products)
        return result._replace(h=result.h * factor)

    return layer


def no_triton(*args):
    raise ImportError("triton: no C compiler\nmore lines")


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def wrong_gradient(batch, weights, settings, products):
    w = weights[1]._replace(gain_c=Halved.apply(weights[1].gain_c))
    return python.layer(batch, [weights[0], w], settings, products)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (python.layer, None),
        (scaled(1.01), "a result differs from the reference by 0.01 of its size"),
        (scaled(float("nan")), "a result differs from the reference by nan of its size"),
        (wrong_gradient, "a result differs from the reference by 0.5 of its size"),
        (no_triton, "triton: no C compiler"),
    ],
)
def test_the_check_compares_values_and_gradients(layer, reason):
    before = torch.get_rng_state()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert check.fault(layer, BA, torch.float32, SHAPE, HERE_IS) == reason
    assert torch.equal(torch.get_rng_state(), before)  # training draws the same


def scaled_decoder(factor):
    def run(inputs, cells, constants, settings, products):
        found = decoder.run_decoder(inputs, cells, constants, settings, products)
        return found._replace(context=found.context * factor)

    return run


@CPU
@pytest.mark.parametrize("norm", ["ba", "per_gate"])
def test_the_check_of_a_decoder(norm):
    for factor, reason in ((1.0, None), (1.01, "a result differs from the reference by 0.01")):
        settings = CellSettings(norm)
        found = check.decoder_fault(scaled_decoder(factor), settings, torch.float32, HERE_IS)
        assert found is reason or found.startswith(reason)


def test_bf16_passes_its_bound_of_the_check_and_not_that_of_fp32():
    def half(batch, weights, settings, products):
        return python.layer(batch, weights, settings, torch.bfloat16)

    assert check.fault(half, BA, torch.bfloat16, (2, 67, 4), HERE_IS) is None
    assert "differs" in check.fault(half, BA, torch.float32, (2, 67, 4), HERE_IS)


def test_a_lack_of_memory_in_the_check_is_raised_for_a_smaller_batch():
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        check.fault(full, BA, torch.float32, SHAPE, HERE_IS)


@pytest.mark.parametrize("norm", ["ba", "joined carried", "ba hidden", "per_gate output rms"])
@pytest.mark.parametrize("backend", [name for name in HERE if name != "reference"])
def test_bf16_is_close_and_its_gradients_have_the_same_direction(backend, norm):
    model, x = make(norm, backend, size=(13, 37)), torch.randn(5, 11, 13, requires_grad=True)
    exact = model(x, lengths=LENGTHS)[0]
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x, lengths=LENGTHS)[0]
    torch.testing.assert_close(half, exact, atol=1e-2, rtol=0)
    results = [gradients([y], (x, *model.parameters())) for y in (exact, half)]
    for judge, ours in zip(*results, strict=True):
        assert torch.cosine_similarity(ours.flatten(), judge.flatten(), dim=0) >= 0.99


@CPU
@pytest.mark.parametrize(
    "rows, inputs, hidden", [(1, 3, 2), (15, 31, 7), (16, 32, 16), (17, 37, 23), (47, 67, 41)]
)
def test_bf16_rounds_the_factors_alone_at_every_edge_of_a_tile(rows, inputs, hidden):
    """Processors multiply bf16 in tiles of 16 rows, depth 32, width 16."""
    torch.manual_seed(rows)
    ours = LayerNormLSTM(inputs, hidden, batch_first=True, norm="none", backend="cpu")
    judge = torch.nn.LSTM(inputs, hidden, batch_first=True)  # of factors rounded beforehand
    with torch.no_grad():
        for own, true in zip(ours.parameters(), judge.parameters(), strict=True):
            true.copy_(own.copy_(own.bfloat16()))
    x, *state = (
        torch.randn(*shape).bfloat16().float().requires_grad_()
        for shape in [(rows, 1, inputs), (1, rows, hidden), (1, rows, hidden)]
    )
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(x, tuple(state))[0]
    outputs = output, judge(x, tuple(state))[0]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    results = [
        gradients([y], (x, *state, *model.parameters()))
        for y, model in zip(outputs, (ours, judge), strict=True)
    ]
    for own, true in zip(*results, strict=True):  # those of the gates are rounded too
        assert (own - true).norm() <= 0.01 * true.norm()


@pytest.mark.parametrize("backend", HERE)
def test_threads_change_nothing(backend):
    lstm, x, before = make("ba", backend, layers=2), torch.randn(9, 11, 3), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            y = lstm(x)[0]
            results.append([y, *gradients([y], list(lstm.parameters()))])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(results[2], results[0], atol=1e-5, rtol=1e-4)


def trained(threads):
    """A fingerprint of one training pass."""
    # Torch's own parallel loops (here in the QR of the orthogonal initialisation) hang in a process
    # forked from one that has run such a loop; this test is about the kernels only.
    torch.set_num_threads(1)
    lstm, x = make("ba", "auto"), torch.ones(8, 11, 3)
    torch.set_num_threads(threads)
    lstm(x)[0].sum().backward()
    return lstm.weight_hh_l0.grad.double().norm().item()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_compute_the_same(method):
    before = torch.get_num_threads()
    try:
        expected = trained(2)  # starts threads before the fork
    finally:
        torch.set_num_threads(before)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # newer Pythons warn about any fork in a process with threads
        with multiprocessing.get_context(method).Pool(1) as pool:
            result = pool.apply_async(trained, (2,)).get(timeout=100)
    assert result == pytest.approx(expected, rel=1e-5)


def load_with_slow_compiler(built, calls):
    """A slow replacement of the compiler that records its calls, to test the lock."""

    def compile_slowly(target):
        calls.write_text(calls.read_text() + "compiled ")
        time.sleep(1)
        shutil.copy(built, target.with_suffix(".part"))
        target.with_suffix(".part").replace(target)

    compiler._compile = compile_slowly
    compiler._library_path.cache_clear()
    compiler._loaded.clear()
    compiler.load()


@pytest.mark.slow
@CPU
def test_processes_that_start_at_once_compile_once(tmp_path, monkeypatch):
    arguments = (compiler._compiled(), tmp_path / "calls")
    arguments[1].touch()
    monkeypatch.setenv("LAYERNORM_LSTM_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # newer Pythons warn about any fork in a process with threads
        fork = multiprocessing.get_context("fork").Process
        several = [fork(target=load_with_slow_compiler, args=arguments) for _ in range(2)]
        for process in several:
            process.start()
    for process in several:
        process.join(100)
    assert [process.exitcode for process in several] == [0, 0]
    assert arguments[1].read_text() == "compiled "


FAKE = """#!/bin/sh
echo "$*" >> {calls}
case "$*" in *-O3*) {compiling} ;; *) {trial} ;; esac
"""
GARBAGE = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo garbage > "$2"; shift; done'
WORKS = f'exec {shutil.which("c++")} "$@"'


@pytest.fixture
def fake(tmp_path, monkeypatch, no_compiler):
    """Puts a compiler first on the PATH, which does these shell commands; -> its calls."""

    def install(compiling, trial=WORKS):
        calls, script = tmp_path / "calls", tmp_path / "bin" / "fake++"
        script.parent.mkdir()
        script.write_text(FAKE.format(calls=calls, compiling=compiling, trial=trial))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return calls

    return install


def warned(caplog, capsys):
    """The lines that a first use of the kernels prints and logs."""
    x, lstm = torch.randn(5, 2, 3), make("ba", "auto")
    torch.testing.assert_close(lstm(x)[0], make("ba", "reference")(x)[0], atol=1e-5, rtol=1e-4)
    printed = capsys.readouterr()
    assert printed.out == ""
    return [*printed.err.splitlines(), *(record.message for record in caplog.records)]


@CPU
@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        ("exit 1", r"\S+/fake\+\+ ended with exit code 1"),
        ("echo 'fake++: error: no host' >&2; exit 3", r"fake\+\+: error: no host"),
        ("kill -9 $$", r"\S+/fake\+\+ was killed by signal 9"),
        ("exit 0", r"\S+/trial.so: cannot open shared object file: .*"),
        (GARBAGE, r"\S+/trial.so: (file too short|invalid ELF header)"),
        ("sleep 100", r"\S+/fake\+\+ has not ended after 0.5 s"),
    ],
)
def test_a_compiler_that_does_not_work_is_one_line(
    trial, reason, fake, caplog, capsys, monkeypatch
):
    monkeypatch.setattr(compiler, "TRIAL_LIMIT", 0.5 if "sleep" in trial else 30.0)
    calls = fake("exit 1", trial)
    (line,) = warned(caplog, capsys)
    known = "the LSTM's slower backend 'python' is used: (the C\\+\\+ compiler does not work: )?"
    assert re.fullmatch(known + reason, line)
    assert len(calls.read_text().splitlines()) == 1


@CPU
@pytest.mark.parametrize(
    ("compiling", "tries"),
    [
        ("echo 'x.o: error: No space left on device' >&2; exit 1", 1),
        ("echo 'c++: error: Killed signal terminated program cc1plus' >&2; exit 1", 1),
        ("kill -9 $$", 1),
        ("echo \"cc1plus: error: bad value for '-march='\" >&2; exit 1", 2),
    ],
)
def test_only_a_compiler_that_refuses_the_flags_is_tried_again(
    compiling, tries, fake, caplog, capsys
):
    calls, sources = fake(compiling), len([*compiler.SOURCES.glob("*.cpp")])
    lines = warned(caplog, capsys)
    assert sum("-O3" in call for call in calls.read_text().splitlines()) <= tries * sources
    assert ("-O3" in calls.read_text()) and len(lines) == 1 + tries
    assert lines[0].endswith(", once")
    assert ("compiling again, for any processor: cc1plus: error: bad value" in lines[1]) == (
        tries == 2
    )
    assert "slower backend 'python' is used: " in lines[-1]


@CPU
def test_what_a_compiler_has_started_ends_with_it(fake, monkeypatch, tmp_path):
    """A grandchild holds the output open, which would otherwise be waited for."""
    monkeypatch.setattr(compiler, "TRIAL_LIMIT", 0.5)
    fake("exit 1", f"sleep 100 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(compiler.BuildError, match="has not ended"):
        compiler.load()
    state = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    end = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z":  # killed, not yet reaped by init
        assert time.monotonic() < end
        time.sleep(0.02)


@CPU
def test_a_compiler_without_openmp_or_march_gets_a_second_try(tmp_path, monkeypatch, capsys):
    compiled, tried = compiler._compiled(), []

    def build(folder, flags):
        tried.append(flags)
        if flags:
            raise RuntimeError("cc1plus: error: bad value for '-march='")
        return Path(shutil.copy(compiled, folder))

    monkeypatch.setattr(compiler, "_build", build)
    monkeypatch.setenv("LAYERNORM_LSTM_MARCH", "x86-64-v9")
    compiler._compile(tmp_path / "kernels.so")
    assert tried == [["-march=x86-64-v9", "-fopenmp"], []]
    assert (tmp_path / "kernels.so").read_bytes() == compiled.read_bytes()
    assert "again, for any processor: cc1plus: error: bad value" in capsys.readouterr().err


@CPU
def test_a_full_disk_moves_the_cache_to_a_temporary_folder(tmp_path, monkeypatch, no_compiler):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    own = tmp_path / "temporary" / f"layernorm_asr_{os.getuid()}"
    with full_disk(compiler.ROOM - 1):
        expected = f"no room for the compiled kernels in {tmp_path} and {own}"
        assert compiler.obstacle() == expected[:200]  # as long as a reason may be
    monkeypatch.setattr(compiler, "_has_room", own.__eq__)
    assert compiler._library_path().parent == own and own.stat().st_mode & 0o777 == 0o700
    monkeypatch.undo()
    assert compiler._has_room(tmp_path)


def test_the_compiler_may_have_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "env 'A=b c' c++")
    assert compiler._compiler() == ["env", "A=b c", "c++"]
    monkeypatch.setenv("CXX", "no 'end")
    with pytest.raises(compiler.BuildError, match=r"no C\+\+ compiler \(no 'end\) on the PATH"):
        compiler._compiler()

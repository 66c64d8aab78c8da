"""The choice of the fastest backend on a GPU, with stand-in backends and a stand-in clock."""

import json
import multiprocessing
import time

import pytest
import torch

from asr.config.cell import CellSettings
from asr.kernels import dispatch, fastest, python
from asr.kernels.cuda import cluster
from asr.kernels.fastest import FILE, Case, FastestBackend, check

PLACE, OTHER = "GPU, torch 1", "GPU, torch 2"
CPU = torch.device("cpu")
BA = CellSettings("ba")
CASE = Case(BA, torch.float32, directions=2, hidden=5, batch=4, learns=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERNORM_LSTM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fastest, "TIMED_FRAMES", 2)
    return tmp_path / "cache"


class Machine:
    """A chooser between `slow` and `quick`, whose speeds are given, with all that it reports."""

    def __init__(self, quick=python.layer, seconds=(3.0, 1.0)):
        self.lines, self.timed, self.quick = [], [], quick
        self.speed = dict(zip((python.layer, self.layer), seconds, strict=True))
        layers = {"slow": python.layer, "quick": self.layer}
        self.chooser = FastestBackend(layers, ("quick",), "slow", self.lines.append, self.clock)

    def layer(self, *args):
        return self.quick(*args)

    def clock(self, run, device):
        run()
        self.timed.append(run.args[0])
        return self.speed[run.args[0]]

    def choose(self, case=CASE, place=PLACE):
        return self.chooser.choose(case, CPU, place)


def stored(cache):
    return json.loads((cache / FILE).read_text())


def test_the_faster_is_chosen_measured_once_and_stored(cache):
    machine = Machine()
    assert [machine.choose(), machine.choose()] == ["quick", "quick"]
    case = "ba split output layer torch.float32, 2 x H 5, B 4, forward and backward"
    line = f"LSTM on {PLACE}: backend 'quick' for {case}: slow 3e+03 ms, quick 1e+03 ms"
    assert machine.lines == [line]
    assert stored(cache) == {
        PLACE: {case: {"backend": "quick", "ms": {"slow": 3000.0, "quick": 1000.0}}}
    }
    later = Machine(seconds=(1.0, 3.0))  # another process would measure the contrary
    assert later.choose() == "quick"
    assert (later.timed, later.lines) == ([], [])


def test_the_slower_is_not_chosen():
    assert Machine(seconds=(1.0, 1.1)).choose() == "slow"


def test_another_case_or_version_is_measured_anew(cache):
    Machine().choose()
    later = Machine(seconds=(1.0, 3.0))
    forward, half = CASE._replace(learns=False), CASE._replace(products=torch.bfloat16)
    assert later.choose(forward) == "slow"
    assert later.choose(half) == "slow"
    assert later.choose(place=OTHER) == "slow"
    assert {place: len(own) for place, own in stored(cache).items()} == {PLACE: 3, OTHER: 1}


def scaled(factor):
    def layer(batch, weights, settings, products):
        result = python.layer(batch, weights, settings, products)
        return result._replace(h=result.h * factor)

    return layer


def no_compiler(*args):
    raise ImportError("triton: no C compiler\nmore lines")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (scaled(1.01), "a result differs from the reference by 0.01 of its size"),
        (scaled(float("nan")), "a result differs from the reference by nan of its size"),
        (no_compiler, "triton: no C compiler"),
    ],
)
def test_a_wrong_or_failing_candidate_is_never_chosen_and_the_failure_not_stored(
    layer, reason, cache
):
    machine = Machine(layer)
    assert [machine.choose(), machine.choose()] == ["slow", "slow"]
    assert machine.timed == []
    (line,) = machine.lines
    assert line.endswith(f"backend 'slow' for {CASE}; 'quick' is not used: {reason}")
    assert not (cache / FILE).exists()
    assert Machine().choose() == "quick"  # the fault may be gone in the next process


def test_a_wrong_gradient_fails_and_without_gradients_is_not_computed():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    def layer(batch, weights, settings, products):
        w = weights[1]._replace(gain_c=Halved.apply(weights[1].gain_c))
        return python.layer(batch, [weights[0], w], settings, products)

    with pytest.raises(fastest.CheckFailed, match=r"by 0\.5 of its size"):
        check(layer, CASE, CPU)
    check(layer, CASE._replace(learns=False), CPU)


def test_bf16_passes_its_bound_and_not_that_of_fp32():
    def half(batch, weights, settings, products):
        return python.layer(batch, weights, settings, torch.bfloat16)

    case = CASE._replace(hidden=67)
    check(half, case._replace(products=torch.bfloat16), CPU)
    with pytest.raises(fastest.CheckFailed):
        check(half, case, CPU)


def test_a_lack_of_memory_is_raised_for_a_smaller_batch():
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    machine = Machine(full)
    with pytest.raises(torch.OutOfMemoryError):
        machine.choose()
    machine.quick = python.layer
    assert machine.choose() == "quick"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"GPU, torch 1": 3}',
        json.dumps({PLACE: {str(CASE): {"backend": "rm -r"}}}),
        json.dumps({PLACE: {str(CASE): ["slow"]}}),
        b"\xff",
        "[" * 100_000,
        " " * (fastest.LIMIT + 1) + "{}",
    ],
)
def test_a_damaged_file_is_replaced(content, cache):
    cache.mkdir()
    (cache / FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert Machine().choose() == "quick"
    assert stored(cache)[PLACE][str(CASE)]["backend"] == "quick"


def test_without_a_place_to_store_the_choice_holds_for_the_process(cache, monkeypatch):
    cache.write_text("a file where the folder should be")
    machine = Machine()
    assert [machine.choose(), machine.choose()] == ["quick", "quick"]
    (line,) = machine.lines
    assert line.endswith(f"; not stored: [Errno 17] File exists: '{cache}'")


def test_a_file_that_cannot_be_replaced_is_reported(cache):
    (cache / FILE).mkdir(parents=True)
    machine = Machine()
    assert machine.choose() == "quick"
    assert "; not stored: [Errno" in machine.lines[0]


def choose_slowly(number, answers):
    """Each rank would measure another backend as the fastest."""
    torch.set_num_threads(1)  # a parallel loop would hang in a fork of a process that had one
    machine = Machine(seconds=(1.0, 3.0) if number % 2 else (3.0, 1.0))
    clock = machine.chooser.seconds
    machine.chooser.seconds = lambda *args: (time.sleep(0.01), clock(*args))[1]
    names = [machine.choose(CASE._replace(batch=size)) for size in (4, 8)]
    answers.put((names, len(machine.lines)))


def test_ranks_take_the_choice_of_the_one_that_measures(cache):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=choose_slowly, args=(n, answers)) for n in range(4)]
    for rank in ranks:
        rank.start()
    names, measured = zip(*(answers.get(timeout=60) for _ in ranks), strict=True)
    for rank in ranks:
        rank.join()
    assert all(own == names[0] for own in names)
    assert sum(measured) == 2  # each case once
    assert len(stored(cache)[PLACE]) == 2


def test_no_random_number_is_drawn():
    before = torch.get_rng_state()
    Machine().choose()
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_of_one_size_share_a_case():
    def case(rows, grad=True):
        x, state = torch.zeros(rows, 3, 2), torch.zeros(1, rows, 7)
        batch = fastest.LayerInput(x, None, state, state, None)
        with torch.set_grad_enabled(grad):
            return Case.of(batch, BA, torch.float32)

    assert case(5) == case(8) == Case(BA, torch.float32, 1, 7, 8, True)
    assert case(1).batch == 1
    assert case(9).batch == 16
    assert not case(5, grad=False).learns


class OnGpu:
    """What dispatch reads of weights on a GPU."""

    device, dtype, shape = torch.device("cuda:0"), torch.float32, (2048, 512)


def test_auto_asks_the_chooser_and_explains_a_missing_triton(monkeypatch, caplog):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    for chooser in dispatch._fastest:
        own = chooser.candidates
        choose = lambda case, device, place, own=own: (own, str(device), place)  # noqa: E731
        monkeypatch.setattr(chooser, "choose", choose)
    monkeypatch.setattr(dispatch, "_place", lambda device: PLACE)
    monkeypatch.setattr(dispatch.cuda, "obstacle", lambda like: None)
    monkeypatch.setattr(cluster, "obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    half = CASE._replace(products=torch.bfloat16)
    for case, candidates in ((CASE, ("cuda",)), (half, ("cluster", "cuda"))):
        assert dispatch._fastest_on_gpu(case, OnGpu()) == (candidates, "cuda:0", PLACE)
    monkeypatch.setattr(OnGpu, "shape", (2052, 513))
    assert dispatch._fastest_on_gpu(half, OnGpu())[0] == ("cuda",)
    monkeypatch.setattr(cluster, "obstacle", lambda: "an older GPU")
    monkeypatch.setattr(OnGpu, "shape", (8, 2))
    assert dispatch._fastest_on_gpu(half, OnGpu())[0] == ("cuda",)
    dispatch._warn_once.cache_clear()
    monkeypatch.setattr(dispatch.cuda, "obstacle", lambda like: "triton is not installed")
    assert dispatch._fastest_on_gpu(CASE, OnGpu()) == "python"
    messages = [record.message for record in caplog.records]
    assert messages == ["the LSTM's slower backend 'python' is used: triton is not installed"]

"""All figures of one GPU: checks, the decoder of LAS, training steps, searches, LSTM kernels.

    python tests/benchmarks/gpu.py --json gpu.json                # under eight minutes on one GPU
    python tests/benchmarks/gpu.py --json las.json --only decoder training     # a part of it
    python tests/benchmarks/gpu.py --json tiny.json --tiny        # its own check, also on a CPU

The most important sections come first. A check that fails is printed, stored, and sets the exit
code to 1, as does a section that ends with an error. A section that runs out of its share of
--seconds skips the rest, which the table and the JSON file name. The file is written after each
section. Triton's kernels are compiled by several processes into its cache before the first check.
No network is used: the corpus of the training steps is noise in FLAC files with random texts, at
the lengths of LibriSpeech and with as many tokens a second (5.5 of 500 BPE units; LibriSpeech 5.4);
its files repeat up to 100 hours. The sections checks, decoder and lstm need torch and triton only;
training, peers and search need the packages of setup.cfg, peers also speechbrain 1.1.2 for its own
rows, and are skipped without them. Launches are calls
of the CUDA runtime that start a kernel or a graph, kernels are those that run, as the profiler
lists both.

Times are medians of ROUNDS passes between events of the device, over two sets of random inputs,
after a warm-up that includes compiling and recording; graphs that a layer has recorded are freed
before the next one. LSTM layers are bidirectional with as many inputs as hidden units. floor_ms is
the larger of operations / measured rate of a large product and bytes / measured rate of a large
copy, each input read and output written once.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from interleave import Batch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from asr.config.cell import CellSettings  # noqa: E402
from asr.kernels import check, dispatch, reference  # noqa: E402
from asr.kernels.check import DecoderSizes  # noqa: E402
from asr.kernels.cuda import cluster  # noqa: E402
from asr.kernels.types import AttentionInput  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Share of the time after which each section ends, and all before it.
SHARES = {"checks": 0.2, "decoder": 0.3, "training": 0.5, "peers": 0.6, "search": 0.75, "lstm": 1.0}
KEY = (512, 32, 400)  # H, B, T at which all norms are compared
NORMS = {
    **{norm: CellSettings(norm) for norm in ("ba", "none", "joined", "per_gate", "raw", "cell")},
    **{f"{norm} rms": CellSettings(norm, norm_kind="rms") for norm in ("ba", "joined", "per_gate")},
    **{f"ba, c {c}": CellSettings("ba", cell_norm=c) for c in ("none", "carried", "state")},
    "joined, hidden": CellSettings("joined", hidden_norm=True),
    "ba, hidden": CellSettings("ba", hidden_norm=True),
    "cell rms": CellSettings("cell", norm_kind="rms"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of the matrix products
BOUNDS = {"fp32": 1e-3, "bf16": 5e-2}  # |difference| / |reference in float64|, recurrent gain 0.3
ROUNDS, SETS = 7, 2
SLOW = 0.1  # seconds: a pass that takes longer is timed once
# cuDNN keeps the weights in the multiprocessors in this case only; its time is of one direction.
PERSISTENT = "nn.LSTM fp16, 1 direction"
BEAM_RATIO = 0.2  # tokens per frame of memory: the models are not trained and would not end


class Budget(NamedTuple):
    """The end of a section, and what it has skipped."""

    end: float
    skipped: list[str]

    def allows(self, what: str) -> bool:
        """Whether there is time for it; else it is listed."""
        if time.monotonic() < self.end:
            return True
        self.skipped.append(what)
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--seconds", type=float, default=440.0, help="for all sections together")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, also on a CPU")
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_share(*options.compile)
        return 0
    if DEVICE.type == "cpu" and not options.tiny:
        parser.error("torch sees no GPU; --tiny runs on a CPU")
    begin = time.monotonic()
    torch.manual_seed(0)
    RATES.update(machine())
    results: dict[str, Any] = {"machine": RATES, "skipped": {}, "errors": {}, "seconds": {}}
    sections = {"checks": checks, "decoder": decoder, "training": training}
    sections |= {"peers": peers, "search": search, "lstm": lstm}
    for name in [name for name in SHARES if name in options.only]:
        start = time.monotonic()
        budget = Budget(begin + SHARES[name] * options.seconds, [])
        try:
            results[name] = sections[name](options.tiny, budget)
        except ImportError as error:
            budget.skipped.append(f"{name}: {error}")
        except Exception:  # the other sections still give their figures
            results["errors"][name] = traceback.format_exc()
            print(results["errors"][name], flush=True)
        results["seconds"][name] = round(time.monotonic() - start, 1)
        if budget.skipped:
            results["skipped"][name] = budget.skipped
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    table(results)
    failed = [row for row in results.get("checks", []) if not row["passed"]]
    return int(bool(failed or results["errors"]))


def machine() -> dict[str, Any]:
    """Device and versions, and the measured rates that the floors are computed from."""
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    found = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    with suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    found["backends"] = dispatch.backends()
    size = 8192 if DEVICE.type == "cuda" else 256
    a = torch.randn(size, size, device=DEVICE)
    half, copied = a.bfloat16(), torch.empty_like(a)
    for key, factor in (("bf16", half), ("fp32", a)):
        took = statistics.median(seconds(partial(torch.mm, factor, factor)) for _ in range(5))
        found[f"{key}_flops"] = 2 * size**3 / took
    took = statistics.median(seconds(partial(copied.copy_, a)) for _ in range(9))
    return found | {"bytes_per_second": 2 * a.nbytes / took}


def seconds(run: Callable[[], object]) -> float:
    """The time of run() on the device."""
    if DEVICE.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_mib(run: Callable[[], object]) -> float:
    """The rise of allocated memory during run(), in MiB; 0 on a CPU."""
    if DEVICE.type == "cpu":
        run()
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def kernel_seconds(run: Callable[[], object]) -> float:
    """The time for which kernels and copies of run() keep the device busy; 0 on a CPU."""
    if DEVICE.type == "cpu":
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return sum(own.self_device_time_total for own in found.key_averages()) / 1e6


# Checks -----------------------------------------------------------------------------------------


def checks(tiny: bool, budget: Budget) -> list[dict[str, Any]]:
    """Each backend and norm against the reference in float64, and what else differs on a GPU."""
    if "cuda" in layers_here():
        compile_kernels()
    general = masked_attention, ctc_gradient, waits_of_a_step
    rows = [passed(run.__name__, run) for run in general]
    norms = dict(islice(NORMS.items(), 3 if tiny else None))
    for (norm, settings), (name, sizes), precision in product(
        norms.items(), decoders(tiny).items(), precisions_of_decoder()
    ):
        what = f"decoder: {name}, {norm}, {precision}"
        if (norm in ("ba", "none") or name == "location") and budget.allows(what):
            rows.append(passed(what, partial(decoder_error, settings, sizes, precision)))
    for name, sizes in decoders(tiny).items():
        rows.append(passed(f"search step: {name}", partial(search_step_error, sizes)))
    for (norm, settings), precision in product(norms.items(), BOUNDS):
        for backend in ["python", *ours_in(precision, KEY[0])]:
            name = f"{backend}: {norm}, {precision}"
            if budget.allows(name):
                case = case_of(settings, precision, *((5, 3) if tiny else KEY[:2]), learns=True)
                rows.append(passed(name, partial(layer_error, backend, case)))
    return rows


COMPILERS = 16  # processes


def compile_kernels() -> None:
    """Fill Triton's cache with the kernels of all checks and timings."""
    count = min(COMPILERS, os.cpu_count() or 1)
    command = [sys.executable, __file__, "--json", os.devnull, "--compile"]
    started = [subprocess.Popen([*command, str(n), str(count)]) for n in range(count)]
    for process in started:
        process.wait()


def compile_share(number: int, count: int) -> None:
    """Run the kernels of every count-th job once; errors show in the checks."""
    decoder_jobs = list(product(NORMS, decoders(False).values(), BOUNDS))
    for norm, sizes, precision in decoder_jobs[number::count]:
        with suppress(Exception):
            decoder_error(NORMS[norm], sizes, precision)
    jobs = list(product(NORMS, BOUNDS, KEY[:1]))
    jobs += product(("ba", "none"), BOUNDS, (256, 1024))
    for norm, precision, H in jobs[number::count]:
        for layer, B in product(ours_in(precision, H), (16, KEY[1], 64)):  # kernels may depend on B
            case = case_of(NORMS[norm], precision, H, B, learns=True)
            with suppress(Exception):
                run_case(layer, case, *fresh_inputs(case, 7))


def passed(name: str, run: Callable[[], float]) -> dict[str, Any]:
    """One row: the error that run() returns, in units of its bound, must be at most 1."""
    try:
        error, reason = run(), None
    except ImportError as missing:
        return {"name": name, "passed": True, "error": None, "reason": f"skipped: {missing}"}
    except Exception as failure:
        error, reason = float("nan"), f"{type(failure).__name__}: {failure}"[:300]
    return {"name": name, "passed": error <= 1.0, "error": error, "reason": reason}


def layers_here() -> list[str]:
    """The backends that can run on the device; reference is the judge."""
    usable = [name for name, reason in dispatch.backends().items() if reason is None]
    wrong = ("reference", "cpu") if DEVICE.type == "cuda" else ("reference", "cuda", "cluster")
    return [name for name in usable if name not in wrong]


class Case(NamedTuple):
    """A bidirectional layer, and whether gradients are computed."""

    settings: CellSettings
    products: torch.dtype
    hidden: int
    batch: int
    learns: bool


def case_of(settings: CellSettings, precision: str, H: int, B: int, learns: bool) -> Case:
    return Case(settings, DTYPES[precision], H, B, learns)


def layer_error(backend: str, case: Case) -> float:
    """The largest relative error of a ragged batch's results and gradients, per bound."""
    T, lengths = 13, [13, *(1 + 5 * row % 13 for row in range(1, case.batch))]
    batch, weights = fresh_inputs(case, T)
    padding = torch.arange(T, device=DEVICE) >= torch.tensor(lengths, device=DEVICE)[:, None]
    x = batch.x.detach().masked_fill(padding.unsqueeze(2), float("nan")).requires_grad_()
    batch = batch._replace(x=x, lengths=lengths)
    exact = case._replace(products=torch.float32)
    wide = [type(w)(*(t if t is None else doubled(t) for t in w)) for w in weights]
    judge_batch = batch._replace(x=doubled(x), h=batch.h.double(), c=batch.c.double())
    ours = run_layer(dispatch.BACKENDS[backend].layer, case, batch, weights, padding)
    judge = run_layer(dispatch.BACKENDS["reference"].layer, exact, judge_batch, wide, padding)
    return worst_error(ours, judge) / BOUNDS["bf16" if case.products == torch.bfloat16 else "fp32"]


def doubled(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def decoders(tiny: bool) -> dict[str, DecoderSizes]:
    """Sizes to check; `location` has those of recipes/librispeech100.yaml."""
    small = DecoderSizes()
    kinds = {"additive, one frame": small._replace(U=2, T=1, kind="additive")}
    kinds |= {"dot": small._replace(kind="dot")} if decoder_backend() == "cuda" else {}
    kinds["one token, one utterance"] = small._replace(U=1, B=1, T=2)
    if tiny:
        return {"location": small._replace(U=2, T=37)} | kinds
    full = DecoderSizes(U=7, B=19, T=353, E=1024, M=256, H=512, A=256, layers=1)
    kinds["A 1024, T 1003"] = small._replace(A=1024, T=1003, E=130)
    return {"location": full} | kinds


def decoder_backend() -> str:
    return "cuda" if DEVICE.type == "cuda" else "cpu"


def precisions_of_decoder() -> list[str]:
    return list(BOUNDS) if DEVICE.type == "cuda" else ["fp32"]


def decoder_error(settings: CellSettings, sizes: DecoderSizes, precision: str) -> float:
    """The largest relative error of results and gradients, per bound; padding holds NaN.

    The speller's backend is compared with the reference in float64, with dropout.
    """
    inputs, cells, constants = check.random_decoder(settings, sizes, DEVICE, dropout=True)
    wide = [
        type(part)(*(t if t is None else doubled(t) for t in part)) for part in (inputs, *cells)
    ]
    exact = constants._replace(
        first=constants.first.double(),
        masks=tuple(m.double() for m in constants.masks),
        keep=constants.keep.double(),
    )
    judge = check.decoder_results(reference.run_decoder, wide[0], wide[1:], exact, settings)
    if DEVICE.type == "cuda":
        with torch.no_grad():
            for part in (inputs.states, inputs.keys):
                part[~constants.valid] = torch.nan
    run = dispatch.BACKENDS[decoder_backend()].decoder
    ours = check.decoder_results(run, inputs, cells, constants, settings, DTYPES[precision])
    return worst_error(ours, judge) / BOUNDS[precision]


def worst_error(ours: list[Tensor], judge: list[Tensor]) -> float:
    """The largest relative error, NaN where one is."""
    errors = [
        float((a.double() - b).norm() / b.norm().clamp_min(1e-9))
        for a, b in zip(ours, judge, strict=True)
    ]
    return float("nan") if any(error != error for error in errors) else max(errors)


@torch.no_grad()
def search_step_error(sizes: DecoderSizes) -> float:
    """Attention of three hypotheses and a cell's step against the reference, per bound."""
    settings, K = CellSettings("ba"), 3
    inputs, (w, *_), constants = check.random_decoder(settings, sizes, DEVICE)
    (B, T, A), H = inputs.keys.shape, sizes.H
    query, past = torch.randn(B, K, A, device=DEVICE), torch.rand(2, B, K, T, device=DEVICE) / T
    given = AttentionInput(inputs.keys, query, inputs.v, *past, inputs.weight_loc, inputs.conv)
    x, h, c = (torch.randn(B * K, n, device=DEVICE) for n in (w.weight_ih.shape[1], H, H))
    backend = dispatch.BACKENDS[decoder_backend()]
    ours = [*backend.attend(given, constants.valid)]
    ours += backend.step(x, (h, c), None, w, settings, torch.float32)
    wide = [type(part)(*(t if t is None else t.double() for t in part)) for part in (given, w)]
    judge = [*reference.attend(wide[0], constants.valid)]
    judge += reference.step(x.double(), (h.double(), c.double()), None, wide[1], settings)
    return worst_error(ours, judge) / BOUNDS["fp32"]


def fresh_inputs(case: Case, T: int) -> tuple[Any, list[Any]]:
    """New random inputs for every call, with recurrent weights small enough to be no chaos."""
    batch, weights = check.random_layer(case.settings, (2, case.hidden, case.batch), T, DEVICE)
    with torch.no_grad():
        for w in weights:
            for part in w:
                if part is not None:
                    part.add_(0.1 * torch.randn_like(part) * part.abs().mean())
                    part.requires_grad_(case.learns)
            gains = [gain for gain in (w.gain_recurrent,) if gain is not None]
            for part in gains or [w.weight_hh]:
                part.mul_(0.3)
    x = torch.randn_like(batch.x).requires_grad_(case.learns)
    return batch._replace(x=x), weights


def run_case(backend: str, case: Case, batch: Any, weights: list[Any]) -> list[Tensor]:
    """Results, and gradients where the case has them."""
    layer = dispatch.BACKENDS[backend].layer
    if case.learns:
        return check.results(layer, batch, weights, case.settings, case.products)
    with torch.no_grad():
        return list(layer(batch, weights, case.settings, case.products))


def run_layer(
    layer: Any, case: Case, batch: Any, weights: list[Any], padding: Tensor
) -> list[Tensor]:
    """Output, states and gradients of a batch whose padding holds NaN."""
    results = layer(batch, weights, case.settings, case.products)
    learned = [batch.x, *(w for own in weights for w in own if w is not None)]
    total = results.output.square().sum() + results.h.sum() + results.c.sum()
    dx, *others = torch.autograd.grad(total, learned)
    assert not results.output[padding].any(), "the output of padding must be 0"
    return [*(part.detach() for part in results), dx[~padding], *others]


def masked_attention() -> float:
    """Attention and its gradients ignore what the mask excludes, in every precision."""
    attend = nn.functional.scaled_dot_product_attention
    valid = torch.arange(37) < torch.tensor([37, 5])[:, None, None, None]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.randn(2, 4, 37, 64).to(dtype)
        for device, kind in ((torch.device("cpu"), torch.float64), (DEVICE, dtype)):
            x = given.to(device, kind).requires_grad_()
            attend(x, x, x, valid.to(device)).float().square().sum().backward()
            found.append(x.grad.double().cpu())
    errors = [
        float((a - b).norm() / a.norm()) for a, b in zip(found[::2], found[1::2], strict=True)
    ]
    return max(error / bound for error, bound in zip(errors, BOUNDS.values(), strict=True))


def ctc_gradient() -> float:
    """The CTC loss and its gradient on the device equal those on the CPU."""
    from asr.training.losses import ctc_loss

    logits, tokens = torch.randn(3, 41, 13), torch.randint(4, 13, (3, 7))
    frames, lengths = torch.tensor([41, 29, 17]), torch.tensor([7, 5, 3])
    found = []
    for device in (torch.device("cpu"), DEVICE):
        own = logits.to(device).detach().requires_grad_()
        loss = ctc_loss(own.log_softmax(-1), frames, tokens.to(device), lengths)
        loss.backward()
        found.append((loss.detach().cpu(), own.grad.cpu()))
    return max(float((a - b).norm() / b.norm()) / 1e-4 for a, b in zip(*found, strict=True))


def waits_of_a_step() -> float:
    """Beside torch's CTC loss, a training step of LAS waits for the GPU once."""
    from asr.training import trainer
    from asr.training.losses import ctc_loss

    objective, batch, config = small_las()
    optimizer = torch.optim.Adam(objective.parameters(), fused=True)
    logits = torch.randn(3, 41, 13, device=DEVICE, requires_grad=True)
    tokens, sizes = torch.ones(3, 7, dtype=torch.long, device=DEVICE), torch.tensor([41, 29, 17])

    def loss() -> None:
        ctc_loss(logits.log_softmax(-1), sizes, tokens, torch.tensor([7, 5, 3])).backward()

    places = {}
    for run in (partial(trainer.take_step, objective, [batch], optimizer, 1e-3, config), loss):
        run()
        places[run] = waits(run)
    print("waits of a step, of the CTC loss:", *places.values(), flush=True)
    step, own = (len(found) for found in places.values())
    assert step <= own + 1, f"{step} waits, {own} of them in the CTC loss"
    return 0.0


def waits(run: Callable[[], object]) -> list[str]:
    """File and line of each wait for the GPU during run(); none on a CPU."""
    if DEVICE.type == "cpu":
        return []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", message=".*synchroniz")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(w.filename).name}:{w.lineno}" for w in caught]


def small_las() -> tuple[nn.Module, Any, Any]:
    from asr.config.schema import LasConfig, ListenerConfig, SpellerConfig, TrainConfig
    from asr.data.batching import Batch
    from asr.models.las import LAS
    from asr.training.losses import SpeechObjective

    parts = {
        "listener": ListenerConfig(layers=2, hidden=32, pyramid=(2,)),
        "speller": SpellerConfig(hidden=32, embedding=16),
    }
    model = LAS(40, 31, LasConfig(kind="las", attention_size=16, ctc_weight=0.3, **parts))
    sizes = torch.tensor([64, 48, 32]), torch.tensor([7, 5, 3])
    tokens, features = torch.randint(4, 31, (3, 7)), torch.randn(3, 64, 40)
    batch = Batch(("a", "b", "c"), features, sizes[0], tokens, sizes[1], 1.0)
    objective = SpeechObjective(model, 0.3, 0.1).to(DEVICE)
    return objective, batch.to(DEVICE), TrainConfig(precision="bf16")


# The decoder of LAS -----------------------------------------------------------------------------


def decoder(tiny: bool, budget: Budget) -> list[dict[str, Any]]:
    """All steps of the speller of recipes/librispeech100.yaml, without and with backward."""
    sizes = DecoderSizes(U=80, B=37, T=350, E=1024, M=256, H=512, A=256, layers=1)
    sizes = DecoderSizes(U=3, T=37) if tiny else sizes
    rows = []
    for precision, learns in product(precisions_of_decoder(), (True, False)):
        for name in (decoder_backend(), "reference"):
            what = f"decoder {name} {precision} {'forward+backward' if learns else 'forward'}"
            if not budget.allows(what):
                continue
            batch = check.random_decoder(CellSettings("ba"), sizes, DEVICE, dropout=True)
            run = partial(decoder_pass, name, precision, learns, batch)
            run()
            took = statistics.median(seconds(run) for _ in range(3 if name == "reference" else 7))
            counts = launches_of(run)
            rows.append(
                {"name": what, "ms": 1e3 * took, "peak_mib": peak_mib(run)}
                | {f"{key}_per_token": count / sizes.U for key, count in counts.items()}
            )
            dispatch.release_memory()
    return rows


def decoder_pass(name: str, precision: str, learns: bool, batch: check.Decoder) -> object:
    settings = CellSettings("ba")
    if name == "reference":  # the steps as a model computes them, but for deferred gradients
        run, options = reference.run_decoder, (settings,)
    else:
        run, options = dispatch.BACKENDS[name].decoder, (settings, DTYPES[precision])
    half = name == "reference" and precision == "bf16"
    with torch.set_grad_enabled(learns):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
            found = run(*batch, *options)
        if not learns:
            return found
        inputs, cells, _ = batch
        learned = [t for part in (inputs, *cells) for t in part if t is not None]
        return torch.autograd.grad(sum(part.square().sum() for part in found), learned)


def launches_of(run: Callable[[], object]) -> dict[str, int]:
    """Calls that start kernels or graphs, and kernels that run; none on a CPU."""
    if DEVICE.type == "cpu":
        run()
        return {}
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    counts = {"launches": 0, "kernels": 0}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counts["kernels"] += 1
        elif "Launch" in event.name and event.name.startswith("cu"):
            counts["launches"] += 1
    return counts


# LSTM layers ------------------------------------------------------------------------------------


def lstm(tiny: bool, budget: Budget) -> list[dict[str, Any]]:
    """A row for each shape, precision, pass and contestant; the key shape with all norms first."""
    H, B, T = (5, 3, 7) if tiny else KEY
    rows = []
    for precision in ("bf16", "fp32"):
        ours = ours_in(precision, H)
        names = ["nn.LSTM", PERSISTENT, *(f"{ours[0]}: {norm}" for norm in NORMS)]
        names += [f"{other}: {norm}" for other in ours[1:] for norm in ("ba", "none")]
        rows += shape_rows([*names, "TorchScript", "python: ba"], precision, H, B, T, budget)
    grid = [] if tiny else product((256, 512, 1024), (16, 64), (100, 400, 800), ("bf16", "fp32"))
    for H, B, T, precision in sorted(grid, key=lambda shape: (shape[2] != 400, shape[2], shape[1])):
        names = ["nn.LSTM", PERSISTENT]
        names += [f"{name}: {norm}" for name in ours_in(precision, H) for norm in ("ba", "none")]
        rows += shape_rows(names, precision, H, B, T, budget)
    return rows


def ours_in(precision: str, H: int) -> list[str]:
    """The backends that compute such a layer; on a GPU the fastest first."""
    names = [name for name in layers_here() if name not in ("python", "cluster")]
    covered = "cluster" in layers_here() and cluster.limit(H, DTYPES[precision]) is None
    return ["cluster", *names] if covered else names


def shape_rows(
    names: list[str], precision: str, H: int, B: int, T: int, budget: Budget
) -> list[dict[str, Any]]:
    """Both passes of every contestant at one shape, the first of which is the judge."""
    shape = f"H{H} B{B} T{T} {precision}"
    rows = []
    for learns in (False, True):
        kind = "forward+backward" if learns else "forward"
        floor, judge = floor_seconds(precision, H, B, T, learns), float("nan")
        for name in names:
            what = f"{shape} {kind} {name}"
            if not budget.allows(what):
                continue
            try:
                found = pass_times(name, precision, H, B, T, learns)
            except Exception as error:
                budget.skipped.append(f"{what}: {error!r}"[:300])
                continue
            took = statistics.median(found["seconds"])
            judge = took if name == names[0] else judge
            rows.append(
                {"H": H, "B": B, "T": T, "precision": precision, "name": name, "pass": kind}
                | {"ms": 1e3 * took, "ratio": took / judge, "floor_ms": 1e3 * floor}
                | {"min_ms": 1e3 * min(found["seconds"]), "max_ms": 1e3 * max(found["seconds"])}
                | {"peak_mib": found["peak_mib"]}
            )
    return rows


def pass_times(name: str, precision: str, H: int, B: int, T: int, learns: bool) -> dict[str, Any]:
    """The times of one contestant's passes and its peak memory."""
    runs = [contestant(name, precision, H, B, T, learns) for _ in range(SETS)]
    for run in runs:
        run()
    first = seconds(runs[0])
    rounds = ROUNDS if first < SLOW else 1
    times = [seconds(runs[number % SETS]) for number in range(rounds)]
    found = {"seconds": times, "peak_mib": peak_mib(runs[0])}
    dispatch.release_memory()
    return found


def floor_seconds(precision: str, H: int, B: int, T: int, learns: bool) -> float:
    """Operations and bytes of a bidirectional layer of H inputs, over the measured rates."""
    size = 2 if precision == "bf16" else 4
    flops = 2 * 2 * B * T * 4 * H * (H + H)  # two directions, W_x x and W_h h
    moved = size * (B * T * H + 2 * 8 * H * H) + 4 * 2 * B * T * H
    passes = 3 if learns else 1
    return max(
        passes * flops / RATES[f"{precision}_flops"], passes * moved / RATES["bytes_per_second"]
    )


RATES: dict[str, Any] = {}


def contestant(
    name: str, precision: str, H: int, B: int, T: int, learns: bool
) -> Callable[[], object]:
    """One pass over random inputs of its own."""
    if ": " in name:
        backend, _, norm = name.partition(": ")
        case = case_of(NORMS[norm], precision, H, B, learns)
        batch, weights = fresh_inputs(case, T)
        return partial(run_case, backend, case, batch, weights)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    dtype = torch.float16 if name == PERSISTENT else dtype
    x = torch.randn(B, T, H, device=DEVICE, dtype=dtype, requires_grad=learns)
    if name == "TorchScript":
        module: nn.Module = torch.jit.script(ScriptedLSTM(H)).to(DEVICE, dtype)
    else:
        module = nn.LSTM(H, H, batch_first=True, bidirectional=name == "nn.LSTM")
        module.to(DEVICE, dtype).flatten_parameters()
    return partial(module_pass, module, x, learns)


def module_pass(module: nn.Module, x: Tensor, learns: bool) -> object:
    with torch.set_grad_enabled(learns):
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        return (
            torch.autograd.grad(output.square().sum(), [x, *module.parameters()])
            if learns
            else output
        )


class ScriptedDirection(nn.Module):
    """Ba et al.'s cell in a loop over time, as torch's own TorchScript benchmark writes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.from_x, self.from_h = (nn.Linear(size, 4 * size, bias=False) for _ in range(2))
        self.norm_x, self.norm_h = (nn.LayerNorm(4 * size) for _ in range(2))
        self.norm_c = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        """x (T, B, H) -> (T, B, H)."""
        gates = self.norm_x(self.from_x(x)).unbind(0)
        h, c = torch.zeros_like(x[0]), torch.zeros_like(x[0])
        outputs: list[Tensor] = []
        for t in range(len(gates)):
            i, f, g, o = (gates[t] + self.norm_h(self.from_h(h))).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self.norm_c(c).tanh()
            outputs += [h]
        return torch.stack(outputs)


class ScriptedLSTM(nn.Module):
    """Both directions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.forth, self.back = ScriptedDirection(size), ScriptedDirection(size)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, H) -> (B, T, 2 H)."""
        x = x.transpose(0, 1)
        both = [self.forth(x), self.back(x.flip(0)).flip(0)]
        return torch.cat(both, 2).transpose(0, 1)


# Training ---------------------------------------------------------------------------------------

HOURS = 100  # of the artificial corpus
STEP_SECONDS = 12  # of training with the loader, after as many in which kernels are recorded
RECIPES = {"las": "", "transformer": "_transformer", "conformer": "_conformer"}
SMALL = {
    "las": ["model.listener.hidden=8", "model.speller.hidden=8", "model.attention_size=8"],
    "transformer": [
        "model.encoder_layers=2",
        "model.decoder_layers=1",
        "model.intermediate_ctc=null",
    ],
    "conformer": [
        "model.encoder_layers=2",
        "model.decoder_layers=1",
        "model.intermediate_ctc=null",
    ],
}


def training(tiny: bool, budget: Budget) -> list[dict[str, Any]]:
    """Steps of the librispeech100 recipes, with the loader of a run, on an artificial corpus."""
    import soundfile  # noqa: F401

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder), 24 if tiny else 700, tiny, 1 if tiny else HOURS)
        for family, precision in product(RECIPES, ("bf16", "fp32")):
            if (precision == "bf16" or family == "las") and budget.allows(f"{family} {precision}"):
                rows.append(steps_of(family, precision, Path(folder), tiny))
    return rows


def make_corpus(folder: Path, count: int, tiny: bool, hours: float = 0.0) -> None:
    """Manifests train.tsv and valid.tsv of noise, 2 to 16 s, with 2.7 random words a second.

    The recordings repeat, with texts of their own, until they are `hours` long.
    """
    generator = random.Random(0)
    words = [
        "".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 7))) for _ in range(999)
    ]
    lines, total = ["id\tspeaker\taudio\tseconds\ttext"], 0.0
    lengths = [
        generator.uniform(0.5, 1.0) if tiny else generator.gauss(13.0, 3.0) for _ in range(count)
    ]
    lengths = [round(min(max(length, 0.5 if tiny else 2.0), 16.0), 2) for length in lengths]
    while len(lines) <= count or (total < 3600 * hours and not tiny):
        number = len(lines) - 1
        length = lengths[number % count]
        text = " ".join(generator.choices(words, k=max(1, round((0.5 if tiny else 2.7) * length))))
        lines.append(f"u{number}\ts{number % 40}\tu{number % count}.flac\t{length}\t{text}")
        total += length
    jobs = [(folder / f"u{number}.flac", length, number) for number, length in enumerate(lengths)]
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(write_noise, jobs, chunksize=16))
    for name, rows in (("train", lines), ("valid", lines[:9])):
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n")


def write_noise(job: tuple[Path, float, int]) -> None:
    import numpy as np
    import soundfile

    path, length, seed = job
    noise = np.random.default_rng(seed).standard_normal(int(16000 * length))
    soundfile.write(path, 0.1 * noise, 16000)


def speech_task_of(family: str, precision: str, folder: Path, tiny: bool) -> Any:
    """The task of a recipe over the artificial corpus."""
    from asr.config.loader import read_recipe
    from asr.tasks.speech import speech_task

    workers = 1 if tiny else max(1, min(12, (os.cpu_count() or 2) - 2))
    overrides = ["data.corpus=null", f"data.train={folder}/train.tsv"]
    overrides += [f"data.valid={folder}/valid.tsv", "data.test={}", f"data.workers={workers}"]
    overrides += [f"train.precision={precision}", "train.short_first=false"]
    if tiny:
        overrides += ["train.batch_seconds=4", "text.kind=characters", *SMALL[family]]
    recipe = read_recipe(ROOT / "recipes" / f"librispeech100{RECIPES[family]}.yaml", overrides)
    return speech_task(recipe, folder / family, False)


def steps_of(family: str, precision: str, folder: Path, tiny: bool) -> dict[str, Any]:
    """Speed with the loader and without, the loader's share of the time, and peak memory."""
    from asr.training import optim, trainer

    task = speech_task_of(family, precision, folder, tiny)
    config = task.recipe.train
    optimizer = optim.make_optimizer(config.optimizer, task.objective)
    take = partial(trainer.take_step, task.objective, optimizer=optimizer, lr=1e-5, config=config)
    batches = task.epochs.batches(1)
    held = list(islice(batches, 2 if tiny else 4))
    for batch in held:  # compiles and records
        take([batch.to(DEVICE)])
    for _ in range(2):  # the shapes of most batches come up in the first round
        audio, waited, steps = 0.0, 0.0, 0
        begin = before = wait_for_device()
        for batch in batches:
            waited += time.perf_counter() - before
            take([batch.to(DEVICE)])
            audio, steps, before = audio + batch.seconds, steps + 1, time.perf_counter()
            if time.perf_counter() - begin > (0.1 if tiny else STEP_SECONDS):
                break
        total = wait_for_device() - begin
    for _ in range(2):  # first to record again the shapes that were dropped meanwhile
        begin = wait_for_device()
        for batch in held:
            take([batch.to(DEVICE)])
        alone = wait_for_device() - begin
    busy = sum(kernel_seconds(lambda batch=batch: take([batch.to(DEVICE)])) for batch in held)
    peak = peak_mib(lambda: take([held[0].to(DEVICE)]))
    parameters = sum(p.numel() for p in task.objective.parameters())
    parts = breakdown(task, optimizer, held[0].to(DEVICE)) if family == "las" else {}
    return parts | {
        "family": family,
        "precision": precision,
        "parameters": parameters,
        "steps": steps,
        "audio_hours_per_hour": audio / total,
        "without_loader": sum(batch.seconds for batch in held) / alone,
        "loader_share": waited / total,
        "gpu_busy": busy / alone,
        "peak_mib": peak,
        "host_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def breakdown(task: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
    """Time of each part of a step of LAS in ms, medians, and launches per token of the speller."""
    from asr.training import losses, trainer

    objective, model = task.objective.train(), task.objective.model
    inputs, targets = losses.shift(batch.tokens, batch.token_lengths)
    frames = model.memory_lengths(batch.lengths)
    cut: Any = None  # the memory, detached
    found: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        results = []
        found.setdefault(name, []).append(1e3 * seconds(lambda: results.append(run())))
        return results[0]

    def speller() -> Tensor:
        return objective.decoder_loss(cut, inputs, targets)[1]["objective"].total

    def ctc() -> Tensor:
        labels = frames, batch.tokens, batch.token_lengths
        return losses.ctc_loss(model.ctc(cut).float(), *labels)

    def forward(run: Callable[[], Any]) -> Callable[[], Any]:
        def in_precision() -> Any:
            with trainer.autocast(DEVICE, task.recipe.train.precision):
                return run()

        return in_precision

    for _ in range(5):
        objective.zero_grad(set_to_none=True)
        memory = timed("listener", forward(partial(model.encode, batch.features, batch.lengths)))
        cut = memory._replace(states=memory.states.detach().requires_grad_())
        for name, run in (("speller", speller), ("CTC", ctc)):
            timed(f"{name} backward", timed(name, forward(run)).backward)
        timed("listener backward", partial(memory.states.backward, cut.states.grad))
        timed("optimiser", optimizer.step)
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    counts = launches_of(lambda: forward(speller)().backward())
    per_token = {f"{key}_per_token": n / inputs.shape[1] for key, n in counts.items()}
    return {"parts_ms": medians, "tokens": inputs.shape[1], **per_token}


def peers(tiny: bool, budget: Budget) -> list[dict[str, Any]]:
    """Steps of LAS and Transformer of librispeech100's size, and of SpeechBrain's modules.

    Without a loader, CTC and SpecAugment: 32 utterances of 12 s, 66 tokens, cross-entropy, Adam.
    """
    import las
    import transformer

    from asr.training.distributed import choose_device

    choose_device("auto")  # torch's settings in training
    rows = []
    batch = {"B": 2, "T": 40, "U": 3} if tiny else {"B": 32, "T": 1200, "U": 66}
    sizes, wide = las.Sizes(**batch), transformer.Sizes(**batch)
    if not tiny:
        sizes = replace(sizes, layers=4, hidden=512, embedding=256)
        wide = replace(wide, width=256, feed_forward=1024, encoder=18, decoder=6)
    builders = {
        "las ba": partial(las.ours, sizes, "ba"),
        "las none": partial(las.ours, sizes, "none"),
        "las SpeechBrain": partial(las.speechbrain, sizes),
        "transformer": partial(transformer.ours, wide),
        "transformer SpeechBrain": partial(transformer.speechbrain, wide),
    }
    for name, build in builders.items():
        shape = wide if name.startswith("transformer") else sizes
        try:
            if budget.allows(name):
                rows.append({"name": name, **step_of(build, shape)})
        except ImportError as error:
            budget.skipped.append(f"{name}: {error}")
    return rows


def step_of(build: Callable[[], Any], batch: Batch) -> dict[str, Any]:
    """Time and memory of a step in bf16 on random features and tokens."""
    model, forward = build()
    model.to(DEVICE).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    features = torch.randn(batch.B, batch.T, batch.F, device=DEVICE)
    tokens = torch.randint(4, batch.V, (batch.B, batch.U + 2), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = forward(features, tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    for _ in range(3):  # compiles and records
        step()
    took = statistics.median(seconds(step) for _ in range(ROUNDS))
    return {
        "ms": 1e3 * took,
        "audio_hours_per_hour": batch.seconds / took,
        "parameters": sum(p.numel() for p in model.parameters()),
        "gpu_busy": kernel_seconds(step) / took,
        "peak_mib": peak_mib(step),
    }


def wait_for_device() -> float:
    """The time when all that was launched has ended."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# Search -----------------------------------------------------------------------------------------


def search(tiny: bool, budget: Budget) -> list[dict[str, Any]]:
    """Greedy and beam search of untrained models over utterances of 12 s, in one batch."""
    import soundfile  # noqa: F401

    from asr.config.schema import DecodeConfig

    counts, T = ((2,), 40) if tiny else ((160, 16), 1200)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder), 24 if tiny else 200, tiny)
        for family in RECIPES:
            if not budget.allows(f"search {family}"):
                continue
            model = speech_task_of(family, "fp32", Path(folder), tiny).objective.model.eval()
            for B, (beam, weight) in product(counts, ((1, 0.0), (10, 0.0), (10, 0.3))):
                decode = DecodeConfig(beam=beam, ctc_weight=weight, max_ratio=BEAM_RATIO)
                run = partial(search_once, model, torch.randn(B, T, 80, device=DEVICE), decode)
                if budget.allows(f"search {family} B {B} beam {beam} CTC {weight}"):
                    run()
                    took = statistics.median(seconds(run) for _ in range(1 if tiny else 3))
                    rows.append(
                        {"family": family, "B": B, "beam": beam, "ctc_weight": weight}
                        | {"seconds": took, "audio_hours_per_hour": B * T / 100 / took}
                        | {"peak_mib": peak_mib(run), "gpu_busy": kernel_seconds(run) / took}
                    )
    return rows


@torch.no_grad()
def search_once(model: Any, features: Tensor, decode: Any) -> None:
    """Encode and search B utterances of the same length."""
    from asr.inference.decode import Encoded, best_hypotheses

    lengths = torch.full((len(features),), features.size(1))
    best_hypotheses([Encoded(model, model.encode(features, lengths))], decode)


# Table ------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> None:
    """The figures as text, the most important ones last."""
    for line in table_lines(results):
        print(line)


def table_lines(results: dict[str, Any]) -> Iterator[str]:
    about = results["machine"]
    yield f"{about['device']}, torch {about['torch']}, triton {about.get('triton')}"
    rates = "  ".join(
        f"{key} {about[key]:.3g}" for key in about if key.endswith(("flops", "second"))
    )
    yield rates
    for row in results.get("lstm", []):
        shape = f"H{row['H']} B{row['B']} T{row['T']} {row['precision']} {row['pass']}"
        yield (
            f"{shape:38} {row['name']:24} {row['ms']:9.3f} ms  {row['ratio']:6.2f} x nn.LSTM  "
            f"floor {row['floor_ms']:.3f}  {row['peak_mib']:.0f} MiB"
        )
    for row in results.get("decoder", []):
        counts = "  ".join(f"{row[key]:.1f} {key}" for key in row if key.endswith("per_token"))
        yield f"{row['name']:44} {row['ms']:9.3f} ms  {row['peak_mib']:.0f} MiB  {counts}"
    for row in results.get("training", []):
        if "parts_ms" in row:
            parts = "  ".join(f"{name} {took:.1f}" for name, took in row["parts_ms"].items())
            per_token = row.get("launches_per_token", 0.0)
            yield f"  parts of a step in ms: {parts}; {per_token:.1f} launches a token"
        yield (
            f"training {row['family']} {row['precision']}: {row['audio_hours_per_hour']:.0f} h/h, "
            f"without loader {row['without_loader']:.0f}, "
            f"loader {100 * row['loader_share']:.0f} %, GPU busy {100 * row['gpu_busy']:.0f} %, "
            f"{row['peak_mib']:.0f} MiB, host {row['host_mib']:.0f} MiB, {row['steps']} steps"
        )
    for row in results.get("peers", []):
        yield (
            f"step {row['name']:24} {row['ms']:9.1f} ms  {row['audio_hours_per_hour']:.0f} h/h  "
            f"{row['parameters'] / 1e6:.1f} M  GPU busy {100 * row['gpu_busy']:.0f} %  "
            f"{row['peak_mib']:.0f} MiB"
        )
    for row in results.get("search", []):
        yield (
            f"search {row['family']} B {row['B']} beam {row['beam']} CTC {row['ctc_weight']}: "
            f"{row['audio_hours_per_hour']:.0f} h/h, GPU busy {100 * row['gpu_busy']:.0f} %, "
            f"{row['peak_mib']:.0f} MiB"
        )
    for name, skipped in results["skipped"].items():
        yield f"skipped in {name}: {len(skipped)}: {'; '.join(skipped[:4])}"
    failed = [row for row in results.get("checks", []) if not row["passed"]]
    for row in failed:
        yield f"FAILED {row['name']}: {row['error']:.3g} of its bound; {row['reason'] or ''}"
    for name in results["errors"]:
        yield f"ERROR in {name}: {results['errors'][name].splitlines()[-1]}"
    yield f"{len(results.get('checks', [])) - len(failed)} checks passed, {len(failed)} failed"
    yield "seconds: " + "  ".join(f"{name} {took}" for name, took in results["seconds"].items())


if __name__ == "__main__":
    sys.exit(main())

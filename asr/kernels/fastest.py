"""The fastest backend of an LSTM layer on a GPU, found by a check and a timing on first use.

A candidate is used only where a small layer's output and gradients equal those of `reference`
within a bound; of those that pass and of the fallback, which is not checked, the fastest is taken.
A choice holds for a Case: the layer's options and size, the batch size rounded up to a power of 2,
and whether gradients are computed. Times are of TIMED_FRAMES frames, as few as an utterance has
after subsampling: with fewer, launching a layer takes longer than computing it.

Choices are stored in fastest_backends.json in the cache folder of the compiled kernels, under the
device's name and the versions of torch, triton and this package. Failed checks are not stored,
since memory may have been short. Processes that need the same choice wait for the first one under a
file lock, so all ranks of a machine compute alike. No random number of the training is drawn.
"""

import fcntl
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.errors import UserError, is_out_of_memory
from asr.io import atomic_write, read_json
from asr.kernels import reference
from asr.kernels.cpu.compiler import cache_folder
from asr.kernels.types import LayerInput, LayerOutput, Weights, weight_shapes

Layer = Callable[[LayerInput, list[Weights], CellSettings, torch.dtype], LayerOutput]

FILE = "fastest_backends.json"
LIMIT = 1 << 20  # bytes of that file
CHECKED_FRAMES, TIMED_FRAMES = 7, 256
WARM_UP, ROUNDS = 2, 5
SLOWER = 3  # times the fastest: not timed again after the warm-up
# Largest |difference| / |reference| of a result. A TF32 product errs by 3e-4; with bf16 products a
# value of the check passes up to 14, each of which rounds three numbers by at most 2^-9.
BOUNDS = {torch.float32: 4e-3, torch.bfloat16: 0.05}


class Case(NamedTuple):
    """What decides which backend is the fastest."""

    settings: CellSettings
    products: torch.dtype
    directions: int
    hidden: int
    batch: int  # a power of 2
    learns: bool  # gradients are computed

    @classmethod
    def of(cls, batch: LayerInput, settings: CellSettings, products: torch.dtype) -> "Case":
        """The case of one call of a layer."""
        size = 1 << (batch.x.shape[0] - 1).bit_length()
        return cls(settings, products, *batch.h.shape[::2], size, torch.is_grad_enabled())

    def __str__(self) -> str:
        own = self.settings
        kinds = own.norm, own.gates, own.cell_norm, own.norm_kind, str(self.products)
        hidden = ", hidden norm" if own.hidden_norm else ""
        size = f"{self.directions} x H {self.hidden}, B {self.batch}"
        passes = "forward and backward" if self.learns else "forward"
        return f"{' '.join(kinds)}{hidden}, {size}, {passes}"


class CheckFailed(Exception):
    """A candidate computes something else than the reference; the message is the reason."""


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The time of run() on a device, waiting for the end of all that it launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


class FastestBackend:
    """Chooses among `candidates` and `fallback`, names of `layers`.

    place: the device's name with all versions; report gets one line for each new choice or reason.
    """

    def __init__(
        self,
        layers: Mapping[str, Layer],
        candidates: tuple[str, ...],
        fallback: str,
        report: Callable[[str], None],
        seconds: Callable[[Callable[[], object], torch.device], float] = device_seconds,
    ) -> None:
        self.layers, self.candidates, self.fallback = layers, candidates, fallback
        self.report, self.seconds = report, seconds
        self.chosen: dict[tuple[str, Case], str] = {}  # of this process

    def choose(self, case: Case, device: torch.device, place: str) -> str:
        """The name of the backend for this case: as before, as stored, or as measured now."""
        if (place, case) not in self.chosen:
            with _locked_file() as (path, fault):
                name = path and self._stored(path, case, place)
                self.chosen[place, case] = name or self._measured(path, fault, case, device, place)
        return self.chosen[place, case]

    def _stored(self, path: Path, case: Case, place: str) -> str | None:
        choice = _read(path).get(place, {})
        found = choice.get(str(case)) if isinstance(choice, dict) else None
        name = found.get("backend") if isinstance(found, dict) else None
        return name if name in (*self.candidates, self.fallback) else None

    def _measured(
        self, path: Path | None, fault: str, case: Case, device: torch.device, place: str
    ) -> str:
        passing, failures = [self.fallback], []
        for name in self.candidates:
            try:
                check(self.layers[name], case, device)
                passing.append(name)
            except Exception as error:  # those of a compiler and a driver are of any kind
                if is_out_of_memory(error):  # no fault of the candidate: a smaller batch may fit
                    raise
                failures.append(f"{name!r} is not used: {_first_line(error)}")
        times = self._times(passing, case, device) if len(passing) > 1 else {}
        name = min(times, key=times.__getitem__, default=self.fallback)
        line = f"LSTM on {place}: backend {name!r} for {case}"
        if times:
            line += ": " + ", ".join(f"{own} {1e3 * t:.3g} ms" for own, t in times.items())
        if path and not failures:
            fault = _write(path, place, case, name, times)
        self.report("; ".join([line, *failures, *([f"not stored: {fault}"] if fault else [])]))
        return name

    def _times(self, names: list[str], case: Case, device: torch.device) -> dict[str, float]:
        """Medians of interleaved rounds, in seconds; of far slower ones the end of the warm-up."""
        inputs = _inputs(case, TIMED_FRAMES, device)
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(WARM_UP + ROUNDS):
            best = min(own[-1] for own in times.values()) if number >= WARM_UP else math.inf
            for name, own in times.items():
                if number < WARM_UP or own[-1] <= SLOWER * best:
                    run = partial(_run, self.layers[name], case, *inputs)
                    own.append(self.seconds(run, device))
        return {n: statistics.median(own[WARM_UP:] or own[-1:]) for n, own in times.items()}


def check(layer: Layer, case: Case, device: torch.device) -> None:
    """Raises CheckFailed unless results and gradients of a ragged batch are the reference's."""
    batch, weights = _inputs(case, CHECKED_FRAMES, device)
    lengths = [CHECKED_FRAMES, *(1 + row % CHECKED_FRAMES for row in range(case.batch - 1))]
    batch = batch._replace(lengths=lengths)
    exact = case._replace(products=torch.float32)
    results = _run(layer, case, batch, weights), _run(reference.layer, exact, batch, weights)
    for ours, judge in zip(*results, strict=True):
        error = float((ours - judge).norm() / judge.norm().clamp_min(1e-6))
        if not error <= BOUNDS[case.products]:  # NaN is no small error
            raise CheckFailed(f"a result differs from the reference by {error:.2g} of its size")


def _inputs(case: Case, T: int, device: torch.device) -> tuple[LayerInput, list[Weights]]:
    """Random ones, drawn by a generator of their own."""
    D, H, B = case.directions, case.hidden, case.batch
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    directions = []
    for _ in range(D):
        named = {}
        for name, shape in weight_shapes(case.settings, H, H).items():
            noise = draw(*shape) * (H**-0.5 if len(shape) == 2 else 0.1)
            named[name] = (noise + name.startswith("gain")).requires_grad_(case.learns)
        directions.append(Weights(**named))
    x, h, c = draw(B, T, H).requires_grad_(case.learns), draw(D, B, H), draw(D, B, H)
    return LayerInput(x, None, h, c, None), directions


def _run(layer: Layer, case: Case, batch: LayerInput, weights: list[Weights]) -> list[Tensor]:
    """Output, states and, where the case learns, the gradients of x and all weights."""
    with torch.set_grad_enabled(case.learns), torch.autocast(batch.x.device.type, enabled=False):
        results = layer(batch, weights, case.settings, case.products)
        if not case.learns:
            return list(results)
        learned = [batch.x, *(w for own in weights for w in own if w is not None)]
        total = results.output.square().sum() + results.h.sum() + results.c.sum()
        return [*(part.detach() for part in results), *torch.autograd.grad(total, learned)]


def place_of(device: torch.device) -> str:
    """The device's name and all versions on which a time depends."""
    folder = Path(__file__).parent
    sources = sorted(path for pattern in ("*.py", "cuda/*.*") for path in folder.glob(pattern))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    names = ("triton", "layernorm-asr")
    versions = [f"torch {torch.__version__}", *(f"{name} {_version(name)}" for name in names)]
    return f"{torch.cuda.get_device_name(device)}, {', '.join(versions)}, kernels {digest}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


@contextmanager
def _locked_file() -> Iterator[tuple[Path | None, str]]:
    """The file of choices, while no other process uses it; None and why if there can be none."""
    with ExitStack() as files:
        path, fault = None, ""
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            lock = files.enter_context((folder / f"{FILE}.lock").open("w"))
            path = folder / FILE
            fcntl.flock(lock, fcntl.LOCK_EX)
        except (OSError, RuntimeError) as error:
            fault = "" if path else _first_line(error)  # without locks the last to write wins
        yield path, fault


def _read(path: Path) -> dict[str, Any]:
    """All choices; none from a file that is missing or damaged, which is then replaced."""
    try:
        content = read_json(path, LIMIT)
    except (OSError, ValueError, UserError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, place: str, case: Case, name: str, times: Mapping[str, float]) -> str:
    """Add a choice to the file; -> why it could not be written; empty if it was."""
    everything = _read(path)
    own = everything.get(place)
    milliseconds = {backend: round(1e3 * t, 4) for backend, t in times.items()}
    new = {str(case): {"backend": name, "ms": milliseconds}}
    everything[place] = (own if isinstance(own, dict) else {}) | new
    try:
        atomic_write(path, json.dumps(everything, indent=1) + "\n")
    except OSError as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

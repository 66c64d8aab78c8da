"""Chooses the backend of an LSTM layer, a cell step, a decoder sequence and an attention step.

The only module that knows which backends exist. A caller names one, or "auto" for the fastest that
can run; the environment variable LAYERNORM_LSTM_BACKEND replaces "auto". What a backend does not
cover falls back to a slower one, with one warning; a backend requested by name that cannot run at
all is an error. On a GPU "auto" is what fastest.py measures there: `cluster`, `cuda` or `python`.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from asr.config.cell import CellSettings
from asr.errors import UserError
from asr.kernels import python, reference, tracing
from asr.kernels.cpu import compiler, decoder, lstm, operator
from asr.kernels.cuda import lstm as cuda
from asr.kernels.deferred import DeferredWeight, autocast_dtype
from asr.kernels.double_backward import is_traced
from asr.kernels.fastest import Case, FastestBackend, place_of
from asr.kernels.types import (
    MODES,
    AttentionInput,
    DecoderConstants,
    DecoderInput,
    DecoderOutput,
    LayerInput,
    LayerOutput,
    State,
    Weights,
    check_shape,
)


def _cluster_layer(
    batch: LayerInput, weights: list[Weights], settings: CellSettings, products: torch.dtype
) -> LayerOutput:
    from asr.kernels.cuda import cluster  # loaded on a GPU only

    return cluster.layer(batch, weights, settings, products)


def _cluster_obstacle(like: Tensor | None = None) -> str | None:
    if reason := cuda.obstacle(like):
        return reason
    from asr.kernels.cuda import cluster

    return cluster.obstacle()


def _cluster_limit(like: Tensor, products: torch.dtype) -> str | None:
    from asr.kernels.cuda import cluster

    return cluster.limit(like.shape[1], products)


LAYERS = {
    "reference": reference.layer,
    "python": python.layer,
    "cpu": lstm.layer,
    "cuda": cuda.layer,
    "cluster": _cluster_layer,
}
ON_GPU = {"cuda": cuda.obstacle, "cluster": _cluster_obstacle}

NAMES = ("auto", *LAYERS)
VARIABLE = "LAYERNORM_LSTM_BACKEND"
PLAIN = CellSettings("none")
P, R = ParamSpec("P"), TypeVar("R")


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Hides a function from torch.compile, which cannot trace pointers passed to C++.

    torch.compiler.disable is called only while compiling, because importing it takes seconds.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def _constant(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compile calls the function once, with constants, and keeps the result.

    As torch.compiler.assume_constant_result, whose import takes seconds.
    """
    function._dynamo_marked_constant = True
    return function


def backends() -> dict[str, str | None]:
    """Every backend's name -> None where it can run on this machine, else the reason why not."""
    found = {"reference": None, "python": None, "cpu": compiler.obstacle()}
    return found | {name: obstacle() for name, obstacle in ON_GPU.items()}


def check_name(name: str) -> str:
    """The name itself. Raises ValueError where there is no such backend, or it cannot run here."""
    if name not in NAMES:
        raise ValueError(f"backend {name!r} is not known; choose one of {', '.join(NAMES)}")
    if reason := backends().get(name):
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    return name


def run_layer(
    name: str, batch: LayerInput, weights: list[Weights], settings: CellSettings
) -> LayerOutput:
    """One layer, all directions. Raises UserError where the named backend cannot run."""
    own = weights[0].weight_hh
    if is_traced(batch.x, batch.h, own):
        return _trace_layer(name, batch, weights, settings)
    if len(batch.x) == 0:  # no rows for a kernel
        return tracing.layer(batch, weights, settings)
    products, mixed = _products(own), autocast_dtype(own.device.type) is not None
    chosen = choose_backend(name, settings, own)
    if own.device.type == "cuda" and chosen == "python" and _is_auto(name):
        chosen = _fastest_on_gpu(Case.of(batch, settings, products), own)
    if chosen == "cluster" and (reason := _cluster_limit(own, products)):
        _warn_once(f"the LSTM's slower backend 'cuda' is used: {reason}")
        chosen = "cuda"
    if not mixed or chosen == "reference":  # autocast applies to the reference's own operators
        return LAYERS[chosen](batch, weights, settings, products)
    with torch.autocast(own.device.type, enabled=False):
        return LAYERS[chosen](_cast(batch, own.dtype), weights, settings, products)


def _trace_layer(
    name: str, batch: LayerInput, weights: list[Weights], settings: CellSettings
) -> LayerOutput:
    """In a graph: C++ is one node for torch.compile; else the layer consists of torch's operators,
    which run everywhere, also without this package.
    """
    own = weights[0].weight_hh
    compiled = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    if compiled and own.device.type == "cpu" and _compiles_to_cpp(name, settings, own.dtype):
        text = _settings_text(settings)
        return operator.layer(_cast(batch, own.dtype), weights, text, _products(own))
    return tracing.layer(batch, weights, settings)


@_constant
def _compiles_to_cpp(name: str, settings: CellSettings, dtype: torch.dtype) -> bool:
    return _choose(name, settings, torch.empty(0, dtype=dtype)) == "cpu"


@_constant
def _settings_text(settings: CellSettings) -> str:
    return operator.settings_text(settings)


def run_step(
    name: str,
    x: Tensor,
    state: State,
    mask: Tensor | None,
    weights: Weights,
    settings: CellSettings,
) -> State:
    """One time step: x (B, I), state of two (B, H) -> the next state; in C++ or as reference.

    Raises ValueError where a shape, dtype or device does not fit.
    """
    own = weights.bias_hh  # the matrices may be DeferredWeights
    check_place("x", x, own)
    for part, one in (("h", state[0]), ("c", state[1]), ("mask", mask)):
        if one is not None:
            check_place(part, one, own)
            check_shape(part, one, (x.shape[0], own.shape[0] // 4))
    deferred = isinstance(weights.weight_hh, DeferredWeight)  # torch.compile cannot trace one
    if is_traced(x, *state, own) and not (deferred and torch.compiler.is_dynamo_compiling()):
        return reference.step(x, state, mask, weights, settings)
    return _run_step(name, x, state, mask, weights, settings)


@_untraced
def _run_step(
    name: str,
    x: Tensor,
    state: State,
    mask: Tensor | None,
    weights: Weights,
    settings: CellSettings,
) -> State:
    own = weights.bias_hh
    products, mixed = _products(own), autocast_dtype(own.device.type) is not None
    if choose_backend(name, settings, own) != "cpu":  # the others are fast in loops only
        return reference.step(x, state, mask, weights, settings)
    if not mixed:
        return lstm.step(x, state, mask, weights, settings, products)
    with torch.autocast(own.device.type, enabled=False):
        x, h, c = (part.to(own.dtype) for part in (x, *state))
        mask = None if mask is None else mask.to(own.dtype)
        return lstm.step(x, (h, c), mask, weights, settings, products)


@_untraced
def attend(name: str, given: AttentionInput, valid: Tensor) -> tuple[Tensor, Tensor] | None:
    """One attention step in C++: valid (B, T) -> its weights and the new total, each (B, K, T).

    None where C++ does not cover it: dot products, other backends, devices and dtypes.
    Raises UserError where C++ is requested by name but cannot run, ValueError for a wrong shape.
    """
    if not _attends_in_cpp(name, given.v, given.keys, given.past_weights, given.past_total):
        return None
    return decoder.attend(given._replace(query=given.query.to(given.keys.dtype)), valid)


def can_run_decoder(
    name: str,
    settings: CellSettings,
    weight: Tensor,
    states: Tensor,
    v: Tensor | None,
    modules: Iterable[nn.Module],
) -> bool:
    """Can run_decoder replace single steps? To be asked before the caller draws dropout masks.

    weight: one of the cells'; states (B, T, E): the memory; v: see AttentionInput; modules: all
    that a step calls. Raises UserError as `attend`.
    """
    if any(map(has_hooks, modules)):
        return False
    return choose_backend(name, settings, weight) == "cpu" and _attends_in_cpp(name, v, states)


def has_hooks(module: nn.Module) -> bool:
    """Has the module a hook? Hooks (train.debug=nan, train.health) must see every single step."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)


@_untraced
def run_decoder(
    given: DecoderInput, cells: list[Weights], constants: DecoderConstants, settings: CellSettings
) -> DecoderOutput:
    """All steps of a decoder along given tokens in C++, where can_run_decoder allows it."""
    return decoder.run_decoder(given, cells, constants, settings, _products(cells[0].bias_hh))


def release_memory() -> None:
    """Free what backends keep between calls, before a batch that did not fit is tried again."""
    cuda.release_graphs()


def check_place(name: str, part: Tensor, own: Tensor) -> None:
    """Raises ValueError for another device than the weights', or dtype unless autocast is on."""
    if part.device != own.device:
        raise ValueError(f"{name} is on {part.device}, the LSTM's weights are on {own.device}")
    if part.dtype != own.dtype and autocast_dtype(own.device.type) is None:
        raise ValueError(f"{name} is {part.dtype}, the LSTM's weights are {own.dtype}")


@_untraced
def choose_backend(name: str, settings: CellSettings, like: Tensor) -> str:
    """The backend for weights like `like`. Raises UserError where the named one cannot run."""
    return "reference" if is_traced(like) else _choose(name, settings, like)


def _choose(name: str, settings: CellSettings, like: Tensor) -> str:
    """choose_backend; reads device and dtype of `like` alone."""
    if name == "auto":
        name = os.environ.get(VARIABLE) or "auto"
        if name not in NAMES:
            choices = ", ".join(NAMES)
            raise UserError(f"{VARIABLE} = {name}: no such backend; choose one of {choices}")
    if name == "auto" and like.device.type != "cpu":
        name = "python"
    if name == "reference":
        return name
    if not settings.guard:
        return _as_reference("zero_variance 'raw'")
    if settings.gates not in MODES or settings.norm_kind not in ("layer", "rms"):
        return _as_reference(f"norm {settings.norm!r}")
    if name in ("auto", "cpu") or (name in ON_GPU and not settings.swap):
        reason = ON_GPU.get(name, _cpu_obstacle)(like)
        if reason is None:
            return "cpu" if name == "auto" else name
        if name != "auto":
            raise UserError(f"backend {name!r} of the LSTM cannot run: {reason}")
        _warn_once(f"the LSTM's slower backend 'python' is used: {reason}")
    return _as_reference(f"norm {settings.norm!r}") if settings.swap else "python"


def _is_auto(name: str) -> bool:
    return name == "auto" and os.environ.get(VARIABLE) in (None, "", "auto")


def _fastest_on_gpu(case: Case, like: Tensor) -> str:
    """The fastest one that is right here."""
    if reason := cuda.obstacle(like):
        _warn_once(f"the LSTM's slower backend 'python' is used: {reason}")
        return "python"
    if torch.cuda.is_current_stream_capturing():  # nothing can be timed
        return "python"
    reason = _cluster_obstacle(like) or _cluster_limit(like, case.products)
    return _fastest[reason is None].choose(case, like.device, _place(like.device))


def _as_reference(what: str) -> str:
    _warn_once(f"{what} is computed by the LSTM's reference backend")
    return "reference"


def _attends_in_cpp(name: str, v: Tensor | None, *others: Tensor) -> bool:
    if v is None or v.device.type != "cpu" or v.dtype not in (torch.float32, torch.float64):
        return False
    if any(t.dtype != v.dtype or t.device != v.device for t in others):
        return False
    return choose_backend(name, PLAIN, v) == "cpu"


def _cpu_obstacle(like: Tensor) -> str | None:
    """Why the C++ kernels cannot be used on weights like these; compiles them if necessary."""
    if like.device.type != "cpu":
        return f"the weights are on {like.device}"
    if like.dtype not in (torch.float32, torch.float64):
        return f"the weights are {like.dtype}"
    try:
        compiler.load()
    except compiler.BuildError as error:
        return str(error)
    return None


def _products(like: Tensor) -> torch.dtype:
    """The dtype of products with float32 weights: bf16 under such an autocast; of others theirs."""
    half = like.dtype == torch.float32 and autocast_dtype(like.device.type) == torch.bfloat16
    return torch.bfloat16 if half else like.dtype


def _cast(batch: LayerInput, dtype: torch.dtype) -> LayerInput:
    """The batch with states and features in the dtype."""
    return LayerInput(
        batch.x.to(dtype),
        batch.lengths,
        batch.h.to(dtype),
        batch.c.to(dtype),
        None if batch.mask is None else batch.mask.to(dtype),
    )


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)


_place = functools.cache(place_of)
# By whether the backend cluster covers the case.
_fastest = [
    FastestBackend(LAYERS, candidates, "python", _warn_once)
    for candidates in (("cuda",), ("cluster", "cuda"))
]

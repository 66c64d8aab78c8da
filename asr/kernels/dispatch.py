"""Chooses the backend of an LSTM layer, a cell step, a decoder sequence and an attention step.

The only module that knows which backends exist. A module makes Kernels from a backend's name or
"auto"; the Backend that computes is chosen at the first call for a kind of weights. "auto" is
`cpu` for weights on a CPU; on an NVIDIA GPU `cluster` where it covers the layer, else `cuda`;
`python` on other devices. What a backend does not cover is computed by the next slower one, with
one warning; a backend requested by name that cannot run at all is an error.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from asr.config.cell import CellSettings
from asr.errors import UserError
from asr.kernels import python, reference, tracing
from asr.kernels.check import decoder_fault, fault
from asr.kernels.cpu import compiler, decoder, lstm, operator
from asr.kernels.cuda import cluster
from asr.kernels.cuda import decoder as cuda_decoder
from asr.kernels.cuda import lstm as cuda
from asr.kernels.deferred import LoopMatrix, autocast_dtype
from asr.kernels.tracing import is_traced
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
    check_weights,
)

VARIABLE = "LAYERNORM_LSTM_BACKEND"  # replaces "auto"
P, R = ParamSpec("P"), TypeVar("R")


class Backend(NamedTuple):
    """The functions of one backend; those that a backend lacks are torch's operators."""

    name: str
    layer: Callable[..., LayerOutput]
    missing: Callable[[], str | None] = lambda: None  # why not on this machine
    # Why not on such weights.
    obstacle: Callable[[torch.device, torch.dtype], str | None] = lambda *_: None
    step: Callable[..., State] = reference.step
    # Does it compute such attention? See `Kernels.covers_decoder`. The next two are then not None.
    covers_attention: Callable[..., bool] = lambda *_: False
    attend: Callable[..., tuple[Tensor, Tensor] | None] | None = None
    decoder: Callable[..., DecoderOutput] | None = None


def _cpu_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the C++ kernels cannot be used on such weights; compiles them if necessary."""
    if device.type != "cpu":
        return f"the weights are on {device}"
    if dtype not in (torch.float32, torch.float64):
        return f"the weights are {dtype}; float32 ones under torch.autocast are as fast as float32"
    try:
        compiler.load()
    except compiler.BuildError as error:
        return str(error)
    return None


_ON_GPU = {
    "step": cuda_decoder.step,
    "covers_attention": cuda_decoder.covers_attention,
    "attend": cuda_decoder.attend,
    "decoder": cuda_decoder.run_decoder,
}
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", reference.layer),
        Backend("python", python.layer),
        Backend(
            "cpu",
            lstm.layer,
            compiler.obstacle,
            _cpu_obstacle,
            lstm.step,
            decoder.covers_attention,
            decoder.attend,
            decoder.run_decoder,
        ),
        Backend("cuda", cuda.layer, cuda.missing, cuda.obstacle, **_ON_GPU),
        Backend("cluster", cluster.layer, cluster.missing, cuda.obstacle, **_ON_GPU),
    )
}
SLOWER = {"cluster": "cuda", "cuda": "python", "cpu": "python", "python": "reference"}
NAMES = ("auto", *BACKENDS)


def backends() -> dict[str, str | None]:
    """Every backend's name -> None where it can run on this machine, else the reason why not."""
    return {name: backend.missing() for name, backend in BACKENDS.items()}


def limit(
    name: str,
    settings: CellSettings,
    products: torch.dtype,
    shape: tuple[int, int, int] | None,
) -> str | None:
    """Why a backend does not compute such a layer; None where it does. As for choose_backend."""
    if name == "reference":
        return None
    if not settings.guard:
        return f"{name!r} does not compute zero_variance 'raw'"
    known = settings.gates in MODES and settings.norm_kind in ("layer", "rms")
    if not known or (settings.swap and name != "cpu"):
        return f"{name!r} does not compute {settings}"
    return cluster.limit(shape[1], products) if name == "cluster" and shape else None


@functools.cache
def choose_backend(
    name: str,
    settings: CellSettings,
    device: torch.device,
    dtype: torch.dtype,
    products: torch.dtype,
    shape: tuple[int, int, int] | None = None,
) -> Backend:
    """The backend for weights on that device, of that dtype; `products` is that of the products.

    shape: of a layer on a GPU, D, H and a power of 2 of at least B; None elsewhere, and for a
    decoder or a single step. On a GPU "auto" takes a backend only if it computes a small layer, or
    a small decoder, as `reference` does.
    Raises UserError where the named backend cannot run.
    """
    chosen, reasons = name, []
    if name == "auto":
        chosen = "cpu" if device.type == "cpu" else "python"
        if device.type == "cuda":
            reason = cluster.missing() or limit("cluster", settings, products, shape)
            chosen = "cuda" if reason or not shape else "cluster"
    while True:
        backend = BACKENDS[chosen]
        reason = limit(chosen, settings, products, shape)
        if reason is None and (reason := backend.obstacle(device, dtype)) and chosen == name:
            raise UserError(f"backend {name!r} of the LSTM cannot run: {reason}")
        if reason is None and name == "auto" and chosen in ("cluster", "cuda"):
            if shape:
                reason = fault(backend.layer, settings, products, shape, device)
            else:
                reason = decoder_fault(backend.decoder, settings, products, device)
            reason = reason and f"{chosen!r} fails its check on {device}: {reason}"
        if reason is None:
            break
        chosen = SLOWER[chosen]
        reasons.append(reason)
    if reasons:
        _warn_once(f"the LSTM's slower backend {chosen!r} is used: {'; '.join(reasons)}")
    return backend


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)


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


@_constant
def _compiles_to_cpp(name: str, settings: CellSettings, dtype: torch.dtype) -> bool:
    return choose_backend(name, settings, torch.device("cpu"), dtype, dtype).name == "cpu"


_settings_text = _constant(operator.settings_text)


class Kernels:
    """What computes one layer, cell or attention.

    name: a backend, or "auto", which the environment variable LAYERNORM_LSTM_BACKEND replaces.
    Raises ValueError where there is no such backend, or it cannot run on this machine.
    """

    def __init__(self, name: str, settings: CellSettings) -> None:
        if name == "auto" and (variable := os.environ.get(VARIABLE)):
            name = variable
            if name not in NAMES:
                choices = ", ".join(NAMES)
                raise UserError(f"{VARIABLE} = {name}: no such backend; choose one of {choices}")
        if name not in NAMES:
            raise ValueError(f"backend {name!r} is not known; choose one of {', '.join(NAMES)}")
        if name != "auto" and (reason := BACKENDS[name].missing()):
            raise ValueError(f"backend {name!r} cannot run here: {reason}")
        self.name, self.settings = name, settings

    def layer(self, batch: LayerInput, weights: list[Weights]) -> LayerOutput:
        """One layer, all directions.

        Raises UserError where the named backend cannot run, ValueError for a wrong weight.
        """
        for one in weights:
            check_weights(one, self.settings, batch.x.shape[2], batch.h.shape[2])
        weight = weights[0].weight_hh
        if is_traced(batch.x, batch.h, weight):
            return self._layer_in_graph(batch, weights)
        if len(batch.x) == 0:  # no rows for a kernel
            return tracing.layer(batch, weights, self.settings)
        backend, products = self._backend(weight, batch), _product_dtype(weight)
        arguments = weights, self.settings, products
        if not _autocasts(weight) or backend.name == "reference":  # autocast knows its operators
            return backend.layer(batch, *arguments)
        with torch.autocast(weight.device.type, enabled=False):
            return backend.layer(_cast(batch, weight.dtype), *arguments)

    def _layer_in_graph(self, batch: LayerInput, weights: list[Weights]) -> LayerOutput:
        """C++ is one node for torch.compile; else the layer consists of torch's operators, which
        run everywhere, also without this package.
        """
        weight = weights[0].weight_hh
        compiled = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        on_cpu = compiled and weight.device.type == "cpu"
        if on_cpu and _compiles_to_cpp(self.name, self.settings, weight.dtype):
            text, batch = _settings_text(self.settings), _cast(batch, weight.dtype)
            return operator.layer(batch, weights, text, _product_dtype(weight))
        return tracing.layer(batch, weights, self.settings)

    def step(self, x: Tensor, state: State, mask: Tensor | None, weights: Weights) -> State:
        """One time step: x (B, I), state of two (B, H) -> the next state; in C++ or as reference.

        Raises ValueError where a shape, dtype or device does not fit.
        """
        weight = weights.bias_hh  # the matrices may be LoopMatrices
        check_device_and_dtype("x", x, weight)
        for part, one in (("h", state[0]), ("c", state[1]), ("mask", mask)):
            if one is not None:
                check_device_and_dtype(part, one, weight)
                check_shape(part, one, (x.shape[0], weight.shape[0] // 4))
        deferred = isinstance(weights.weight_hh, LoopMatrix)  # torch.compile cannot trace one
        if is_traced(x, *state, weight) and not (deferred and torch.compiler.is_dynamo_compiling()):
            return reference.step(x, state, mask, weights, self.settings)
        return self._step(x, state, mask, weights)

    @_untraced
    def _step(self, x: Tensor, state: State, mask: Tensor | None, weights: Weights) -> State:
        weight = weights.bias_hh
        backend, products = self._backend(weight), _product_dtype(weight)
        if not _autocasts(weight) or backend.step is reference.step:
            return backend.step(x, state, mask, weights, self.settings, products)
        with torch.autocast(weight.device.type, enabled=False):
            x, h, c = (part.to(weight.dtype) for part in (x, *state))
            mask = None if mask is None else mask.to(weight.dtype)
            return backend.step(x, (h, c), mask, weights, self.settings, products)

    def attend(self, inputs: AttentionInput, valid: Tensor) -> tuple[Tensor, Tensor]:
        """One attention step: valid (B, T) -> its weights and the new total, each (B, K, T).

        Raises UserError where the named backend cannot run, ValueError for a wrong shape.
        """
        result = self._attend(inputs, valid)
        return reference.attend(inputs, valid) if result is None else result

    @_untraced
    def _attend(self, inputs: AttentionInput, valid: Tensor) -> tuple[Tensor, Tensor] | None:
        """None where the backend does not cover it."""
        keys, query, v, *past, weight_loc, conv = inputs
        like = keys if v is None else v
        if is_traced(like) or not _fit(like, keys, *past):
            return None
        backend = self._backend(like)
        if not backend.covers_attention(keys.shape[2], v, weight_loc, conv):
            return None
        return backend.attend(inputs._replace(query=query.to(keys.dtype)), valid)

    @_untraced
    def covers_decoder(
        self,
        weight: Tensor,
        states: Tensor,
        matrices: Sequence[Tensor | None],
        modules: Iterable[nn.Module],
    ) -> bool:
        """Can `decoder` replace single steps? To be asked before the caller draws dropout masks.

        weight: one of the cells'; states (B, T, E): the memory; matrices: weight_query, v,
        weight_loc and conv of DecoderInput; modules: all that a step calls. Raises UserError as
        `attend`.
        """
        if any(map(has_hooks, modules)) or is_traced(weight):
            return False
        weight_query, *others = matrices
        if not _fit(weight, states, *(t for t in matrices if t is not None)):
            return False
        return self._backend(weight).covers_attention(len(weight_query), *others)

    @_untraced
    def decoder(
        self, inputs: DecoderInput, cells: list[Weights], constants: DecoderConstants
    ) -> DecoderOutput:
        """All steps of a decoder along known tokens, where covers_decoder allows it."""
        for one in cells:
            check_weights(one, self.settings, one.weight_ih.shape[1], one.weight_hh.shape[1])
        weight = cells[0].weight_hh
        run, products = self._backend(weight).decoder, _product_dtype(weight)
        with torch.autocast(weight.device.type, enabled=False):
            return run(inputs, cells, constants, self.settings, products)

    def _backend(self, weight: Tensor, batch: LayerInput | None = None) -> Backend:
        """The backend for weights like `weight`, of a layer with this batch or of single steps."""
        shape = None
        if batch is not None and weight.device.type == "cuda":
            D, B, H = batch.h.shape
            shape = D, H, 1 << (B - 1).bit_length()
        kind = weight.device, weight.dtype, _product_dtype(weight)
        return choose_backend(self.name, self.settings, *kind, shape)


def has_hooks(module: nn.Module) -> bool:
    """Has the module a hook? Hooks (train.debug=nan, train.health) must see every single step."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)


def release_memory() -> None:
    """Free what backends keep between calls, before a batch that did not fit is tried again."""
    cuda.release_graphs()


def check_device_and_dtype(name: str, part: Tensor, weight: Tensor) -> None:
    """Raises ValueError for another device than the weights', or dtype unless autocast is on."""
    if part.device != weight.device:
        raise ValueError(f"{name} is on {part.device}, the LSTM's weights are on {weight.device}")
    if part.dtype != weight.dtype and not _autocasts(weight):
        raise ValueError(f"{name} is {part.dtype}, the LSTM's weights are {weight.dtype}")


def _fit(weight: Tensor, *others: Tensor) -> bool:
    return all(t.dtype == weight.dtype and t.device == weight.device for t in others)


def _autocasts(like: Tensor) -> bool:
    return autocast_dtype(like.device.type) is not None


def _product_dtype(weight: Tensor) -> torch.dtype:
    """Of products with such weights: bf16 for float32 under autocast to it, else their dtype."""
    half = weight.dtype == torch.float32 and autocast_dtype(weight.device.type) == torch.bfloat16
    return torch.bfloat16 if half else weight.dtype


def _cast(batch: LayerInput, dtype: torch.dtype) -> LayerInput:
    """The batch with states and features in the dtype."""
    return LayerInput(
        batch.x.to(dtype),
        batch.lengths,
        batch.h.to(dtype),
        batch.c.to(dtype),
        None if batch.mask is None else batch.mask.to(dtype),
    )

"""Which backend computes a layer or a step: the one asked for, or the fastest that can.

"auto" may be replaced by the environment variable LAYERNORM_LSTM_BACKEND. What a fast backend
does not cover falls back to one that does, said once; a backend that is asked for by name where
it cannot run at all is an error. On a GPU "auto" is `python` until `cuda` has been measured there.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from asr.errors import UserError
from asr.nn.kernels import python, reference
from asr.nn.kernels.cpu import backend as cpu
from asr.nn.kernels.cpu import build
from asr.nn.kernels.cpu import spell as cpu_spell
from asr.nn.kernels.cpu import step as cpu_step
from asr.nn.kernels.cpu.spell import Spelled
from asr.nn.kernels.cuda import backend as cuda
from asr.nn.kernels.problem import Batch, Result, Setting, Weights

LAYERS = {
    "reference": reference.layer,
    "python": python.layer,
    "cpu": cpu.layer,
    "cuda": cuda.layer,
}
NAMES = ("auto", *LAYERS)
VARIABLE = "LAYERNORM_LSTM_BACKEND"
State = tuple[Tensor, Tensor]
P, R = ParamSpec("P"), TypeVar("R")


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """For torch.compile, which cannot follow what C++ is given by its address.

    torch.compiler.disable is asked for only then: it takes seconds to import.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def backends() -> dict[str, str | None]:
    """Every backend's name -> None where it can run on this machine, else the reason why not."""
    return {"reference": None, "python": None, "cpu": build.obstacle(), "cuda": cuda.obstacle()}


def check_name(name: str) -> str:
    """The name itself. Raises ValueError where there is no such backend, or it can never run."""
    if name not in NAMES:
        raise ValueError(f"backend {name!r} is not known; choose one of {', '.join(NAMES)}")
    if reason := backends().get(name):
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    return name


@_untraced
def run_layer(name: str, batch: Batch, weights: list[Weights], setting: Setting) -> Result:
    """One layer, all directions. Raises UserError where the backend asked for cannot run."""
    own = weights[0].weight_hh
    setting, mixed = _under_autocast(setting, own)
    chosen = choose(name, setting, own)
    if not mixed or chosen == "reference":  # which autocast serves as it does any module
        return LAYERS[chosen](batch, weights, setting)
    with torch.autocast(own.device.type, enabled=False):
        batch = Batch(*(_cast(part, own.dtype) for part in batch))
        return LAYERS[chosen](batch, weights, setting)


@_untraced
def run_step(
    name: str, x: Tensor, state: State, mask: Tensor | None, weights: Weights, setting: Setting
) -> State:
    """One time step: x (B, I), state of two (B, H) -> the next state; in C++ or as reference.

    Raises ValueError where a shape, dtype or device does not fit.
    """
    own = weights.bias_hh  # the matrices may be those of a loop
    check_place("x", x, own)
    shape = (x.shape[0], own.shape[0] // 4)
    for part, one in (("h", state[0]), ("c", state[1]), ("mask", mask)):
        if one is not None:
            check_place(part, one, own)
            check_shape(part, one, shape)
    setting, mixed = _under_autocast(setting, own)
    if choose(name, setting, own) != "cpu":  # a step has no loop that other backends could save
        return reference.step(x, state, mask, weights, setting)
    if not mixed:
        return cpu_step.step(x, state, mask, weights, setting)
    with torch.autocast(own.device.type, enabled=False):
        x, h, c, mask = (_cast(part, own.dtype) for part in (x, *state, mask))
        return cpu_step.step(x, (h, c), mask, weights, setting)


@_untraced
def run_spell(given: cpu_spell.Inputs, cells: list[Weights], fixed: cpu_spell.Fixed) -> Spelled:
    """A speller's steps along given tokens, where a step is chosen to run in C++."""
    setting, _ = _under_autocast(fixed.setting, cells[0].bias_hh)
    return cpu_spell.spell(given, cells, fixed._replace(setting=setting))


def check_place(name: str, part: Tensor, own: Tensor) -> None:
    """Raises ValueError where a part lies elsewhere than the weights, or has another dtype.

    Autocast alone may bring another dtype. C++ would read either as what it is not.
    """
    if part.device != own.device:
        raise ValueError(f"{name} is on {part.device}, the LSTM's weights are on {own.device}")
    if part.dtype != own.dtype and not torch.is_autocast_enabled(own.device.type):
        raise ValueError(f"{name} is {part.dtype}, the LSTM's weights are {own.dtype}")


def check_shape(name: str, part: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError where a part has another shape."""
    if part.shape != expected:
        raise ValueError(f"{name} has shape {tuple(part.shape)}; expected {expected}")


@_untraced
def choose(name: str, setting: Setting, like: Tensor) -> str:
    """The backend for weights like `like`. Raises UserError where the one asked for cannot run."""
    name = _from_environment() if name == "auto" else name
    if name == "reference":
        return name
    if not setting.guard:
        return _as_reference("zero_rows 'raw'")
    if name == "python" or (name == "auto" and like.device.type != "cpu"):
        return _in_python(setting)
    if name == "cuda" and setting.norm == "thesis":
        return _as_reference("norm 'thesis'")
    reason = cuda.obstacle(like) if name == "cuda" else _obstacle(like)
    if reason is None:
        return "cuda" if name == "cuda" else "cpu"
    if name != "auto":
        raise UserError(f"backend {name!r} of the LSTM cannot run: {reason}")
    _say_once(f"the LSTM's slower backend 'python' is used: {reason}")
    return _in_python(setting)


def _in_python(setting: Setting) -> str:
    return "python" if setting.norm != "thesis" else _as_reference("norm 'thesis'")


def _as_reference(what: str) -> str:
    _say_once(f"{what} is computed by the LSTM's reference backend")
    return "reference"


def _from_environment() -> str:
    name = os.environ.get(VARIABLE) or "auto"
    if name not in NAMES:
        choices = ", ".join(NAMES)
        raise UserError(f"{VARIABLE} = {name}: no such backend; choose one of {choices}")
    return name


def _obstacle(like: Tensor) -> str | None:
    """Why the C++ kernels cannot be used on weights like these; compiles them if need be."""
    if like.device.type != "cpu":
        return f"the weights are on {like.device}"
    if like.dtype not in (torch.float32, torch.float64):
        return f"the weights are {like.dtype}"
    try:
        build.load()
    except build.BuildError as error:
        return str(error)
    return None


def _under_autocast(setting: Setting, like: Tensor) -> tuple[Setting, bool]:
    kind = like.device.type
    if not torch.is_autocast_enabled(kind):
        return setting, False
    half = torch.get_autocast_dtype(kind) == torch.bfloat16
    return (setting._replace(precision="bf16") if half else setting), True


def _cast(part: object, dtype: torch.dtype) -> object:
    return part.to(dtype) if isinstance(part, Tensor) else part


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)

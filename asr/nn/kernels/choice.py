"""Which backend computes a layer or a step: the one asked for, or the fastest that can."""

from torch import Tensor

from asr.errors import UserError
from asr.nn.kernels import reference
from asr.nn.kernels.problem import Batch, Result, Setting, Weights

NAMES = ("auto", "reference")


def backends() -> dict[str, str | None]:
    """Every backend's name -> None where it can run on this machine, else the reason why not."""
    return {"reference": None}


def check_name(name: str) -> str:
    """The name itself. Raises UserError where there is no such backend."""
    if name not in NAMES:
        raise UserError(f"backend {name!r} is not known; choose one of {', '.join(NAMES)}")
    return name


def run_layer(name: str, batch: Batch, weights: list[Weights], setting: Setting) -> Result:
    """One layer, all directions."""
    return reference.layer(batch, weights, setting)


def run_step(
    name: str,
    x: Tensor,
    state: tuple[Tensor, Tensor],
    mask: Tensor | None,
    weights: Weights,
    setting: Setting,
) -> tuple[Tensor, Tensor]:
    """One time step: x (B, I), state of two (B, H) -> the next state."""
    return reference.step(x, state, mask, weights, setting)

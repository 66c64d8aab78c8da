"""The optimizer, and learning rates as functions of the step, which have no state to resume.

Every schedule warms up linearly over `warmup` steps. Steps are counted from 1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from asr.config.schema import OptimizerConfig, ScheduleConfig

Schedule = Callable[[int, float], float]  # (step, progress from 0 to 1) -> learning rate


def constant(lr: float, warmup: int) -> Schedule:
    """Up to lr, then constant."""
    return lambda step, progress: lr * _ramp(step, warmup)


def noam(factor: float, warmup: int, width: int) -> Schedule:
    """factor * width^-0.5 * min(step^-0.5, step * warmup^-1.5): Vaswani et al. 2017, eq. 3."""
    slope = max(warmup, 1) ** -1.5
    return lambda step, progress: factor * width**-0.5 * min(step**-0.5, step * slope)


def tri_stage(lr: float, warmup: int, hold: float, floor: float) -> Schedule:
    """Up to lr, constant until `hold` of the run, then exponentially down to floor * lr at its end.

    Park et al. 2019 (arXiv:1904.08779), section 3.3, in shares of the run instead of steps.
    """

    def rate(step: int, progress: float) -> float:
        decay = 0.0 if hold >= 1.0 else min(max(progress - hold, 0.0) / (1.0 - hold), 1.0)
        return lr * _ramp(step, warmup) * floor**decay

    return rate


def _ramp(step: int, warmup: int) -> float:
    return min(step / warmup, 1.0) if warmup else 1.0


def make_schedule(config: ScheduleConfig, lr: float) -> Schedule:
    """The schedule of a recipe; `lr` is that of the optimizer's section."""
    if config.kind == "noam":
        return noam(lr, config.warmup, config.width)
    if config.kind == "constant":
        return constant(lr, config.warmup)
    return tri_stage(lr, config.warmup, config.hold, config.floor)


def make_optimizer(config: OptimizerConfig, module: nn.Module) -> optim.Optimizer:
    """Adam or AdamW over all trainable parameters; gains and biases are not decayed."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    make = {"adam": optim.Adam, "adamw": optim.AdamW}[config.kind]
    return make(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def load_moments(optimizer: optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the moments of a state_dict, but not its betas, eps and decay, which the recipe sets.

    Raises ValueError where they are not Adam's moments of these parameters.
    """
    groups = optimizer.state_dict()["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if [group["params"] for group in state["param_groups"]] != [g["params"] for g in groups]:
        raise ValueError("optimizer: moments of other parameters")
    numbers = range(len(parameters))
    if wrong := [n for n in state["state"] if type(n) is not int or n not in numbers]:
        raise ValueError(f"optimizer: no parameter {wrong[0]}")
    moments = {n: _copied(n, parameters[n], own) for n, own in state["state"].items()}
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _copied(number: int, parameter: nn.Parameter, moments: dict[str, Any]) -> dict[str, Tensor]:
    """The moments of one parameter, read from the file that they are mapped from."""
    shapes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
    for name, shape in shapes.items():
        tensor = moments.get(name)
        if not (
            type(tensor) is Tensor
            and (tensor.layout, tensor.device.type) == (torch.strided, "cpu")
            and tensor.dtype == (torch.float32 if name == "step" else parameter.dtype)
            and tensor.shape == shape
            and bool(tensor.isfinite().all())
            and (name == "exp_avg" or bool((tensor >= 0).all()))
        ):
            raise ValueError(f"optimizer: {name} of parameter {number} does not fit")
    return {n: moments[n].clone(memory_format=torch.contiguous_format) for n in shapes}

"""The optimiser, and learning rates as plain functions of the step: nothing of them to resume.

Every schedule warms up linearly over `warmup` steps. Steps are counted from 1.
"""

from collections.abc import Callable
from typing import Any

from torch import nn, optim

Schedule = Callable[[int, float], float]  # (step, progress from 0 to 1) -> learning rate


def constant(lr: float, warmup: int) -> Schedule:
    """Up to lr and stay there."""
    return lambda step, progress: lr * _ramp(step, warmup)


def noam(factor: float, warmup: int, width: int) -> Schedule:
    """factor * width^-0.5 * min(step^-0.5, step * warmup^-1.5): Vaswani et al. 2017, eq. 3."""
    slope = max(warmup, 1) ** -1.5
    return lambda step, progress: factor * width**-0.5 * min(step**-0.5, step * slope)


def ramp_hold_decay(lr: float, warmup: int, hold: float, floor: float) -> Schedule:
    """Up to lr, stay until `hold` of the run, fall exponentially to floor * lr at its end.

    Park et al. 2019 (arXiv:1904.08779), section 3.3, in shares of the run instead of steps.
    """

    def rate(step: int, progress: float) -> float:
        fallen = 0.0 if hold >= 1.0 else min(max(progress - hold, 0.0) / (1.0 - hold), 1.0)
        return lr * _ramp(step, warmup) * floor**fallen

    return rate


def _ramp(step: int, warmup: int) -> float:
    return min(step / warmup, 1.0) if warmup else 1.0


def make_optimizer(
    module: nn.Module,
    kind: str,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> optim.Optimizer:
    """Adam or AdamW over all parameters; gains and biases are not decayed."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in module.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    make = {"adam": optim.Adam, "adamw": optim.AdamW}[kind]
    return make(groups, lr=lr, betas=betas, eps=eps, fused=True)


def load_moments(optimizer: optim.Optimizer, state: dict[str, Any]) -> None:
    """From another's state_dict what it had gathered; betas, eps and decay stay `optimizer`'s own.

    torch would take these too, and so undo what a recipe has changed since.
    """
    optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})

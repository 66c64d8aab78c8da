"""The optimizer, and learning rates as functions of the step, which have no state to resume.

    adam, adamw      Kingma & Ba 2015; decoupled weight decay: Loshchilov & Hutter 2019
    muon             Jordan et al. 2024: the momentum of every matrix is made orthogonal; with the
                     step size of Liu et al. 2025 (arXiv:2502.16982), that of AdamW. Embeddings,
                     output layers and all that is no matrix are left to AdamW. The four gates of
                     an LSTM, or the queries, keys and values of attention, are one matrix.
    schedule_free    AdamW with an average of the weights instead of a falling rate: Defazio et al.
                     2024 (arXiv:2405.15682); averaging.py has the weights to validate and save

Every schedule warms up linearly over `warmup` steps. Steps are counted from 1.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, count, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn, optim

from asr.config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from asr.errors import UserError
from asr.training import distributed
from asr.training.losses import read

Schedule = Callable[[int, float], float]  # (step, progress from 0 to 1) -> learning rate


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


def cosine(lr: float, warmup: int, floor: float) -> Schedule:
    """Up to lr, and along half a cosine over the whole run down to floor * lr at its end.

    Loshchilov & Hutter 2017 (arXiv:1608.03983), eq. 5, without restarts.
    """

    def rate(step: int, progress: float) -> float:
        fallen = (1.0 - math.cos(math.pi * min(progress, 1.0))) / 2
        return lr * _ramp(step, warmup) * (1.0 - (1.0 - floor) * fallen)

    return rate


def _ramp(step: int, warmup: int) -> float:
    return min(step / warmup, 1.0) if warmup else 1.0


def make_schedule(config: ScheduleConfig, lr: float) -> Schedule:
    """The schedule of a recipe; `lr` is that of the optimizer's section."""
    if config.kind == "noam":
        return noam(lr, config.warmup, config.width)
    if config.kind == "cosine":
        return cosine(lr, config.warmup, config.floor)
    hold = 1.0 if config.kind == "constant" else config.hold
    return tri_stage(lr, config.warmup, hold, config.floor)


# Matrices with a row per token or class, at the ends of a network; Muon is for those between.
ENDS = re.compile(r"((.+\.)?(embedding|words|output|ctc_head)|(model\.)?(speller\.)?out)\.weight")


LARGEST = 1e18  # of a weight: products of two such overflow float32


def check_weights(tensors: Mapping[str, Tensor], step: int, config: OptimizerConfig) -> None:
    """Raise UserError where one is NaN, infinite or beyond LARGEST, which no further step mends.

    It names `step` and the first such tensor.
    """
    named = {n: t.detach() for n, t in tensors.items() if t.is_floating_point() and t.numel()}
    largest = read([t.abs().max() for t in named.values()]).tolist()  # NaN where one is
    for name, value in zip(named, largest, strict=True):
        if not value <= LARGEST:
            shown = f"{value:.3g}" if value < math.inf else "infinite"
            shown = "NaN" if math.isnan(value) else shown
            raise UserError(
                f"step {step}: a weight of {name} is {shown} after its update, and is not saved; "
                f"lower train.optimizer.lr = {config.lr:g}"
            )


def matching(model: nn.Module, pattern: str) -> Iterator[nn.Parameter]:
    """The parameters whose names match, where * is any text. Tied ones have several names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if fnmatchcase(name, pattern):
            yield parameter


def check_patterns(model: nn.Module, config: TrainConfig) -> None:
    """Raise UserError for a pattern that matches no parameter, and where all are frozen."""
    factors = config.optimizer.lr_factors
    for key, patterns in {"freeze": config.freeze, "optimizer.lr_factors": factors}.items():
        for pattern in patterns:
            if not any(True for _ in matching(model, pattern)):
                hint = _nearest(pattern, [name for name, _ in model.named_parameters()])
                raise UserError(f"train.{key}: no parameter has a name like {pattern!r}; {hint}")
    frozen = {p for pattern in config.freeze for p in matching(model, pattern)}
    if len(frozen) == len(list(model.parameters())):
        raise UserError(f"train.freeze = {list(config.freeze)} leaves no parameter to train")


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Patterns and names that may have been meant."""
    parts = [list(accumulate(name.split("."), "{}.{}".format)) for name in names]
    known = dict.fromkeys([*(f"{part}.*" for p in parts for part in p[:-1]), *names])
    near = " or ".join(difflib.get_close_matches(pattern, known, n=3))
    first = ", ".join(dict.fromkeys(part[0] for part in parts))
    return f"names begin with {first}" + (f". Did you mean {near}?" if near else "")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters that match one of the patterns from training."""
    for parameter in (p for pattern in patterns for p in matching(model, pattern)):
        parameter.requires_grad_(False)


def make_optimizer(config: OptimizerConfig, module: nn.Module) -> optim.Optimizer:
    """The optimizer of all parameters; gains and biases are not decayed.

    Frozen ones are included, which without gradient take no step: a stage may train them.
    """
    factors: dict[nn.Parameter, float] = {}
    for pattern, factor in config.lr_factors.items():
        for parameter in matching(getattr(module, "model", module), pattern):
            factors.setdefault(parameter, factor)
    if config.kind == "muon":
        hidden, others = [], []
        for name, parameter in module.named_parameters():
            is_hidden_matrix = parameter.dim() == 2 and not ENDS.fullmatch(name)
            (hidden if is_hidden_matrix else others).append(parameter)
        return Muon(config, _groups(config, hidden, factors), _groups(config, others, factors))
    groups = _groups(config, list(module.parameters()), factors)
    if config.kind == "schedule_free":
        from schedulefree import AdamWScheduleFree

        made = AdamWScheduleFree(groups, config.lr, config.betas, config.eps)
        made.train()
        return made
    make = {"adam": optim.Adam, "adamw": optim.AdamW}[config.kind]
    return make(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _groups(
    config: OptimizerConfig,
    parameters: Sequence[nn.Parameter],
    factors: Mapping[nn.Parameter, float],
) -> list[dict[str, Any]]:
    """First matrices, then gains and biases; the factors change neither order nor numbers."""
    ordered = sorted(parameters, key=lambda p: p.dim() <= 1)
    grouped = groupby(ordered, lambda p: (p.dim() > 1, factors.get(p, 1.0)))
    return [
        {
            "params": list(group),
            "weight_decay": config.weight_decay if decayed else 0.0,
            "lr_factor": factor,
        }
        for (decayed, factor), group in grouped
    ]


class Muon(optim.AdamW):
    """AdamW, but Muon for the groups of hidden matrices, which follow the others."""

    def __init__(
        self,
        config: OptimizerConfig,
        hidden: list[dict[str, Any]],
        others: list[dict[str, Any]],
    ) -> None:
        settings = optim.Muon([torch.zeros(1, 1)]).defaults | {"lr": config.lr}
        groups = [*others, *(settings | group for group in hidden)]
        super().__init__(groups, config.lr, config.betas, config.eps, fused=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        optim.Optimizer.__setstate__(self, state)  # AdamW's reads a step of every parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all weights; every rank calls it."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if kind_of(group) == "adam"]
        super().step()
        self.param_groups = groups
        self._step_hidden([group for group in groups if kind_of(group) == "muon"])

    def _step_hidden(self, groups: list[dict[str, Any]]) -> None:
        """One update of the hidden matrices as torch's Muon; each rank computes a share of them.

        Making the matrices orthogonal can take a third of a training step. All ranks have the same
        momenta, because they have the same gradients.
        """
        used = [p for group in groups for p in group["params"] if p.grad is not None]
        # Multiplications of one Newton-Schulz iteration, up to a factor.
        owners = distributed.assign_owners([max(p.shape) * min(p.shape) ** 2 for p in used])
        mine = {p for p, owner in zip(used, owners, strict=True) if owner == distributed.rank()}
        for group in groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            decay = group["momentum"]
            for p in parameters:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momenta = {p: self.state[p]["momentum_buffer"] for p in parameters}
            torch._foreach_lerp_(list(momenta.values()), [p.grad for p in parameters], 1 - decay)
            for alike in _of_one_shape([p for p in parameters if p in mine]):
                gradients, own = [p.grad for p in alike], [momenta[p] for p in alike]
                ahead = torch._foreach_lerp(gradients, own, decay)
                directions = orthogonal(torch.stack(ahead) if len(ahead) > 1 else ahead[0], group)
                directions = directions.float().view(len(alike), *ahead[0].shape).unbind()
                scale = 0.2 * math.sqrt(max(ahead[0].shape))  # the step size of AdamW
                torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(alike, directions, alpha=-group["lr"] * scale)
        distributed.broadcast(used, owners)


def _of_one_shape(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices to multiply at once: on a GPU, where launching takes longer, all of one shape."""
    if not matrices or matrices[0].device.type == "cpu":
        yield from ([matrix] for matrix in matrices)
        return
    shape = attrgetter("shape")
    for _, alike in groupby(sorted(matrices, key=shape), shape):
        yield list(alike)


def orthogonal(matrices: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """(M, N) or (B, M, N) -> nearly U V^T of each one's singular value decomposition, by
    Newton-Schulz iterations.

    As torch's Muon, whose ns_coefficients, ns_steps and eps are the settings, in bf16; but float32
    on a CPU without bf16 instructions, where bf16 takes twenty times as long.
    """
    a, b, c = settings["ns_coefficients"]
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    x = matrices.to(torch.bfloat16 if distributed.computes_bf16(matrices.device) else torch.float32)
    turned = x.size(-2) > x.size(-1)
    x = x.mT if turned else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=settings["eps"])
    for _ in range(settings["ns_steps"]):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if turned else x


def load_moments(optimizer: optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the moments of a state_dict, but not its betas, eps, decay and groups by factor of the
    learning rate, which the recipe sets.

    Raises ValueError where they are not this optimizer's moments of these parameters.
    """
    groups = optimizer.state_dict()["param_groups"]
    ours, theirs = (
        [n for g in each for n in g["params"]] for each in (groups, state["param_groups"])
    )
    if ours != theirs:
        raise ValueError("optimizer: moments of other parameters")
    saved = {n: group for group in state["param_groups"] for n in group["params"]}
    # Parameters that a stage trains from now on have no moments, and their steps count from 0.
    progress = [
        {key: saved[n].get(key) for key in _PROGRESS} if n in state["state"] else {} for n in ours
    ]
    if kind_of(groups[0]) == "schedule_free":
        optimizer.param_groups[:] = _by_progress(optimizer.param_groups, progress)
        groups = optimizer.state_dict()["param_groups"]
    for group in (group for group in groups if group["params"]):
        before = progress[group["params"][0]]
        group |= {k: _progress(k, before[k]) for k in _PROGRESS if k in group and k in before}
    known = {
        number: (parameter, _MOMENTS[kind_of(group)])
        for group, mapped in zip(optimizer.param_groups, groups, strict=True)
        for number, parameter in zip(mapped["params"], group["params"], strict=True)
    }
    if wrong := [n for n in state["state"] if type(n) is not int or n not in known]:
        raise ValueError(f"optimizer: no parameter {wrong[0]}")
    moments = {n: _copied(n, *known[n], saved) for n, saved in state["state"].items() if saved}
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


# What the optimizers store for each parameter; where negative values are possible, False.
_MOMENTS = {
    "adam": {"step": True, "exp_avg": False, "exp_avg_sq": True},
    "muon": {"momentum_buffer": False},
    "schedule_free": {"z": False, "exp_avg_sq": True},
}
# What schedule_free stores in its groups beside settings, its steps and the weight of its average:
# types and the lowest value.
_PROGRESS = {"k": ((int,), 0), "weight_sum": ((int, float), 0), "lr_max": ((int, float), -1)}


def kind_of(group: dict[str, Any]) -> str:
    """The key of _MOMENTS for a group of parameters, known by its settings."""
    if "ns_steps" in group:
        return "muon"
    return "schedule_free" if "weight_sum" in group else "adam"


def _by_progress(
    groups: Sequence[dict[str, Any]], progress: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The groups, divided where the progress of their parameters, in order, differs."""
    numbers = count()
    return [
        {**group, "params": list(part)}
        for group in groups
        for _, part in groupby(group["params"], lambda _: progress[next(numbers)])
    ]


def _progress(key: str, value: Any) -> float:
    kinds, least = _PROGRESS[key]
    if type(value) not in kinds or not least <= value < 2**63:
        raise ValueError(f"optimizer: {key} must be a number, {least} or more")
    return value


def is_finite_tensor(value: Any, shape: torch.Size) -> bool:
    """Whether it is a plain tensor of that shape, on the CPU, without NaN or infinity."""
    return (
        type(value) is Tensor
        and (value.layout, value.device.type) == (torch.strided, "cpu")
        and value.shape == shape
        and bool(value.isfinite().all())
    )


def _copied(
    number: int, parameter: nn.Parameter, names: dict[str, bool], moments: dict[str, Any]
) -> dict[str, Tensor]:
    """The moments of one parameter, read from the file that they are mapped from."""
    for name, positive in names.items():
        tensor = moments.get(name)
        shape = torch.Size() if name == "step" else parameter.shape
        if not (
            is_finite_tensor(tensor, shape)
            and tensor.dtype == (torch.float32 if name == "step" else parameter.dtype)
            and (not positive or bool((tensor >= 0).all()))
        ):
            raise ValueError(f"optimizer: {name} of parameter {number} does not fit")
    return {n: moments[n].clone(memory_format=torch.contiguous_format) for n in names}

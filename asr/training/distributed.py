"""Several processes that train one model: what they share, and what the first does alone.

torchrun starts them and tells each, in its environment, its number (rank) and how many there are.
Every rank reads its own batches and sums their gradients; one sum over all ranks makes the step.
That sum stands behind the backward pass, not within it as in DistributedDataParallel: a rank may
then have no batch in an epoch's last step, cut one that does not fit in memory, or leave out
layers, and the sum is still that of one process over the same batches.

Without torchrun there is one rank, and nothing here does anything. What is handed to `gather` may
be any object; all ranks must call the functions below in the same order.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asr.errors import UserError
from asr.training.meeting import has_spoken, new_room
from asr.training.objective import Sum, add

Value = TypeVar("Value")
# A rank that dies is noticed by its connections and by torchrun, not by this; the first rank may
# make a corpus, or measure its statistics, while the others wait.
PATIENCE = timedelta(hours=3)
BUCKET = 8 << 20  # numbers that are summed at once: 32 MB of gradients


class Lost(Exception):
    """Another rank has ended; it has said why, or was killed."""


def world() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this rank writes the files and speaks for all."""
    return rank() == 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Within, the processes that torchrun started are one training's ranks; `device` as in recipes.

    The first rank that fails says why; the others, which fail because of it, end in silence.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    backend = _take_device(device)
    whole, number, count = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(new_room(whole, number, count), whole)
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    try:
        yield
        gather(None)  # torchrun ends all as soon as one ends with a code other than 0
    except Lost as error:
        print(f"rank {number}: ends, another was killed or says why ({error})", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if has_spoken(store, number, count):
            sys.exit(2 if isinstance(error, UserError) else 1)
        if isinstance(error, UserError):
            raise UserError(f"rank {number}: {error}") from None
        raise
    dist.destroy_process_group()


def _take_device(device: str) -> str:
    """This rank's own GPU, where GPUs are used -> the backend that sums on it."""
    if device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if ":" in device:
        raise UserError(f"train.device = {device} is one GPU for all ranks; take auto or cuda")
    if local >= there:
        raise UserError(
            f"{there} GPUs for rank {local} and those before it: take --nproc-per-node={there}"
        )
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


@contextmanager
def first_alone() -> Iterator[None]:
    """The first rank goes through the block alone; the others when it is done."""
    if not is_first():
        gather(None)
    yield
    if is_first():
        gather(None)


def check_share(batches: int) -> None:
    """UserError where an epoch of so many batches leaves a rank without any."""
    if batches < world():
        raise UserError(
            f"{batches} batches an epoch are too few for {world()} ranks: make them smaller "
            "(train.batch_seconds; of text data.batch_bytes, of images data.batch) or start fewer "
            "(--nproc-per-node)"
        )


def begin_alike(module: nn.Module) -> None:
    """The first rank's weights on all of them, and other random numbers on each.

    Machines of different kinds may draw the same numbers and yet compute other weights from them.
    """
    if world() == 1:
        return
    for tensor in module.state_dict().values():
        _together(dist.broadcast, tensor, 0)
    torch.manual_seed(torch.initial_seed() + 1_000_003 * rank())


def gather(value: Value) -> list[Value]:
    """Every rank's value, in the order of the ranks."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    _together(dist.all_gather_object, values, value)
    return values


def add_sums(
    sums: dict[str, Sum], said: Sequence[str] = ()
) -> tuple[dict[str, Sum], Sequence[str]]:
    """The sums over all ranks, and what each has to say about them."""
    if world() == 1:
        return sums, said
    mine = {name: (float(total), float(count)) for name, (total, count) in sums.items()}
    whole: dict[str, Sum] = {}
    lines: list[str] = []
    for number, (part, notes) in enumerate(gather((mine, said))):
        lines += [f"rank {number}: {line}" for line in notes]
        add(
            whole,
            {name: Sum(*torch.tensor(two, dtype=torch.float64)) for name, two in part.items()},
        )
    return whole, lines


def add_gradients(module: nn.Module) -> None:
    """Every gradient becomes its sum over the ranks; where no rank has one there stays none."""
    if world() == 1:
        return
    parameters = list(module.parameters())
    there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    _together(dist.all_reduce, there, dist.ReduceOp.MAX)
    used = [p for p, one in zip(parameters, there.tolist(), strict=True) if one]
    for parameter in used:
        if parameter.grad is None:  # LayerDrop, or no batch
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets(used):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        _together(dist.all_reduce, flat)
        parts = flat.split([p.numel() for p in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _together(call: Callable[..., Any], *args: Any) -> None:
    """Raises Lost where a rank is no longer there."""
    try:
        call(*args)
    except RuntimeError as error:  # gloo has no error of its own
        said = re.sub(r"\[\S+:\d+\] ", "", str(error))  # where in gloo's sources
        raise Lost(said.split(". ")[0]) from None

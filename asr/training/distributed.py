"""Distributed training: the processes (ranks) that torchrun starts train one model.

Every rank reads different batches; after the backward pass the gradients of all ranks are summed.
This is done outside of the backward pass, unlike in DistributedDataParallel: a rank may have no
batch in the last step of an epoch, split one that does not fit in memory or skip layers, and the
sum still is that of one process over the same batches.

Without torchrun there is one rank, and the functions below return at once. All ranks must call them
in the same order.
"""

import json
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asr.errors import EXIT_USER_ERROR, UserError, print_line
from asr.io import read_json, write_files
from asr.training.losses import Sum, add, on_cpu

Value = TypeVar("Value")

# Of collectives: rank 0 may make a corpus or measure statistics while the others wait. Connections
# and torchrun detect a dead rank sooner.
TIMEOUT = timedelta(hours=3)
BUCKET = 8 << 20  # numbers that one collective sums or sends: 32 MB
POLL = 0.02  # seconds
REPORT_WAIT = 2.0  # seconds; ranks that fail for one reason fail together
REPORTED = "reported"  # key in the store: number of ranks that have failed; the first reports
MAX_RANKS = 100_000
LAUNCH = ".launch"  # in the run folder: the torchrun processes that started or resumed it last


class RankLost(Exception):
    """Another rank was killed, or failed and has reported why."""


class Ranks(NamedTuple):
    """Which of the processes that torchrun started this is."""

    number: int  # of this process, from 0
    count: int  # of processes
    local: int  # number among the processes of this machine


def ranks_of_environment() -> Ranks:
    """What torchrun has set; one process without it. UserError for what is no such number."""
    count = _environment_number("WORLD_SIZE", 1, 1, MAX_RANKS)
    number = _environment_number("RANK", 0 if count == 1 else None, 0, count - 1)
    return Ranks(number, count, _environment_number("LOCAL_RANK", number, 0, count - 1))


def _environment_number(name: str, default: int | None, low: int, high: int) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    is_number = text is not None and re.fullmatch("[0-9]{1,9}", text)
    if not (is_number and low <= int(text) <= high):
        shown = "is not set" if text is None else f"= {text[:40]!r}"
        raise UserError(
            f"environment: {name} {shown}: must be a number from {low} to {high}; start the "
            f"processes with torchrun, or unset {name}"
        )
    return int(text)


def world() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this is rank 0, which alone writes files and logs."""
    return rank() == 0


_printed: list[str] = []


def print_first(*lines: str | None) -> None:
    """Print lines on rank 0; nothing for None."""
    for line in filter(None, lines):
        if is_first():
            print_line(line)
            _printed.append(line)


def printed_lines() -> list[str]:
    """The lines of print_first since the last call, for the log, which is opened after them."""
    lines = list(_printed)
    _printed.clear()
    return lines


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Connects the processes that torchrun started; `device` as in recipes.

    The first rank that fails reports its error; the others, which fail because of it, do not.
    """
    number, count, local = ranks_of_environment()
    if count == 1:
        yield
        return
    store = _connect(_select_gpu(device, local), number, count)
    try:
        yield
        gather(None)  # torchrun ends all ranks as soon as one ends with an exit code other than 0
    except RankLost as error:
        reason = f"another was killed or failed, or cannot be reached ({error})"
        print(f"rank {number}: exits because {reason}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if has_reported(store, number, count):
            sys.exit(EXIT_USER_ERROR if isinstance(error, UserError) else 1)
        if isinstance(error, UserError):
            raise UserError(f"rank {number}: {error}") from None
        raise
    dist.destroy_process_group()


def _connect(backend: str, number: int, count: int) -> dist.Store:
    """Connect the ranks; -> their store. UserError where the environment does not fit."""
    if not (address := os.environ.get("MASTER_ADDR")):
        raise UserError("environment: MASTER_ADDR is not set: start the processes with torchrun")
    port = _environment_number("MASTER_PORT", None, 1, 65535)
    try:
        if number == 0:  # the address of rank 0; the others wait until rank 0 has one
            socket.getaddrinfo(address, port)
        store = next(dist.rendezvous("env://"))[0]
        store = dist.PrefixStore(new_key_prefix(store, number, count), store)
        group = {"store": store, "rank": number, "world_size": count, "timeout": TIMEOUT}
        dist.init_process_group(backend, **group)
    except (RuntimeError, OSError, UnicodeError) as error:
        where = f"MASTER_ADDR = {address[:80]}, MASTER_PORT = {port}"
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"environment: {where}: rank {number} cannot connect: {reason}") from None
    return store


def _select_gpu(device: str, local: int) -> str:
    """Select a GPU for this rank, where GPUs are used; -> the backend that sums on it."""
    if device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    gpus = torch.cuda.device_count()
    if ":" in device:
        raise UserError(f"train.device = {device} is one GPU for all ranks; take auto or cuda")
    if local >= gpus:
        remedy = f"take --nproc-per-node={gpus}"
        raise UserError(f"{gpus} GPUs for rank {local} and those before it: {remedy}")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def check_device(name: str) -> torch.device:
    """As choose_device, but without a choice for torch, which takes memory of a GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"train.device = {name}: this machine has no such GPU; try auto or cpu")
    return device


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one; cuda:N becomes torch's current GPU.

    Raises UserError for a GPU that does not exist.
    """
    device = check_device(name)
    if device.type == "cuda":
        # cuDNN's attention plans each new batch shape, for 7 ms in each layer: docs/scaling.md.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if device.index is not None:
            torch.cuda.set_device(device)  # streams and graphs belong to the current one
    return device


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16; without, it is slower than fp32."""
    if device.type == "cuda":  # before Ampere, such as T4, torch emulates it
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def new_key_prefix(store: dist.Store, number: int, count: int) -> str:
    """A key prefix of this launch, the same on all `count` ranks; called by rank `number`.

    torchrun may keep its store when it restarts the ranks. The store may then hold addresses of
    finished processes; connecting to one hangs. Rank 0 chooses the prefix. Each other rank requests
    it under a new id until the answer carries that id, and confirms.
    """
    new = uuid.uuid4().hex
    if number:
        store.set(f"request {number}", new)
        while (answer := store.get(f"answer {number}").decode().split())[1] != new:
            time.sleep(POLL)
        store.set(f"confirmed {number}", answer[0])
        return answer[0]
    missing = set(range(1, count))
    while missing:
        for other in sorted(missing):
            if request := _value(store, f"request {other}"):
                store.set(f"answer {other}", f"{new} {request}")
            if _value(store, f"confirmed {other}") == new:
                missing.remove(other)
        time.sleep(POLL)
    return new


def _value(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def has_reported(store: dist.Store, number: int, count: int) -> bool:
    """Whether another rank has reported an error; from now on this one (`number`) has."""
    try:
        before = store.add(REPORTED, 1) - 1
        end = time.monotonic() + REPORT_WAIT
        # Without torchrun rank 0 holds the store, and asking a store that is gone prints pages of
        # warnings: rank 0 waits for the others.
        while number == 0 and store.add(REPORTED, 0) < count and time.monotonic() < end:
            time.sleep(POLL)
    except RuntimeError:  # the store ended with rank 0, which reports why
        return True
    return before > 0


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Rank 0 executes the block alone; the others execute it when rank 0 has finished."""
    if not is_first():
        gather(None)
    yield
    if is_first():
        gather(None)


def check_share(batches: int) -> None:
    """Raises UserError where an epoch of so many batches leaves a rank without any."""
    if batches < world():
        raise UserError(
            f"{batches} batches an epoch are too few for {world()} ranks: make them smaller "
            "(train.batch_seconds; of text data.batch_bytes, of images data.batch) or start fewer "
            "(--nproc-per-node)"
        )


def synchronize(module: nn.Module) -> None:
    """Copy the weights of rank 0 to all ranks, and give each rank another random seed.

    Different machines may compute different initial weights from the same random numbers.
    """
    if world() == 1:
        return
    for tensor in module.state_dict().values():
        _collective(dist.broadcast, tensor, 0)
    torch.manual_seed(torch.initial_seed() + 1_000_003 * rank())


def gather(value: Value) -> list[Value]:
    """The values of all ranks, in order; any object."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    _collective(dist.all_gather_object, values, value)
    return values


def add_sums(
    sums: dict[str, Sum], messages: Sequence[str] = ()
) -> tuple[dict[str, Sum], Sequence[str]]:
    """The sums over all ranks, and the messages of all."""
    if world() == 1:
        return sums, messages
    ours = {
        n: s._replace(total=float(s.total), count=float(s.count)) for n, s in on_cpu(sums).items()
    }
    totals: dict[str, Sum] = {}
    lines: list[str] = []
    for number, (part, texts) in enumerate(gather((ours, messages))):
        lines += [f"rank {number}: {text}" for text in texts]
        for name, each in part.items():
            pair = torch.tensor([each.total, each.count], dtype=torch.float64)
            add(totals, {name: each._replace(total=pair[0], count=pair[1])})
    return totals, lines


def add_gradients(module: nn.Module) -> None:
    """Replace every gradient by its sum over the ranks; it stays None where no rank has one."""
    if world() == 1:
        return
    parameters = list(module.parameters())
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    _collective(dist.all_reduce, present, dist.ReduceOp.MAX)
    used = [p for p, one in zip(parameters, present.tolist(), strict=True) if one]
    for parameter in used:
        if parameter.grad is None:  # LayerDrop, or no batch
            parameter.grad = torch.zeros_like(parameter)
    gradients = (p.grad for p in used)
    for parameter, total in zip(used, _joined(gradients, dist.all_reduce), strict=True):
        parameter.grad = total


def assign_owners(costs: Sequence[float]) -> list[int]:
    """For each piece of work the rank that does it, so that all have nearly the same to do."""
    loads, chosen = [0.0] * world(), [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: -costs[i]):
        chosen[piece] = loads.index(min(loads))
        loads[chosen[piece]] += costs[piece]
    return chosen


def broadcast(tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
    """Copy each tensor from the rank that owns it to all others; all of one dtype and device."""
    if world() == 1:
        return
    for owner in range(world()):
        owned = [t.detach() for t, one in zip(tensors, owners, strict=True) if one == owner]
        for tensor, new in zip(owned, _joined(owned, dist.broadcast, owner), strict=True):
            tensor.copy_(new)


def _joined(tensors: Iterable[Tensor], call: Callable[..., Any], *args: Any) -> Iterator[Tensor]:
    """What the collective makes of each tensor; it is called once for many of them."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        _collective(call, flat, *args)
        parts = flat.split([tensor.numel() for tensor in bucket])
        yield from (part.view_as(tensor) for tensor, part in zip(bucket, parts, strict=True))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _collective(call: Callable[..., Any], *args: Any) -> None:
    """Raises RankLost where a rank has ended."""
    try:
        call(*args)
    except RuntimeError as error:  # gloo raises nothing more specific
        raise RankLost(_reason(str(error))) from None


def _reason(message: str) -> str:
    """What a collective's error says, without the lines of its sources."""
    _, is_nccl, cause = message.partition("Last error:")  # the rest explains all kinds of errors
    if is_nccl:
        return f"NCCL: {' '.join(cause.split())}; NCCL_DEBUG=INFO shows more"
    return re.sub(r"\[\S+:\d+\] ", "", message).split(". ")[0]


def restarted_by_torchrun(run: Path) -> bool:
    """Whether torchrun restarted (--max-restarts) ranks of the launch recorded in the run folder.

    Such a restart resumes without --resume. A launch that refused to train into the folder of an
    earlier run is not recorded there, and refuses again. To be called before record_launch.
    """
    # Only of the ranks that failed.
    counts = gather(_environment_number("TORCHELASTIC_RESTART_COUNT", 0, 0, 999_999_999))
    agents = gather(_agent())
    recorded: Any = []
    with suppress(OSError, ValueError, UserError):
        recorded = read_json(run / LAUNCH)
    # One agent is enough, for some may have changed since.
    known = recorded if isinstance(recorded, list) else []
    same_launch = not any(agents) or any(agent in known for agent in agents)
    return any(gather(is_first() and max(counts) > 0 and same_launch))


def record_launch(run: Path) -> None:
    """Record on rank 0 which launch trains in the run folder."""
    agents = [agent for agent in gather(_agent()) if agent]
    if agents and is_first():
        write_files(run, {LAUNCH: json.dumps(agents) + "\n"})


def _agent() -> str:
    """The torchrun process of this machine, by the name of its log folder; "" without torchrun.

    From FOLDER_RANDOM/attempt_0/RANK/error.json; RANDOM differs between launches.
    """
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    return str(folders[2]) if len(folders) > 2 else ""

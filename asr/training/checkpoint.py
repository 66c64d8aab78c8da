"""Checkpoints: the weights as safetensors, the rest of a training run beside them.

    RUN/checkpoints/00000500/model.safetensors   weights; step and validation loss as metadata
                             training.pt         optimiser, train state, random states
                             sha256.json         checksums of both

A checkpoint is written into a hidden folder (.STEP.part), synced and renamed, so it is complete or
absent; one that is replaced or removed is renamed first, too (.STEP.old). newest_sound cleans up
after a crash and skips damaged checkpoints. No file read here can run code: safetensors for the
weights, weights_only for the rest. Both are mapped into memory and compared with the model before
their tensors are read, so that a file takes no more memory than the model.
"""

import json
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asr.errors import UserError
from asr.io import check_run_folder, open_file, read_json, sha256_of_files, sync
from asr.shipped import train_command
from asr.training.state import check_archive, check_training

WEIGHTS = "model.safetensors"
TRAINING = "training.pt"
SUMS = "sha256.json"
MAX_WEIGHTS = 16 << 30  # bytes
MAX_HEADER = 16 << 20  # bytes of names, shapes and metadata
_NUMBERS = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")  # types of weights


class NotSaved(UserError):
    """A checkpoint could not be written; the one it should replace is unchanged."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk; `loss` ranks it, the lower the better, and is infinite if unknown.

    It is the validation loss in nats, or that of train.early_stopping.metric.
    """

    folder: Path
    step: int
    loss: float


def save_checkpoint(
    run: Path,
    module: nn.Module,
    training: dict[str, Any] | None,
    step: int,
    loss: float,
    metadata: dict[str, str],
) -> Checkpoint:
    """Write RUN/checkpoints/STEP, or leave the disk as it was.

    metadata: stored with the weights (vocabulary fingerprint). Without `training` only the weights
    are written. Raises NotSaved where the disk is full or cannot be written, or the run
    folder is gone, and as check_run_folder does.
    """
    folder = run / "checkpoints" / f"{step:08d}"
    part = folder.with_name(f".{folder.name}.part")
    check_run_folder(run)
    try:
        shutil.rmtree(part, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        part.mkdir()
        meta = {**metadata, "step": str(step), "loss": repr(loss)}
        # Not save_file, which makes its file private: run folders are often shared.
        (part / WEIGHTS).write_bytes(save(named_tensors(module), metadata=meta))
        if training is not None:
            torch.save(training, part / TRAINING)
        sums = {path.name: sha256_of_files([path]) for path in sorted(part.iterdir())}
        (part / SUMS).write_text(json.dumps(sums))
        for path in (*part.iterdir(), part):
            sync(path)
        old = _hide(folder)
        part.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError | RuntimeError | SafetensorError):  # one for each writer
            reason = why_unwritten(error, folder)
            raise NotSaved(f"{folder}: cannot be saved ({reason})") from None
        raise
    return Checkpoint(folder, step, loss)


def _hide(folder: Path) -> Path:
    """Rename a checkpoint, if there is one, which removes it at once, not file by file."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    return old


def why_unwritten(error: Exception, folder: Path) -> str:
    """Why the folder could not be written; torch and safetensors hide the system's reason."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UserError):
        return str(error)
    existing = next(parent for parent in folder.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    return f"{_first_line(error)[:120]}; {free / 1e6:.0f} MB are free on that disk"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def checkpoint_folders(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, complete and damaged ones, by step."""
    folders = [f for f in (run / "checkpoints").glob("*") if re.fullmatch("[0-9]{8,15}", f.name)]
    return sorted(folders, key=lambda folder: int(folder.name))


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run, by step; folders that cannot be read as one are skipped."""
    checkpoints = []
    for folder in checkpoint_folders(run):
        try:
            with _open_weights(folder / WEIGHTS) as file:
                metadata = file.metadata() or {}
            step, loss = int(folder.name), float(metadata["loss"])
            if metadata["step"] == str(step):
                checkpoints.append(Checkpoint(folder, step, loss))
        except (OSError, SafetensorError, KeyError, ValueError, UserError):
            continue
    return checkpoints


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    """A file of weights, of which only the header is read. Raises OSError or SafetensorError."""
    with open_file(path, MAX_WEIGHTS) as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER:
            raise SafetensorError("its header is too large")
    with safe_open(path, "pt") as weights:
        yield weights


def _limit(path: Path) -> int:
    """Bytes that a file of a checkpoint may have: moments are twice as large as the weights."""
    if path.name == WEIGHTS:
        return MAX_WEIGHTS
    weights = path.with_name(WEIGHTS)
    return 4 * (weights.stat().st_size if weights.exists() else 0) + (64 << 20)


def is_sound(checkpoint: Checkpoint, names: Sequence[str] = (WEIGHTS, TRAINING)) -> bool:
    """Whether the checksums of its files are those written."""
    try:
        sums = read_json(checkpoint.folder / SUMS)
        paths = [checkpoint.folder / name for name in names]
        return all(
            path.stat().st_size <= _limit(path) and sha256_of_files([path]) == sums[path.name]
            for path in paths
        )
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return False


def prune(run: Path, keep: int, keep_best: int) -> None:
    """Remove all but the last `keep` checkpoints and the best `keep_best`."""
    checkpoints = list_checkpoints(run)
    kept = [*checkpoints[-keep:], *best_of(checkpoints)[:keep_best]]
    for checkpoint in checkpoints:
        if checkpoint not in kept:
            shutil.rmtree(_hide(checkpoint.folder), ignore_errors=True)


def best_of(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Those with a validation loss, the lowest first; of equal ones the later."""
    measured = [c for c in checkpoints if math.isfinite(c.loss)]
    return sorted(measured, key=lambda c: (c.loss, -c.step))


def choose(run: Path, which: str, average: int) -> list[Checkpoint]:
    """The `average` best or last checkpoints of a run.

    Raises UserError where it has none, and as check_run_folder does.
    """
    check_run_folder(run)
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise UserError(f"{run}: no checkpoint in it; train it first ({train_command(run)})")
    best = best_of(checkpoints) if which == "best" else []
    return (best or checkpoints[::-1])[:average]


def load_weights(
    module: nn.Module,
    checkpoints: Sequence[Checkpoint],
    metadata: dict[str, str],
    pretrained: str | None = None,
    kept: tuple[str, ...] = (),
) -> None:
    """Load the mean of the checkpoints' weights into the module.

    pretrained: prefix of tensors that keep their values where a checkpoint has none of them. kept:
    prefixes of those that keep them in any case. Raises UserError where a file is damaged, or of
    another model or vocabulary (`metadata`).
    """
    mean: dict[str, Tensor] = {}
    numbers = sum(tensor.numel() for tensor in _tensors(module).values())
    # In bytes; a file of a larger vocabulary has more numbers than the module.
    most = MAX_HEADER + (16 if kept else 8) * numbers
    for checkpoint in checkpoints:
        path = checkpoint.folder / WEIGHTS
        # Weights that were copied without their checksums are taken as they are. Larger files than
        # the module's are refused below.
        summed = (checkpoint.folder / SUMS).exists() and path.stat().st_size <= most
        if summed and not is_sound(checkpoint, [WEIGHTS]):
            raise UserError(f"{path}: damaged, its checksum differs; take another checkpoint")
        with _checked_weights(checkpoint, module, metadata, pretrained, kept) as (file, names):
            for name in names:
                weight = file.get_tensor(name).double() / len(checkpoints)
                mean[name] = mean[name] + weight if name in mean else weight
    tensors = module.state_dict()
    module.load_state_dict({n: w.to(tensors[n].dtype) for n, w in mean.items()}, strict=False)


class MemoryLimit(TorchFunctionMode):
    """Within, a model is built that must not have more numbers than its checkpoint.

    Raises UserError before a larger one, which a recipe of a few lines can describe, takes memory.
    """

    SLACK = 1 << 24  # numbers of tables, which are not saved
    CREATE = (torch.empty, torch.randn, torch.zeros, torch.ones)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.path = checkpoint.folder / WEIGHTS
        with _open_weights(self.path) as file:
            names = list(file.keys())
            shapes = [file.get_slice(name).get_shape() for name in names]
        self.left = self.SLACK + 2 * sum(map(math.prod, shapes))  # some start as other tensors

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        if function in self.CREATE:
            size = args[0] if args and isinstance(args[0], Sequence) else args
            self.left -= math.prod(size)
            if self.left < 0:
                remedy = "its recipe.yaml describes a larger one"
                raise UserError(f"{self.path}: weights of another model: {remedy}")
        return function(*args, **(named or {}))


@contextmanager
def _checked_weights(
    checkpoint: Checkpoint,
    module: nn.Module,
    metadata: Mapping[str, str],
    pretrained: str | None,
    kept: tuple[str, ...],
) -> Iterator[tuple[Any, Collection[str]]]:
    """The weights of a checkpoint and the names to load, which have the shapes of the module."""
    path = checkpoint.folder / WEIGHTS
    try:
        with _open_weights(path) as file:
            stored = file.metadata() or {}
            for name, value in metadata.items():
                if stored.get(name) != value:
                    was = str(stored.get(name))[:80]
                    raise UserError(f"{path}: of another {name} ({was}, here {value})")
            names = [name for name in file.keys() if not name.startswith(kept)]  # noqa: SIM118
            weights = {name: file.get_slice(name) for name in names}
            tensors = {n: t for n, t in _tensors(module).items() if not n.startswith(kept)}
            if pretrained and not any(name.startswith(pretrained) for name in weights):
                tensors = {n: t for n, t in tensors.items() if not n.startswith(pretrained)}
            _check_shapes(tensors, weights, path)
            yield file, names
    except (OSError, SafetensorError) as error:
        reason = _first_line(error)[:200]
        raise UserError(f"{path}: cannot be read as weights ({reason})") from None


def read_training(checkpoint: Checkpoint) -> dict[str, Any]:
    """The `training` of save_checkpoint, with tensors that are mapped from the disk.

    Raises UserError where it is damaged, lacks a key or has a value that no training writes.
    """
    path = checkpoint.folder / TRAINING
    try:
        check_archive(path, _limit(path))
        with catch_warnings(action="ignore"):  # of kinds of tensors that are refused below
            training = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_training(training)
    except Exception as error:  # torch.load raises many kinds; all mean the same to a user
        raise unreadable(checkpoint, error) from None
    return training


def unreadable(checkpoint: Checkpoint, error: Exception) -> UserError:
    """The error for a training state that cannot be used."""
    path = checkpoint.folder / TRAINING
    reason = _first_line(error).removeprefix(f"{path}: ")[:200]
    return UserError(f"{path}: cannot be read as a training state ({reason})")


def _check_shapes(tensors: Mapping[str, Tensor], weights: Mapping[str, Any], path: Path) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        name
        for name in weights.keys() & shapes.keys()
        if weights[name].get_shape() != shapes[name] or weights[name].get_dtype() not in _NUMBERS
    ]
    unlike = sorted((weights.keys() ^ shapes.keys()) | set(wrong))
    if unlike:
        raise UserError(
            f"{path}: weights of another model: {unlike[0][:80]} and {len(unlike) - 1} more do not "
            "fit; model.* and features.* must be those of their run's recipe.yaml"
        )


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Each tensor once: tied weights share their memory, which safetensors does not store."""
    return {name: tensor.cpu().contiguous() for name, tensor in _tensors(module).items()}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    seen: set[int] = set()
    once = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            once[name] = tensor.detach()
    return once


def newest_sound(run: Path) -> tuple[Checkpoint | None, list[Path]]:
    """The newest checkpoint whose checksums agree, and the damaged newer ones, newest first."""
    _clean_up(run / "checkpoints")
    readable = {checkpoint.folder: checkpoint for checkpoint in list_checkpoints(run)}
    damaged = []
    for folder in reversed(checkpoint_folders(run)):
        if folder in readable and is_sound(readable[folder]):
            return readable[folder], damaged
        damaged.append(folder)
    return None, damaged


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to damaged-STEP, which list_checkpoints skips; -> its path."""
    aside = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def _clean_up(folder: Path) -> None:
    """Undo what a crash interrupted: restore a checkpoint half replaced, remove partial ones."""
    for old in folder.glob(".*.old"):
        replaced = folder / old.name[1:].removesuffix(".old")
        # Where its removal had begun, it is not sound.
        if not replaced.exists() and is_sound(Checkpoint(old, 0, 0.0)):
            old.rename(replaced)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for part in folder.glob(".*.part"):
        shutil.rmtree(part, ignore_errors=True)

"""Checkpoints: the weights as safetensors, the rest of a training run beside them.

    RUN/checkpoints/00000500/model.safetensors   weights; step and validation loss as metadata
                             training.pt         optimiser, train state, random states
                             sha256.json         checksums of both

A checkpoint is written into a hidden folder (.STEP.part), synced and renamed, so it is complete or
absent; one that is replaced or removed is renamed first, too (.STEP.old). newest_sound cleans up
after a crash and skips damaged checkpoints. No file read here can run code: safetensors for the
weights, weights_only for the rest.
"""

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from asr.errors import UserError
from asr.io import read_small_file, sha256_of_files, sync

WEIGHTS = "model.safetensors"
TRAINING = "training.pt"
SUMS = "sha256.json"


class NotSaved(UserError):
    """A checkpoint could not be written; the one it should replace is unchanged."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk; `loss` is the validation loss in nats, infinite if unknown."""

    folder: Path
    step: int
    loss: float


def save_checkpoint(
    run: Path,
    module: nn.Module,
    training: dict[str, Any] | None,
    step: int,
    loss: float,
    about: dict[str, str],
) -> Checkpoint:
    """Write RUN/checkpoints/STEP, or leave the disk as it was.

    `about` goes into the metadata of the weights (vocabulary fingerprint). Without `training` only
    the weights are written. Raises NotSaved where the disk is full or cannot be written.
    """
    folder = run / "checkpoints" / f"{step:08d}"
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        meta = {**about, "step": str(step), "loss": repr(loss)}
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
    existing = next(parent for parent in folder.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    return f"{_first_line(error)[:120]}; {free / 1e6:.0f} MB are free on that disk"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run, by step; folders that cannot be read as one are skipped."""
    checkpoints = []
    for folder in sorted((run / "checkpoints").glob("[0-9]*")):
        try:
            with safe_open(folder / WEIGHTS, "pt") as file:
                about = file.metadata() or {}
            checkpoints.append(Checkpoint(folder, int(about["step"]), float(about["loss"])))
        except (OSError, SafetensorError, KeyError, ValueError):
            continue
    return checkpoints


def is_sound(checkpoint: Checkpoint, names: Sequence[str] = (WEIGHTS, TRAINING)) -> bool:
    """Whether the checksums of its files are those written."""
    try:
        sums = json.loads(read_small_file(checkpoint.folder / SUMS))
        return all(sha256_of_files([checkpoint.folder / name]) == sums[name] for name in names)
    except (OSError, ValueError, KeyError, TypeError):
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
    """The `average` best or last checkpoints of a run. Raises UserError where it has none."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise UserError(f"{run}: no checkpoint in it; train it first (python -m asr.train)")
    best = best_of(checkpoints) if which == "best" else []
    return (best or checkpoints[::-1])[:average]


def load_weights(
    module: nn.Module, checkpoints: Sequence[Checkpoint], about: dict[str, str]
) -> None:
    """Load the mean of the checkpoints' weights into the module.

    Raises UserError where a file is damaged, or of another model or vocabulary (`about`).
    """
    mean: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        path = checkpoint.folder / WEIGHTS
        # Weights that were copied without their checksums are taken as they are.
        if (checkpoint.folder / SUMS).exists() and not is_sound(checkpoint, [WEIGHTS]):
            raise UserError(f"{path}: damaged, its checksum differs; take another checkpoint")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
            weights = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read as weights ({error})") from None
        for name, value in about.items():
            if metadata.get(name) != value:
                raise UserError(f"{path}: of another {name} ({metadata.get(name)}, here {value})")
        for name, weight in weights.items():
            mean[name] = mean.get(name, 0) + weight.double() / len(checkpoints)
    _fill(module, mean, checkpoints[-1].folder / WEIGHTS)


def read_training(checkpoint: Checkpoint, mapped: bool = False) -> dict[str, Any]:
    """The `training` given to save_checkpoint. Raises UserError where it is damaged.

    mapped: its tensors, twice the size of the weights, are read from the disk only when used.
    """
    path = checkpoint.folder / TRAINING
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch.load raises many kinds; all mean the same to a user
        reason = _first_line(error)
        raise UserError(f"{path}: cannot be read as a training state ({reason})") from None


def _fill(module: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    own = module.state_dict()
    wrong = [n for n in weights.keys() & own.keys() if weights[n].shape != own[n].shape]
    unlike = sorted((weights.keys() ^ named_tensors(module).keys()) | set(wrong))
    if unlike:
        raise UserError(
            f"{path}: weights of another model: {unlike[0]} and {len(unlike) - 1} more do not fit; "
            "model.* and features.* must be those of their run's recipe.yaml"
        )
    module.load_state_dict({n: w.to(own[n].dtype) for n, w in weights.items()}, strict=False)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Each tensor once: tied weights share their memory, which safetensors does not store."""
    seen: set[int] = set()
    once = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            once[name] = tensor.detach().cpu().contiguous()
    return once


@dataclass(frozen=True)
class SoundCheckpoint:
    """The newest checkpoint that is not damaged, and the damaged newer ones, newest first."""

    checkpoint: Checkpoint | None
    damaged: tuple[Path, ...]


def newest_sound(run: Path) -> SoundCheckpoint:
    """Checks the checkpoints of a run, the newest first, until one's checksums agree."""
    _clean_up(run / "checkpoints")
    readable = {checkpoint.folder: checkpoint for checkpoint in list_checkpoints(run)}
    damaged = []
    for folder in sorted((run / "checkpoints").glob("[0-9]*"), reverse=True):
        if folder in readable and is_sound(readable[folder]):
            return SoundCheckpoint(readable[folder], tuple(damaged))
        damaged.append(folder)
    return SoundCheckpoint(None, tuple(damaged))


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to damaged-STEP, which list_checkpoints skips; -> its path."""
    place = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(place, ignore_errors=True)
    return folder.rename(place)


def _clean_up(folder: Path) -> None:
    """Undo what a crash interrupted: restore a checkpoint half replaced, remove partial ones."""
    for old in folder.glob(".*.old"):
        place = folder / old.name[1:].removesuffix(".old")
        # Where its removal had begun, it is not sound.
        if not place.exists() and is_sound(Checkpoint(old, 0, 0.0)):
            old.rename(place)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for part in folder.glob(".*.part"):
        shutil.rmtree(part, ignore_errors=True)

"""Checkpoints: the weights as safetensors, the rest of a training run beside them.

    RUN/checkpoints/00000500/model.safetensors   weights; step and validation loss as metadata
                             training.pt         optimiser, position, random states

A checkpoint is written into a hidden folder, synced and renamed, so it is there whole or not at
all; one that is replaced or removed is renamed first, too (.STEP.old). What a crash leaves of that
is put right in recovery.py. Nothing that is read can run code: safetensors for the weights,
weights_only for the rest.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from asr.data.content import sha256_of_files
from asr.errors import UserError

WEIGHTS = "model.safetensors"
TRAINING = "training.pt"
SUMS = "sha256.json"


class NotSaved(UserError):
    """A checkpoint could not be written; what had been there is there still."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk; `loss` is the validation loss in nats, infinite if not measured."""

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
    """Write RUN/checkpoints/STEP whole, or leave what was there.

    `about` goes into the metadata of the weights (vocabulary fingerprint). Without `training` there
    are weights alone. Raises NotSaved where the disk is full or cannot be written.
    """
    folder = run / "checkpoints" / f"{step:08d}"
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        meta = {**about, "step": str(step), "loss": repr(loss)}
        # Not save_file, which makes its file private: a run folder is often shared.
        (part / WEIGHTS).write_bytes(save(named_tensors(module), metadata=meta))
        if training is not None:
            torch.save(training, part / TRAINING)
        sums = {path.name: sha256_of_files([path]) for path in sorted(part.iterdir())}
        (part / SUMS).write_text(json.dumps(sums))
        for path in (*part.iterdir(), part):
            _sync(path)
        _put(part, folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # each writer has its own
        shutil.rmtree(part, ignore_errors=True)
        raise NotSaved(f"{folder}: cannot be saved ({why_unwritten(error, folder)})") from None
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Checkpoint(folder, step, loss)


def _put(part: Path, folder: Path) -> None:
    """Give a whole folder its name; what had that name stays until then."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def why_unwritten(error: Exception, folder: Path) -> str:
    """Why the folder could not be written; torch and safetensors hide the system's own word."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    there = next(place for place in folder.parents if place.exists())
    free = shutil.disk_usage(there).free
    said = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return f"{said}; {free / 1e6:.0f} MB are free on that disk"


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """The whole ones of a run, by step; a folder that cannot be read as one is left out."""
    found = []
    for folder in sorted((run / "checkpoints").glob("[0-9]*")):
        try:
            with safe_open(folder / WEIGHTS, "pt") as file:
                about = file.metadata() or {}
            found.append(Checkpoint(folder, int(about["step"]), float(about["loss"])))
        except (OSError, SafetensorError, KeyError, ValueError):
            continue
    return found


def is_sound(checkpoint: Checkpoint, names: Sequence[str] = (WEIGHTS, TRAINING)) -> bool:
    """Whether its files are what was written (by their checksums)."""
    try:
        sums = json.loads((checkpoint.folder / SUMS).read_text())
        return all(sha256_of_files([checkpoint.folder / name]) == sums[name] for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def prune(run: Path, keep: int, keep_best: int) -> None:
    """Leave the last `keep` checkpoints and the best `keep_best`."""
    there = list_checkpoints(run)
    kept = {c.folder for c in there[-keep:]} | {c.folder for c in best_of(there)[:keep_best]}
    for checkpoint in there:
        if checkpoint.folder not in kept:
            old = checkpoint.folder.with_name(f".{checkpoint.folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            checkpoint.folder.rename(old)  # gone at once, not file by file
            shutil.rmtree(old, ignore_errors=True)


def best_of(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Those with a validation loss, the lowest first; of equals the later."""
    measured = [c for c in checkpoints if math.isfinite(c.loss)]
    return sorted(measured, key=lambda c: (c.loss, -c.step))


def choose(run: Path, which: str, average: int) -> list[Checkpoint]:
    """The checkpoints to read a model from: the `average` best or last ones.

    Raises UserError where the run has none.
    """
    there = list_checkpoints(run)
    if not there:
        raise UserError(f"{run}: no checkpoint in it; train it first (python -m asr.train)")
    chosen = best_of(there) if which == "best" else there[::-1]
    return (chosen or there[::-1])[:average]


def load_weights(
    module: nn.Module, checkpoints: Sequence[Checkpoint], about: dict[str, str]
) -> None:
    """The mean of the checkpoints' weights into the module.

    Raises UserError where a file is damaged, or of another model or vocabulary.
    """
    mean: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        path = checkpoint.folder / WEIGHTS
        # Weights that were copied without their checksums are taken as they are.
        if (checkpoint.folder / SUMS).exists() and not is_sound(checkpoint, [WEIGHTS]):
            raise UserError(f"{path}: damaged, its checksum differs; take another checkpoint")
        try:
            with safe_open(path, "pt") as file:
                there = file.metadata() or {}
            weights = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read as weights ({error})") from None
        for name, value in about.items():
            if there.get(name) != value:
                raise UserError(f"{path}: of another {name} ({there.get(name)}, here {value})")
        for name, weight in weights.items():
            mean[name] = mean.get(name, 0) + weight.double() / len(checkpoints)
    _fill(module, mean, checkpoints[-1].folder / WEIGHTS)


def read_training(checkpoint: Checkpoint, mapped: bool = False) -> dict[str, Any]:
    """What save_checkpoint was given as `training`. Raises UserError where it is damaged.

    mapped: its tensors, twice the weights, are left on the disk until somebody looks at them.
    """
    path = checkpoint.folder / TRAINING
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch.load raises many kinds; all mean the same to a user
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
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
    """Each tensor once: tied weights share their memory, and safetensors stores no sharing."""
    seen: set[int] = set()
    once = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            once[name] = tensor.detach().cpu().contiguous()
    return once


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

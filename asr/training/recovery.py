"""What a crash or a bad disk left of a run's checkpoints: the newest whole one is gone on from."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from asr.training.checkpoint import Checkpoint, is_sound, list_checkpoints


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole, and the newer ones that are damaged, newest first."""

    checkpoint: Checkpoint | None
    damaged: tuple[Path, ...]


def newest_sound(run: Path) -> Found:
    """Looks at the checkpoints of a run, the newest first, until one's checksums agree."""
    _heal(run / "checkpoints")
    readable = {checkpoint.folder: checkpoint for checkpoint in list_checkpoints(run)}
    damaged = []
    for folder in sorted((run / "checkpoints").glob("[0-9]*"), reverse=True):
        if folder in readable and is_sound(readable[folder]):
            return Found(readable[folder], tuple(damaged))
        damaged.append(folder)
    return Found(None, tuple(damaged))


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing takes it for a whole one; -> its new place."""
    place = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(place, ignore_errors=True)
    return folder.rename(place)


def _heal(folder: Path) -> None:
    """Ends what a crash broke off: a checkpoint half replaced comes back, rubbish goes."""
    for old in folder.glob(".*.old"):
        place = folder / old.name.removeprefix(".").removesuffix(".old")
        whole = (old / "sha256.json").exists()  # half removed already, else
        if whole and not place.exists() and is_sound(Checkpoint(old, 0, 0.0)):
            old.rename(place)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for part in folder.glob(".*.part"):
        shutil.rmtree(part, ignore_errors=True)

"""Utterances that cannot be read and gradients that are no numbers: how many are too many."""

import math
from collections.abc import Callable, Sequence
from itertools import chain

from asr.errors import UserError
from asr.training.distributed import gather
from asr.training.given import Batch, Between, Limits, Read
from asr.training.position import Position

NAMED = 5  # utterances that a line on a validation names


def allowed_broken(limits: Limits, utterances: int) -> float:
    """Unreadable utterances that an epoch may have: a share, but one bad file in any corpus."""
    return max(limits.broken * utterances, math.ceil(limits.broken))


def count(position: Position, read: Read, allowed: float, note: Callable[[str], None]) -> None:
    """Count a step into the position. UserError where more than `allowed` an epoch are broken."""
    position.batch += read.batches
    position.audio_seconds += read.seconds
    position.utterances += read.utterances
    position.broken += len(read.broken)
    for broken in read.broken:
        note(f"left out {broken.id}: {broken.reason}")
    if position.broken > allowed * position.epoch:
        seen = position.utterances + position.broken
        raise UserError(
            f"{position.broken} of {seen} training utterances so far cannot be read, more than the "
            "share data.broken of the corpus; the log names each. Run python -m asr.prepare tsv."
        )


def left_out(read: Read) -> list[str]:
    """What the log should say of a validation that could not be read whole."""
    if not read.broken:
        return []
    ids = " ".join(broken.id for broken in read.broken[:NAMED])
    more = " ..." if len(read.broken) > NAMED else ""
    said = f"{len(read.broken)} of {read.utterances + len(read.broken)} utterances left out"
    return [f"validation: {said}: {ids}{more} ({read.broken[0].reason})"]


def bad_step(
    bad: int, group: Sequence[Batch], position: Position, limits: Limits, between: Between
) -> int:
    """Say which utterances gave no finite gradient; -> how many steps in a row that makes.

    UserError, with the evidence kept, where these are `limits.bad_steps`.
    """
    ids = " ".join(chain(*gather([name for batch in group for name in batch.ids])))
    between.note(f"step {position.step}: loss or gradient not finite, not used; utterances {ids}")
    if bad + 1 >= limits.bad_steps:
        raise UserError(
            f"step {position.step}: {bad + 1} steps in a row without a finite gradient; lower "
            "train.optimizer.lr or train.clip. The log names the utterances. "
            f"{between.evidence(group)}".rstrip()
        )
    return bad + 1

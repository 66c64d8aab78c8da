"""Transcripts of a long list of files, by any number of processes, gone on with after any end.

    OUT/about.json                whose transcripts these are: run, settings, list
    OUT/shards/00000042.jsonl     a line for every file of one shard of the list: whole or not there
    OUT/transcripts.tsv|.jsonl    at the end: all, in the order of the list
    OUT/failures.tsv              files that could not be read, and why
    OUT/summary.json              how many, how long, how fast

The list is cut into shards of so many files. Rank r of N begins with the shards r, r + N, ... and
then takes up what others have left, so that whoever is killed is made up for and any number of
ranks can go on. Nobody waits for another's message: a shard is claimed by a lock (claims.py), which
the system releases however its holder ends.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asr.data.content import sha256_of_files
from asr.data.corpus import read_manifest
from asr.errors import UserError
from asr.scoring.files import replace_files
from asr.settings import SpeechRecipe
from asr.settings.data import TRAINING_ONLY
from asr.training.checkpoint import WEIGHTS, Checkpoint, choose


@dataclass(frozen=True)
class Job:
    """What is to be done: the files, and where their transcripts go."""

    out: Path
    files: list[str]
    size: int  # files in a shard
    kind: str  # of the file with all transcripts: text or json
    attempt: int = 1  # what failed in an earlier one is tried again
    _settled: set[int] = field(default_factory=set)  # shards that were seen to be done

    @property
    def count(self) -> int:
        """Shards."""
        return -(-len(self.files) // self.size)

    def path(self, shard: int) -> Path:
        """Where its transcripts stand once it is done."""
        return self.out / "shards" / f"{shard:08d}.jsonl"

    def done(self) -> set[int]:
        """The shards that are."""
        there = {int(path.stem) for path in self.out.glob("shards/[0-9]*.jsonl")}
        return {shard for shard in there if self.is_done(shard)}

    def is_done(self, shard: int) -> bool:
        """Whether it is there, without failures that this attempt is to try again.

        The files say so, and not when they were written or by whom: a rank that comes late to an
        attempt does not repeat what the others have done in it.
        """
        if shard not in self._settled and self.path(shard).exists():
            failures = (row for row in self.rows([shard]) if "error" in row)
            if self.attempt == 1 or all(row["attempt"] >= self.attempt for row in failures):
                self._settled.add(shard)
        return shard in self._settled

    def rows(self, shards: Iterable[int]) -> Iterator[dict[str, Any]]:
        """What is written of their files."""
        for shard in shards:
            with self.path(shard).open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)

    @property
    def summary(self) -> Path:
        """There once everything is done."""
        return self.out / "summary.json"

    def told(self) -> dict[str, Any] | None:
        """The summary of this attempt or a later one; None where there is none yet."""
        if not self.summary.exists():
            return None
        summary = json.loads(self.summary.read_text(encoding="utf-8"))
        return summary if summary["attempt"] >= self.attempt else None


def read_list(path: Path, allow_outside: bool = False) -> list[str]:
    """The files of a list, one a line, or of a manifest (.tsv); each once.

    `allow_outside` also accepts a manifest's audio that is not below its folder.
    Raises UserError where the list cannot be read or is empty.
    """
    if path.suffix == ".tsv":
        names = (str(utterance.audio) for utterance in read_manifest(path, allow_outside))
    else:
        try:  # a name may hold bytes that are not text, and an editor may begin with a mark
            text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        # Not splitlines: it also cuts at form feeds and other characters that a name may hold.
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        names = (str(Path(line)) for line in lines if line.strip())
    files = list(dict.fromkeys(names))
    if not files:
        raise UserError(f"{path}: the list is empty; it needs one audio file a line")
    return files


def identity(run: Path, recipe: SpeechRecipe) -> dict[str, Any]:
    """What transcripts depend on: the weights, what they are shown and how they are decoded.

    A language model and an ensemble's runs count by their content, wherever they lie. Raises
    UserError where there is none.
    """
    decode, features = recipe.decode, recipe.features
    weights, *others = (
        _sha256s(choose(one, decode.checkpoint, decode.average)) for one in (run, *decode.ensemble)
    )
    keys = {
        "decode": decode.model_dump(mode="json", exclude={"batch_seconds", "lm", "ensemble"}),
        "features": features.model_dump(mode="json", exclude=TRAINING_ONLY),
        "data": recipe.data.model_dump(mode="json", include={"max_seconds"}),
    }
    settings = {f"{group}.{key}": tree[key] for group, tree in keys.items() for key in tree}
    lm = None if decode.lm is None else _sha256_of_language_model(decode.lm)
    return {"weights": weights, "decode.ensemble": others or None, "decode.lm": lm, **settings}


def _sha256s(checkpoints: Iterable[Checkpoint]) -> list[str]:
    return [sha256_of_files([checkpoint.folder / WEIGHTS]) for checkpoint in checkpoints]


def _sha256_of_language_model(path: Path) -> str:
    if path.is_dir():
        return _sha256s(choose(path, "best", 1))[0]
    return sha256_of_files([path])


def open_folder(job: Job, about: dict[str, Any]) -> None:
    """Makes the folder, or finds it as this very job has left it. UserError where it is not."""
    digest = hashlib.sha256("\n".join(job.files).encode(errors="surrogateescape")).hexdigest()
    mine = {**about, "list": digest, "files in a shard": job.size, "format": job.kind}
    path = job.out / "about.json"
    (job.out).mkdir(parents=True, exist_ok=True)
    there = [name.name for name in job.out.iterdir() if not name.name.startswith(".")]
    if not path.exists():  # looked for after the others, since it is written before them
        if there:
            raise UserError(
                f"{job.out}: holds {there[0]}, but no transcripts; choose another --out"
            )
        replace_files(job.out, {path.name: json.dumps(mine, indent=1) + "\n"})
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        other = [name for name in mine if theirs.get(name) != mine[name]]
    except (ValueError, AttributeError):
        raise UserError(f"{path}: damaged; choose another --out") from None
    if other:
        raise UserError(
            f"{job.out}: holds transcripts of another run, list or settings "
            f"({', '.join(other)} differ); choose another --out"
        )
    job.path(0).parent.mkdir(exist_ok=True)

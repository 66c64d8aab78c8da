"""Transcripts of a long list of files, by any number of processes; any of them may be killed.

    OUT/about.json                what the transcripts depend on: run, settings, list
    OUT/shards/00000042.jsonl     a line for every file of one shard of the list; complete or absent
    OUT/transcripts.tsv|.jsonl    at the end: all transcripts, in the order of the list
    OUT/failures.tsv              files that could not be read, and why
    OUT/summary.json              counts, duration, speed
    OUT/shards.lock               locks of the shards that ranks work on

The list is cut into shards of a fixed number of files. Rank r of N starts with the shards r, r + N,
... and then transcribes those that the others have not. Ranks exchange no messages: each locks a
shard while it works on it, and the system releases the lock of a process that ends or is killed.
The same command, with any number of ranks, resumes the job.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from asr.config.schema import TRAINING_ONLY_FEATURES, SpeechRecipe
from asr.data.corpus import read_manifest
from asr.data.manifest import write_rows
from asr.errors import UserError, one_line
from asr.features.files import name_of
from asr.hub import local_run
from asr.inference.load import find_language_model
from asr.inference.recognition import Recognizer
from asr.inference.transcript import ON_ONE_LINE, json_line, json_row, level_warning
from asr.io import (
    atomic_writer,
    check_run_folder,
    open_append,
    open_file,
    parse_json,
    read_json,
    sha256_of_files,
    try_lock,
    unlock,
    write_files,
)
from asr.training.checkpoint import WEIGHTS, choose

FAILURES, SUMMARY = "failures.tsv", "summary.json"
LIST_BYTES = 1 << 28  # of a list, which has some million names
PRINTED = 10  # failures printed at the end; the file has all
PROGRESS = 10.0  # seconds between two lines of progress
POLL = 0.5  # seconds between two checks of the other ranks' shards


class ShardLocks:
    """Locks on the shards 0, 1, ..., each a byte of one file, which exclude other processes alone.

    supported: False once the file system has refused a lock.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.supported = path, True

    def __enter__(self) -> "ShardLocks":
        self._file: IO[bytes] = open_append(self.path)
        with self.lock(1 << 40):  # tests for support
            return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @contextmanager
    def lock(self, shard: int) -> Iterator[bool]:
        """Whether this process holds the shard within the block; always, without support."""
        try:
            locked = try_lock(self._file, shard, 1)
        except OSError:
            self.supported = False
            yield True
            return
        try:
            yield locked
        finally:
            if locked:
                unlock(self._file, shard, 1)


@dataclass(frozen=True)
class BulkJob:
    """The files to transcribe, and the folder of their transcripts."""

    out: Path
    files: list[str]
    size: int  # files in a shard
    kind: str  # of the file with all transcripts: text or json
    attempt: int = 1  # failures of earlier attempts are tried again
    _done: set[int] = field(default_factory=set)  # shards known to be done

    @property
    def count(self) -> int:
        return -(-len(self.files) // self.size)

    def path(self, shard: int) -> Path:
        """The file of a shard, which exists once it is done."""
        return self.out / "shards" / f"{shard:08d}.jsonl"

    def done(self) -> set[int]:
        written = {path.name for path in self.path(0).parent.iterdir()}
        shards = range(self.count)
        return {n for n in shards if self.path(n).name in written and self.is_done(n)}

    def is_done(self, shard: int) -> bool:
        """Whether its file exists, without failures that an earlier attempt recorded."""
        if shard not in self._done and self.path(shard).exists():
            failures = (row for row in self.rows([shard]) if "error" in row)
            if self.attempt == 1 or all(row["attempt"] >= self.attempt for row in failures):
                self._done.add(shard)
        return shard in self._done

    def rows(self, shards: Iterable[int]) -> Iterator[dict[str, Any]]:
        """The lines of shards, one for each of their files. UserError for a damaged shard."""
        for shard in shards:
            path = self.path(shard)
            names = self.files[shard * self.size : (shard + 1) * self.size]
            with open_file(path) as file, _damaged(path):
                for name in names:
                    row = parse_json(file.readline())
                    if row["audio"] != name_of(name) or not row.keys() & {"text", "error"}:
                        raise ValueError("a line of another file")
                    yield row

    def summary(self) -> dict[str, Any] | None:
        """The summary of this attempt or a later one; None until every shard is done."""
        path = self.out / SUMMARY
        if not path.exists():
            return None
        with _damaged(path):
            summary = read_json(path)
            return summary if summary["attempt"] >= self.attempt else None


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Raise UserError for a file of the job that has other content than the job writes."""
    try:
        yield
    except (ValueError, TypeError, KeyError):
        remedy = "remove it and start the same command again"
        raise UserError(f"{path}: damaged; {remedy}") from None


def read_list(path: Path, allow_outside: bool = False) -> list[str]:
    """The files of a list, one a line, or of a manifest (.tsv); each once.

    allow_outside: as in read_manifest. Raises UserError for a list that is empty or unreadable.
    """
    if path.suffix == ".tsv":
        names = (str(utterance.audio) for utterance in read_manifest(path, allow_outside))
    else:
        try:  # a name may have bytes that are not text, and an editor may add a byte order mark
            with open_file(path, LIST_BYTES) as file:
                text = file.read(LIST_BYTES).decode("utf-8-sig", "surrogateescape")
            if "\0" in text:
                raise UserError(f"{path}: no list of files; name audio without --list")
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        # Not splitlines, which also splits at form feeds and other characters of a name.
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        names = (str(Path(line)) for line in lines if line.strip())
    files = list(dict.fromkeys(names))
    if not files:
        raise UserError(f"{path}: the list is empty; it needs one audio file a line")
    return files


def identity(run: Path, recipe: SpeechRecipe) -> dict[str, Any]:
    """What transcripts depend on: weights, features and decode settings.

    Models are identified by content, not by path. Raises UserError where one is missing.
    """
    decode, features = recipe.decode, recipe.features
    weights = _sha256s(run, decode.checkpoint, decode.average)
    try:
        others = [
            _sha256s(local_run(one), decode.checkpoint, decode.average) for one in decode.ensemble
        ]
    except UserError as error:
        raise UserError(f"decode.ensemble: {error}") from None
    lm = decode.lm and find_language_model(decode.lm)
    if lm:
        lm = _sha256s(lm, "best", 1)[0] if lm.is_dir() else sha256_of_files([lm])
    keys = {
        "decode": decode.model_dump(mode="json", exclude={"batch_seconds", "lm", "ensemble"}),
        "features": features.model_dump(mode="json", exclude=TRAINING_ONLY_FEATURES),
        "data": recipe.data.model_dump(mode="json", include={"max_seconds"}),
    }
    settings = {f"{group}.{key}": tree[key] for group, tree in keys.items() for key in tree}
    return {"weights": weights, "decode.ensemble": others or None, "decode.lm": lm, **settings}


def _sha256s(run: Path, which: str, average: int) -> list[str]:
    chosen = choose(run, which, average)
    return [sha256_of_files([checkpoint.folder / WEIGHTS]) for checkpoint in chosen]


def open_folder(job: BulkJob, settings: dict[str, Any]) -> None:
    """Create the folder of a job. Raises UserError where it has anything else in it."""
    digest = hashlib.sha256("\n".join(job.files).encode(errors="surrogateescape")).hexdigest()
    mine = {**settings, "list": digest, "files in a shard": job.size, "format": job.kind}
    path = job.out / "about.json"
    job.out.mkdir(parents=True, exist_ok=True)
    check_run_folder(job.out)  # nothing is read or written through a link in it
    names = [entry.name for entry in job.out.iterdir() if not entry.name.startswith(".")]
    if not path.exists():  # checked after listing the others, which are written after it
        if names:
            raise UserError(
                f"{job.out}: holds {names[0]}, but no transcripts; choose another --out"
            )
        write_files(job.out, {path.name: json.dumps(mine, indent=1) + "\n"})
    try:
        theirs = read_json(path)
        other = [name for name in mine if theirs.get(name) != mine[name]]
    except (ValueError, AttributeError):
        raise UserError(f"{path}: damaged; choose another --out") from None
    if other:
        raise UserError(
            f"{job.out}: holds transcripts of another run, list or settings "
            f"({', '.join(other)} differ); choose another --out"
        )
    job.path(0).parent.mkdir(exist_ok=True)


def transcribe_all(job: BulkJob, load: Callable[[], Recognizer], rank: int, ranks: int) -> int:
    """Transcribe what is not done yet, together with the other ranks -> exit code, 2 for failures.

    `load` is called only if there is work. Returns when every shard is done; on a file system
    without locks, when the rank's shards are.
    """
    progress = Progress(job, rank)
    if job.summary() and rank == 0:
        print(f"{job.out}: everything is done already", flush=True)
    with ShardLocks(job.out / "shards.lock") as locks:
        recognizer: Recognizer | None = None
        while left := sorted(set(range(job.count)) - job.done()):
            recognizer = recognizer or load()
            of_this_rank = [shard for shard in left if shard % ranks == rank]
            others = [shard for shard in reversed(left) if shard % ranks != rank]
            shards = of_this_rank + (others if locks.supported else [])
            worked = [_transcribe(job, shard, recognizer, locks, progress) for shard in shards]
            if not locks.supported and len(of_this_rank) < len(left):
                print(f"rank {rank}: its shards are done; run it again at the end", flush=True)
                return 0
            if not any(worked):
                time.sleep(POLL)  # other ranks work on the rest
            progress.report()
        while not (summary := job.summary()):
            with locks.lock(job.count) as mine:
                if mine and not job.summary():
                    progress.finish(ranks)
            time.sleep(0 if mine else POLL)
    if summary["failures"] and rank == 0:
        print(
            f"{summary['failures']} of {summary['files']} files failed, see {job.out / FAILURES}; "
            f"once the causes are fixed, --attempt {summary['attempt'] + 1} tries them again",
            file=sys.stderr,
            flush=True,
        )
    return 2 if summary["failures"] else 0


def _transcribe(
    job: BulkJob, shard: int, recognizer: Recognizer, locks: ShardLocks, progress: "Progress"
) -> bool:
    """Transcribe a shard unless it is done or locked by another process -> whether it did."""
    path = job.path(shard)
    with locks.lock(shard) as mine:
        if not mine or job.is_done(shard):
            return False
        files = job.files[shard * job.size : (shard + 1) * job.size]
        rows = _transcribe_files(recognizer, files)
        for name in files:
            if "error" in rows[name]:
                rows[name]["attempt"] = job.attempt
        write_files(path.parent, {path.name: "".join(json_line(rows[name]) for name in files)})
    progress.report()
    return True


def _transcribe_files(recognizer: Recognizer, files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The row of each file: its transcript, or why there is none."""
    faults: dict[Path, str] = {}
    rows: dict[str, dict[str, Any]] = {}
    for path, transcript in recognizer.transcribe_files(map(Path, files), faults):
        rows[str(path)] = {**json_row(path, transcript), "audio": name_of(path)}
    for path, reason in faults.items():
        name = name_of(path)
        words = reason.removeprefix(f"{name}: ").split()
        rows[str(path)] = {"audio": name, "error": " ".join(words)}
    return rows


class Progress:
    """The work of all ranks in this session, which rank 0 reports every PROGRESS seconds."""

    def __init__(self, job: BulkJob, rank: int) -> None:
        self.job, self.rank = job, rank
        self.seen = job.done()
        self.begin = self.last_report = time.time()
        self.seconds = 0.0  # of audio, since the start

    def report(self) -> None:
        """Print a line if one is due."""
        if self.rank == 0 and time.time() - self.last_report > PROGRESS:
            self._update()
            self.last_report = time.time()
            total = len(self.job.files)
            files = min(len(self.seen) * self.job.size, total)
            share, rate = f"{100 * files / total:.1f} %", f"{self._rate():.1f}"
            print(f"{files} of {total} files ({share}), {rate} audio-hours per hour", flush=True)

    def finish(self, ranks: int) -> None:
        """Write all transcripts into one file, failures and summary; print the end of the job."""
        self._update()
        job, shards = self.job, range(self.job.count)
        failures = [(row["audio"], row["error"]) for row in job.rows(shards) if "error" in row]
        warnings = [
            (row["audio"], reason)
            for row in job.rows(shards)
            if "error" not in row and (reason := level_warning(row["level"]))
        ]
        seconds = sum(row.get("seconds", 0.0) for row in job.rows(shards))
        for part in job.path(0).parent.glob(".*"):  # of processes killed while they wrote
            part.unlink()
        write_rows(job.out / FAILURES, ("audio", "error"), failures)
        _write_all(job, (row for row in job.rows(shards) if "error" not in row))
        summary = {
            "files": len(job.files),
            "failures": len(failures),
            "too_quiet": len(warnings),
            "attempt": job.attempt,
            "audio_hours": round(seconds / 3600, 4),
            "last_session": {
                "processes": ranks,
                "audio_hours": round(self.seconds / 3600, 4),
                "seconds": round(time.time() - self.begin, 1),
                "audio_hours_per_hour": round(self._rate(), 1),
            },
        }
        write_files(job.out, {SUMMARY: json.dumps(summary, indent=1) + "\n"})
        for kind, pairs in (("failed", failures), ("warning", warnings)):
            for name, reason in pairs[:PRINTED]:
                print(one_line(f"{kind}: {name}: {reason}"), file=sys.stderr, flush=True)
        print(
            f"{job.out}: {len(job.files)} files, {seconds / 3600:.2f} hours of audio, "
            f"{len(failures)} failures; this session {self.seconds / 3600:.2f} hours at "
            f"{self._rate():.1f} audio-hours per hour, ranks: {ranks}",
            flush=True,
        )

    def _update(self) -> None:
        done = self.job.done()
        self.seconds += sum(row.get("seconds", 0.0) for row in self.job.rows(done - self.seen))
        self.seen = done

    def _rate(self) -> float:
        return self.seconds / (time.time() - self.begin)  # audio-hours per hour


def _write_all(job: BulkJob, rows: Iterator[dict[str, Any]]) -> None:
    if job.kind == "text":
        texts = ((row, row["text"].translate(ON_ONE_LINE)) for row in rows)
        table = ((row["audio"], f"{row['seconds']:.3f}", text) for row, text in texts)
        write_rows(job.out / "transcripts.tsv", ("audio", "seconds", "text"), table)
        return
    with atomic_writer(job.out / "transcripts.jsonl", sync=True) as file:
        file.writelines(json_line(row).encode() for row in rows)

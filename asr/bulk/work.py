"""The shards of a job that are not done yet, one after another, and at the end all in one table."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asr.bulk.claims import Claims
from asr.bulk.job import Job
from asr.data.table import whole, write_rows
from asr.recognizer import Recognizer
from asr.scoring.files import replace_files
from asr.training.memory import is_out_of_memory
from asr.transcript import Transcript, as_plain

FAILURES = "failures.tsv"
TOLD = 10  # failures that are said at the end; the file has all
EVERY = 10.0  # seconds between two words on progress
PATIENCE = 0.5  # seconds between two looks at what others still work on


def transcribe_all(job: Job, load: Callable[[], Recognizer], rank: int, ranks: int) -> int:
    """Does what is not done yet, together with the other ranks -> exit code, 2 for failures.

    The recogniser is loaded only where there is work for it. Ends when all is done, whoever did it;
    on a file system without locks, when the rank's own shards are.
    """
    watch = Watch(job, rank)
    if job.told() and rank == 0:
        print(f"{job.out}: everything is done already", flush=True)
    with Claims(job.out / "claims") as claims:
        recognizer: Recognizer | None = None
        while left := sorted(set(range(job.count)) - job.done()):
            recognizer = recognizer or load()
            own = [shard for shard in left if shard % ranks == rank]
            others = [shard for shard in reversed(left) if shard % ranks != rank]
            worked = [
                _transcribe(job, shard, recognizer, claims, watch)
                for shard in own + (others if claims.work else [])
            ]
            if not claims.work and len(own) < len(left):
                print(f"rank {rank}: its shards are done; run it again at the end", flush=True)
                return 0
            if not any(worked):
                time.sleep(PATIENCE)  # the rest is in others' hands
            watch.tell()
        while not (told := job.told()):
            with claims.claim(job.count) as mine:
                if mine and not job.told():
                    watch.finish(ranks)
            time.sleep(0 if mine else PATIENCE)
    if told["failures"] and rank == 0:
        print(
            f"{told['failures']} of {told['files']} files failed, see {job.out / FAILURES}; once "
            f"what is wrong is put right, --attempt {told['attempt'] + 1} tries them again",
            file=sys.stderr,
            flush=True,
        )
    return 2 if told["failures"] else 0


def _transcribe(
    job: Job, shard: int, recognizer: Recognizer, claims: Claims, watch: "Watch"
) -> bool:
    """Writes a shard that nobody has done or claimed -> whether there was need."""
    place = job.path(shard)
    with claims.claim(shard) as mine:
        if not mine or job.is_done(shard):
            return False
        files = job.files[shard * job.size : (shard + 1) * job.size]
        rows = _heard(recognizer, files)
        for name in files:
            if "error" in rows[name]:
                rows[name]["attempt"] = job.attempt
        lines = (json.dumps(rows[name], ensure_ascii=False) + "\n" for name in files)
        replace_files(place.parent, {place.name: "".join(lines)})
    watch.tell()
    return True


def _heard(recognizer: Recognizer, files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is written of each file; of one that cannot be read or is too much for memory, why."""
    faults: dict[Path, str] = {}
    rows: dict[str, dict[str, Any]] = {}
    try:
        for path, transcript in recognizer.transcribe_files(map(Path, files), faults):
            rows[str(path)] = _row(path, transcript)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if len(files) > 1:
            return {name: row for one in files for name, row in _heard(recognizer, [one]).items()}
        faults[Path(files[0])] = "out of memory"
    return rows | {str(path): _failure(path, faults[path]) for path in faults}


def _row(path: Path, transcript: Transcript) -> dict[str, Any]:
    return {**as_plain(path, transcript), "audio": _name(path)}


def _failure(path: Path, reason: str) -> dict[str, Any]:
    name = _name(path)
    return {"audio": name, "error": " ".join(reason.removeprefix(f"{name}: ").split())}


def _name(path: Path) -> str:
    """A name may hold line breaks, and bytes that are no text."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


class Watch:
    """What this session has done, by all ranks together; rank 0 says so now and then."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.seen = job.done()
        self.begin = self.told = time.time()
        self.seconds = 0.0  # of audio, since then

    def tell(self) -> None:
        """A line on progress, where it is time for one."""
        if self.rank == 0 and time.time() - self.told > EVERY:
            self._look()
            self.told = time.time()
            files = min(len(self.seen) * self.job.size, len(self.job.files))
            print(
                f"{files} of {len(self.job.files)} files "
                f"({100 * files / len(self.job.files):.1f} %), {self._rate():.1f} "
                "audio-hours per hour",
                flush=True,
            )

    def finish(self, ranks: int) -> None:
        """All transcripts in one file, and what is to be said at the end."""
        self._look()
        job = self.job
        everything = [*range(job.count)]
        failures = [(row["audio"], row["error"]) for row in job.rows(everything) if "error" in row]
        seconds = sum(row.get("seconds", 0.0) for row in job.rows(everything))
        for left in job.path(0).parent.glob(".*"):  # of who was killed as it wrote
            left.unlink()
        write_rows(job.out / FAILURES, ("audio", "error"), failures)
        _write_all(job, (row for row in job.rows(everything) if "error" not in row))
        summary = {
            "files": len(job.files),
            "failures": len(failures),
            "attempt": job.attempt,
            "audio_hours": round(seconds / 3600, 4),
            "last_session": {
                "processes": ranks,
                "audio_hours": round(self.seconds / 3600, 4),
                "seconds": round(time.time() - self.begin, 1),
                "audio_hours_per_hour": round(self._rate(), 1),
            },
        }
        replace_files(job.out, {job.summary.name: json.dumps(summary, indent=1) + "\n"})
        for name, reason in failures[:TOLD]:
            print(f"failed: {name}: {reason}", file=sys.stderr, flush=True)
        print(
            f"{job.out}: {len(job.files)} files, {seconds / 3600:.2f} hours of audio, "
            f"{len(failures)} failures; this session {self.seconds / 3600:.2f} hours at "
            f"{self._rate():.1f} audio-hours per hour, ranks: {ranks}",
            flush=True,
        )

    def _look(self) -> None:
        done = self.job.done()
        self.seconds += sum(row.get("seconds", 0.0) for row in self.job.rows(done - self.seen))
        self.seen = done

    def _rate(self) -> float:
        return self.seconds / (time.time() - self.begin)


def _write_all(job: Job, rows: Iterator[dict[str, Any]]) -> None:
    if job.kind == "text":
        table = ((row["audio"], f"{row['seconds']:.3f}", row["text"]) for row in rows)
        write_rows(job.out / "transcripts.tsv", ("audio", "seconds", "text"), table)
        return
    with whole(job.out / "transcripts.jsonl") as file:
        file.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)

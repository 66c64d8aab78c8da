"""Fuzz all commands: whatever they read, they succeed or print one line of error, and harm nothing.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/fuzz.py [--cases 5000] [--jobs 2]
    ... --kind audio --number 17 --keep       repeats one case and prints its output and folder

Each case is a command on something damaged or hostile: fuzz_cases.py has the kinds of cases, with
content from fuzz_files.py, fuzz_media.py, fuzz_recipes.py and fuzz_server.py, on the sound data of
fuzz_world.py; fuzz_judge.py runs the command and lists what counts as a fault. A case is determined
by (seed, kind, number), so that it can be repeated. Prints every fault, and for each kind how many
cases ended in success, were refused (exit code 2), were stopped (by a signal) or are wrong, the
most memory and the longest time of the processor. Exit code 1 after any fault.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import forked_commands  # noqa: F401 (imports what commands import as they run)
from fuzz_cases import KINDS
from fuzz_judge import Case, Result, fault_of
from fuzz_server import serve
from fuzz_world import World, make_world, new_place

ENDS = {0: "success", 2: "refused"}


def one_case(
    world: World, kind: str, number: int, seed: int
) -> tuple[str | None, Case, Result, Path]:
    """Make and run a case -> its fault, if any, the case, what it did, and its folder."""
    place = new_place(world.folder / "cases" / f"{kind}-{number}", world.runs["las"])
    make, _ = KINDS[kind]
    case = make(world, place, random.Random(f"{seed} {kind} {number}"))
    fault, result = fault_of(case, place, (world.corpus, world.folder / "runs"))
    return fault, case, result, place


def run_cases(world: World, wanted: list[tuple[str, int]], seed: int, keep: bool) -> list:
    """Run cases, print the faults -> (kind, end, MB, seconds of the processor) of each case."""
    world.served = Path(tempfile.mkdtemp(dir=world.folder))
    server, port = serve(world.served)
    world.address = f"http://127.0.0.1:{port}/{seed}"
    ends = []
    try:
        for kind, number in wanted:
            fault, case, result, place = one_case(world, kind, number, seed)
            end = "WRONG" if fault else ENDS.get(result.code, "stopped")
            ends.append((kind, end, result.memory >> 20, result.cpu))
            if fault or keep:
                print(report(kind, number, fault, case, result, place), flush=True)
            if not keep:
                shutil.rmtree(place)
            if len(ends) % 250 == 0:
                print(f"{len(ends)} of {len(wanted)} cases", flush=True)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return ends


def report(
    kind: str, number: int, fault: str | None, case: Case, result: Result, place: Path
) -> str:
    """A case in a few lines."""
    line = " ".join(repr(argument)[1:-1] for argument in case.arguments)
    more = f"\n  {case.environment}" if case.environment else ""
    return (
        f"{kind} {number}: {fault or 'right'}\n  {case.module.__name__} {line[:1500]}{more}\n"
        f"  code {result.code}, {result.cpu:.1f} s, {result.memory >> 20} MB, in {place}\n"
        f"  {printable(result.err)}"
    )


def printable(text: str) -> str:
    """The end of a text, with escapes."""
    return "\n  ".join(repr(line)[1:-1] for line in text[-1500:].splitlines())


def in_parallel(world: World, wanted: list, seed: int, keep: bool, jobs: int) -> list:
    """Run the cases in so many processes -> as run_cases."""
    pids = {}
    for job in range(jobs):
        path = world.folder / f"ends-{job}.json"
        pid = os.fork()
        if not pid:
            code = 1
            try:
                path.write_text(json.dumps(run_cases(world, wanted[job::jobs], seed, keep)))
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids[pid] = path
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise SystemExit(f"a job failed: {[os.waitstatus_to_exitcode(s) for s in statuses]}")
    return [tuple(end) for path in pids.values() for end in json.loads(path.read_text())]


def shares(cases: int, kinds: Iterable[str]) -> list[tuple[str, int]]:
    """So many cases, split over the kinds by their shares and interleaved."""
    parts = {kind: KINDS[kind][1] for kind in kinds}
    counts = {kind: round(cases * part / sum(parts.values())) for kind, part in parts.items()}
    ordered = [(n / counts[kind], kind, n) for kind in counts for n in range(counts[kind])]
    return [(kind, number) for _, kind, number in sorted(ordered)]


def main() -> int:
    """Run the cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    parser.add_argument("--number", type=int, help="only the case of this number")
    parser.add_argument("--first", type=int, default=0, help="skip the numbers below it")
    parser.add_argument("--keep", action="store_true", help="keep the folders, print all output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Else threads of a new process, when they begin at once, find torch's pool half made.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    wanted = shares(args.cases, args.kind or KINDS)
    wanted = [(kind, number + args.first) for kind, number in wanted]
    if args.number is not None:
        wanted = [(kind, args.number) for kind in args.kind or KINDS]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        world = make_world(folder)
        ends = in_parallel(world, wanted, args.seed, args.keep, args.jobs)
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    for kind in dict.fromkeys(kind for kind, _ in wanted):
        own = [end for end in ends if end[0] == kind]
        counts = Counter(end for _, end, _, _ in own)
        figures = ", ".join(f"{counts[end]} {end}" for end in (*ENDS.values(), "stopped", "WRONG"))
        most, longest = max(end[2] for end in own), max(end[3] for end in own)
        print(f"{kind}: {len(own)} cases: {figures}; at most {most} MB, {longest:.1f} s")
    wrong = sum(end == "WRONG" for _, end, _, _ in ends)
    print(f"{len(ends)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

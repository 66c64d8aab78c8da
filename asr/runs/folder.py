"""What a run folder says of itself: its recipe, and whether it came to its end."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from asr.errors import UserError
from asr.recipe import read_recipe
from asr.scoring.events import begun, event_files
from asr.settings import Recipe

CONSOLE = "console.log"  # what asr.sweep keeps of a run's console
_FINISHED = re.compile(r"finished at step (\d+)")


def finished(run: Path) -> int | None:
    """The step at which the run came to its end; None where it has not, or went on since."""
    try:
        lines = (run / "train.log").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    found = _FINISHED.search(lines[-1]) if lines else None
    return int(found[1]) if found else None


def recipe_of(run: Path) -> Recipe:
    """The recipe a run was trained with. UserError, in one line, where it cannot be read."""
    path = run / "recipe.yaml"
    if not path.exists():
        raise UserError(f"{run}: no recipe.yaml: it ended before training began{last_error(run)}")
    return read_recipe(path)


def last_error(run: Path) -> str:
    """; and the last error that a sweep saw of it, or nothing."""
    try:
        text = (run / CONSOLE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    lines = text.rpartition("\n$ ")[2].splitlines()  # what its last command said
    errors = [line for line in lines if re.match(r"(error:|\w*(Error|Exception)\b)", line)]
    return f" ({errors[-1].removeprefix('error: ')[:300]})" if errors else ""


def is_run(folder: Path) -> bool:
    """Whether training was begun in the folder, or at least tried by a sweep."""
    names = ("recipe.yaml", "train.log", CONSOLE)
    return any((folder / name).is_file() for name in names) or bool(event_files(folder))


def expand(places: Iterable[Path]) -> list[Path]:
    """Run folders from run folders and sweep folders (folders of runs), each once.

    The runs of a sweep come in the order in which they were begun, as its grid has them: what the
    user named first (no norm, say) is what the others are compared with.
    Raises UserError for a place that is neither.
    """
    found: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place}: there is no such folder; name runs or a sweep's folder")
        inside = [place]
        if not is_run(place):
            runs = sorted(filter(is_run, place.iterdir()), key=_begun)
            inside = runs + [sub for sub in sorted(place.iterdir()) if _is_empty(sub)]
        if not any(map(is_run, inside)):
            raise UserError(f"{place}: no run and no folder of runs; train one first")
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def names_of(runs: Sequence[Path]) -> list[str]:
    """A name for each: its folder's, with that above it where two sweeps have runs of one name."""
    tails = [run.resolve().parts[1:] for run in runs]
    names = []
    for tail in tails:
        same = [other for other in tails if other[-1] == tail[-1]]
        sizes = range(1, len(tail) + 1)
        size = next((n for n in sizes if len({other[-n:] for other in same}) == len(same)), 1)
        names.append("/".join(tail[-size:]))
    return names


def _is_empty(place: Path) -> bool:
    """A folder without anything: a run that was lost; a report says so."""
    return place.is_dir() and not any(place.iterdir())


def _begun(run: Path) -> tuple[float, list[tuple[int, str]]]:
    """The second of its first event file, then its name, seed=2 before seed=10."""
    first = next((begun(path) for path in event_files(run)), math.inf)
    parts = re.findall(r"(\D+)(\d*)", f"/{run.name}")
    return first, [(int(number or 0), text) for text, number in parts]

"""The contents of run folders: recipe, whether training finished, curves, cost, evaluations."""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asr.analysis.curves import Curve, finite, read_scalars, start_times
from asr.analysis.report import plain_text
from asr.analysis.score_files import is_number, read_evaluation
from asr.analysis.wer import Score
from asr.config.loader import flat, read_recipe
from asr.config.registered import any_name
from asr.config.schema import DecodeConfig, Recipe
from asr.errors import UserError
from asr.io import check_run_folder, open_file, read_json, sha256_of_files
from asr.shipped import missing_run, train_command
from asr.training.checkpoint import choose, list_checkpoints, read_training
from asr.training.losses import SpeechObjective
from asr.training.resume import OBJECTIVE, SHA256, Content

TAIL = 1 << 20  # bytes of a log that are read
MAX_HASHED = 1 << 30  # bytes of a file that is hashed
REPORT = "compare"  # folder of asr.compare's report, in a sweep's
CONSOLE = "console.log"  # in a run folder: the console output that asr.sweep keeps
TRAIN, VALID = "train/nll", "valid/nll"
HOURS, SECONDS = "speed/audio_hours", "speed/train_seconds"  # cost of the run so far
OVER_WORDS = ("valid/wer", "valid/ctc_wer", "valid/word_perplexity")  # whatever the vocabulary is
BEST = "best "  # and `loss`, or another curve on validation: the name of a figure of every run
WER_OF = "WER of "  # and the split: the name of a figure
FIGURES = ("accuracy", "nll")  # of a score.json without word error rates
# A line of a log with the end of training, or its start.
_ENDS = re.compile(
    r"^(?:[-0-9]+ [0-9:,]+ )?"  # the time
    r"(?:finished at step (?P<step>[0-9]{1,15})\b|(?:training|resuming) .*: [0-9.]+ M parameters)",
    re.MULTILINE,
)
# Keys besides the recipe's. Losses are comparable where DATA is equal.
DATA, TRAINING_DATA = "data and vocabulary", "training data"


def finished(run: Path) -> int | None:
    """The step at which training finished; None if it did not, or was resumed since."""
    last = _last_end(run)
    return int(last["step"]) if last and last["step"] else None


def unfinished_note(run: Path) -> str | None:
    """A line for a run whose training has not finished; None where the folder has no log of it."""
    last = _last_end(run)
    if not last or last["step"]:
        return None
    return f"{run}: its training has not finished; to continue: {train_command(run)}"


def _last_end(run: Path) -> re.Match[str] | None:
    """Trackers may log lines after the end; a resumed run logs its start."""
    ends = list(_ENDS.finditer(_text(run / "train.log")))
    return ends[-1] if ends else None


def _text(path: Path) -> str:
    """The end of a log file; empty if there is no such file."""
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read(TAIL).decode(errors="replace")
    except (OSError, UserError):
        return ""


def recipe_of(run: Path) -> Recipe:
    """The recipe a run was trained with, to read its settings: norms of another program have no
    more than their names.

    Raises UserError if it cannot be read or check_run_folder refuses the folder.
    """
    if not run.exists():
        raise missing_run(run)
    check_run_folder(run)
    path = run / "recipe.yaml"
    if not path.exists():
        raise UserError(f"{run}: no recipe.yaml: training did not start{last_error(run)}")
    with any_name():
        return read_recipe(path)


def last_error(run: Path) -> str:
    """The last error in the console output of a sweep's run, in parentheses; "" without one."""
    lines = _text(run / CONSOLE).rpartition("\n$ ")[2].splitlines()  # of its last command
    errors = [line for line in lines if re.match(r"(error:|\w*(Error|Exception)\b)", line)]
    return f" ({errors[-1].removeprefix('error: ')[:300]})" if errors else ""


def is_run(folder: Path) -> bool:
    """Whether training was started in the folder, or a sweep tried to start it."""
    names = ("recipe.yaml", "train.log", CONSOLE)
    return any((folder / name).is_file() for name in names) or bool(start_times(folder))


def expand_runs(folders: Iterable[Path]) -> list[Path]:
    """Run folders from run folders and sweep folders (folders of runs), each once.

    The runs of a sweep are sorted by their start, so in the order of the grid; others are compared
    with its first setting. Empty folders, of lost runs, come last. UserError for other folders.
    """
    runs: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder; name runs or a sweep's folder")
        selected = [folder]
        if not is_run(folder):
            subfolders = sorted(filter(Path.is_dir, folder.iterdir()))
            selected = sorted(filter(is_run, subfolders), key=_start)
            selected += [f for f in subfolders if not any(f.iterdir()) and f.name != REPORT]
        if not any(map(is_run, selected)):
            raise UserError(f"{folder}: no run and no folder of runs; train one first")
        for run in selected:
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def run_names(runs: Sequence[Path]) -> list[str]:
    """A unique name for each: its folder's, with parents if two sweeps have equal names."""
    tails = [run.resolve().parts[1:] for run in runs]
    names = []
    for tail in tails:
        same = [other for other in tails if other[-1] == tail[-1]]
        sizes = range(1, len(tail) + 1)
        size = next((n for n in sizes if len({other[-n:] for other in same}) == len(same)), 1)
        names.append(plain_text("/".join(tail[-size:])))
    return names


def _start(run: Path) -> tuple[float, list[tuple[int, str]]]:
    """The second of its first event file, then its name, seed=2 before seed=10."""
    parts = re.findall(r"(\D+)(\d*)", f"/{run.name}")
    name = [(int(number or 0), text) for text, number in parts]
    return min(start_times(run), default=math.inf), name


def short_names(keys: Iterable[str], all_keys: Iterable[str]) -> dict[str, str]:
    """Each key's shortest ending that no other key has: model.listener.norm -> listener.norm."""
    counts = Counter(ending for other in all_keys for ending in _endings(other))
    return {key: next((e for e in _endings(key) if counts[e] <= 1), key) for key in keys}


def _endings(key: str) -> list[str]:
    """a.b.c -> c, b.c, a.b.c"""
    parts = key.split(".")
    return [".".join(parts[start:]) for start in reversed(range(len(parts)))]


def value_text(value: Any) -> str:
    """A recipe value as on the command line: ba, 0.1, null, [0.9,1.1]."""
    return plain_text(value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))


@dataclass(frozen=True)
class RunRecord:
    """One run. fault: why it is not counted, if it is not."""

    folder: Path
    settings: dict[str, Any]  # dotted recipe key -> value; empty if it cannot be read
    curves: dict[str, Curve]
    fault: str | None
    name: str  # unique among the runs read with it


def read_runs(folders: Sequence[Path], curve: str) -> list[RunRecord]:
    """Each run's recipe, curves and fault."""
    runs = []
    files: dict[tuple[str, Any], Any] = {}  # key and hash of data -> their first path
    for folder, name in zip(folders, run_names(folders), strict=True):
        try:
            settings = flat(recipe_of(folder))
            curves = read_scalars(folder, {TRAIN, curve, HOURS, SECONDS})
            fault, content = _fault(folder, curves, curve), _content(folder)
            if content or not fault:
                settings[DATA] = _data_hash(folder, content, settings, curve)
            settings |= _learned_from(content)
            known = settings.keys() & content.keys()  # moved data are the same data
            settings |= {k: files.setdefault((k, content[k][SHA256]), settings[k]) for k in known}
        except UserError as error:
            runs.append(RunRecord(folder, {}, {}, str(error), name))
            continue
        except OSError as error:
            runs.append(RunRecord(folder, {}, {}, f"{error.filename}: {error.strerror}", name))
            continue
        runs.append(RunRecord(folder, settings, curves, fault, name))
    _complete_data(runs)
    return runs


def _complete_data(runs: Sequence[RunRecord]) -> None:
    """Name the data of lost runs; none if those of a counted run are unknown."""
    counted = [run.settings for run in runs if not run.fault]
    lost = [run.settings for run in runs if run.settings and run.fault]
    if not all(TRAINING_DATA in settings for settings in counted):  # unknown, not another
        for settings in (*counted, *lost):
            settings.pop(TRAINING_DATA, None)
    for settings in lost if counted else ():
        # Without a checkpoint its data are unknown: as of the run that it agrees most with.
        nearest = max(
            counted, key=lambda other: sum(pair in other.items() for pair in settings.items())
        )
        for key in (DATA, TRAINING_DATA):
            if key in nearest:
                settings.setdefault(key, nearest[key])


def _fault(folder: Path, curves: dict[str, Curve], curve: str) -> str | None:
    """Why a run is not counted: it has no curve, its loss is NaN, or it did not finish."""
    error = last_error(folder)
    if not start_times(folder):
        return f"{folder}: no event file{error}"
    for name in (TRAIN, curve):
        values = curves[name].values
        if len(values) and not math.isfinite(values[-1]):
            good = np.flatnonzero(np.isfinite(values))
            step = curves[name].steps[good[-1] + 1 if len(good) else 0]
            return f"{folder}: diverged: {name} is not finite from step {step} on{error}"
    if finished(folder) is None:
        last = max((int(c.steps[-1]) for c in curves.values() if len(c)), default=0)
        return f"{folder}: not finished, last seen at step {last}{error}"
    if not len(curves[curve]):
        return f"{folder}: no point of {curve} in its event files"
    return None


def _content(folder: Path) -> Content:
    """What the run learned from, of its last checkpoint, since the files may have changed.

    Empty where that is damaged or has weights only.
    """
    with suppress(UserError):
        for checkpoint in list_checkpoints(folder)[-1:]:
            return read_training(checkpoint)["content"]
    return {}


def _data_hash(folder: Path, content: Content, settings: dict[str, Any], curve: str) -> str:
    """A hash of validation data, and of the vocabulary where the curve depends on it; of their
    content if that is known.
    """
    # Images validate on a part of the folder.
    known = content.get("data.valid") or content.get("data.folder")
    valid = str(known.get(SHA256)).encode() if known else _validation_files_hash(settings)
    digest = hashlib.sha256(valid)
    vocabulary = () if curve in OVER_WORDS else ("tokenizer.json", "tokenizer.model")
    for path in map(folder.joinpath, vocabulary):
        exists = path.is_file()
        digest.update(sha256_of_files([path], MAX_HASHED).encode() if exists else b"none")
    return digest.hexdigest()[:8]


def _learned_from(content: Content) -> dict[str, str]:
    """Settings that the recipe does not have: the training data, and an objective of a program."""
    settings = {}
    if data := content.get("data.train"):
        settings[TRAINING_DATA] = str(data[SHA256])[:8]
    objective = content.get(OBJECTIVE, {})
    if objective.get("class", SpeechObjective.__name__) != SpeechObjective.__name__:
        settings[OBJECTIVE] = f"{objective['class']}@{str(objective[SHA256])[:8]}"
    return settings


def _validation_files_hash(settings: dict[str, Any]) -> bytes:
    """The hash of the current files that the recipe names; of their names if one is missing."""
    named = settings.get("data.valid")
    files = [Path(str(name)) for name in (named if isinstance(named, list) else [named])]
    with suppress(OSError, ValueError):  # ValueError: an impossible file name
        if all(file.is_file() and file.stat().st_size <= MAX_HASHED for file in files):
            return sha256_of_files(files).encode()
    return repr(named).encode()


@dataclass(frozen=True)
class Cost:
    """Audio and time at N steps, the first of which is 0; there is no other if none is known."""

    steps: np.ndarray  # (N,)
    hours: np.ndarray  # of audio trained on
    seconds: np.ndarray  # of training and loading, without validation

    def at(self, step: float) -> tuple[float, float] | None:
        """Audio-hours and seconds at a step: interpolated; proportional after the last step."""
        if self.steps[-1] <= 0:
            return None
        scale = max(1.0, step / self.steps[-1])
        known = min(step, self.steps[-1])
        hours = np.interp(known, self.steps, self.hours) * scale
        return float(hours), float(np.interp(known, self.steps, self.seconds) * scale)


def read_cost(curves: Mapping[str, Curve]) -> Cost:
    """From the curves HOURS and SECONDS."""
    hours, seconds = finite(curves[HOURS]), finite(curves[SECONDS])
    steps = np.intersect1d(hours.steps, seconds.steps)
    pair = [c.values[np.isin(c.steps, steps)] for c in (hours, seconds)]
    return Cost(*(np.insert(row, 0, 0) for row in (steps, *pair)))


def _rates_without_words(file: Path) -> dict[str, Any]:
    """The content of score.json; empty if it has word error rates or is damaged."""
    try:
        rates = read_json(file)
    except (OSError, ValueError, UserError):
        return {}
    return rates if isinstance(rates, dict) and "wer" not in rates else {}


def _is_outdated(run: Path, metadata: Mapping[str, Any]) -> bool:
    """Whether an evaluation used other checkpoints than it would now; False if unknown."""
    decode, steps = metadata.get("decode"), metadata.get("steps")
    average = decode.get("average", 1) if isinstance(decode, dict) else None
    if type(average) is not int or steps is None or not list_checkpoints(run):
        return False
    now = choose(run, decode.get("checkpoint", "best"), max(average, 1))
    return [checkpoint.step for checkpoint in now] != steps


def evaluation_notes(run: Path, folder: Path, metadata: Mapping[str, Any]) -> list[str]:
    """What limits a comparison with the evaluation in `folder`."""
    notes = []
    if _is_outdated(run, metadata):
        notes.append(f"{folder}: of older checkpoints than the run has now; evaluate again.")
    missing = metadata.get("not_decoded")
    if type(missing) is int and missing:
        notes.append(f"{folder}: {missing} utterances not decoded, scored as empty.")
    return notes


def unequal_decoding(*decoded: Mapping[str, str]) -> dict[str, list[str]]:
    """The decode_settings that differ: key -> values."""
    keys = dict.fromkeys(key for settings in decoded for key in settings)
    rows = {key: [settings.get(key, "as trained") for settings in decoded] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def decode_settings(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The decode settings of an evaluation, and its overrides of the run's other settings."""
    decode = metadata.get("decode")
    settings = {}
    if isinstance(decode, dict):
        # An evaluation older than a setting used what is now its default; a removed one is ignored.
        defaults = DecodeConfig().model_dump(mode="json", exclude={"batch_seconds"})
        settings = {key: decode.get(key, default) for key, default in defaults.items()}
    overrides = metadata.get("overrides")
    changes = overrides if isinstance(overrides, list) else []
    other = [change.partition("=") for change in changes if isinstance(change, str)]
    settings |= {key: value for key, _, value in other if not key.startswith(("decode.", "data."))}
    return {key: value_text(value) for key, value in settings.items()}


@dataclass(frozen=True)
class SettingRun:
    """One run of a setting, as compared with others."""

    name: str
    seed: int
    loss: Curve  # on validation
    train_loss: Curve
    cost: Cost
    scores: dict[str, Score]  # by split
    figures: dict[str, float]  # by name: "best loss", "WER of test", "accuracy of test", ...
    decoded: dict[str, dict[str, str]]  # by split: decode settings


@dataclass(frozen=True)
class SettingRuns:
    """All runs of one setting, which differ only in their seeds."""

    label: str
    short: str  # a letter instead of a long label, for table rows with two settings
    legend: str  # the whole label
    factors: Mapping[str, str]  # the settings that differ: short name -> value as text
    members: tuple[SettingRun, ...]
    failed: int
    comparable: bool  # its losses are of the same data and vocabulary as those of most runs

    @property
    def name(self) -> str:
        """The label in a sentence: the letter if the whole label is long."""
        return self.short if self.short == self.label else self.legend


def best_of(curve: str) -> str:
    """The name of the lowest value of a curve on validation."""
    return BEST + ("loss" if curve == VALID else curve)


def read_setting_run(run: RunRecord, curve: str, notes: list[str]) -> SettingRun:
    """A run with its cost and evaluations; damaged and outdated ones are listed in `notes`."""
    seed, loss = run.settings["seed"], run.curves[curve]
    scores, figures, decoded = {}, {best_of(curve): float(finite(loss).values.min())}, {}
    for file in sorted(run.folder.glob("evaluate/*/score.json")):
        folder, split = file.parent, plain_text(file.parent.name)
        if rates := _rates_without_words(file):
            numbers = {name: rates[name] for name in FIGURES if is_number(rates.get(name))}
            figures |= {f"{name} of {split}": number for name, number in numbers.items()}
            continue
        try:
            evaluation = read_evaluation(folder)
        except UserError as error:
            notes.append(f"skipped: {error}.")
            continue
        notes += evaluation_notes(run.folder, folder, evaluation.metadata)
        scores[split], decoded[split] = evaluation.score, decode_settings(evaluation.metadata)
        figures[f"{WER_OF}{split}"] = evaluation.score.wer
    cost = read_cost(run.curves)
    return SettingRun(run.name, seed, loss, run.curves[TRAIN], cost, scores, figures, decoded)

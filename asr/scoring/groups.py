"""Which settings tell runs apart: runs that differ in nothing else belong to one group.

Settings are flat mappings, dotted key -> value, as a recipe's keys are. Runs need not have the same
keys: those of another kind of model are missing altogether.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
_MISSING, _OFF = "\0missing", "\0off"  # no YAML text can hold them


@dataclass(frozen=True)
class Group:
    """Runs with equal settings: what sets them apart from the others, and their numbers."""

    settings: dict[str, str]  # short name -> value as text
    members: tuple[int, ...]

    @property
    def label(self) -> str:
        """norm=ba hidden=128; empty where there is only one group."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def group(runs: Sequence[Settings], ignore: Iterable[str] = ()) -> list[Group]:
    """The groups in the order of their first run; `ignore` names keys that may differ within one.

    A key that only some runs have, all with one value (a Transformer's, beside LAS), is left out
    where the keys shown already tell those runs from the rest.
    """
    columns = _columns(runs, set(ignore))
    shown = {
        key: values for key, values in columns.items() if len(set(values) - {_MISSING, _OFF}) > 1
    }
    for key, values in columns.items():
        if key not in shown and not _told(values, shown.values()):
            shown[key] = values
    names = short_names(list(shown), {key for run in runs for key in run})
    groups: dict[tuple[str, ...], list[int]] = {}
    for number in range(len(runs)):
        row = tuple(values[number] for values in shown.values())
        groups.setdefault(row, []).append(number)
    return [Group(_named(names.values(), row), tuple(members)) for row, members in groups.items()]


def letter(place: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    before, last = divmod(place, 26)
    return (letter(before - 1) if before else "") + chr(ord("A") + last)


def short_names(keys: Iterable[str], among: Iterable[str]) -> dict[str, str]:
    """Each key's shortest ending that no other key has: model.listener.norm -> listener.norm."""
    others = [f".{key}" for key in among]
    names = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[place:]) for place in reversed(range(len(parts)))]
        clear = (e for e in endings if sum(other.endswith(f".{e}") for other in others) <= 1)
        names[key] = next(clear, key)
    return names


def value_text(value: Any) -> str:
    """A setting's value as one would type it: ba, 0.1, null, [0.9,1.1]."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _columns(runs: Sequence[Settings], ignore: set[str]) -> dict[str, tuple[str, ...]]:
    """The keys that are not the same in all runs, with every run's value as text."""
    keys = list(dict.fromkeys(key for run in runs for key in run))
    # `train.guide: null` in one run and keys below train.guide in another: only those are shown.
    parents = {key[:place] for key in keys for place, sign in enumerate(key) if sign == "."}
    columns = {
        key: tuple(_value(run, key) for run in runs)
        for key in keys
        if key not in ignore and key not in parents
    }
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def _value(run: Settings, key: str) -> str:
    if key in run:
        return value_text(run[key])
    parts = key.split(".")
    above = (".".join(parts[:size]) for size in range(1, len(parts)))
    return _OFF if any(name in run for name in above) else _MISSING


def _told(values: Sequence[str], shown: Iterable[Sequence[str]]) -> bool:
    """Whether runs that agree in all columns shown also agree in this one."""
    seen: dict[tuple[str, ...], str] = {}
    columns = list(shown)
    rows = zip(*columns, strict=True) if columns else [()] * len(values)
    return all(seen.setdefault(r, value) == value for r, value in zip(rows, values, strict=True))


def _named(names: Iterable[str], row: Iterable[str]) -> dict[str, str]:
    there = {n: value for n, value in zip(names, row, strict=True) if value != _MISSING}
    return {n: "null" if value == _OFF else value for n, value in there.items()}

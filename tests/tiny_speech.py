"""A corpus of a few tones, a recipe for the smallest LAS, and commands run in this process."""

import json
import sys
from dataclasses import asdict

import numpy as np
import pytest
import soundfile
import yaml

from asr import errors
from asr.data.corpus import Utterance, write_manifest
from asr.features.augment import SpecAugment
from asr.training.state import TrainState, random_state

RATE = 8000
PITCH = {"a": 350.0, "b": 900.0, "c": 2100.0, " ": 0.0}
TEXTS = {
    "train": "abc cab bca ac b c a aab cb abccba|c a b|ba".replace("|", " ").split(),
    "valid": ["cb a", "abc", "b"],
    "test": ["bc", "a cb", "cab", "aa c"],
}


def spec_augment(**settings):
    """The masks of Park et al.'s policy LD, unlimited by the utterance's length, except these."""
    policy = {"freq_masks": 2, "freq_width": 27, "time_masks": 2, "time_width": 100}
    return SpecAugment(**{**policy, "time_fraction": 1.0, "time_warp": 0, **settings})


def tones(text, seed):
    """0.12 s of tone for each letter, with a little noise: (S,) in -1 to 1."""
    time = np.arange(int(0.12 * RATE)) / RATE
    signal = np.concatenate([0.3 * np.sin(2 * np.pi * PITCH[s] * time) for s in text])
    return signal + 0.01 * np.random.default_rng(seed).standard_normal(len(signal))


def make_corpus(folder):
    """folder/{train,valid,test}.tsv with their audio."""
    for split, texts in TEXTS.items():
        rows = []
        for number, text in enumerate(texts):
            name = f"{split}-{number}"
            samples = tones(text, hash_of(name))
            path = folder / f"{name}.flac"
            soundfile.write(path, samples, RATE)
            rows.append(Utterance(name, f"s{number % 2}", path, len(samples) / RATE, text))
        write_manifest(folder / f"{split}.tsv", rows)


def hash_of(name):
    return sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**32


def make_recipe(folder):
    """The smallest LAS with all random augmentation and dropout."""
    listener = {"layers": 2, "hidden": 5, "pyramid": [2], "dropout": 0.1, "recurrent_dropout": 0.1}
    speller = {"hidden": 7, "embedding": 3, "scheduled_sampling": 0.2, "dropout": 0.1}
    recipe = {
        "run": "tiny",
        "data": {
            "train": str(folder / "train.tsv"),
            "valid": str(folder / "valid.tsv"),
            "test": {"test": str(folder / "test.tsv")},
            "workers": 0,
        },
        "features": {
            "sample_rate": RATE,
            "mel_bins": 11,
            "speed_perturb": [0.9, 1.0, 1.1],
            "spec_augment": {"freq_width": 3, "time_width": 5},
            "noise": [20, 40],
        },
        "model": {
            "kind": "las",
            "listener": listener,
            "speller": speller,
            "attention_size": 5,
        },
        "train": {
            "epochs": 2,
            "batch_seconds": 1.2,
            "accumulate": 2,
            "optimizer": {"lr": 0.01},
            "schedule": {"warmup": 2},
            "guided_attention": {"steps": 4},
            "samples": 0,
            "log_every": 1,
            "threads": 1,
            "device": "cpu",
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def json_lines(path, rows):
    """Write one JSON object a line; text as it is, to give a faulty line. -> path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def age(run):
    """Event files are read in the order of the time in their name; move these before others."""
    for number, path in enumerate(sorted(run.glob("events.*"))):
        path.rename(path.with_name(f"events.out.tfevents.{number:010d}.old"))


def training_state(**values):
    """What a checkpoint of a training holds beside the weights, with these values."""
    state = {"optimizer": {"param_groups": [], "state": {}}, "position": asdict(TrainState())}
    state |= {"random": random_state(), "ranks": [], "trained": [{}], "recipe": "", "content": {}}
    return state | {"validated": -1, "metrics": {}, "trackers": {}} | values


class Commands:
    """`commands(asr.train, "recipe.yaml", ...)` -> exit code, stdout, stderr."""

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, module, *arguments):
        self.monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            errors.run_command(module.main)
        captured = self.capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    def refused(self, module, *arguments):
        """The one error line of a command that refuses its input."""
        code, _, err = self(module, *arguments)
        assert code == 2, err
        assert "Traceback" not in err
        (line,) = err.splitlines()
        assert line.startswith("error: ") and len(line) < 500
        return line.removeprefix("error: ")

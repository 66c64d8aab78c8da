"""The manifests a recipe names: made where they are built in, checked, cut to length."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asr.data.corpora import spoken_numbers
from asr.data.corpus import Corpus, read_manifest
from asr.errors import UserError
from asr.settings import Data

PREPARE = {
    None: "python -m asr.prepare tsv MANIFEST.tsv --to {folder}",
    "spoken-numbers": "python -m asr.prepare spoken-numbers --to {folder}",
    "librispeech": "python -m asr.prepare librispeech --to {folder} --subsets {split}",
    "mini-librispeech": "python -m asr.prepare librispeech --to {folder} --subsets {split}",
}


def corpus(data: Data, path: Path | None, role: str) -> Corpus:
    """The manifest at `path`. UserError names the command that makes it where it is not there."""
    if path is None:
        raise UserError(f"data.{role} is not set: name a manifest, data.{role}=PATH.tsv")
    make_built_in(data.corpus, path)
    if not path.is_file():
        command = PREPARE[data.corpus].format(folder=path.parent, split=path.stem)
        raise UserError(f"data.{role}: {path} is not there. Make it with: {command}")
    return read_manifest(path, data.outside)


def make_built_in(corpus: str | None, manifest: Path) -> None:
    """The spoken numbers, where a recipe names them and they are not there yet."""
    if corpus == "spoken-numbers" and not manifest.exists():
        print(f"making the spoken numbers in {manifest.parent} (once, under a minute)", flush=True)
        spoken_numbers.prepare(manifest.parent)


def split(data: Data, name: str) -> Corpus:
    """What `--split NAME` means: train, valid, one of data.test, or a manifest's path."""
    known = {"train": data.train, "valid": data.valid, **data.test}
    if name in known:
        return corpus(data, known[name], name if name in ("train", "valid") else f"test.{name}")
    if name.endswith(".tsv"):
        return read_manifest(Path(name), data.outside)
    raise UserError(f"--split {name}: neither a manifest (.tsv) nor one of {', '.join(known)}")


def within(whole: Corpus, low: float, high: float) -> Corpus:
    """The utterances between two lengths in seconds. UserError where none is left."""
    kept = (whole.seconds >= low) & (whole.seconds <= high)
    if not kept.any():
        raise UserError(
            f"{whole.path}: no utterance between data.min_seconds = {low:g} "
            f"and data.max_seconds = {high:g}"
        )
    return whole if kept.all() else whole.take(np.flatnonzero(kept))


def check_text(texts: Sequence[str], unknown: Sequence[str], path: Path | None) -> None:
    """UserError where a split's text has no character of the vocabulary."""
    letters = set("".join(texts)) - {" "}
    if letters and letters <= set("".join(unknown)):
        raise UserError(f"{path}: its text has no character that the training text has; check case")

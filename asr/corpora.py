"""The manifests a recipe names: made where they are built in, checked, cut to length."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asr.data.corpora import spoken_numbers
from asr.data.corpus import Corpus, read_manifest
from asr.errors import UserError
from asr.settings import Data
from asr.training.distributed import is_first

MOST_UNKNOWN = 0.5  # of a text's letters
MOST_SHOWN = 20  # letters
PREPARE = {
    None: "python -m asr.prepare tsv MANIFEST.tsv --to {folder}",
    "spoken-numbers": "python -m asr.prepare spoken-numbers --to {folder}, which has train.tsv, "
    "valid.tsv and test.tsv",
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
    """The spoken numbers, where a recipe names one of their splits and it is not there yet."""
    splits = spoken_numbers.VARIANTS
    if corpus == "spoken-numbers" and manifest.stem in splits and not manifest.exists():
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
    """The utterances between two lengths in seconds, and a line of those that are not.

    UserError where none is left.
    """
    kept = (whole.seconds >= low) & (whole.seconds <= high)
    if not kept.any():
        raise UserError(
            f"{whole.path}: no utterance between data.min_seconds = {low:g} "
            f"and data.max_seconds = {high:g}"
        )
    if kept.all():
        return whole
    if is_first():
        out = whole.seconds[~kept]
        print(
            f"{whole.path}: {len(out)} of {len(whole)} utterances ({out.sum() / 3600:.2f} of "
            f"{whole.seconds.sum() / 3600:.2f} h) are left out: shorter than data.min_seconds = "
            f"{low:g} or longer than data.max_seconds = {high:g}",
            flush=True,
        )
    return whole.take(np.flatnonzero(kept))


def check_text(texts: Sequence[str], unknown: Sequence[str], path: Path | None) -> None:
    """Says which letters of a split the vocabulary lacks, if any; UserError where it lacks most.

    `unknown`: those of each text.
    """
    count = Counter("".join(texts).replace(" ", ""))
    lost = {letter: count[letter] for letter in set("".join(unknown)) & set(count)}
    if not lost:
        return
    share = sum(lost.values()) / count.total()
    shown = " ".join(sorted(lost, key=lambda letter: (-lost[letter], letter))[:MOST_SHOWN])
    line = f"{path}: {100 * share:.3g} % of its letters are none that the model knows: {shown}"
    if share > MOST_UNKNOWN:
        raise UserError(f"{line}; check case and language (asr.prepare tsv --text upper, lower)")
    if is_first():
        print(line, flush=True)

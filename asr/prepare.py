"""Make manifests: python -m asr.prepare librispeech|tsv|spoken-numbers|... --to DIR"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from asr import command
from asr.data.corpora import librispeech, mnist, spoken_numbers, tsv, webdataset
from asr.data.corpus import read_manifest
from asr.data.shards import pack
from asr.errors import UserError

Kinds = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main() -> None:
    """Read the command line and prepare what it names."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.prepare",
        description="Make manifests (id, speaker, audio, seconds, text) that recipes train on.",
    )
    names = "librispeech | librispeech-lm | tsv | shards | webdataset | spoken-numbers | mnist"
    kinds = parser.add_subparsers(required=True, metavar=names)
    _add_librispeech(kinds)
    _add_tsv(kinds)
    _add_shards(kinds)
    _add_webdataset(kinds)
    _add_spoken_numbers(kinds)
    _add_mnist(kinds)
    _add_librispeech_lm(kinds)
    args = parser.parse_args()
    args.prepare(args)


def _add(
    kinds: Kinds, prepare: Callable[[argparse.Namespace], None], name: str, **told: str
) -> argparse.ArgumentParser:
    """A kind of corpus, which `prepare` makes in the folder --to; told: help and description."""
    parser = kinds.add_parser(name, **told)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR")
    parser.set_defaults(prepare=prepare)
    return parser


def _add_librispeech(kinds: Kinds) -> None:
    parser = _add(
        kinds,
        _librispeech,
        "librispeech",
        help="LibriSpeech or Mini LibriSpeech, from openslr.org or an unpacked folder",
        description="Downloads, verifies and unpacks subsets of LibriSpeech, and writes "
        "DIR/SUBSET.tsv for each. Running it again goes on where it broke off.",
    )
    parser.add_argument(
        "--subsets",
        nargs="+",
        required=True,
        choices=librispeech.SUBSETS,
        metavar="SUBSET",
        help=", ".join(librispeech.SUBSETS),
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="an unpacked LibriSpeech folder: nothing is downloaded or copied; "
        "DIR/SUBSET.audio becomes a link to it",
    )
    parser.add_argument("--url", default=librispeech.URL, help="a mirror of %(default)s")
    parser.add_argument(
        "--keep-archives", action="store_true", help="keep DIR/SUBSET.tar.gz once unpacked"
    )


def _librispeech(args: argparse.Namespace) -> None:
    # All folders first: a subset that is not there shall not leave the others half done.
    folders = {
        subset: librispeech.find(args.source, subset)
        if args.source
        else librispeech.download(subset, args.to, args.url, args.keep_archives)
        for subset in args.subsets
    }
    for subset, folder in folders.items():
        _say(librispeech.write(subset, folder, args.to))


def _add_tsv(kinds: Kinds) -> None:
    parser = _add(
        kinds,
        _tsv,
        "tsv",
        help="your own recordings, listed in a table",
        description="Checks every row of a table with the columns id, audio, text, and perhaps "
        "speaker and seconds (parted by tabs, audio relative to the table), decodes every file, "
        "and writes DIR/NAME.tsv. Faults are listed all at once, and then nothing is written.",
    )
    parser.add_argument("table", type=Path, metavar="MANIFEST.tsv")
    parser.add_argument(
        "--audio",
        type=Path,
        metavar="FOLDER",
        help="the folder that all audio must lie in (default: the table's own); where it is not "
        "below DIR, DIR/NAME.audio becomes a link to it",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="write the good rows; the others are listed"
    )
    parser.add_argument(
        "--text",
        choices=("as-is", "upper", "lower"),
        default="as-is",
        help="turn the text to capitals or small letters (default: as-is, nothing is changed)",
    )
    parser.add_argument(
        "--headers-only",
        action="store_true",
        help="believe the audio files' headers; faster, but any file that breaks off passes",
    )
    parser.add_argument("--max-seconds", type=float, help="longer recordings are a fault")
    parser.add_argument(
        "--hours",
        type=float,
        help="a random part of the table this long; the same one every time, and a shorter part "
        "lies within a longer one",
    )


def _tsv(args: argparse.Namespace) -> None:
    checked = tsv.check(args.table, args.audio, args.headers_only, args.max_seconds)
    for message in checked.messages():
        print(f"skipped: {message}" if args.skip_bad else message, file=sys.stderr)
    if checked.faults and not args.skip_bad:
        whole = len(checked.faults) + len(checked.rows)
        raise UserError(
            f"{args.table}: {len(checked.faults)} of {whole} rows are faulty, nothing is written; "
            "mend them, or leave them out with --skip-bad"
        )
    if args.hours is not None:
        checked.keep_part(args.hours)
    _say(tsv.write(checked, args.to, args.text))


def _add_shards(kinds: Kinds) -> None:
    parser = _add(
        kinds,
        lambda args: _say(pack(args.manifest, args.to, args.megabytes, args.outside)),
        "shards",
        help="a manifest's audio as some large tars, for storage that hates small files",
        description="Packs the audio of a manifest into DIR/NAME-00000.tar, ... and writes "
        "DIR/NAME.tsv, which recipes take as any other: it says where in which tar each recording "
        "lies. Every tar can be read by the webdataset library, too.",
    )
    parser.add_argument("manifest", type=Path, metavar="MANIFEST.tsv")
    parser.add_argument(
        "--megabytes", type=float, default=1000.0, help="of one tar (default: %(default)g)"
    )
    parser.add_argument("--outside", action="store_true", help="audio that lies elsewhere, too")


def _add_webdataset(kinds: Kinds) -> None:
    parser = _add(
        kinds,
        _webdataset,
        "webdataset",
        help="tars in the webdataset library's layout, as they are",
        description="Writes DIR/NAME.tsv of the tars in a folder, whose samples have audio and a "
        ".txt, or a .json with text; DIR/NAME.audio becomes a link to the folder.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")


def _webdataset(args: argparse.Namespace) -> None:
    found = webdataset.write(args.folder, args.to)
    for line in found.left_out:
        print(f"left out: {line}", file=sys.stderr)
    _say(found.manifest)


def _add_spoken_numbers(kinds: Kinds) -> None:
    parser = _add(
        kinds,
        _spoken_numbers,
        "spoken-numbers",
        help="the built-in corpus of synthetic speech, made on this machine in a minute",
        description="Synthesises number phrases in many voices: DIR/train.tsv (about 1 hour), "
        "DIR/valid.tsv, DIR/test.tsv, with other voices and phrases in each.",
    )
    parser.add_argument("--seed", type=int, default=1)


def _spoken_numbers(args: argparse.Namespace) -> None:
    spoken_numbers.prepare(args.to, seed=args.seed)
    for split in ("train", "valid", "test"):
        _say(args.to / f"{split}.tsv")


def _add_mnist(kinds: Kinds) -> None:
    parser = _add(
        kinds,
        _mnist,
        "mnist",
        help="handwritten digits, to inspect an LSTM cell with",
        description="Brings MNIST's four IDX files to DIR, and checks them.",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="copy the files of this folder, packed or not; nothing is downloaded",
    )
    parser.add_argument("--url", default=mnist.URL, help="a mirror of %(default)s")


def _mnist(args: argparse.Namespace) -> None:
    mnist.copy(args.source, args.to) if args.source else mnist.download(args.to, args.url)
    for images in mnist.read(args.to):
        shape = "{} images of {} x {}".format(*images.pixels.shape)
        other = "" if mnist.is_original(images) else " (not MNIST's own pixels)"
        print(f"{args.to}: {images.name}: {shape}{other}")


def _add_librispeech_lm(kinds: Kinds) -> None:
    parser = _add(
        kinds,
        _librispeech_lm,
        "librispeech-lm",
        help="LibriSpeech's text for language models, from openslr.org",
        description=f"Downloads and verifies DIR/{librispeech.LM_TEXT} (1.5 GB). Running it "
        "again goes on where it broke off.",
    )
    parser.add_argument("--url", default=librispeech.URL, help="a mirror of %(default)s")


def _librispeech_lm(args: argparse.Namespace) -> None:
    print(f"{librispeech.download_text(args.to, args.url)}: whole")


def _say(manifest: Path) -> None:
    corpus = read_manifest(manifest)
    hours = float(corpus.seconds.sum()) / 3600
    print(f"{manifest}: {len(corpus)} utterances, {hours:.2f} hours")


if __name__ == "__main__":
    command.run(main)

"""Make manifests that recipes train on: python -m asr.prepare KIND ... --to DIR"""

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from asr.arguments import CommandParser, above_zero, natural
from asr.errors import UserError, one_line, run_command

# A function per kind; its docstring is the help of its command line. It imports what it needs
# itself, since torch takes seconds, for which --help should not wait.


def main() -> None:
    """Parse the arguments and prepare the corpus."""
    parser = CommandParser(
        prog="python -m asr.prepare",
        description="Make manifests (id, speaker, audio, seconds, text) that recipes train on.",
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    kinds.type = str  # the arguments after KIND are checked by its own parser

    def add(name: str, prepare: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        summary, _, description = (inspect.getdoc(prepare) or "").partition("\n\n")
        kind = kinds.add_parser(name, help=summary.rstrip("."), description=description)
        kind.add_argument("--to", type=Path, required=True, metavar="DIR", help="output folder")
        kind.set_defaults(prepare=prepare)
        return kind

    mirror = "a mirror of https://www.openslr.org/resources"
    kind = add("librispeech", _librispeech)
    names = "train-clean-100, train-clean-360, train-other-500, dev-clean, dev-other, test-clean, "
    names += "test-other; of Mini LibriSpeech train-clean-5, dev-clean-2"
    kind.add_argument("--subsets", nargs="+", required=True, metavar="SUBSET", help=names)
    text = "an unpacked LibriSpeech folder: nothing is downloaded or copied; DIR/SUBSET.audio "
    text += "becomes a link to it"
    kind.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help=text)
    kind.add_argument("--url", help=mirror)
    text = "keep DIR/SUBSET.tar.gz after unpacking"
    kind.add_argument("--keep-archives", action="store_true", help=text)

    kind = add("librispeech-lm", _librispeech_lm)
    kind.add_argument("--url", help=mirror)

    kind = add("tsv", _tsv)
    kind.add_argument("table", type=Path, metavar="MANIFEST.tsv")
    text = "the folder that must hold all audio (default: the table's own); if it is not below "
    text += "DIR, DIR/NAME.audio becomes a link to it"
    kind.add_argument("--audio", type=Path, metavar="FOLDER", help=text)
    text = "list the faulty rows and write the others"
    kind.add_argument("--skip-bad", action="store_true", help=text)
    text = "convert the text to upper or lower case (default: %(default)s)"
    kind.add_argument("--text", choices=("as-is", "upper", "lower"), default="as-is", help=text)
    text = "trust the audio files' headers: faster, but truncated files pass"
    kind.add_argument("--headers-only", action="store_true", help=text)
    kind.add_argument("--max-seconds", type=above_zero, help="longer recordings are faulty")
    text = "a random part of the table of this duration: the same part every time, and a subset "
    kind.add_argument("--hours", type=above_zero, help=text + "of any longer part")

    kind = add("shards", _shards)
    kind.add_argument("manifest", type=Path, metavar="MANIFEST.tsv")
    text = "of one tar (default: %(default)g)"
    kind.add_argument("--megabytes", type=above_zero, default=1000.0, help=text)
    text = "also pack audio outside the manifest's folder"
    kind.add_argument("--outside", action="store_true", help=text)

    kind = add("webdataset", _webdataset)
    kind.add_argument("folder", type=Path, metavar="FOLDER")

    kind = add("spoken-numbers", _spoken_numbers)
    kind.add_argument("--seed", type=natural, default=1)

    kind = add("mnist", _mnist)
    text = "copy the files of this folder, packed or not; nothing is downloaded"
    kind.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help=text)
    kind.add_argument("--url", help="a mirror of the four files")

    args = parser.parse_args()
    args.prepare(args)


def _librispeech(args: argparse.Namespace) -> None:
    """LibriSpeech or Mini LibriSpeech, from openslr.org or an unpacked folder.

    Download, verify and unpack subsets of LibriSpeech, and write DIR/SUBSET.tsv for each. Repeating
    the command resumes it.
    """
    from asr.data.importers import librispeech

    for subset in args.subsets:
        if subset not in librispeech.SUBSETS:
            raise UserError(f"--subsets {subset}: must be of {', '.join(librispeech.SUBSETS)}")
    url = args.url or librispeech.URL
    # All folders first: a missing subset must not leave the others half done.
    folders = {
        subset: librispeech.find(args.source, subset)
        if args.source
        else librispeech.download(subset, args.to, url, args.keep_archives)
        for subset in args.subsets
    }
    for subset, folder in folders.items():
        _report(librispeech.write(subset, folder, args.to))


def _librispeech_lm(args: argparse.Namespace) -> None:
    """LibriSpeech's text for language models, from openslr.org.

    Download and verify DIR/librispeech-lm-norm.txt.gz (1.5 GB). Repeating the command resumes it.
    """
    from asr.data.importers import librispeech

    print(f"{librispeech.download_text(args.to, args.url or librispeech.URL)}: complete")


def _tsv(args: argparse.Namespace) -> None:
    """Your own recordings, listed in a table.

    Check every row of a table with the columns id, audio, text, and perhaps speaker and seconds
    (separated by tabs, audio relative to the table), decode every file, and write DIR/NAME.tsv. All
    faults are listed at once, and then nothing is written.
    """
    from asr.data.importers import tsv

    checked = tsv.check(args.table, args.audio, args.headers_only, args.max_seconds)
    for message in checked.messages():
        line = one_line(message)
        print(f"skipped: {line}" if args.skip_bad else line, file=sys.stderr)
    if checked.faults and not args.skip_bad:
        count = len(checked.faults) + len(checked.rows)
        raise UserError(
            f"{args.table}: {len(checked.faults)} of {count} rows are faulty, nothing is written; "
            "correct them, or skip them with --skip-bad"
        )
    if args.hours is not None:
        checked.keep_part(args.hours)
    _report(tsv.write(checked, args.to, args.text))


def _shards(args: argparse.Namespace) -> None:
    """A manifest's audio in some large tars, for storage that is slow with small files.

    Pack the audio of a manifest into DIR/NAME-00000.tar, ... and write DIR/NAME.tsv, which gives
    each recording's place and which recipes use like any other manifest. The webdataset library can
    read the tars, too.
    """
    from asr.data.shards import pack

    _report(pack(args.manifest, args.to, args.megabytes, args.outside))


def _webdataset(args: argparse.Namespace) -> None:
    """Tars in the webdataset library's layout, unchanged.

    Write DIR/NAME.tsv of the tars in a folder, whose samples have audio and a .txt, or a .json with
    text; DIR/NAME.audio becomes a link to the folder.
    """
    from asr.data.importers import webdataset

    result = webdataset.write(args.folder, args.to)
    for line in result.skipped:
        print(f"skipped: {one_line(line)}", file=sys.stderr)
    _report(result.manifest)


def _spoken_numbers(args: argparse.Namespace) -> None:
    """The built-in corpus of synthetic speech, made on this machine in a minute.

    Synthesise number phrases in many voices: DIR/train.tsv (about 1 hour), DIR/valid.tsv,
    DIR/test.tsv, with other voices and phrases in each.
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

    if args.source:
        data.copy(args.source, args.to)
    else:
        data.download(args.to, args.url or data.URL)
    for images in data.read(args.to):
        shape = "{} images of {} x {}".format(*images.pixels.shape)
        other = "" if data.is_original(images) else " (not MNIST's own pixels)"
        print(f"{args.to}: {images.name}: {shape}{other}")


def _report(manifest: Path) -> None:
    from asr.data.corpus import read_manifest

    corpus = read_manifest(manifest)
    hours = float(corpus.seconds.sum()) / 3600
    print(f"{manifest}: {len(corpus)} utterances, {hours:.2f} hours")


if __name__ == "__main__":
    run_command(main)

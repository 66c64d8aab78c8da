"""Text of audio files: python -m asr.transcribe RUN AUDIO... [decode.key=value ...]

Of very many, by any number of processes:
torchrun --nproc-per-node N -m asr.transcribe RUN --list FILES.txt --out DIR
"""

import argparse
import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from asr.arguments import CommandParser, call_of, last_of_each, positive, run_folder
from asr.errors import UserError, one_line, run_command
from asr.io import atomic_write, check_writable
from asr.shipped import find_run, run_names

if TYPE_CHECKING:
    from asr.inference.recognition import Recognizer
    from asr.inference.sources import Source
    from asr.inference.transcript import Transcript

OVERRIDE = re.compile(r"\w+(\.\w+)*=")  # the begin of a setting; a path has a slash before its =
SHARD_FILES = 64
SUFFIXES = {"text": "txt", "json": "json", "srt": "srt", "vtt": "vtt"}


def main() -> int:
    """Transcribe the files, or those of --list. Exit code 2 if any could not be read."""
    args = arguments()
    files, overrides = split_arguments(args.audio)
    if args.list:
        return transcribe_list(args, files, overrides)
    if args.run.is_file() and args.run.suffix != ".yaml":
        raise UserError(
            f"{args.run}: a file; the run comes first, then the audio: {call_of('transcribe')} RUN "
            f"{args.run}"
        )
    if not files:
        raise UserError("no audio: name files, folders, - or --list FILES")
    from asr.analysis.model_card import rates_in_card
    from asr.analysis.runs import unfinished_note
    from asr.inference.recognition import Recognizer
    from asr.inference.sources import open_sources, targets

    faults: dict[Path, str] = {}
    with open_sources(files, faults) as sources:
        if len(sources) > 1 and not args.out and args.format in ("srt", "vtt"):
            kind = f"--format {args.format}"
            raise UserError(f"{kind} makes a file of each recording: add --out FOLDER")
        places = targets(sources) if args.out and check_writable(args.out) else {}
        recognizer = Recognizer.load(args.run, overrides)
        if args.run in map(find_run, map(Path, run_names())):  # which its user has not evaluated
            print(f"{args.run.name}: {rates_in_card(args.run)}", file=sys.stderr, flush=True)
        if note := unfinished_note(args.run):
            print(note, file=sys.stderr, flush=True)
        transcribe(recognizer, sources, places, args, faults)
    for reason in faults.values():
        print(f"error: {one_line(reason)}", file=sys.stderr, flush=True)
    return 2 if faults else 0


def transcribe(
    recognizer: "Recognizer",
    sources: Sequence["Source"],
    places: Mapping[Path, PurePath],
    args: argparse.Namespace,
    faults: dict[Path, str],
) -> None:
    """Report the transcript of every source, or add it to `faults`. places: in --out."""
    from asr.features.files import name_of
    from asr.inference.transcript import level_warning

    names = {source.path: source.name for source in sources}
    failed: dict[Path, str] = {}
    for path, transcript in recognizer.transcribe_files(names, failed):
        name = names[path]
        reason = level_warning(transcript.level)
        if transcript.seconds < (least := recognizer.min_seconds):
            short = f"{transcript.seconds:.3f} seconds of audio, fewer than {least:g}"
            reason = f"{short}; its transcript is empty"
        if reason:
            print(f"warning: {name_of(name)}: {reason}", file=sys.stderr, flush=True)
        try:
            report(name, transcript, args.format, args.out, places.get(path))
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            failed[path] = f"{name_of(name)}: its name is too long for a file in --out"
    for path, reason in failed.items():
        faults[path] = reason.replace(name_of(path), name_of(names[path]), 1)


def report(
    name: Path, transcript: "Transcript", kind: str, out: Path | None, place: PurePath | None
) -> None:
    """Print a transcript, or write it to its place in a folder and print where it is."""
    from asr.features.files import name_of

    text = content(name, transcript, kind)
    if out and place:
        make_folders(out, place.parent)
        target = out / place.parent / f"{place.name}.{SUFFIXES[kind]}"
        atomic_write(target, text)
        text = f"{name_of(name)}: {name_of(target)}\n"
    elif kind == "text":
        text = f"{name_of(name)}: {text}"
    print(text, end="", flush=True)


def make_folders(out: Path, inner: PurePath) -> None:
    """Make out/inner. Raises UserError for a link in `inner`, which could lead out of `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for part in inner.parts:
        out = out / part
        if out.is_symlink():
            raise UserError(f"{out}: a symbolic link, which is not written through; remove it")
        out.mkdir(exist_ok=True)


def arguments() -> argparse.Namespace:
    """The command line, with files and overrides together in `audio`."""
    parser = CommandParser(
        prog="python -m asr.transcribe",
        description="Transcribe audio files with a trained run.",
        epilog="Keys of the run's recipe may stand among the files: decode.beam=8 ... "
        "Exit code 2 if any file could not be read.",
    )
    add = parser.add_argument
    add(
        "run",
        type=run_folder,
        help="a run folder, a shipped run (conformer) or hf:USER/NAME[@REVISION]",
    )
    audio = (
        "WAV, FLAC, OGG, Opus or MP3, with ffmpeg also M4A, MP4 and WebM, of any rate or length; a "
        "folder of such files; - for standard input"
    )
    add("audio", nargs="*", help=audio)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--format", choices=SUFFIXES, default="text", help="json, srt, vtt: times")
    one.add_argument("--json", dest="format", action="store_const", const="json")
    add(
        "--out",
        type=Path,
        help="folder for a file per recording; recordings of folders keep theirs",
    )
    listed = (
        "a text file that names an audio file a line, or a manifest (.tsv): all transcripts in "
        "OUT/transcripts.tsv (.jsonl); the same command resumes it, under torchrun with any number "
        "of processes"
    )
    add("--list", type=Path, metavar="FILES", help=listed)
    together = f"files of --list that are written, or lost, together ({SHARD_FILES})"
    add("--shard-files", type=positive, metavar="N", help=together)
    again = "2, 3, ...: try the shards of --list again whose files failed before"
    add("--attempt", type=positive, metavar="N", help=again)
    args = parser.parse()
    if (args.shard_files or args.attempt) and not args.list:
        parser.error("--shard-files and --attempt are for --list")
    return args


def split_arguments(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Files, each once, and overrides: KEY.PATH=..., unless it is a file's name."""
    # Unlike Path.exists, also for a name that no file can have.
    overrides = [t for t in arguments if OVERRIDE.match(t) and not os.path.exists(t)]  # noqa: PTH110
    files = dict.fromkeys(Path(text) for text in arguments if text not in overrides)
    return list(files), last_of_each(overrides)


def transcribe_list(args: argparse.Namespace, files: list[Path], overrides: list[str]) -> int:
    """Transcribe the files of --list, together with the other processes of torchrun."""
    if files:
        raise UserError(f"{files[0]} and --list: name files or give a list of them, not both")
    if not args.out:
        raise UserError("--list needs a folder for the transcripts: --out FOLDER")
    if args.format in ("srt", "vtt"):
        raise UserError(
            f"--format {args.format} makes a file of each recording, --list one of all: "
            "--format json has the times"
        )
    import torch

    from asr.data.corpus import audio_remedy
    from asr.hub import local_run
    from asr.inference import bulk
    from asr.inference.load import load_run_recipe
    from asr.inference.recognition import Recognizer
    from asr.training.distributed import ranks_of_environment

    ranks = ranks_of_environment()
    if torch.cuda.is_available() and ranks.count > 1:
        torch.cuda.set_device(ranks.local % torch.cuda.device_count())
    run = local_run(args.run)
    recipe = load_run_recipe(run, overrides)
    listed = bulk.read_list(args.list, recipe.data.allow_outside_audio)
    shard_files, attempt = args.shard_files or SHARD_FILES, args.attempt or 1
    job = bulk.BulkJob(args.out, listed, shard_files, args.format, attempt)
    bulk.open_folder(job, bulk.identity(run, recipe))
    load = partial(Recognizer.load, run, overrides)
    code = bulk.transcribe_all(job, load, ranks.number, ranks.count)
    if code and ranks.number == 0 and args.list.suffix == ".tsv":
        print(f"audio that cannot be read: {audio_remedy(args.list)}", file=sys.stderr)
    return code


def content(path: Path, transcript: "Transcript", kind: str) -> str:
    """The transcript's file of that kind."""
    from asr.decoding.subtitles import make_cues, srt, webvtt
    from asr.inference.transcript import ON_ONE_LINE, json_line, json_row

    if kind == "json":
        return json_line(json_row(path, transcript))
    if kind == "text":
        return f"{transcript.text.translate(ON_ONE_LINE)}\n"
    return {"srt": srt, "vtt": webvtt}[kind](make_cues(transcript.words))


if __name__ == "__main__":
    run_command(main)
